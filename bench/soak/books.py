"""Whether a server's counters agree with what its clients saw. Pure.

Every counter is bounded by the records that must be in it and those that may be; with no ambiguous record the bounds meet. Beside that
stand the server's own identities, which hold without a client's help once nothing runs or waits.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.soak.ledger import ANSWERED, REFUSED, SUBMITTED, Fate, Record

SUBMITS = "ds4batch_requests_submitted_total"
REJECTS = "ds4batch_requests_rejected_total"
SUCCESS = "vllm:request_success_total"
CANCELS = "ds4batch_cancelled_total"
GENERATED = "vllm:generation_tokens_total"
PROMPTS = "vllm:prompt_tokens_total"
QUERIES = "vllm:prefix_cache_queries_total"
HITS = "vllm:prefix_cache_hits_total"
E2E = "vllm:e2e_request_latency_seconds_count"
ROUTED = "ds4batch_route_total"
RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"

Reading = Mapping[str, float]


@dataclass(frozen=True)
class Imbalance:
    """A counter that is not what the records say."""

    counter: str
    counted: float
    low: float
    high: float

    def __str__(self) -> str:
        wanted = f"{self.low:g}" if self.low == self.high else f"{self.low:g} to {self.high:g}"
        return f"{self.counter}: {self.counted:g} instead of {wanted}"


def total(reading: Reading, name: str, **labels: str) -> float:
    """The sum of a metric's samples that carry all `labels`."""
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    return sum(
        value
        for series, value in reading.items()
        if re.split(r"\{", series, maxsplit=1)[0] == name and all(part in series for part in wanted)
    )


def imbalances(before: Reading, after: Reading, records: Sequence[Record]) -> list[Imbalance]:
    """Everything that does not add up between two readings, both taken with nothing running or waiting.

    `records` are all requests that were begun in between.
    """

    def change(name: str, **labels: str) -> float:
        return total(after, name, **labels) - total(before, name, **labels)

    found: list[Imbalance] = []

    def hold(counter: str, counted: float, low: float, high: float) -> None:
        if not low <= counted <= high:
            found.append(Imbalance(counter, counted, low, high))

    by_fate = {
        **{fate: change(SUCCESS, finished_reason=fate.value) for fate in (*sorted(ANSWERED), Fate.ABORT, Fate.ERROR)},
        **{fate: change(REJECTS, reason=fate.value) for fate in (*sorted(REFUSED), Fate.QUEUE_FULL)},
    }
    for fate, counted in by_fate.items():
        hold(f"requests that ended as {fate.value}", counted, *_bounds(records, frozenset({fate})))
    hold("requests counted in all", sum(by_fate.values()), *_bounds(records, frozenset(Fate) - {Fate.UNSEEN}))
    hold(SUBMITS, change(SUBMITS), *_bounds(records, SUBMITTED))
    hold(GENERATED, change(GENERATED), sum(r.tokens[0] for r in records), sum(r.tokens[1] for r in records))

    # the server's own identities
    ended, queue_full = change(SUCCESS), change(REJECTS, reason=Fate.QUEUE_FULL.value)
    hold(f"{SUBMITS} = those that ended + queue_full", change(SUBMITS), ended + queue_full, ended + queue_full)
    cancelled = change(CANCELS)
    hold(f"{CANCELS} = those that ended as abort", cancelled, by_fate[Fate.ABORT], by_fate[Fate.ABORT])
    hold(f"{HITS} = ds4batch_reused_tokens_total", change(HITS), *[change("ds4batch_reused_tokens_total")] * 2)
    for gauge in (RUNNING, WAITING):
        hold(gauge, total(after, gauge), 0, 0)
    if all(r.fates <= ANSWERED for r in records):  # nothing is uncertain: all must be exact
        prompts = sum(r.said.prompt_tokens for r in records)
        hold(PROMPTS, change(PROMPTS), prompts, prompts)
        hold(QUERIES, change(QUERIES), prompts, prompts)
        hold(HITS, change(HITS), *[sum(r.said.cached_tokens for r in records)] * 2)
        hold(E2E, change(E2E), len(records), len(records))
        hold(ROUTED, change(ROUTED), len(records), len(records))
    return found


def ambiguous(records: Sequence[Record]) -> int:
    """Records whose fate is not known."""
    return sum(len(r.fates) > 1 for r in records)


def _bounds(records: Sequence[Record], fates: frozenset[Fate]) -> tuple[int, int]:
    """Records that must be among `fates`, and those that may be."""
    return sum(r.fates <= fates for r in records), sum(bool(r.fates & fates) for r in records)
