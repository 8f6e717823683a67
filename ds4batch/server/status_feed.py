"""What the status page shows, gathered as it passes the link. Costs a few counts an event, whether anybody looks or not.

It sees requests, and keeps of them when they came, where they are and how many tokens they have: no text reaches it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ds4batch.messages import (
    CancelCause,
    Delta,
    Event,
    Failed,
    Finished,
    Progress,
    Ready,
    Routed,
    SlotStat,
    Stats,
    StepSample,
    Transfer,
)
from ds4batch.server.engine_link import EngineLink, Observer
from ds4batch.server.inflight import Job
from ds4batch.server.status_shapes import TierView
from ds4batch.server.status_window import Window, observe

BUSY = ("prefill", "restore", "decode", "parked")
_EMPTY = SlotStat("empty", 0, 0, 0)


class Feed:
    """An observer of the link."""

    def __init__(self, slots: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.window = Window(clock())
        self.waiting: dict[int, Job] = {}  # by id, oldest first
        self.placed: dict[int, Job] = {}  # by slot
        self.tiers: dict[str, TierView] = {}  # of finished requests
        self.checked = 0  # drafts
        self.accepted = 0
        self.last = _nothing(slots)
        self.used_at: dict[int, float] = {}  # by slot, when a request was last seen in it

    def submitted(self, job: Job) -> None:
        """A request went to the engine."""
        self.waiting[job.id] = job

    def event(self, job: Job, event: Event, now: float) -> None:
        """One event; `job.trail` is as it was before."""
        match event:
            case Routed():
                self._forget(job)  # where it was before, when it is tried once more
                self.placed[event.slot] = job
            case Progress():
                self._prompt(job, event.done, now)
            case Delta():
                self._generated(job, event.tokens, now)
            case Finished():
                self._finished(job, event, now)
            case Failed():
                self._forget(job)

    def cancelled(self, job: Job, cause: CancelCause) -> None:
        """The engine's last word on it follows."""

    def step(self, sample: StepSample) -> None:
        """One forward."""
        self.checked += sample.drafts
        self.accepted += sum(sample.accepted)

    def transfer(self, transfer: Transfer) -> None:
        """Of no interest here."""

    def stats(self, stats: Stats) -> None:
        """Gauges of one instant."""
        now = self.clock()
        for i, slot in enumerate(stats.slots):
            if slot.state in BUSY or (i < len(self.last.slots) and self.last.slots[i].state in BUSY):
                self.used_at[i] = now
            elif slot.state == "empty":
                self.used_at.pop(i, None)
        self.last = stats

    def ready(self, ready: Ready) -> None:
        """The link keeps it."""

    def engine_down(self) -> None:
        """The engine is gone, and every session with it."""
        self.waiting.clear()
        self.placed.clear()
        self.used_at.clear()
        self.last = _nothing(len(self.last.slots))

    def _prompt(self, job: Job, done: int, now: float) -> None:
        if done > job.trail.evaluated:
            self.window.cell(now).prompt += done - job.trail.evaluated

    def _generated(self, job: Job, count: int, now: float) -> None:
        """As /metrics counts them: a gap that brought k tokens counts k times a k-th, and the first token ends no gap."""
        if count <= 0:
            return
        trail, cell = job.trail, self.window.cell(now)
        cell.generated += count
        if trail.first_token_at is None:
            observe(cell.ttft, now - trail.arrival)
            count -= 1
        if count and trail.last_token_at is not None:
            observe(cell.itl, (now - trail.last_token_at) / count, count)

    def _finished(self, job: Job, event: Finished, now: float) -> None:
        self._forget(job)
        trail = job.trail
        self.window.cell(now).generated += max(0, event.completion_tokens - trail.generated)
        if event.completion_tokens:
            self._prompt(job, event.prompt_tokens, now)
        if trail.routed is None or job.cancelled is not None or event.reason == "abort":
            return
        tier = trail.routed.tier
        before = self.tiers.get(tier) or TierView(tier=tier, requests=0, prompt_tokens=0, cached_tokens=0)
        self.tiers[tier] = TierView(
            tier=tier,
            requests=before.requests + 1,
            prompt_tokens=before.prompt_tokens + event.prompt_tokens,
            cached_tokens=before.cached_tokens + max(0, min(event.cached_tokens, event.prompt_tokens)),
        )

    def _forget(self, job: Job) -> None:
        self.waiting.pop(job.id, None)
        for slot in [slot for slot, other in self.placed.items() if other is job]:
            del self.placed[slot]


class Both:
    """Two observers as one."""

    def __init__(self, first: Observer, second: Observer) -> None:
        self._all = (first, second)

    def submitted(self, job: Job) -> None:
        """To both."""
        for one in self._all:
            one.submitted(job)

    def event(self, job: Job, event: Event, now: float) -> None:
        """To both."""
        for one in self._all:
            one.event(job, event, now)

    def cancelled(self, job: Job, cause: CancelCause) -> None:
        """To both."""
        for one in self._all:
            one.cancelled(job, cause)

    def step(self, sample: StepSample) -> None:
        """To both."""
        for one in self._all:
            one.step(sample)

    def transfer(self, transfer: Transfer) -> None:
        """To both."""
        for one in self._all:
            one.transfer(transfer)

    def stats(self, stats: Stats) -> None:
        """To both."""
        for one in self._all:
            one.stats(stats)

    def ready(self, ready: Ready) -> None:
        """To both."""
        for one in self._all:
            one.ready(ready)

    def engine_down(self) -> None:
        """To both."""
        for one in self._all:
            one.engine_down()


def attach(link: EngineLink, feed: Feed) -> None:
    """Let a feed see what passes from now on, behind the link's own observer."""
    link.observer = Both(link.observer, feed)


def _nothing(slots: int) -> Stats:
    return Stats(running=0, waiting=0, kv_usage=0.0, slots=[_EMPTY] * slots)
