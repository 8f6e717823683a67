"""All that /metrics shows, fed from the engine's reports and from the trails of the requests. Nothing here asks the engine.

Names under `vllm:` mean what they mean in vLLM, so that its dashboards carry over; what only this server has is under
`ds4batch_`. Intervals (vLLM V1): queue = scheduled - arrival, prefill = first token - scheduled, decode = last - first token,
inference = prefill + decode, TTFT = first token - arrival, E2E = finish - arrival, ITL = gap between tokens; a gap that brought
k tokens counts k times a k-th. An aborted request is observed for the phases it completed, and for E2E when it had produced a
token.

With nothing on the way between the processes: running + waiting = submitted - rejected{queue_full} - the sum of
request_success; reused tokens add up to the prefix cache's hits; request_success adds up to the E2E count plus the aborts
without a token; what was cancelled adds up to the aborts plus what was given up with an error (stall, deadline).
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Gauge, disable_created_metrics, generate_latest

from ds4batch.messages import (
    FALLBACKS,
    CancelCause,
    Delta,
    Event,
    Failed,
    Finished,
    Progress,
    Ready,
    Routed,
    Stats,
    StepSample,
    Transfer,
)
from ds4batch.server import metric_series as m
from ds4batch.server.connections import DROPPED, Dropped
from ds4batch.server.disk_metrics import DiskMetrics
from ds4batch.server.draft_metrics import DraftMetrics
from ds4batch.server.inflight import Job, Trail
from ds4batch.server.key_metrics import KeyMetrics
from ds4batch.server.pool_metrics import PoolMetrics
from ds4batch.settings import Settings

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
QUEUE_FULL = 429


class Metrics:
    """The registry and its feeders. It observes an EngineLink."""

    def __init__(self, settings: Settings, model: str) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._settings = settings
        self._model = model
        slots = [str(i) for i in range(settings.batched_session)]
        s = m.Series(self.registry, model)

        self._running = s.gauge("vllm:num_requests_running", "Requests that have a slot.").at()
        self._waiting = s.gauge("vllm:num_requests_waiting", "Requests in the queue.").at()
        self._kv_usage = s.gauge("vllm:kv_cache_usage_perc", "Share of the KV pool in use, 0 to 1.").at()
        self._queries = s.counter("vllm:prefix_cache_queries", "Prompt tokens looked up.").at()
        self._hits = s.counter("vllm:prefix_cache_hits", "Prompt tokens found in a session.").at()
        self._prompt_tokens = s.counter("vllm:prompt_tokens", "Prompt tokens evaluated or reused, as they happen.").at()
        self._generation_tokens = s.counter("vllm:generation_tokens", "Tokens generated.").at()
        self._success = s.counter("vllm:request_success", "Requests by how they ended.", finished_reason=m.FINISHED)
        self._ttft = s.histogram("vllm:time_to_first_token_seconds", "Arrival to first token.", m.TTFT).at()
        self._itl = s.histogram("vllm:inter_token_latency_seconds", "Gap between two tokens of a request.", m.ITL).at()
        self._tpot = s.histogram("vllm:request_time_per_output_token_seconds", "Mean gap of a request.", m.ITL).at()
        self._e2e = s.histogram("vllm:e2e_request_latency_seconds", "Arrival to end.", m.REQUEST).at()
        self._queue = s.histogram("vllm:request_queue_time_seconds", "Arrival to slot.", m.SHORT_REQUEST).at()
        self._prefill = s.histogram("vllm:request_prefill_time_seconds", "Slot to first token.", m.SHORT_REQUEST).at()
        self._decode = s.histogram("vllm:request_decode_time_seconds", "First to last token.", m.REQUEST).at()
        self._inference = s.histogram("vllm:request_inference_time_seconds", "Slot to last token.", m.REQUEST).at()
        self._iteration = s.histogram("vllm:iteration_tokens_total", "Tokens in one forward.", m.STEP_TOKENS).at()
        token_buckets = m.one_two_five(settings.ctx)
        self._req_prompt = s.histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", token_buckets).at()
        self._req_generation = s.histogram("vllm:request_generation_tokens", "Generated tokens of a request.", token_buckets).at()
        self._req_max_generation = s.histogram(
            "vllm:request_max_num_generation_tokens", "Generated tokens of a request's longest answer.", token_buckets
        ).at()
        self._req_max_tokens = s.histogram(
            "vllm:request_params_max_tokens", "Requested output limit.", m.one_two_five(settings.tokens)
        ).at()
        self._req_n = s.histogram("vllm:request_params_n", "Requested answers, always 1.", (1, 2, 5, 10, 20)).at()
        self._config = Gauge(
            "vllm:cache_config_info",
            "The configuration, in the labels.",
            registry=self.registry,
            labelnames=(*m.COMMON, "ctx", "slots", "block_size", "kv_dtype", "quantum"),
        )
        self._describe_config(settings.page_tokens or settings.ctx, settings.dtype)

        self._slots = s.gauge("ds4batch_slots", "Slots by state; they add up to all slots.", state=m.SLOT_STATES)
        self._slot_live = s.gauge("ds4batch_slot_live_tokens", "Tokens of a slot's session.", slot=slots)
        self._slot_prefill = s.gauge(
            "ds4batch_prefill_tokens_in_flight", "A slot's prompt under evaluation.", slot=slots, kind=("done", "total")
        )
        s.gauge("ds4batch_slot_context_limit_tokens", "Context length of a session.").at().set(settings.ctx)
        self._route = s.counter("ds4batch_route", "Requests routed.", tier=m.TIERS, victim=m.VICTIMS)
        self._reused = s.counter("ds4batch_reused_tokens", "Prompt tokens reused.", tier=m.TIERS)
        self._fell = s.counter("ds4batch_materialise_failed", "Reuse that was found and could not be carried out.", tier=m.TIERS)
        self._evicted = s.counter(
            "ds4batch_evicted_tokens",
            "Session tokens given up for another's request or its pages.",
            **{"class": ("stale", "protected")},
        )
        self._rows = s.histogram("ds4batch_decode_batch_rows", "Decode rows of a forward that had any.", m.ROWS).at()
        self._step = s.histogram(
            "ds4batch_decode_step_seconds", "Time of a forward with decode rows.", m.ITL, kind=("plain", "spec")
        )
        self._drafts = DraftMetrics(s, settings)
        self._chunk = s.histogram("ds4batch_prefill_chunk_tokens", "Prompt tokens of a forward that had any.", m.CHUNK).at()
        self._fallback = s.counter("ds4batch_fallback", "Forwards on the ordered path.", reason=FALLBACKS)
        self._cancelled = s.counter("ds4batch_cancelled", "Requests given up.", phase=m.PHASES, cause=m.CAUSES)
        self._stalled = s.counter(
            "ds4batch_stalled_requests", "Requests ended by the watchdog because nothing came of them while the engine ran."
        ).at()
        self._memory = s.gauge(
            "ds4batch_memory_bytes", "Memory by kind: as planned at start, and what the sessions hold.", kind=m.MEMORY_KINDS
        )
        self._device_memory = s.gauge("ds4batch_device_memory_bytes", "Memory in use on the device, 0 if unknown.").at()
        self._pool = PoolMetrics(s, slots, self._memory, self._evicted)
        self.device_memory = 0  # bytes, of the last report
        self._submitted = s.counter("ds4batch_requests_submitted", "Requests handed to the engine.").at()
        self._rejected = s.counter("ds4batch_requests_rejected", "Requests refused, by reason.", reason=m.REJECTIONS)
        self._logins = s.counter("ds4batch_logins_refused", "Requests without a key that lets them in.", reason=m.LOGIN_REFUSALS)
        self._dropped = s.counter(
            "ds4batch_connections_dropped", "Connections ended before a request of theirs was read.", reason=DROPPED
        )
        self._keys = KeyMetrics(s)
        self._up = s.gauge("ds4batch_engine_up", "1 while the engine takes requests.").at()
        self._starts = s.counter("ds4batch_engine_ready", "Times the engine became ready.").at()
        self._disk = DiskMetrics(s)
        self._no_slots()

    def exposition(self) -> bytes:
        """The text format 0.0.4."""
        return generate_latest(self.registry)

    def rejected(self, reason: str) -> None:
        """A request was refused before it reached the engine; `reason` is one of REJECTIONS."""
        self._rejected.at(reason).inc()

    def login_refused(self, reason: str) -> None:
        """Nobody was let in; `reason` is one of LOGIN_REFUSALS."""
        self._logins.at(reason).inc()

    def connection_dropped(self, reason: Dropped) -> None:
        """A connection was ended before a handler had it."""
        self._dropped.at(reason).inc()

    # what the link tells

    def submitted(self, job: Job) -> None:
        """A request went to the engine."""
        self._submitted.inc()
        self._keys.submitted(job)
        self._req_max_tokens.observe(job.max_tokens)
        self._req_n.observe(1)

    def event(self, job: Job, event: Event, now: float) -> None:
        """One event; `job.trail` is as it was before."""
        match event:
            case Routed():
                self._routed(job, event)
            case Progress():
                self._advance_prompt(job.trail, event.done)
            case Delta():
                self._tokens(job, event.tokens, now)
            case Finished():
                self._finished(job, event, now)
            case Failed():
                self._failed(job, event, now)

    def cancelled(self, job: Job, cause: CancelCause) -> None:
        """The front gave a request up."""
        self._cancelled.at(job.trail.phase, cause).inc()
        if cause == "stall":
            self._stalled.inc()

    def step(self, sample: StepSample) -> None:
        """One forward."""
        self._iteration.observe(sample.decode_rows + sample.drafts + sample.prefill_tokens)
        self._drafts.step(sample)
        if sample.decode_rows:
            self._rows.observe(sample.decode_rows)
            self._step.at("spec" if sample.drafts else "plain").observe(sample.seconds)
        if sample.prefill_tokens:
            self._chunk.observe(sample.prefill_tokens)
        if sample.fallback is not None:
            self._fallback.at(sample.fallback).inc()

    def transfer(self, transfer: Transfer) -> None:
        """One checkpoint went to the disk or came from it."""
        self._disk.transfer(transfer)

    def stats(self, stats: Stats) -> None:
        """Gauges of one instant."""
        if stats.pool is not None:
            self._pool.stats(stats.pool, stats.slots)
        if stats.drafts is not None:
            self._drafts.stats(stats.drafts)
        if stats.disk is not None:
            self._disk.stats(stats.disk)
        if stats.owners:
            self._keys.stats(stats.owners)
        self._running.set(stats.running)
        self._waiting.set(stats.waiting)
        self._kv_usage.set(stats.kv_usage)
        self.device_memory = stats.device_memory
        self._device_memory.set(stats.device_memory)
        states = dict.fromkeys(m.SLOT_STATES, 0)
        for i, slot in enumerate(stats.slots):
            states[slot.state] = states.get(slot.state, 0) + 1
            self._slot_live.at(str(i)).set(slot.live_tokens)
            self._slot_prefill.at(str(i), "done").set(slot.prefill_done)
            self._slot_prefill.at(str(i), "total").set(slot.prefill_total)
        for state, count in states.items():
            self._slots.at(state).set(count)

    def ready(self, ready: Ready) -> None:
        """The engine has loaded the model."""
        self._up.set(1)
        self._starts.inc()
        self._describe_config(ready.page_tokens, ready.dtype)
        for kind, size in ready.memory.items():
            self._memory.at(kind).set(size)

    def engine_down(self) -> None:
        """The engine is gone: nothing runs, nothing waits, no session is left."""
        self._up.set(0)
        self._disk.engine_down()
        self._drafts.engine_down()
        self._keys.engine_down()
        self._pool.engine_down([str(i) for i in range(self._settings.batched_session)])
        for gauge in (self._running, self._waiting, self._kv_usage, self._device_memory):
            gauge.set(0)
        self._no_slots()

    # one event at a time

    def _routed(self, job: Job, event: Routed) -> None:
        if job.trail.routed is not None:
            return
        cached = max(0, min(event.cached_tokens, job.prompt_tokens))
        self._queue.observe(event.queue_seconds)
        self._queries.inc(job.prompt_tokens)
        self._hits.inc(cached)
        self._reused.at(event.tier).inc(cached)
        self._route.at(event.tier, event.victim).inc()
        if event.fell_from is not None:
            self._fell.at(event.fell_from).inc()
        if event.evicted_tokens and event.victim in ("stale", "protected"):
            self._evicted.at(event.victim).inc(event.evicted_tokens)
        self._advance_prompt(job.trail, cached)

    def _advance_prompt(self, trail: Trail, done: int) -> None:
        if done > trail.evaluated:
            self._prompt_tokens.inc(done - trail.evaluated)

    def _tokens(self, job: Job, count: int, now: float) -> None:
        if count <= 0:
            return
        trail = job.trail
        self._generation_tokens.inc(count)
        if trail.first_token_at is None:
            self._ttft.observe(now - trail.arrival)
            count -= 1  # the first token ends no gap; others in the same message came with it
        since = trail.last_token_at if trail.last_token_at is not None else now
        for _ in range(count):
            self._itl.observe((now - since) / count)

    def _finished(self, job: Job, event: Finished, now: float) -> None:
        trail = job.trail
        produced = trail.first_token_at is not None or event.completion_tokens > 0
        if event.completion_tokens > trail.generated:  # tokens that brought no delta, such as the one that ended the turn
            self._generation_tokens.inc(event.completion_tokens - trail.generated)
        if produced:
            self._advance_prompt(trail, event.prompt_tokens)
            self._prefill.observe(event.prefill_seconds)
            self._decode.observe(event.decode_seconds)
            self._inference.observe(event.prefill_seconds + event.decode_seconds)
        if event.completion_tokens > 1:
            self._tpot.observe(event.decode_seconds / (event.completion_tokens - 1))
        reason = event.reason if job.cancelled is None else _given_up(job)
        if reason == "abort" and job.cancelled is None:
            self._cancelled.at(trail.phase, "shutdown").inc()
        self._keys.ended(job, max(event.completion_tokens, trail.generated))
        self._ended(job, reason, max(event.completion_tokens, trail.generated), now)

    def _failed(self, job: Job, event: Failed, now: float) -> None:
        # A client that left before it heard of the full queue is among the cancelled, and so among the aborts as well.
        if event.status == QUEUE_FULL and job.trail.routed is None and job.cancelled is None:
            self._rejected.at("queue_full").inc()
            return
        self._keys.ended(job, job.trail.generated)
        self._ended(job, "error" if job.cancelled is None else _given_up(job), job.trail.generated, now)

    def _ended(self, job: Job, reason: str, generated: int, now: float) -> None:
        self._success.at(reason).inc()
        if reason == "abort" and generated == 0:
            return
        self._e2e.observe(now - job.trail.arrival)
        self._req_prompt.observe(job.prompt_tokens)
        self._req_generation.observe(generated)
        self._req_max_generation.observe(generated)

    def _no_slots(self) -> None:
        count = self._settings.batched_session
        for state in m.SLOT_STATES:
            self._slots.at(state).set(count if state == "empty" else 0)
        for slot in map(str, range(count)):
            self._slot_live.at(slot).set(0)
            self._slot_prefill.at(slot, "done").set(0)
            self._slot_prefill.at(slot, "total").set(0)

    def _describe_config(self, page_tokens: int, dtype: str) -> None:
        self._config.clear()
        self._config.labels(
            self._model,
            m.ENGINE,
            str(self._settings.ctx),
            str(self._settings.batched_session),
            str(page_tokens),
            dtype,
            str(self._settings.mixed_prefill_quantum),
        ).set(1)


def _given_up(job: Job) -> str:
    """How a request ended that the front gave up: where the client is still there it got an error."""
    return "error" if job.cancelled in ("stall", "deadline") else "abort"
