"""From the waiting line into a slot: routes each job that can run and carries out the reuse its probe promised."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

from scheduler.backend import Backend, Clock, Text
from scheduler.bindings import unavailable
from scheduler.checkpoints import NOT_RESTORED, Keeper, Restored, Step
from scheduler.divergence import Divergence, nearest
from scheduler.events import Routed
from scheduler.job import Job, JobState, pack
from scheduler.options import Options
from scheduler.points import settle
from scheduler.pool import Pool
from scheduler.prefix_index import PrefixIndex
from scheduler.reuse import FROM_DISK, NOT_FOUND, Found, Hold, Reuse, Tier, turn_start_after
from scheduler.roster import Roster
from scheduler.router import FORK, Placement, Router
from scheduler.slots import NOTHING, Checkpoint, Slot
from scheduler.victims import victim

log = logging.getLogger(__name__)


class _Refused(Exception):
    """A job cannot be started. Its slot is as it was."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Admission:
    """Starts waiting jobs."""

    def __init__(
        self,
        roster: Roster,
        backend: Backend,
        text: Text,
        clock: Clock,
        options: Options,
        ladder: Sequence[Tier],
        keeper: Keeper,
        pool: Pool,
    ) -> None:
        self._roster = roster
        self._index = PrefixIndex(len(roster.slots))
        self._router = Router(roster.slots, backend, options, ladder, self._index)
        self._backend = backend
        self._text = text
        self._clock = clock
        self._options = options
        self._keeper = keeper
        self._pool = pool
        self._forks: list[tuple[Slot, Slot]] = []  # donor and slot, since they were last taken
        self._fetching: dict[int, Placement] = {}  # slot -> of the job that waits there for its session
        self._ages_at = math.inf  # when a job that waits for its own slot may take any

    def dispatch(self) -> None:
        """Give slots to the waiting jobs that can have one, in fair order. Looks only when something changed."""
        roster = self._roster
        now = self._clock()
        if self._keeper.finished():
            roster.changed = True
        self._begin_fetched(now)
        if not roster.changed and now < self._ages_at:
            return
        roster.changed = False
        self._ages_at = math.inf
        for job in roster.fairness.order():
            if not roster.free:
                return  # the next slot to be freed routes again
            on_disk = self._keeper.on_disk(job)
            placement = self._router.place(job, now, on_disk)
            if placement is not None:
                if not self._pool.admits(job, placement):
                    roster.fairness.hold(job)
                    return  # nobody overtakes a job that waits for pages
                self._prepare(job, placement, now, on_disk)
                continue
            free_at = self._router.free_at(job)
            if free_at is not None:
                self._ages_at = min(self._ages_at, free_at)

    def _prepare(self, job: Job, placement: Placement, now: float, on_disk: int) -> None:
        """Start the job, unless what it destroys must be saved before, or its session must be fetched."""
        slot, reuse = placement.slot, placement.found.reuse
        step = self._keeper.prepare(job, slot, reuse, not reuse.tokens or reuse.foreign, on_disk)
        if step is Step.BEGIN:
            self._start(job, placement, now)
        elif step is Step.FETCH:
            self._roster.seat(job, slot, now, JobState.RESTORE)
            self._fetching[slot.id] = placement

    def _begin_fetched(self, now: float) -> None:
        """Start the jobs whose sessions have come."""
        for slot in self._roster.slots:
            job = slot.job
            if job is None or job.state is not JobState.RESTORE:
                continue
            lacking = self._keeper.lacking(slot)
            if lacking:
                self._pool.reclaim(self._backend.room().free + lacking)
            restored = self._keeper.fetched(slot)
            if restored is None:
                continue
            placement = self._fetching.pop(slot.id)
            if restored.tokens:
                tokens = self._backend.tokens(slot.id)
                text = job.text[: restored.text]
                slot.checkpoint = Checkpoint(
                    length=len(tokens),
                    packed=pack(tokens),
                    text=None if restored.shows_less else text,
                    prompt_length=len(tokens) if restored.answered else 0,
                    asked=text,
                )
                found = Found(Reuse(FROM_DISK.name, len(tokens), restored.text, 0, foreign=False), FROM_DISK)
                self._start(job, placement._replace(found=found), now, restored)
            else:
                self._start(job, placement._replace(fell_from=FROM_DISK.name), now, restored)

    def _start(self, job: Job, placement: Placement, now: float, restored: Restored = NOT_RESTORED) -> None:
        """Materialise the reuse, then bind job and slot."""
        slot = placement.slot
        try:
            prompt, placement = self._materialise(job, placement, now)
        except _Refused as refused:
            self._roster.fail(job, refused.status, str(refused))
            return
        reuse = placement.found.reuse
        divergence = self._divergence(job) if reuse.lost or not reuse.tokens else None
        if placement.evicted:
            log.info(
                "slot %d: request reuses %s; evicting checkpoint (%d tokens, idle %d s, %s)",
                slot.id, f"{reuse.tokens} tokens" if reuse.tokens else "nothing", placement.evicted,
                slot.idle_seconds(now), placement.victim,
            )  # fmt: skip
        if job.state is JobState.RESTORE:
            job.move(JobState.PREFILL)
        else:
            self._roster.seat(job, slot, now)
        self._index.replace(slot.id, self._backend.tokens(slot.id))
        job.tier = reuse.tier
        job.prompt = prompt
        job.cached = job.done = len(self._backend.tokens(slot.id))
        settle(job, slot.checkpoint, reuse, self._text, self._backend.needs_marks)
        if job.mark_at == job.done > 0:
            self._backend.mark(slot.id)
        job.turn_start = _turn_start(placement, reuse)
        job.limit = min(job.max_tokens, self._backend.ctx - len(prompt))
        self._roster.events.append(
            Routed(
                job=job.id,
                slot=slot.id,
                tier=job.tier,
                cached_tokens=job.cached,
                prompt_tokens=len(prompt),
                victim=placement.victim,
                evicted_tokens=placement.evicted,
                queue_seconds=job.times.queue_seconds or 0.0,
                fell_from=placement.fell_from,
                divergence=divergence,
                source=restored.source,
                restore_seconds=restored.seconds,
            )
        )
        self._keeper.start(slot, job)

    def take_forks(self) -> list[tuple[Slot, Slot]]:
        """Each new fork's donor and its slot, since the last call."""
        forks, self._forks = self._forks, []
        return forks

    def _fork(self, placement: Placement) -> Placement | None:
        """Begin the slot's session as the donor's. Where no page is left to copy into, only whole pages are taken; None when
        that is nothing, or the donor is not what it was."""
        slot, donor, reuse = placement.slot, placement.donor, placement.found.reuse
        assert donor is not None
        size = self._backend.room().page_tokens
        if reuse.tokens % size:
            self._pool.reclaim(1, {donor.id, slot.id})
        for tokens in (reuse.tokens, reuse.tokens - reuse.tokens % size):
            if self._backend.fork(donor.id, slot.id, tokens):
                slot.checkpoint = NOTHING  # what it was is gone, and must not be taken for what was copied
                self._forks.append((donor, slot))
                return placement._replace(found=Found(reuse._replace(tokens=tokens), None))
        return None

    def _divergence(self, job: Job) -> Divergence | None:
        try:
            return nearest(self._roster.slots, job, self._text)
        except Exception:  # what is only told about it must not cost the request
            log.exception("job %d: where its prompt differs", job.id)
            return None

    def _materialise(self, job: Job, placement: Placement, now: float) -> tuple[list[int], Placement]:
        """The prompt whose first tokens the slot now holds, and the placement as it turned out.

        A tier that cannot be carried out after all costs the reuse, not the request, unless only live state can
        answer it.
        """
        slot, (reuse, tier) = placement.slot, placement.found
        if reuse.tier == FORK:
            forked = self._fork(placement)
            if forked is not None:
                return job.tokens, forked
            placement = placement._replace(found=NOT_FOUND, fell_from=reuse.tier)
        if job.needs_live_state and (tier is None or not tier.live_state):
            raise _Refused(409, unavailable(job.api))
        if tier is not None:
            try:
                prompt = tier.materialise(Hold(slot.id, job, reuse, self._backend, self._text))
            except Exception as error:
                log.exception("job %d: tier %s", job.id, tier.name)
                raise _Refused(500, f"the prompt could not be prepared: {error}") from error
            if prompt is not None:
                return prompt, placement
            if job.needs_live_state:
                raise _Refused(409, unavailable(job.api))
            drives_out, evicted = victim(slot, NOT_FOUND.reuse, now, self._options.stale_after)
            placement = Placement(slot, NOT_FOUND, placement.score, drives_out, evicted, fell_from=tier.name)
        if self._backend.tokens(slot.id) and not self._backend.truncate(slot.id, 0):
            raise _Refused(500, f"slot {slot.id} could not be emptied")
        return job.tokens, placement


def _turn_start(placement: Placement, reuse: Reuse) -> int:
    """Where the turn begins that follows `reuse`, in the slot's own session or in a fork."""
    donor = placement.donor if reuse.tier == FORK else None
    if donor is None or donor.job is None:
        return turn_start_after((donor or placement.slot).checkpoint, reuse)
    return donor.job.turn_start if donor.job.turn_start <= reuse.tokens else 0
