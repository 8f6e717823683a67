"""Ends what does not get on: a request of which nothing comes while the engine runs, and an engine that makes no step.

Waiting for a slot is no stall, nor is waiting in host memory for pages: both depend on others. A prompt under evaluation shows by its
progress. The engine answers a ping between any two steps, so one that neither works nor answers hangs, whatever it hangs in.

Time is counted in ticks of bounded length: a server that was itself stopped for a while blames nobody for it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import NamedTuple

from ds4batch.messages import CancelCause, Event, Failed, Finished, Ready, Routed, SlotStat, Stats, StepSample, Transfer
from ds4batch.server.engine_link import EngineLink, EngineState
from ds4batch.server.inflight import Job
from ds4batch.server.status_feed import Both

log = logging.getLogger(__name__)

PERIOD_SECONDS = 1.0
KILL_SECONDS = 30.0
"""A killed process that is still there after this is stuck in the kernel, and so is whoever waits for it."""


class _Running(NamedTuple):
    """A request in a slot."""

    job: Job
    moved_at: float  # watched seconds


class Watchdog:
    """An observer of the link. Create it before the link runs; `run` is its task. `timeout` in seconds, 0 never ends anything."""

    def __init__(self, link: EngineLink, timeout: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._link = link
        self._timeout = timeout
        self._clock = clock
        self.period = min(PERIOD_SECONDS, timeout / 8) if timeout else PERIOD_SECONDS
        self._ticked_at = clock()
        self._watched = 0.0  # seconds
        self._running: dict[int, _Running] = {}  # by the job's id
        self._slots: list[SlotStat] = []
        self._heard = link.heard
        self._heard_at = 0.0  # watched seconds
        self._pinged = False
        self._killed_at: float | None = None  # by the clock
        link.observer = Both(link.observer, self)

    @property
    def alive(self) -> bool:
        """False when a hanging engine was killed and did not go: only a restart from outside helps then."""
        return self._killed_at is None or self._clock() - self._killed_at < KILL_SECONDS

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        while self._timeout:
            await asyncio.sleep(self.period)
            self.tick(self._clock())

    def tick(self, now: float) -> None:
        """One look."""
        self._watched += min(max(0.0, now - self._ticked_at), 2 * self.period)
        self._ticked_at = now
        if self._link.heard != self._heard or self._link.status.state is not EngineState.READY:
            self._heard, self._heard_at, self._pinged = self._link.heard, self._watched, False
        silent = self._watched - self._heard_at
        if silent >= self._timeout:
            self._replace(f"the engine made no step and answered nothing for {self._timeout:g} s")
        elif silent >= self._timeout / 2:
            if not self._pinged:
                log.debug("the engine has been silent for %.1f s and is asked for a sign of life", silent)
                self._link.ping()
                self._pinged = True
        else:
            self._look_at_requests()

    def _look_at_requests(self) -> None:
        for id, (job, moved_at) in list(self._running.items()):
            routed = job.trail.routed
            slot = self._slots[routed.slot] if routed is not None and routed.slot < len(self._slots) else None
            if slot is not None and slot.state == "parked":
                self._running[id] = _Running(job, self._watched)
            elif self._watched - moved_at < self._timeout:
                continue
            elif job.cancelled is not None:
                self._replace(f"the engine did not let go of a request for {self._timeout:g} s after it was cancelled")
                return
            else:
                self._running[id] = _Running(job, self._watched)  # the engine has as long again to free its slot
                self._end(job, slot)

    def _end(self, job: Job, slot: SlotStat | None) -> None:
        routed = job.trail.routed
        log.error(
            "request %s stalled: nothing came of it for %g s while the engine ran, it is ended (job %d, slot %s: %s, %d of %d prompt "
            "tokens evaluated, %d generated)",
            job.request_id,
            self._timeout,
            job.id,
            routed.slot if routed is not None else None,
            f"{slot.state}, {slot.live_tokens} tokens" if slot is not None else "unknown",
            job.trail.evaluated,
            job.prompt_tokens,
            job.trail.generated,
        )
        self._link.give_up(job, "stall", 500, f"the request stalled: nothing came of it for {self._timeout:g} s, it was ended")

    def _replace(self, why: str) -> None:
        log.error("%s; it is killed", why)
        self._killed_at = self._clock()
        self._running.clear()
        self._link.replace(why)

    # what the link tells

    def submitted(self, job: Job) -> None:
        """It waits for a slot."""

    def event(self, job: Job, event: Event, now: float) -> None:
        """Something came of a request."""
        if isinstance(event, Finished | Failed):
            self._running.pop(job.id, None)
        elif (isinstance(event, Routed) or job.id in self._running) and job.cancelled is None:
            self._running[job.id] = _Running(job, self._watched)

    def cancelled(self, job: Job, cause: CancelCause) -> None:
        """The engine's last word on it must follow."""
        if job.id in self._running:
            self._running[job.id] = _Running(job, self._watched)

    def step(self, sample: StepSample) -> None:
        """Heard is enough."""

    def transfer(self, transfer: Transfer) -> None:
        """Heard is enough."""

    def stats(self, stats: Stats) -> None:
        """How the slots stand."""
        self._slots = stats.slots

    def ready(self, ready: Ready) -> None:
        """A new engine."""
        self._killed_at = None

    def engine_down(self) -> None:
        """Nothing runs any more."""
        self._killed_at = None
        self._running.clear()
