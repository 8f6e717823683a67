"""Summaries of a list of figures: mean, spread and percentiles, under both percentile rules in use.

Owns the arithmetic of one list. It knows nothing of requests or servers; the caller chooses the unit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

LOW_N = 100  # below this many values the 99th percentile is an interpolation towards the largest one


@dataclass(frozen=True)
class Summary:
    """One list of figures. Every field but `n` and `low_n` is None for an empty list.

    `pNN` interpolates linearly (numpy's default, and what `vllm bench serve` prints); `pNN_nr` is the nearest-rank rule
    value[int(f * n)] that older load scripts use. `std` is the population's, as numpy's default.
    """

    n: int
    low_n: bool  # p99 rests on fewer than LOW_N values
    mean: float | None = None
    std: float | None = None
    median: float | None = None
    p50: float | None = None
    p75: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    p50_nr: float | None = None
    p75_nr: float | None = None
    p90_nr: float | None = None
    p95_nr: float | None = None
    p99_nr: float | None = None
    min: float | None = None
    max: float | None = None


def percentile(ordered: Sequence[float], fraction: float) -> float:
    """The linear percentile of a non-empty ascending list; `fraction` is 0..1. Type 7 of Hyndman and Fan (1996)."""
    position = fraction * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def nearest_rank(ordered: Sequence[float], fraction: float) -> float:
    """The value at index int(fraction * n), clipped to the last, of a non-empty ascending list."""
    return ordered[min(int(fraction * len(ordered)), len(ordered) - 1)]


def summarize(values: Sequence[float]) -> Summary:
    """Every figure of `values`, in the unit of `values`."""
    count = len(values)
    if not count:
        return Summary(n=0, low_n=True)
    ordered = sorted(values)
    mean = math.fsum(ordered) / count
    return Summary(
        n=count,
        low_n=count < LOW_N,
        mean=mean,
        std=math.sqrt(math.fsum((value - mean) ** 2 for value in ordered) / count),
        median=percentile(ordered, 0.5),
        p50=percentile(ordered, 0.50),
        p75=percentile(ordered, 0.75),
        p90=percentile(ordered, 0.90),
        p95=percentile(ordered, 0.95),
        p99=percentile(ordered, 0.99),
        p50_nr=nearest_rank(ordered, 0.50),
        p75_nr=nearest_rank(ordered, 0.75),
        p90_nr=nearest_rank(ordered, 0.90),
        p95_nr=nearest_rank(ordered, 0.95),
        p99_nr=nearest_rank(ordered, 0.99),
        min=ordered[0],
        max=ordered[-1],
    )
