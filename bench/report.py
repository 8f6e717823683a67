"""Turns the requests of a load into the figures that are published.

Owns the definition of each figure of the result and the result's JSON form. Rejected streams and deliberate hang-ups
are counted here and appear in no latency list.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench.environment import Environment
from bench.http_stream import Outcome, Result
from bench.load import Measured
from bench.rates import DecodeRate, decode_rate, peak_overlap, peak_tokens_per_second
from bench.serve_options import Options
from bench.server_metrics import (
    QUEUE,
    RUNNING,
    WAITING,
    HistogramSummary,
    Reading,
    Speculation,
    difference,
    histogram,
    speculation,
    total,
)
from bench.stats import Summary, summarize

SCHEMA = "ds4batch.serve_concurrency/1"
SWEEP_SCHEMA = "ds4batch.serve_concurrency.sweep/1"
LAG_WARNING_MS = 5.0
NOT_SENT = "not_sent"


@dataclass(frozen=True)
class FailureCount:
    """How often streams were rejected under one name, and what the first of them said."""

    reason: str
    count: int
    example: str


@dataclass(frozen=True)
class Goodput:
    """Requests that met every goal, out of all that were answered or rejected."""

    goals_ms: dict[str, float]
    good: int
    fraction: float
    requests_per_s: float


@dataclass(frozen=True)
class TurnReport:
    """One turn over all sessions: what the reuse of a growing history is worth."""

    turn: int  # from 1
    completed: int
    prompt_tokens: int
    cached_tokens: int
    ttft_ms: Summary


@dataclass(frozen=True)
class IntruderReport:
    """The long prompt that arrived during the load, and what the others felt of it.

    Its waiting time runs from its start to its first token, and so includes any time in a queue. A gap between two
    chunks of another request belongs to `itl_during_ms` if it overlaps the waiting time, otherwise to `itl_outside_ms`.
    """

    reason: str  # empty if it was answered
    detail: str
    asked_tokens: int
    prompt_tokens: int
    cached_tokens: int
    at_s: float | None  # after the load's first start
    ttft_ms: float | None
    e2el_ms: float | None
    decoders: int  # requests that had a gap in the waiting time
    itl_during_ms: Summary
    itl_outside_ms: Summary


@dataclass(frozen=True)
class ServerReport:
    """The server's metrics over the load."""

    delta: Reading  # the series that changed
    running_after: float | None
    waiting_after: float | None
    queue_ms: HistogramSummary | None
    spec: Speculation | None


@dataclass(frozen=True)
class Report:
    """Every figure of one load. Names ending in _ms are milliseconds, in _s seconds; throughputs are per second."""

    config: dict[str, Any]
    completed: int
    failed: int
    disconnected: int
    interrupted: bool
    failures: tuple[FailureCount, ...]
    duration_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    request_throughput: float
    output_throughput: float
    total_token_throughput: float
    decode_rate: DecodeRate
    full_width_decode_rate: DecodeRate
    peak_output_tokens_per_s: float
    peak_concurrency: int
    ttft_ms: Summary
    tpot_ms: Summary
    itl_ms: Summary
    e2el_ms: Summary
    dispatch_lag_ms: Summary
    goodput: Goodput | None
    turns: tuple[TurnReport, ...]
    intruder: IntruderReport | None
    server: ServerReport | None


