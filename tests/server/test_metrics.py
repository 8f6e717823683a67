from __future__ import annotations

import concurrent.futures
import itertools
import os
import re
import signal
from typing import Any

from harness import Server, running, script
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from ds4batch.messages import (
    FALLBACKS,
    Delta,
    DraftStat,
    Event,
    Failed,
    Finished,
    PriceStat,
    Progress,
    Routed,
    Stats,
    StepSample,
)
from ds4batch.server import metric_series as m
from ds4batch.server.inflight import Job
from ds4batch.server.metrics import Metrics
from ds4batch.settings import Settings
from scheduler.pricing import Decision

COUNTERS = [
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:num_preemptions_total",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:spec_decode_num_drafts_total",
    "vllm:spec_decode_num_draft_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_total",
    'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"}',
    "ds4batch_requests_submitted_total",
]
HISTOGRAMS = [
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:request_time_per_output_token_seconds",
    "vllm:e2e_request_latency_seconds",
    "vllm:request_queue_time_seconds",
    "vllm:request_prefill_time_seconds",
    "vllm:request_decode_time_seconds",
    "vllm:request_inference_time_seconds",
    "vllm:iteration_tokens_total",
    "vllm:request_prompt_tokens",
    "vllm:request_generation_tokens",
    "vllm:request_max_num_generation_tokens",
    "vllm:request_params_max_tokens",
    "vllm:request_params_n",
    "ds4batch_decode_batch_rows",
    "ds4batch_prefill_chunk_tokens",
]


def labelled(name: str, **values: tuple[str, ...]) -> list[str]:
    names = sorted(values)
    return [
        name + "{" + ",".join(f'{n}="{v}"' for n, v in zip(names, combination, strict=True)) + "}"
        for combination in itertools.product(*(values[n] for n in names))
    ]


def samples(metrics: Metrics) -> dict[str, float]:
    out = {}
    for line in metrics.exposition().decode().splitlines():
        if not line.startswith("#"):
            key, value = line.rsplit(" ", 1)
            own = [p for p in re.findall(r'[a-z_]+="[^"]*"', key) if not re.match("model_name=|engine=", p)]
            out[key.partition("{")[0] + ("{" + ",".join(own) + "}" if own else "")] = float(value)
    return out


def fresh(slots: int = 2) -> Metrics:
    return Metrics(Settings(model="x", ctx=4096, batched_session=slots), "x")


def test_every_series_is_there_at_zero_from_the_start() -> None:
    got = samples(fresh())
    zero = [
        *COUNTERS,
        *(name + part for name in HISTOGRAMS for part in ("_count", "_sum", '_bucket{le="+Inf"}')),
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "ds4batch_engine_up",
        *labelled("vllm:request_success_total", finished_reason=m.FINISHED),
        *labelled("ds4batch_route_total", tier=m.TIERS, victim=m.VICTIMS),
        *labelled("ds4batch_reused_tokens_total", tier=m.TIERS),
        *labelled("ds4batch_materialise_failed_total", tier=m.TIERS),
        *labelled("ds4batch_evicted_tokens_total", **{"class": ("stale", "protected")}),
        *labelled("ds4batch_cancelled_total", phase=m.PHASES, cause=m.CAUSES),
        *labelled("ds4batch_fallback_total", reason=FALLBACKS),
        *labelled("ds4batch_requests_rejected_total", reason=m.REJECTIONS),
        *labelled("ds4batch_memory_bytes", kind=m.MEMORY_KINDS),
        *labelled("ds4batch_slot_live_tokens", slot=("0", "1")),
        *labelled("ds4batch_prefill_tokens_in_flight", slot=("0", "1"), kind=("done", "total")),
        *labelled("ds4batch_decode_step_seconds_count", kind=("plain", "spec")),
        *labelled("ds4batch_spec_decisions_total", kind=tuple(d.value for d in Decision)),
    ]
    assert {name: got.get(name) for name in zero} == dict.fromkeys(zero, 0)
    assert got['ds4batch_slots{state="empty"}'] == 2
    assert got["ds4batch_slot_context_limit_tokens"] == 4096
    config = next(name for name in got if name.startswith("vllm:cache_config_info"))
    assert 'ctx="4096"' in config
    assert 'slots="2"' in config


