"""What the status page is told: without a server, from the events that pass the link."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
from serve_fake import load

from ds4batch.messages import (
    Delta,
    DraftStat,
    Event,
    Failed,
    Finished,
    PoolStat,
    PriceStat,
    Progress,
    Routed,
    SlotStat,
    Stats,
    StepSample,
)
from ds4batch.server.engine_link import EngineLink
from ds4batch.server.inflight import Job
from ds4batch.server.metrics import Metrics
from ds4batch.server.service import Service
from ds4batch.server.status import Status
from ds4batch.server.status_shapes import SlotView, Snapshot
from ds4batch.server.tool_memory import ToolMemory
from ds4batch.server.watch import ConnectionWatch
from ds4batch.settings import Settings


def service(**options: object) -> Service:
    """A front whose engine was never started."""
    settings = msgspec.convert({"model": "x", "ctx": 1000, "batched_session": 2, **options}, Settings)
    metrics = Metrics(settings, "m")
    pool = ThreadPoolExecutor(1)
    link = EngineLink(settings, metrics)
    return Service(settings, load(settings), link, metrics, ConnectionWatch(), pool, None, ToolMemory(0, None))


class Told:
    """A status page and what its link passes on, at times of its own."""

    def __init__(self, **options: object) -> None:
        self.service = service(**options)
        self.status = Status(self.service)
        self.observer = self.service.link.observer
        self.now = time.monotonic()
        self.status._feed.clock = lambda: self.now

    def job(self, id: int, prompt: int = 100, most: int = 50) -> Job:
        job = Job(id, prompt, most, self.now)
        self.observer.submitted(job)
        return job

    def event(self, job: Job, event: Event) -> None:
        self.observer.event(job, event, self.now)
        job.push(event, self.now)

    def routed(self, job: Job, slot: int, tier: str = "none", cached: int = 0) -> None:
        event = Routed(id=job.id, slot=slot, tier=tier, cached_tokens=cached, victim="empty", evicted_tokens=0, queue_seconds=0.0)
        self.event(job, event)

    def finished(self, job: Job, generated: int, cached: int = 0, reason: str = "stop") -> None:
        given = {"id": job.id, "reason": reason, "prompt_tokens": job.prompt_tokens, "cached_tokens": cached}
        times = {"queue_seconds": 0.0, "prefill_seconds": 0.0, "decode_seconds": 0.0}
        self.event(job, msgspec.convert({"type": "Finished", **given, **times, "completion_tokens": generated}, Finished))

    def stats(self, *slots: SlotStat, running: int = 0, waiting: int = 0) -> None:
        self.observer.stats(Stats(running=running, waiting=waiting, kv_usage=0.25, slots=list(slots)))

    def snapshot(self) -> Snapshot:
        return self.status.snapshot(self.now)

    def slot(self, id: int) -> SlotView:
        return self.snapshot().slots[id]


EMPTY = SlotStat("empty", 0, 0, 0)


def test_before_the_engine_is_there_every_slot_is_empty() -> None:
    got = Told().snapshot()
    assert (got.engine.state, [slot.state for slot in got.slots]) == ("starting", ["empty", "empty"])
    assert (got.model, got.ctx, got.memory.planned, got.drafts) == ("fake-model", 1000, {}, None)
    assert got.recent.ttft_p50 is None


def test_a_request_is_seen_waiting_then_in_its_slot_then_gone() -> None:
    told = Told()
    job = told.job(1, prompt=100, most=5000)
    told.stats(EMPTY, EMPTY, waiting=1)
    told.now += 2
    queue = told.snapshot().queue
    assert (queue.waiting, queue.limit, queue.oldest_seconds) == (1, 64, 2.0)
    told.routed(job, 1, "fork", 40)
    told.event(job, Progress(1, 70, 100))
    told.stats(EMPTY, SlotStat("prefill", 70, 30, 60), running=1)
    slot = told.slot(1)
    assert (slot.state, slot.tier, slot.cached_tokens, slot.generated) == ("prefill", "fork", 40, 0)
    assert (slot.prefill_done, slot.prefill_total, slot.limit, slot.tokens_per_second) == (30, 60, 900, None)
    assert (told.slot(0).tier, told.snapshot().queue.oldest_seconds) == (None, None)
    told.event(job, Delta(id=1, text="a", tokens=1))
    told.now += 2
    told.event(job, Delta(id=1, text="b", tokens=4))
    told.stats(EMPTY, SlotStat("decode", 105, 0, 0), running=1)
    slot = told.slot(1)
    assert (slot.generated, slot.tokens_per_second, slot.request_seconds, slot.idle_seconds) == (5, 2.0, 4.0, None)
    told.finished(job, 6, cached=40)
    told.stats(EMPTY, SlotStat("idle", 106, 0, 0))
    told.now += 30
    slot = told.slot(1)
    assert (slot.state, slot.tokens, slot.idle_seconds, slot.generated, slot.limit) == ("idle", 106, 30.0, None, None)


def test_idleness_goes_on_when_a_session_gets_stale_and_ends_with_it() -> None:
    told = Told()
    told.stats(SlotStat("decode", 5, 0, 0), EMPTY)
    told.stats(SlotStat("idle", 5, 0, 0), EMPTY)
    told.now += 4000
    told.stats(SlotStat("stale", 5, 0, 0), EMPTY)
    assert told.slot(0).idle_seconds == 4000
    told.stats(EMPTY, EMPTY)
    assert told.slot(0).idle_seconds is None


def test_rates_count_what_was_evaluated_and_what_was_generated() -> None:
    told = Told()
    job = told.job(1)
    told.routed(job, 0, "memory-token", 60)
    told.now += 0.5
    told.event(job, Progress(1, 100, 100))
    told.event(job, Delta(id=1, text="x", tokens=1))
    told.now += 0.1
    told.event(job, Delta(id=1, text="xy", tokens=2))
    told.finished(job, 4, cached=60)
    told.now += 2.4
    got = told.snapshot()
    assert (got.series.prompt_per_second, got.series.generated_per_second) == ([13.3], [1.3])  # 40 and 4 in 3 s
    assert got.series.ttft_p50 == [pytest.approx(0.5, rel=0.03)]
    assert got.series.itl_p50 == [pytest.approx(0.05, rel=0.03)]
    assert (got.recent.ttft_p50, got.recent.itl_p50) == (got.series.ttft_p50[0], got.series.itl_p50[0])
    told.now += 3
    assert told.snapshot().series.ttft_p50[-1] is None


def test_reuse_is_told_by_tier_of_finished_requests_only() -> None:
    told = Told()
    for id, (tier, cached, reason) in enumerate(
        [("fork", 50, "stop"), ("fork", 70, "length"), ("none", 0, "stop"), ("memory-token", 9, "abort")]
    ):
        job = told.job(id)
        told.routed(job, 0, tier, cached)
        told.finished(job, 3, cached, reason)
    running, failed, gone = told.job(10), told.job(11), told.job(12)
    for job in (running, failed, gone):
        told.routed(job, 0, "disk-text", 5)
    told.event(failed, Failed(id=11, status=500, message="no"))
    gone.cancel("client")
    told.finished(gone, 1, 5)
    assert [(t.tier, t.requests, t.prompt_tokens, t.cached_tokens) for t in told.snapshot().reuse] == [
        ("fork", 2, 200, 120),
        ("none", 1, 100, 0),
    ]


def test_a_request_that_is_tried_once_more_is_in_one_slot() -> None:
    told = Told()
    job = told.job(1)
    told.routed(job, 0)
    told.routed(job, 1)
    assert [slot.prompt_tokens for slot in told.snapshot().slots] == [None, 100]


def test_when_the_engine_dies_nothing_is_left_of_its_sessions() -> None:
    told = Told()
    told.routed(told.job(1), 0)
    told.job(2)
    told.stats(SlotStat("decode", 5, 0, 0), SlotStat("idle", 7, 0, 0), running=1, waiting=1)
    told.observer.engine_down()
    got = told.snapshot()
    assert [(slot.state, slot.tokens, slot.generated) for slot in got.slots] == [("empty", 0, None)] * 2
    assert (got.queue.running, got.queue.waiting, got.queue.oldest_seconds, got.memory.kv_usage) == (0, 0, None, 0.0)


def test_the_pool_and_the_drafts_are_told() -> None:
    told = Told(draft="lookup", mtp_draft=3)
    pool = PoolStat(
        pages=10, page_bytes=64, used=4, unshared=7, parked=1, parks=0, resumes=0, evicted_stale=0, evicted_protected=0
    )
    drafts = DraftStat(prices=[PriceStat(1, 1, 0.5, 1.75, 0.1, 0.2, True)], decisions={"priced": 3})
    told.observer.step(StepSample(1, 0, 0.1, None, 1, 3, [1, 1]))
    told.observer.stats(Stats(running=0, waiting=0, kv_usage=0.4, slots=[EMPTY], device_memory=99, pool=pool, drafts=drafts))
    got = told.snapshot()
    assert got.memory.pool is not None
    assert (got.memory.pool.used, got.memory.pool.unshared, got.memory.device, got.memory.kv_usage) == (4, 7, 99, 0.4)
    assert got.drafts is not None
    assert (got.drafts.drafter, got.drafts.most, got.drafts.checked, got.drafts.accepted) == ("lookup", 3, 3, 2)
    assert (got.drafts.decisions, got.drafts.widths[0].drafting) == ({"priced": 3}, True)


def test_one_snapshot_serves_many_listeners() -> None:
    told = Told()
    first = told.status.encoded()
    told.now += 0.4
    assert told.status.encoded() is first
    told.now += 0.2
    assert told.status.encoded() != first