def build_report(
    measured: Measured, options: Options, config: dict[str, Any], width: int, readings: tuple[Reading, Reading] | None
) -> Report:
    """The figures of `measured`.

    `width` is how many requests the load keeps in flight; `readings` are the server's metrics before and after.
    """
    good = [result for result in measured.results if result.outcome is Outcome.COMPLETED]
    made = [result for result in measured.results if result.end > result.sent]
    intruder = _intruder(measured, options, good) if options.intruder_tokens else None
    failures = count_failures(measured.results, intruder)
    duration = max(r.end for r in made) - min(r.start for r in made) if made else 0.0
    prompt, output = sum(r.prompt_tokens for r in good), sum(r.output_tokens for r in good)
    return Report(
        config=config,
        completed=len(good),
        failed=sum(failure.count for failure in failures),
        disconnected=sum(r.outcome is Outcome.DISCONNECTED for r in measured.results),
        interrupted=measured.interrupted,
        failures=failures,
        duration_s=duration,
        prompt_tokens=prompt,
        cached_tokens=sum(r.cached_tokens for r in good),
        output_tokens=output,
        request_throughput=_per(len(good), duration),
        output_throughput=_per(output, duration),
        total_token_throughput=_per(prompt + output, duration),
        decode_rate=decode_rate(good),
        full_width_decode_rate=decode_rate(good, width),
        peak_output_tokens_per_s=peak_tokens_per_second(good),
        peak_concurrency=peak_overlap((r.sent, r.end) for r in made),
        ttft_ms=summarize([1e3 * r.ttft for r in good]),
        tpot_ms=summarize([1e3 * r.tpot for r in good if r.tpot is not None]),
        itl_ms=summarize([1e3 * (end - start) for r in good for start, end in r.gaps]),
        e2el_ms=summarize([1e3 * r.e2el for r in good]),
        dispatch_lag_ms=summarize([1e3 * r.dispatch_lag for r in good] if options.mode == "poisson" else []),
        goodput=goodput(good, options.goodput, sum(r.outcome is Outcome.FAILED for r in measured.results), duration),
        turns=_turns(good) if options.mode == "sessions" else (),
        intruder=intruder,
        server=_server(*readings) if readings else None,
    )


