"""From the waiting line into a slot: routes each job that can run and carries out the reuse its probe promised."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

from scheduler.backend import Backend, Clock, Text
from scheduler.events import Routed
from scheduler.job import Job
from scheduler.options import Options
from scheduler.reuse import NOT_FOUND, Hold, Tier, turn_start_after
from scheduler.roster import Roster
from scheduler.router import Placement, Router
from scheduler.victims import victim

log = logging.getLogger(__name__)

_NO_LIVE_STATE = "continuation state is not available; retry by replaying the full input/messages history"


class _Refused(Exception):
    """A job cannot be started. Its slot is as it was."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Admission:
    """Starts waiting jobs."""

    def __init__(
        self, roster: Roster, backend: Backend, text: Text, clock: Clock, options: Options, ladder: Sequence[Tier]
    ) -> None:
        self._roster = roster
        self._router = Router(roster.slots, backend, options, ladder)
        self._backend = backend
        self._text = text
        self._clock = clock
        self._options = options
        self._ages_at = math.inf  # when a job that waits for its own slot may take any

    def dispatch(self) -> None:
        """Give slots to the waiting jobs that can have one, in order. Looks only when something changed."""
        roster = self._roster
        now = self._clock()
        if not roster.changed and now < self._ages_at:
            return
        roster.changed = False
        self._ages_at = math.inf
        for job in list(roster.queue):
            if not roster.free:
                return  # the next slot to be freed routes again
            placement = self._router.place(job, now)
            if placement is not None:
                self._start(job, placement, now)
                continue
            free_at = self._router.free_at(job)
            if free_at is not None:
                self._ages_at = min(self._ages_at, free_at)

    def _start(self, job: Job, placement: Placement, now: float) -> None:
        """Materialise the reuse, then bind job and slot."""
        slot = placement.slot
        try:
            prompt, placement = self._materialise(job, placement, now)
        except _Refused as refused:
            self._roster.fail(job, refused.status, str(refused))
            return
        reuse = placement.found.reuse
        if placement.evicted:
            log.info(
                "slot %d: request reuses %s; evicting checkpoint (%d tokens, idle %d s, %s)",
                slot.id, f"{reuse.tokens} tokens" if reuse.tokens else "nothing", placement.evicted,
                slot.idle_seconds(now), placement.victim,
            )  # fmt: skip
        self._roster.seat(job, slot, now)
        job.tier = reuse.tier
        job.prompt = prompt
        job.cached = job.done = len(self._backend.tokens(slot.id))
        job.turn_start = turn_start_after(slot.checkpoint, reuse)
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
            )
        )

    def _materialise(self, job: Job, placement: Placement, now: float) -> tuple[list[int], Placement]:
        """The prompt whose first tokens the slot now holds, and the placement as it turned out.

        A tier that cannot be carried out after all costs the reuse, not the request, unless only live state can
        answer it.
        """
        slot, (reuse, tier) = placement.slot, placement.found
        if job.needs_live_state and (tier is None or not tier.live_state):
            raise _Refused(409, _NO_LIVE_STATE)
        if tier is not None:
            try:
                prompt = tier.materialise(Hold(slot.id, job, reuse, self._backend, self._text))
            except Exception as error:
                log.exception("job %d: tier %s", job.id, tier.name)
                raise _Refused(500, f"the prompt could not be prepared: {error}") from error
            if prompt is not None:
                return prompt, placement
            if job.needs_live_state:
                raise _Refused(409, _NO_LIVE_STATE)
            drives_out, evicted = victim(slot, NOT_FOUND.reuse, now, self._options.stale_after)
            placement = Placement(slot, NOT_FOUND, placement.score, drives_out, evicted, fell_from=tier.name)
        if slot.checkpoint.length and not self._backend.truncate(slot.id, 0):
            raise _Refused(500, f"slot {slot.id} could not be emptied")
        return job.tokens, placement
