"""Whether a process grew with the requests: the slope of its memory behind a warm-up."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

WARM_UP = 0.3
"""Of the run is left out: until then every kind of request came often, so that pools, caches and allocators have what they take."""
MOST_PER_REQUEST = 1024.0
"""Bytes. One request leaves a record of its body and its connection of several KiB if it leaks, so that a leak in every fifth would
show; a run of 10,000 may not end 10 MiB above its beginning."""
NOISE_BYTES = 6 << 20
"""Growth over the whole measured stretch that says nothing: what an allocator keeps back depends on which threads met large bodies."""


class Growth(NamedTuple):
    """How a process' memory went."""

    per_request: float  # bytes, the median slope
    first: int  # bytes at the beginning of the measured stretch
    last: int
    requests: int  # of the measured stretch

    @property
    def grew(self) -> bool:
        """Whether that is more than noise."""
        return self.per_request > MOST_PER_REQUEST and self.per_request * self.requests > NOISE_BYTES


def growth(samples: Sequence[tuple[int, int]]) -> Growth:
    """From (requests so far, bytes) after each batch. The median of all pairs' slopes (Theil and Sen): one peak says nothing."""
    measured = [sample for sample in samples if sample[0] > WARM_UP * samples[-1][0]] if samples else []
    if len(measured) < 2:
        return Growth(0.0, 0, 0, 0)
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(measured, 2)]
    return Growth(statistics.median(slopes), measured[0][1], measured[-1][1], measured[-1][0] - measured[0][0])
