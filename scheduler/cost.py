"""What a step costs, learnt from the steps that ran.

    seconds = decode(rows) + max(0, offset + token * tokens + reach * sum of the tokens' positions)

`decode(rows)` is what a step of that many decode rows alone was seen to take. A prompt token costs its products and, because it
attends to every position before it, more the deeper it lies. The offset is never positive: where a step waits for the weights
anyway the first tokens beside the decoders are free, and the price of the others is that of a line that starts below zero.

Where the device was surveyed, the survey stands in place of the three prices, times one factor that is learnt.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

from scheduler.survey import Survey

_FORGET = 0.95  # of what earlier steps taught, kept at each new one
_WINDOW = 16  # decode steps over which the time of a width is averaged
_FLOOR = 1.1  # a step this close above the decoders' own shows that its tokens were nearly free
_SURPRISE = 2.0  # a step counts as at most so many times what was expected: one hiccup must not stop the prefill
_TRUSTED = 8  # steps after which the expectation is good enough to doubt a measurement

_TOKEN = 5e-4  # seconds, until measured: a slow device, so that the first chunk is short
_REACH = 5e-7  # seconds for each position before a token, until measured: a device whose attention is slow
_DOUBT = 1e-4  # weight of these guesses, beside the squares of relative errors: they count until anything was measured

_MARGIN = 0.1  # of the expected seconds, to begin with
_SURVEYED_MARGIN = 0.03
_FACTOR_RATE = 0.05  # of a surveyed device
_FACTORS = (0.5, 3.0)
_MARGINS = (0.02, 0.5)
_MARGIN_RATE = 0.05
_QUANTILE = 0.99  # of the steps that shall stay within expectation and margin

_TICK = 1e-6  # seconds: a step that took less was not timed
_ROUNDING = 1e-9  # of a pivot: what is smaller is nothing but rounding errors

_FIRST = 32  # tokens beside decoders, while no prompt token was measured
_FREE_GROWTH, _GROWTH = 2.0, 1.25  # of the largest chunk measured: where its tokens were free, where they were not
_STEP = 16  # tokens by which a chunk may always grow


class Load(NamedTuple):
    """What one forward was made of."""

    decode_rows: int
    tokens: int  # of prompts
    reach: float  # the sum of those tokens' positions


def load_of(decode_rows: int, chunks: Sequence[tuple[int, int]]) -> Load:
    """The load of decode rows and `chunks`, each the position of its first token and its number of tokens."""
    return Load(decode_rows, sum(n for _, n in chunks), sum(n * (at + (n - 1) / 2) for at, n in chunks))


class CostModel:
    """Prices loads. A device that is slower than expected is believed at once, a faster one step by step.

    The three prices are the weighted least squares of the relative errors, newer steps weighing more, within their signs.
    A step may return before the device has finished: its time is only a lower bound, and counts in full together with the
    next step that is complete.
    """

    def __init__(self, survey: Survey | None = None) -> None:
        self._survey = survey
        self._factor = 1.0  # of the survey's seconds
        self._decode: dict[int, tuple[float, int]] = {}  # width bucket -> seconds a decode-only step, steps seen
        self._moments = [[0.0] * 3 for _ in range(3)]  # decayed sums of products of the features, see `_learn`
        self._products = [0.0] * 3  # the same of features and seconds
        self._prices: tuple[float, float, float] | None = (0.0, _TOKEN, _REACH)  # offset, token, reach; None: to be solved
        self._seen = 0  # steps that taught prices
        self._margin = _MARGIN if survey is None else _SURVEYED_MARGIN
        self._limit = float(_FIRST if survey is None else 1 << 30)  # tokens that are not too far from what was measured
        self._open = Load(0, 0, 0.0)  # of steps not complete yet
        self._open_seconds = 0.0

    def observe(self, load: Load, seconds: float, complete: bool = True) -> None:
        """Learn from one step."""
        if not complete:
            self._open_seconds += seconds
            self._open = Load(0, self._open.tokens + load.tokens, self._open.reach + load.reach)
            if load.tokens and seconds > self.expected(load):
                self._learn(load, seconds)
            return
        alone = not self._open.tokens
        seconds += self._open_seconds
        load = load._replace(tokens=load.tokens + self._open.tokens, reach=load.reach + self._open.reach)
        self.pause()
        if load.tokens:
            self._follow(load, seconds, alone)
            self._learn(load, seconds)
        elif load.decode_rows and alone:
            self._learn_decode(_bucket(load.decode_rows), seconds)

    def pause(self) -> None:
        """The device has run dry: what was not complete is finished by now, and nobody timed it."""
        self._open, self._open_seconds = Load(0, 0, 0.0), 0.0

    def decode_seconds(self, rows: int) -> float:
        """Seconds a step of `rows` decode rows takes, from the measured width nearest to it; 0 while there is none."""
        if not rows or not self._decode:
            return 0.0
        wanted = _bucket(rows)
        return self._decode[min(self._decode, key=lambda bucket: (abs(bucket - wanted), bucket))][0]

    def expected(self, load: Load) -> float:
        """Seconds a step of this load takes."""
        if self._survey is not None:
            return self._base(load) + self._surveyed(load)
        offset, token, reach = self.prices
        return self._base(load) + max(0.0, offset + token * load.tokens + reach * load.reach)

    def chunk(self, load: Load, position: int, seconds: float) -> int:
        """Prompt tokens from `position` on that can join `load` in a step of `seconds`, with the margin; 0 when none can.

        As a survey says, or the positive root of reach / 2 * n^2 + (token + reach * position) * n = what is left.
        """
        if self._survey is not None:
            base = self._base(load)
            left = (seconds / (1.0 + self._margin) - base) / self._factor
            return self._survey.most(left, position, load.tokens, load.reach, base / self._factor) if left > 0.0 else 0
        offset, token, reach = self.prices
        left = seconds / (1.0 + self._margin) - self._base(load) - offset - token * load.tokens - reach * load.reach
        if left <= 0.0:
            return 0
        linear = token + reach * position
        if linear <= 0.0 and reach <= 0.0:
            return 1 << 30
        return int(2.0 * left / (linear + math.sqrt(linear * linear + 2.0 * reach * left)))

    @property
    def limit(self) -> int:
        """Tokens of a step that are not too far from what was measured for the prices to hold."""
        return int(self._limit)

    @property
    def prices(self) -> tuple[float, float, float]:
        """Seconds: the offset, a token, and a token's every position."""
        if self._prices is None:
            self._prices = self._solve()
        return self._prices

    def _base(self, load: Load) -> float:
        """A step without decoders reads the weights as well: it costs no less than the narrowest one with them."""
        return self.decode_seconds(max(load.decode_rows, 1))

    def _surveyed(self, load: Load) -> float:
        assert self._survey is not None
        return self._factor * self._survey.seconds(load.tokens, load.reach / load.tokens if load.tokens else 0.0)

    def _follow(self, load: Load, seconds: float, alone: bool) -> None:
        """Move the margin to where all but one step in a hundred lie below it, and the limit after what was measured."""
        expected = self.expected(load)
        if load.decode_rows and alone and self._seen >= _TRUSTED:
            above = seconds > expected * (1.0 + self._margin)
            self._margin += _MARGIN_RATE * (_QUANTILE if above else _QUANTILE - 1.0)
            self._margin = min(max(self._margin, _MARGINS[0]), _MARGINS[1])
        free = seconds < _FLOOR * self._base(load)
        grown = max(load.tokens * (_FREE_GROWTH if free else _GROWTH), load.tokens + _STEP)
        self._limit = max(self._limit, grown)

    def _learn(self, load: Load, seconds: float) -> None:
        """One more equation: offset + token * tokens + reach * positions = seconds beyond the decoders', relative to the step.

        A step whose tokens were free says only that they cost no more, and teaches nothing to a model that knows it.
        """
        base, expected = self._base(load), self.expected(load)
        if self._survey is not None:
            surveyed = self._surveyed(load)
            if seconds > _TICK and surveyed > (_FLOOR - 1.0) * base:  # else the decoders' own time is all that is seen
                found = self._factor * min(max(seconds - base, 0.0) / surveyed, _SURPRISE)
                self._factor = min(max(self._factor + _FACTOR_RATE * (found - self._factor), _FACTORS[0]), _FACTORS[1])
            self._seen += 1
            return
        if seconds < _TICK or (seconds < _FLOOR * base and expected <= _FLOOR * base):
            return
        if self._seen >= _TRUSTED:
            seconds = min(seconds, max(_SURPRISE * expected, _TICK))
        features = (1.0, float(load.tokens), load.reach)
        weight = 1.0 / (seconds * seconds)
        for i, one in enumerate(features):
            self._products[i] = self._products[i] * _FORGET + weight * one * max(0.0, seconds - base)
            row = self._moments[i]
            for j, other in enumerate(features):
                row[j] = row[j] * _FORGET + weight * one * other
        self._seen += 1
        self._prices = None

    def _solve(self) -> tuple[float, float, float]:
        """The prices of least error: the best of the solutions in which some are zero and the others have their sign."""
        guesses = (0.0, _TOKEN, _REACH)
        # scaled by what each price is expected to be, so that one weight of doubt fits all three
        scale = (-max(self._decode_scale(), _TOKEN), _TOKEN, _REACH)
        matrix = [[self._moments[i][j] * scale[i] * scale[j] for j in range(3)] for i in range(3)]
        vector = [self._products[i] * scale[i] for i in range(3)]
        for i in range(3):
            matrix[i][i] += _DOUBT
            vector[i] += _DOUBT * guesses[i] / scale[i]
        best, least = [0.0] * 3, 0.0
        for size in (1, 2, 3):
            for chosen in combinations(range(3), size):
                found = _linear(matrix, vector, chosen)
                if found is None or min(found) < 0.0:
                    continue
                error = -sum(found[i] * vector[i] for i in range(3))
                if error < least:
                    best, least = found, error
        return best[0] * scale[0], best[1] * scale[1], best[2] * scale[2]

    def _decode_scale(self) -> float:
        return max((seconds for seconds, _ in self._decode.values()), default=0.0)

    def _learn_decode(self, bucket: int, seconds: float) -> None:
        mean, seen = self._decode.get(bucket, (0.0, 0))
        seen = min(seen + 1, _WINDOW)
        self._decode[bucket] = (mean + (seconds - mean) / seen, seen)


def _linear(matrix: list[list[float]], vector: list[float], chosen: tuple[int, ...]) -> list[float] | None:
    """The solution of the chosen rows and columns of a positive definite system by elimination, 0 elsewhere.

    None where rounding leaves nothing of a pivot: the features are multiples of each other, and fewer of them do.
    """
    rows = [[matrix[i][j] for j in chosen] + [vector[i]] for i in chosen]
    size = len(rows)
    for k in range(size):
        if rows[k][k] <= _ROUNDING * matrix[chosen[k]][chosen[k]]:
            return None
        for i in range(k + 1, size):
            factor = rows[i][k] / rows[k][k]
            for j in range(k, size + 1):
                rows[i][j] -= factor * rows[k][j]
    found = [0.0] * len(vector)
    for k in reversed(range(size)):
        known = sum(rows[k][j] * found[chosen[j]] for j in range(k + 1, size))
        found[chosen[k]] = (rows[k][size] - known) / rows[k][k]
    return found


def _bucket(rows: int) -> int:
    """Width bucket: 1, 2, 3-4, 5-8, 9-16, ..."""
    return (rows - 1).bit_length()
