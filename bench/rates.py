"""Figures of a whole load: throughput peaks, concurrency, and the rate at which a batch decodes.

Owns what is computed from several requests together. Times are seconds on one clock.

Decode rate. A request decodes from its first token to [DONE], and in that time it yields output_tokens - 1 tokens (the
first one is the prefill's). The aggregate decode rate is the sum of these tokens over the requests, divided by the
length of time in which at least one request was decoding (the union of the intervals, so nothing is counted twice).
Time in which everybody waited for a first token is excluded; time in which some prefilled while others decoded is
included, which is the price of sharing that a user sees. With one request at a time it is 1 / TPOT. The full-width rate
counts only the time in which at least `width` requests decoded at once, and so leaves out the ramps and the neighbours'
prefill: it is the speed of the batch itself.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from bench.http_stream import Result

Interval = tuple[float, float]


@dataclass(frozen=True)
class DecodeRate:
    """Output tokens a second over a stretch of time. `tokens_per_s` is None where there was no such time."""

    tokens_per_s: float | None
    tokens: float
    seconds: float


def where_overlapping(intervals: Iterable[Interval], width: int) -> list[Interval]:
    """The stretches in which at least `width` of the intervals overlap, ascending and disjoint."""
    edges = sorted(edge for start, end in intervals if end > start for edge in ((start, 1), (end, -1)))
    stretches: list[Interval] = []
    depth, opened = 0, 0.0
    for at, step in edges:
        before, depth = depth, depth + step
        if before < width <= depth:
            opened = at
        elif depth < width <= before and at > opened:
            stretches.append((opened, at))
    return stretches


def peak_overlap(intervals: Iterable[Interval]) -> int:
    """The most intervals that overlap at one instant; one that ends as another starts does not overlap it."""
    depth = most = 0
    for _, step in sorted(edge for start, end in intervals for edge in ((start, 1), (end, -1))):
        depth += step
        most = max(most, depth)
    return most


def peak_tokens_per_second(results: Sequence[Result]) -> float:
    """The most output tokens in any whole second counted from the first start.

    Tokens come from usage; a stream's tokens are spread evenly over its chunks, as no chunk says how many it holds.
    """
    if not results:
        return 0.0
    origin = min(result.start for result in results)
    bins: dict[int, float] = {}
    for result in results:
        weight = result.output_tokens / len(result.token_times)
        for at in result.token_times:
            second = int(at - origin)
            bins[second] = bins.get(second, 0.0) + weight
    return max(bins.values())


def decode_rate(results: Sequence[Result], width: int = 1) -> DecodeRate:
    """Tokens decoded while at least `width` requests decode, over the length of that time."""
    stretches = where_overlapping(((result.token_times[0], result.end) for result in results), width)
    covered = Coverage(stretches)
    tokens = sum(_tokens_within(result, covered) for result in results)
    return DecodeRate(tokens / covered.seconds if covered.seconds > 0 else None, tokens, covered.seconds)


def _tokens_within(result: Result, covered: Coverage) -> float:
    """The part of a request's decoded tokens that falls into the covered time.

    A token was being made during the whole gap before its chunk, so a gap cut by a border counts by its share.
    """
    gaps = list(pairwise(result.token_times)) or [(result.token_times[0], result.end)]
    each = (result.output_tokens - 1) / len(gaps)
    return each * sum(covered.share(start, end) for start, end in gaps)


class Coverage:
    """Answers how much of an interval lies within a set of stretches."""

    def __init__(self, stretches: Sequence[Interval]) -> None:
        """`stretches` are ascending and disjoint."""
        self._starts = [start for start, _ in stretches]
        self._ends = [end for _, end in stretches]
        self._before = [
            0.0,
            *accumulate(end - start for start, end in stretches),
        ]  # seconds covered before each stretch

    @property
    def seconds(self) -> float:
        """All the time covered."""
        return self._before[-1]

    def share(self, start: float, end: float) -> float:
        """The covered part of an interval, 0..1. An empty one counts if its instant is covered, borders too."""
        if end > start:
            return (self._until(end) - self._until(start)) / (end - start)
        k = bisect_right(self._starts, start) - 1
        return float(k >= 0 and start <= self._ends[k])

    def _until(self, at: float) -> float:
        k = bisect_left(self._starts, at)
        return self._before[k] - max(0.0, self._ends[k - 1] - at) if k else 0.0