def _per(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 0 else 0.0


def count_failures(results: Sequence[Result], intruder: IntruderReport | None) -> tuple[FailureCount, ...]:
    """Rejected streams by name, the most frequent first. The intruder's failure is among them under its own name."""
    failed = [(r.reason, r.detail) for r in results if r.outcome is Outcome.FAILED]
    if intruder is not None and intruder.reason:
        failed.append((f"intruder:{intruder.reason}", intruder.detail))
    examples = dict(reversed(failed))  # the first of a name wins
    return tuple(
        FailureCount(reason, count, examples[reason]) for reason, count in Counter(reason for reason, _ in failed).most_common()
    )


def goodput(good: Sequence[Result], goals: dict[str, float], failed: int, duration: float) -> Goodput | None:
    """How many requests met all of `goals` (milliseconds); None without goals. One token meets any TPOT goal."""
    if not goals:
        return None

    def meets(result: Result) -> bool:
        figures = {"ttft": result.ttft, "tpot": result.tpot or 0.0, "e2el": result.e2el}
        return all(1e3 * figures[name] <= limit for name, limit in goals.items())

    count = sum(map(meets, good))
    return Goodput(goals, count, _per(count, len(good) + failed), _per(count, duration))


def _turns(good: Sequence[Result]) -> tuple[TurnReport, ...]:
    reports = []
    for turn in sorted({r.turn for r in good}):
        of_turn = [r for r in good if r.turn == turn]
        reports.append(
            TurnReport(
                turn=turn + 1,
                completed=len(of_turn),
                prompt_tokens=sum(r.prompt_tokens for r in of_turn),
                cached_tokens=sum(r.cached_tokens for r in of_turn),
                ttft_ms=summarize([1e3 * r.ttft for r in of_turn]),
            )
        )
    return tuple(reports)


def _intruder(measured: Measured, options: Options, good: Sequence[Result]) -> IntruderReport:
    result = measured.intruder
    if result is None:
        detail = "the load was over before --intruder-at"
        return IntruderReport(NOT_SENT, detail, options.intruder_tokens, 0, 0, None, None, None, 0, summarize([]), summarize([]))
    answered = result.outcome is Outcome.COMPLETED
    waiting = (result.start, result.token_times[0] if result.token_times else result.end)
    during: list[float] = []
    outside: list[float] = []
    decoders = 0
    for other in good:
        overlapping = [start < waiting[1] and end > waiting[0] for start, end in other.gaps]
        decoders += any(overlapping)
        for (start, end), inside in zip(other.gaps, overlapping, strict=True):
            (during if inside else outside).append(1e3 * (end - start))
    return IntruderReport(
        reason=result.reason,
        detail=result.detail,
        asked_tokens=options.intruder_tokens,
        prompt_tokens=result.prompt_tokens,
        cached_tokens=result.cached_tokens,
        at_s=result.start - min(r.start for r in measured.results),
        ttft_ms=1e3 * result.ttft if answered else None,
        e2el_ms=1e3 * result.e2el if answered else None,
        decoders=decoders,
        itl_during_ms=summarize(during),
        itl_outside_ms=summarize(outside),
    )


def _server(before: Reading, after: Reading) -> ServerReport:
    delta = difference(before, after)
    return ServerReport(
        delta={name: change for name, change in delta.items() if change},
        running_after=total(after, RUNNING),
        waiting_after=total(after, WAITING),
        queue_ms=histogram(delta, QUEUE),
        spec=speculation(delta),
    )


@dataclass(frozen=True)
class SweepRow:
    """One concurrency of a sweep beside the first. A ratio is None where either rate is."""

    concurrency: int
    requests: int
    failed: int
    decode_tokens_per_s: float | None
    full_width_tokens_per_s: float | None
    output_throughput: float
    decode_ratio: float | None
    full_width_ratio: float | None
    throughput_ratio: float | None


def compare(reports: Sequence[Report]) -> tuple[SweepRow, ...]:
    """Each load of a sweep against the first one."""
    base = reports[0]
    return tuple(
        SweepRow(
            concurrency=report.config["concurrency"],
            requests=report.config["requests"],
            failed=report.failed,
            decode_tokens_per_s=report.decode_rate.tokens_per_s,
            full_width_tokens_per_s=report.full_width_decode_rate.tokens_per_s,
            output_throughput=report.output_throughput,
            decode_ratio=_ratio(report.decode_rate.tokens_per_s, base.decode_rate.tokens_per_s),
            full_width_ratio=_ratio(report.full_width_decode_rate.tokens_per_s, base.full_width_decode_rate.tokens_per_s),
            throughput_ratio=_ratio(report.output_throughput, base.output_throughput),
        )
        for report in reports
    )


def _ratio(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None


def to_json(report: Report, environment: Environment, per_request: Sequence[Result] | None) -> dict[str, Any]:
    """The JSON form of one load; `per_request` adds every request to it."""
    body = asdict(report)
    server = body.pop("server") or {}
    return {
        "schema": SCHEMA,
        **asdict(environment),
        **body,
        "queue_ms": server.get("queue_ms"),
        "spec": server.get("spec"),
        "server_delta": server.get("delta", {}),
        "server_after": {"running": server.get("running_after"), "waiting": server.get("waiting_after")},
        "per_request": None if per_request is None else _per_request(per_request),
    }


def sweep_to_json(rows: Sequence[SweepRow], runs: Sequence[dict[str, Any]], environment: Environment) -> dict[str, Any]:
    """The JSON form of a sweep: the comparison, and each load in full."""
    return {"schema": SWEEP_SCHEMA, **asdict(environment), "sweep": [asdict(row) for row in rows], "runs": list(runs)}


def _per_request(results: Sequence[Result]) -> list[dict[str, Any]]:
    origin = min((r.start for r in results), default=0.0)
    return [
        {
            "index": r.index,
            "turn": r.turn,
            "outcome": str(r.outcome),
            "reason": r.reason,
            "detail": r.detail,
            "finish_reason": r.finish_reason,
            "start_s": r.start - origin,
            "dispatch_lag_ms": 1e3 * r.dispatch_lag,
            "prompt_tokens": r.prompt_tokens,
            "cached_tokens": r.cached_tokens,
            "output_tokens": r.output_tokens,
            "ttft_ms": 1e3 * r.ttft if r.token_times else None,
            "e2el_ms": 1e3 * r.e2el,
            "tpot_ms": 1e3 * r.tpot if r.token_times and r.tpot is not None else None,
            "itl_ms": [1e3 * (end - start) for start, end in r.gaps],
        }
        for r in results
    ]
