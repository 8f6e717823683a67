"""Rates and medians of the last minutes in bounded memory. A call costs the same whatever came before."""

from __future__ import annotations

import math
from collections import Counter, deque

SECONDS = 3.0
"""What one value of a series stands for."""
COUNT = 100
_LOG_STEP = math.log(1.05)  # a median is exact to half of this
_LEAST = 1e-6


class Cell:
    """One stretch of SECONDS."""

    __slots__ = ("generated", "itl", "prompt", "ttft")

    def __init__(self) -> None:
        self.generated = 0
        self.prompt = 0
        self.ttft: Counter[int] = Counter()
        self.itl: Counter[int] = Counter()


class Window:
    """COUNT whole cells and the one under way. `now` is in monotonic seconds and never goes back."""

    def __init__(self, now: float) -> None:
        self._began = now
        self._at = 0  # number of the cell under way
        self._cells: deque[Cell] = deque([Cell()], maxlen=COUNT + 1)

    def cell(self, now: float) -> Cell:
        """The cell to count in."""
        at = int((now - self._began) / SECONDS)
        for _ in range(min(at - self._at, COUNT + 1)):
            self._cells.append(Cell())
        self._at = max(at, self._at)
        return self._cells[-1]

    def whole(self, now: float) -> list[Cell]:
        """The cells that are over, oldest first; fewer than COUNT in the beginning."""
        self.cell(now)
        return list(self._cells)[:-1]

    def recent(self, now: float) -> tuple[list[Cell], float]:
        """The cell under way and the two before it, and the seconds they stand for."""
        self.cell(now)
        cells = list(self._cells)[-3:]
        elapsed = (len(cells) - 1) * SECONDS + (now - self._began) - self._at * SECONDS
        return cells, max(1.0, elapsed)

    def all(self, now: float) -> list[Cell]:
        """Every cell, the one under way too."""
        self.cell(now)
        return list(self._cells)


def observe(counts: Counter[int], seconds: float, times: int = 1) -> None:
    """Count a duration."""
    counts[round(math.log(max(seconds, _LEAST)) / _LOG_STEP)] += times


def median(counts: Counter[int]) -> float | None:
    """The lower median of what was counted, None for nothing."""
    left = (counts.total() + 1) // 2
    for key in sorted(counts):
        left -= counts[key]
        if left <= 0:
            return float(f"{math.exp(key * _LOG_STEP):.3g}")
    return None