def test_the_exposition_is_well_formed_and_every_series_names_the_model() -> None:
    metrics = fresh()
    metrics.step(StepSample(3, 64, 0.01, "matrix products depend on the row count"))
    text = metrics.exposition().decode()
    assert "_created" not in text
    # the reference parser takes a histogram whose name ends in _total for a counter's
    for family in text_string_to_metric_families(text.replace("iteration_tokens_total", "iteration_tokens")):
        for sample in family.samples:
            assert sample.labels["model_name"] == "x"
            assert sample.labels["engine"] == "0"
            if family.type == "counter":
                assert sample.name.endswith("_total")
    got = samples(metrics)
    assert got["vllm:iteration_tokens_total_sum"] == 67
    assert got["ds4batch_decode_batch_rows_sum"] == 3
    assert got["ds4batch_prefill_chunk_tokens_sum"] == 64
    assert got['ds4batch_fallback_total{reason="matrix products depend on the row count"}'] == 1


def test_drafts_are_counted_by_their_place_and_their_forwards_timed_apart() -> None:
    metrics = Metrics(Settings(model="x", ctx=4096, batched_session=6, draft="lookup", mtp_draft=3), "x")
    metrics.step(StepSample(4, 0, 0.010, None))
    metrics.step(StepSample(4, 0, 0.012, None, 3, 8, [3, 1]))
    metrics.step(StepSample(4, 16, 0.014, None, 2, 5, [2, 2, 1]))
    got = samples(metrics)
    assert got["vllm:spec_decode_num_drafts_total"] == 5
    assert got["vllm:spec_decode_num_draft_tokens_total"] == 13
    assert got["vllm:spec_decode_num_accepted_tokens_total"] == 9
    per_place = [got[f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{i}"}}'] for i in range(3)]
    assert per_place == [5, 3, 1]
    assert [got[f'ds4batch_decode_step_seconds_count{{kind="{kind}"}}'] for kind in ("plain", "spec")] == [1, 2]
    assert got["vllm:iteration_tokens_total_sum"] == 4 + 12 + 25


def test_prices_are_shown_by_width_and_decisions_go_on_through_a_restart() -> None:
    metrics = Metrics(Settings(model="x", ctx=4096, batched_session=6, mtp=True), "x")
    before = samples(metrics)
    assert [before[f'ds4batch_spec_policy{{width="{width}"}}'] for width in ("1", "2", "3-4", "5-8")] == [0] * 4

    def report(decisions: dict[str, int], *prices: PriceStat) -> None:
        drafts = DraftStat(prices=list(prices), decisions=decisions)
        metrics.stats(Stats(running=0, waiting=0, kv_usage=0.0, slots=[], drafts=drafts))

    report({"explore": 5, "speculate": 7}, PriceStat(3, 4, 0.8, 1.7, 0.010, 0.012, True))
    got = samples(metrics)
    assert got['ds4batch_spec_acceptance{width="3-4"}'] == 0.8
    assert got['ds4batch_spec_tokens{width="3-4"}'] == 1.7
    costs = [got[f'ds4batch_spec_step_cost_seconds{{kind="{kind}",width="3-4"}}'] for kind in ("plain", "spec")]
    assert costs == [0.010, 0.012]
    assert got['ds4batch_spec_policy{width="3-4"}'] == 1
    metrics.engine_down()
    report({"explore": 2, "speculate": 0})
    got = samples(metrics)
    assert got['ds4batch_spec_policy{width="3-4"}'] == 0
    assert got['ds4batch_spec_decisions_total{kind="explore"}'] == 7
    assert got['ds4batch_spec_decisions_total{kind="speculate"}'] == 7


def test_buckets_of_token_counts_end_with_the_first_that_holds_the_context() -> None:
    assert m.one_two_five(4096) == (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
    assert m.one_two_five(1000)[-1] == 1000


class Driver:
    """Feeds one request's events the way the link does."""

    def __init__(self, metrics: Metrics, job: Job) -> None:
        self.metrics, self.job = metrics, job
        metrics.submitted(job)

    def __call__(self, event: Event, now: float) -> None:
        self.metrics.event(self.job, event, now)
        self.job.push(event, now)


def ended(job: Job, reason: Any, generated: int) -> Finished:
    return Finished(
        id=job.id,
        reason=reason,
        prompt_tokens=job.prompt_tokens,
        cached_tokens=0,
        completion_tokens=generated,
        queue_seconds=0.5,
        prefill_seconds=1.0,
        decode_seconds=3.0,
    )


def routed(job: Job, tier: str = "memory-token", cached: int = 40) -> Routed:
    return Routed(id=job.id, slot=0, tier=tier, cached_tokens=cached, victim="none", evicted_tokens=0, queue_seconds=0.5)


def test_the_prompt_counter_moves_with_the_chunks_and_the_intervals_follow_their_definitions() -> None:
    metrics = fresh()
    job = Job(1, 100, 10, arrival=1000.0)
    feed = Driver(metrics, job)
    moves = []
    for event, now in [
        (routed(job), 1000.5),
        (Progress(1, 70, 100), 1001.0),
        (Progress(1, 100, 100), 1001.4),
        (Delta(id=1, text="a", tokens=1), 1001.5),
        (Delta(id=1, text="", tokens=3), 1002.1),
    ]:
        feed(event, now)
        moves.append(samples(metrics)["vllm:prompt_tokens_total"])
    assert moves == [40, 70, 100, 100, 100]
    feed(ended(job, "stop", 5), 1004.6)
    got = samples(metrics)
    assert got["vllm:time_to_first_token_seconds_sum"] == 1.5
    assert got["vllm:inter_token_latency_seconds_count"] == 3
    assert abs(got["vllm:inter_token_latency_seconds_sum"] - 0.6) < 1e-6
    assert abs(got["vllm:e2e_request_latency_seconds_sum"] - 4.6) < 1e-6
    assert got["vllm:request_queue_time_seconds_sum"] == 0.5
    assert got["vllm:request_inference_time_seconds_sum"] == 4.0
    assert got["vllm:request_time_per_output_token_seconds_sum"] == 0.75
    assert got["vllm:generation_tokens_total"] == 5  # the last token brought no delta
    assert (got["vllm:prefix_cache_queries_total"], got["vllm:prefix_cache_hits_total"]) == (100, 40)


def test_an_abort_counts_the_phases_it_completed() -> None:
    metrics = fresh()
    queued, decoding = Job(1, 10, 5, arrival=0.0), Job(2, 10, 5, arrival=0.0)
    feed_queued, feed = Driver(metrics, queued), Driver(metrics, decoding)
    feed(routed(decoding, "none", 0), 1)
    feed(Delta(id=2, text="x", tokens=1), 2)
    for job, one in ((queued, feed_queued), (decoding, feed)):
        metrics.cancelled(job, "client")
        job.cancel("client")
        one(ended(job, "abort", job.trail.generated), 3)
    got = samples(metrics)
    assert got['ds4batch_cancelled_total{cause="client",phase="queue"}'] == 1
    assert got['ds4batch_cancelled_total{cause="client",phase="decode"}'] == 1
    assert got['vllm:request_success_total{finished_reason="abort"}'] == 2
    assert got["vllm:e2e_request_latency_seconds_count"] == 1
    assert got["vllm:request_queue_time_seconds_count"] == 1
    assert got["vllm:time_to_first_token_seconds_count"] == 1


def test_a_client_that_left_before_it_heard_of_a_full_queue_is_counted_once() -> None:
    metrics = fresh()
    job = Job(1, 10, 5, arrival=0.0)
    feed = Driver(metrics, job)
    metrics.cancelled(job, "client")
    job.cancel("client")
    feed(Failed(id=1, status=429, message=""), 1)
    got = samples(metrics)
    assert got['ds4batch_cancelled_total{cause="client",phase="queue"}'] == 1
    assert got['vllm:request_success_total{finished_reason="abort"}'] == 1
    assert got['ds4batch_requests_rejected_total{reason="queue_full"}'] == 0


@st.composite
def lives(draw: st.DrawFn) -> list[tuple[str, int]]:
    """The steps of one request's life, each with a number."""
    steps: list[tuple[str, int]] = []
    if draw(st.booleans()):
        steps.append(("routed", draw(st.integers(0, 60))))
        steps += [("progress", n) for n in draw(st.lists(st.integers(0, 50), max_size=4))]
        steps += [("delta", n) for n in draw(st.lists(st.integers(0, 3), max_size=5))]
    if draw(st.booleans()):
        steps.append(("cancel", 0))
    return [*steps, (draw(st.sampled_from(["stop", "length", "abort", "error", "failed", "full"])), draw(st.integers(0, 2)))]


@settings(max_examples=60, deadline=None)
@given(st.lists(lives(), max_size=8), st.randoms(use_true_random=False))
def test_the_invariants_hold_for_any_interleaving_of_lives(all_lives: list[list[tuple[str, int]]], rnd: Any) -> None:
    metrics = fresh()
    jobs = [Job(i, 50, 9, arrival=0.0) for i in range(len(all_lives))]
    drivers = [Driver(metrics, job) for job in jobs]
    pending = [list(life) for life in all_lives]
    silent_aborts, now = 0, 0.0
    while open_ := [i for i, life in enumerate(pending) if life]:
        i = rnd.choice(open_)
        kind, n = pending[i].pop(0)
        job, now = jobs[i], now + 0.25
        if kind == "routed":
            drivers[i](routed(job, rnd.choice(m.TIERS), n), now)
        elif kind == "progress":
            drivers[i](Progress(i, n, 50), now)
        elif kind == "delta":
            drivers[i](Delta(id=i, text="", tokens=n), now)
        elif kind == "cancel":
            metrics.cancelled(job, "client")
            job.cancel("client")
        elif kind == "full" and job.trail.routed is None:
            drivers[i](Failed(id=i, status=429, message=""), now)
            silent_aborts += job.cancelled is not None
        else:
            failed = kind in ("failed", "full")
            final: Event = Failed(id=i, status=503, message="") if failed else ended(job, kind, job.trail.generated + n)
            generated = job.trail.generated + (0 if failed else n)
            drivers[i](final, now)
            silent_aborts += generated == 0 and (job.cancelled is not None or kind == "abort")
    got = samples(metrics)
    success = sum(got[name] for name in labelled("vllm:request_success_total", finished_reason=m.FINISHED))
    assert got["ds4batch_requests_submitted_total"] - got['ds4batch_requests_rejected_total{reason="queue_full"}'] == success
    assert success == got["vllm:e2e_request_latency_seconds_count"] + silent_aborts
    cancelled = sum(got[name] for name in labelled("ds4batch_cancelled_total", phase=m.PHASES, cause=m.CAUSES))
    assert cancelled == got['vllm:request_success_total{finished_reason="abort"}']
    assert got["vllm:prefix_cache_hits_total"] <= got["vllm:prefix_cache_queries_total"]
    reused = sum(got[name] for name in labelled("ds4batch_reused_tokens_total", tier=m.TIERS))
    assert reused == got["vllm:prefix_cache_hits_total"]
    assert got["vllm:prompt_tokens_total"] <= 50 * len(jobs)


def test_on_the_wire_running_and_waiting_are_what_was_accepted_and_not_finished() -> None:
    with running({"batched_session": 2}) as server, concurrent.futures.ThreadPoolExecutor(6) as pool:

        def balance() -> tuple[float, float]:
            got = server.metrics()
            success = sum(v for k, v in got.items() if k.startswith("vllm:request_success_total"))
            return (
                got["vllm:num_requests_running"] + got["vllm:num_requests_waiting"],
                got["ds4batch_requests_submitted_total"] - success,
            )

        held = [server.send({"prompt": script(n=4000, delay=0.05)}, "/v1/completions") for _ in range(5)]
        server.until_metric("vllm:num_requests_waiting", 3)
        assert balance() == (5, 5)
        for sock in held:
            sock.close()
        server.until_metric("vllm:num_requests_running", 0)
        server.until_metric("vllm:num_requests_waiting", 0)
        assert balance() == (0, 0)
        list(pool.map(lambda _: server.complete("x"), range(12)))
        assert balance() == (0, 0)


def test_on_the_wire_a_client_that_left_before_it_heard_of_a_full_queue_is_counted_once() -> None:
    with running({"batched_session": 1, "max_queue": 1}) as server:
        body = {"prompt": script(n=4000, delay=0.05)}
        held = [server.send(body, "/v1/completions")]
        server.until_metric("vllm:num_requests_running", 1)
        held.append(server.send(body, "/v1/completions"))
        server.until_metric("vllm:num_requests_waiting", 1)
        pid = server.health()["engine_pid"]
        os.kill(pid, signal.SIGSTOP)  # a long forward, as the front sees it
        try:
            late = server.send(body, "/v1/completions")
            server.until_metric("ds4batch_requests_submitted_total", 3)
            late.close()
            server.until_metric('ds4batch_cancelled_total{cause="client",phase="queue"}', 1)
        finally:
            os.kill(pid, signal.SIGCONT)
        server.until_metric('vllm:request_success_total{finished_reason="abort"}', 1)
        assert server.metric('ds4batch_requests_rejected_total{reason="queue_full"}') == 0
        for sock in held:
            sock.close()


def test_slots_always_add_up(server: Server) -> None:
    server.chat()
    got = server.metrics()
    assert sum(got[name] for name in labelled("ds4batch_slots", state=m.SLOT_STATES)) == 4
    assert server.get("/metrics").headers["content-type"].startswith("text/plain; version=0.0.4")
