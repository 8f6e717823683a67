"""Which slot a job gets. Reads published checkpoints and asks the backend only what it could truncate; changes nothing
but its memory of answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from scheduler.backend import Backend
from scheduler.events import Victim
from scheduler.job import Job
from scheduler.options import Options
from scheduler.reuse import LADDER, Found, Tier, probe
from scheduler.slots import Slot
from scheduler.victims import REQUIRED, gain, score, victim


class Placement(NamedTuple):
    """A job's slot, and what it finds and destroys there."""

    slot: Slot
    found: Found
    score: int
    victim: Victim
    evicted: int  # tokens
    fell_from: str | None = None  # the tier that was found and could not be carried out


class Router:
    """Scores every free slot for a job."""

    def __init__(self, slots: Sequence[Slot], backend: Backend, options: Options, ladder: Sequence[Tier] = LADDER) -> None:
        self._slots = slots
        self._backend = backend
        self._options = options
        self._ladder = ladder

    def probe(self, slot: Slot, job: Job) -> Found:
        """What `job` finds in a free `slot`. Asked again for the same generation of the slot, it is a look-up."""
        known = job.probes.get(slot.id)
        if known is not None and known[0] == slot.generation:
            return known[1]
        can_truncate = partial(self._backend.can_truncate, slot.id)
        found = probe(slot.checkpoint, job, can_truncate, self._options, self._ladder)
        job.probes[slot.id] = (slot.generation, found)
        return found

    def place(self, job: Job, now: float) -> Placement | None:
        """The best free slot for `job`, or None when it has to wait. Equal scores go to the lowest slot."""
        best: tuple[int, int] | None = None
        chosen: tuple[Slot, Found] | None = None
        for slot in self._slots:
            if slot.job is not None or not self._may_take(slot, job, now):
                continue
            found = self.probe(slot, job)
            rank = self._rank(slot, found, job, now)
            if best is None or rank > best:
                best, chosen = rank, (slot, found)
        if best is None or chosen is None:
            return None
        slot, found = chosen
        return Placement(slot, found, best[0], *victim(slot, found.reuse, now, self._options.stale_after))

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

    def _rank(self, slot: Slot, found: Found, job: Job, now: float) -> tuple[int, int]:
        """The score, and between foreign reuses that reach the same bound, what they gain."""
        if job.required_slot == slot.id:
            return REQUIRED, 0
        value = score(slot, found.reuse, now, self._options.stale_after)
        return value, gain(found.reuse) if found.reuse.foreign and value < 0 else 0
