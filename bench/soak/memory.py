"""Whether memory stays flat: a robust slope through samples of a process's resident size. Pure.

The slope is Theil and Sen's (the median of the slopes between all pairs of samples): a burst or a collection of garbage moves a few
samples, and those do not move a median.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

MIB = 1 << 20
WARM_UP_SECONDS = 60.0  # caches fill, the allocator finds its size, every slot has been used
LEAST_SECONDS = 150.0  # that a series must last behind its warm-up to be judged
LEAST_SAMPLES = 20
LIMIT_MIB_H = 48.0
"""Most a process may grow, MiB an hour.

A soak makes some 20,000 requests an hour of a few KiB each way: a leak of the requests' own size would be above this, and one of a whole
session's state far above. Below it, a series of some minutes says nothing: the allocator's own steps are of a MiB.
"""


@dataclass(frozen=True)
class Sample:
    """One look at a process."""

    at: float  # monotonic seconds
    pid: int
    resident: int  # bytes


@dataclass(frozen=True)
class Series:
    """A process's life as it is judged."""

    process: str
    pid: int
    life: int  # of the server
    seconds: float  # behind the warm-up
    samples: int
    first_mib: float
    last_mib: float
    slope_mib_h: float | None  # None: too short to be judged

    @property
    def flat(self) -> bool:
        """Whether it did not grow, as far as it can be judged."""
        return self.slope_mib_h is None or self.slope_mib_h <= LIMIT_MIB_H


def series_of(process: str, life: int, samples: Sequence[Sample], filled: float = 0.0) -> list[Series]:
    """One series for each process id, in order of appearance: a restarted engine begins anew.

    Each is judged from WARM_UP_SECONDS after its first sample, and not before `filled`, the time at which the fill had ended.
    """
    by_pid: dict[int, list[Sample]] = {}
    for sample in samples:
        by_pid.setdefault(sample.pid, []).append(sample)
    return [_series(process, life, pid, taken, filled) for pid, taken in by_pid.items()]


def _series(process: str, life: int, pid: int, taken: Sequence[Sample], filled: float) -> Series:
    begin = max(taken[0].at + WARM_UP_SECONDS, filled)
    warm = [sample for sample in taken if sample.at >= begin]
    seconds = warm[-1].at - warm[0].at if warm else 0.0
    judged = seconds >= LEAST_SECONDS and len(warm) >= LEAST_SAMPLES
    slope = theil_sen([(s.at, s.resident) for s in warm]) * 3600 / MIB if judged else None
    ends = warm or taken
    return Series(process, pid, life, seconds, len(warm), ends[0].resident / MIB, ends[-1].resident / MIB, slope)


def theil_sen(points: Sequence[tuple[float, float]]) -> float:
    """The median slope between all pairs of points whose first members differ."""
    slopes = [(y2 - y1) / (x2 - x1) for i, (x1, y1) in enumerate(points) for x2, y2 in points[i + 1 :] if x2 != x1]
    return median(slopes) if slopes else 0.0
