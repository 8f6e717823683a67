"""Which slot a job gets. Reads published checkpoints and asks the backend only what it could truncate or give away; changes
nothing but its memory of answers.

A job continues the session of its own conversation where there is one. Else it forks: it begins with what another session, busy
or idle, shares with its prompt, in a slot that the ladder of victims names. So nobody's session is cut for a beginning that can
be had without. In order:

1. own session in a free slot (a reuse that is not foreign): by its length. If another session gives more, it is forked into this
   slot, whose owner asked;
2. a fork into an empty slot: by its length, like a reuse. Equal to a reuse of one's own it comes second, equal to cutting a stale
   conversation first;
3. a stale conversation that is cut, the empty slot without reuse, the most idle stale conversation, as without forks: the last
   two are where the fork goes when there is one;
4. protected conversations: by what the job gains less what their owners lose, see `victims`. Cut in place or replaced by a
   fork, what the two begin with alike is not lost. Equal, the cut comes first: it copies nothing. Those of owners that hold no more
   than their share of the slots come last.

A reuse that would cut a conversation inside its earlier turns counts as foreign, whatever its tier says.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from scheduler.backend import Backend
from scheduler.events import Victim
from scheduler.fairness import spared
from scheduler.job import Job
from scheduler.options import Options
from scheduler.prefix_index import Donor, PrefixIndex
from scheduler.reuse import LADDER, NOT_FOUND, Found, Reuse, Tier, probe
from scheduler.slots import Slot
from scheduler.victims import REQUIRED, fork_score, gain, score, victim

FORK = "fork"


class Placement(NamedTuple):
    """A job's slot, and what it finds and destroys there."""

    slot: Slot
    found: Found
    score: int
    victim: Victim
    evicted: int  # tokens
    fell_from: str | None = None  # the tier that was found and could not be carried out
    donor: Slot | None = None  # of a fork


class _Choice(NamedTuple):
    """What a job could do with one slot."""

    rank: tuple[int, int, int]
    slot: Slot
    found: Found
    donor: Slot | None


class Router:
    """Scores every free slot for a job."""

    def __init__(
        self,
        slots: Sequence[Slot],
        backend: Backend,
        options: Options,
        ladder: Sequence[Tier] = LADDER,
        index: PrefixIndex | None = None,
    ) -> None:
        """`index` knows the prefixes of all sessions; without one nothing is forked."""
        self._slots = slots
        self._backend = backend
        self._options = options
        self._ladder = ladder
        self._index = index

    def probe(self, slot: Slot, job: Job) -> Found:
        """What `job` finds in a free `slot`. Asked again for the same generation of the slot, it is a look-up."""
        known = job.probes.get(slot.id)
        if known is not None and known[0] == slot.generation:
            return known[1]
        can_truncate = partial(self._backend.can_truncate, slot.id)
        found = probe(slot.checkpoint, job, can_truncate, self._options, self._ladder, slot.bound)
        if found.reuse.lost and found.reuse.tokens < slot.checkpoint.turn_start:
            found = found._replace(reuse=found.reuse._replace(foreign=True))
        job.probes[slot.id] = (slot.generation, found)
        return found

    def required_slot(self, job: Job) -> int | None:
        """The slot that alone can answer `job`: the one it names, or whose calls it continues without a history of its own."""
        if job.required_slot is not None or not job.needs_live_state:
            return job.required_slot
        for slot in self._slots:
            if slot.job is None:
                tier = self.probe(slot, job).tier
                if tier is not None and tier.live_state:
                    return slot.id
        return None

    def place(self, job: Job, now: float, on_disk: int = 0) -> Placement | None:
        """The best free slot for `job`, or None when it has to wait. Equal ranks go to the lowest slot.

        A store holds `on_disk` tokens for the job. A session of its own in a slot comes before that, however long; what it only
        shares with another's must not be less.
        """
        only = self.required_slot(job) if job.needs_live_state else None
        free = [slot for slot in self._slots if slot.job is None and only in (None, slot.id) and self._may_take(slot, job, now)]
        if not free:
            return None
        donors = [donor for donor in self._donors(job) if donor.tokens >= on_disk]
        keep = spared(self._slots, lambda slot: 1, len(self._slots), job.owner)
        choices = (self._choice(slot, job, donors, now, on_disk, slot.id in keep) for slot in free)
        best = max(choices, key=lambda choice: choice.rank)
        slot, found, donor = best.slot, best.found, best.donor
        return Placement(slot, found, best.rank[0], *victim(slot, found.reuse, now, self._options.stale_after), donor=donor)

    def free_at(self, job: Job) -> float | None:
        """When a waiting job may take any slot; None when that makes no difference to it."""
        if job.required_slot is None or job.needs_live_state or job.times.queued is None:
            return None
        return job.times.queued + self._options.age_after

    def _may_take(self, slot: Slot, job: Job, now: float) -> bool:
        if job.required_slot is None or job.required_slot == slot.id:
            return True
        free_at = self.free_at(job)
        return free_at is not None and now >= free_at

    def _donors(self, job: Job) -> list[Donor]:
        """The sessions that hold most of a prompt. Tokens alone do not say what an image shows: with one there are none."""
        if self._index is None or job.needs_live_state or job.images:
            return []
        for slot in self._slots:
            self._index.update(slot.id, self._backend.tokens(slot.id))
        return self._index.donors(job, self._backend.tokens, self._fork_point)

    def _fork_point(self, slot: int, most: int) -> int:
        holder = self._slots[slot]
        images = holder.checkpoint.images if holder.job is None else holder.job.images
        return 0 if images else self._backend.fork_point(slot, most)

    def _choice(self, slot: Slot, job: Job, donors: Sequence[Donor], now: float, on_disk: int, spared: bool) -> _Choice:
        """The better of continuing the slot's session and replacing it by a fork, and its rank; see the module."""
        found = self.probe(slot, job)
        if found.reuse.foreign and found.reuse.tokens <= on_disk:
            found = NOT_FOUND
        reuse, stale_after = found.reuse, self._options.stale_after
        own = bool(reuse.tokens) and not reuse.foreign
        donor = next((donor for donor in donors if donor.slot != slot.id), None)
        if donor is None or donor.tokens <= reuse.tokens:
            value = score(slot, reuse, now, stale_after, spared)
            cost = gain(reuse) if reuse.foreign and value < 0 else 0
            choice = _Choice((value, 2 * own, cost), slot, found, None)
        else:
            value, cost = donor.tokens, 0
            if not own:
                kept = self._index.shared(slot.id, job) if self._index is not None else 0
                value = fork_score(slot, donor.tokens, kept, now, stale_after, spared)
                cost = donor.tokens - slot.checkpoint.length + min(kept, donor.tokens) - 1 if value < 0 else 0
            lost = 0 if own else slot.checkpoint.length
            fork = Found(Reuse(FORK, donor.tokens, None, lost, foreign=not own), None)
            choice = _Choice((value, 1 + own, cost), slot, fork, self._slots[donor.slot])
        if job.required_slot == slot.id:
            choice = choice._replace(rank=(REQUIRED, 0, 0))
        return choice
