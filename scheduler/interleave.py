"""How many prompt tokens a step takes, and whose.

Every step decodes all that can decode and takes one prefill quantum, so neither side starves. The quantum is sized by
what steps were seen to cost: beside decoders the step must fit the ITL budget, without them it must end soon enough to
hear of cancels and arrivals.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from scheduler.options import Options

QUANTUM_UNIT = 16  # tokens: quanta are multiples of it, which keeps chunk borders on kernel tiles
IDLE_FLOOR = 128  # tokens without decoders, however slow the device is
_UNKNOWN_TOKEN_SECONDS = 5e-4  # until measured: a slow device, so that the first chunk is short
_FORGET = 0.75  # of the measured prefill, kept at each new measurement
_WINDOW = 16  # decode steps over which the time of a width is averaged


class CostModel:
    """What steps cost, learnt from those that ran.

    A step whose logits are not sampled may return before the device has finished: its time is only a lower bound, and
    counts in full together with the next step that is sampled.
    """

    def __init__(self) -> None:
        self._decode: dict[int, tuple[float, int]] = {}  # width bucket -> seconds a decode-only step, steps seen
        self._prefill_seconds = 0.0  # decayed sums, so that a chunk weighs by its tokens
        self._prefill_tokens = 0.0
        self._open_seconds = 0.0  # of steps not sampled yet
        self._open_tokens = 0

    def observe(self, decode_rows: int, prefill_tokens: int, seconds: float, sampled: bool) -> None:
        """Learn from one step of `decode_rows` rows and `prefill_tokens` prompt tokens."""
        if not sampled:
            self._open_seconds += seconds
            self._open_tokens += prefill_tokens
            if prefill_tokens and seconds > prefill_tokens * self.token_seconds:
                self._learn_prefill(seconds, prefill_tokens)
            return
        alone = not self._open_seconds
        seconds += self._open_seconds
        tokens = prefill_tokens + self._open_tokens
        self._open_seconds, self._open_tokens = 0.0, 0
        if tokens:
            self._learn_prefill(max(0.0, seconds - self.decode_seconds(decode_rows)), tokens)
        elif decode_rows and alone:
            self._learn_decode(_bucket(decode_rows), seconds)

    def pause(self) -> None:
        """The device has run dry: what was not sampled is finished by now, and nobody timed it."""
        self._open_seconds, self._open_tokens = 0.0, 0

    @property
    def token_seconds(self) -> float:
        """Seconds a prompt token adds to a step."""
        if not self._prefill_tokens:
            return _UNKNOWN_TOKEN_SECONDS
        return self._prefill_seconds / self._prefill_tokens

    def decode_seconds(self, rows: int) -> float:
        """Seconds a step of `rows` decode rows takes, from the measured width nearest to it; 0 while there is none."""
        if not rows or not self._decode:
            return 0.0
        wanted = _bucket(rows)
        return self._decode[min(self._decode, key=lambda bucket: (abs(bucket - wanted), bucket))][0]

    def _learn_prefill(self, seconds: float, tokens: int) -> None:
        self._prefill_seconds = self._prefill_seconds * _FORGET + seconds
        self._prefill_tokens = self._prefill_tokens * _FORGET + tokens

    def _learn_decode(self, bucket: int, seconds: float) -> None:
        mean, seen = self._decode.get(bucket, (0.0, 0))
        seen = min(seen + 1, _WINDOW)
        self._decode[bucket] = (mean + (seconds - mean) / seen, seen)


class Share(NamedTuple):
    """Prompt tokens of one slot for the coming step."""

    slot: int
    tokens: int


class Interleaver:
    """Divides the prefill quantum among the slots that prefill, in turn."""

    def __init__(self, options: Options, cost: CostModel) -> None:
        self._options = options
        self._cost = cost
        self._last = -1  # the slot served last

    def quantum(self, decode_rows: int) -> int:
        """Prompt tokens the coming step may take: a multiple of 16, at least 16, whatever the budget says."""
        options, cost = self._options, self._cost
        if decode_rows:
            low, high = QUANTUM_UNIT, options.mixed_prefill_quantum
            budget = options.itl_budget - cost.decode_seconds(decode_rows)
        else:
            high = options.idle_prefill_quantum
            low = min(IDLE_FLOOR, high)
            budget = options.idle_budget
        # a token may be measured as free, where a forward waits for its weights anyway
        fitting = int(min(high, budget / cost.token_seconds)) if cost.token_seconds > 0 else high
        return _round_down(max(low, fitting))

    def shares(self, remaining: Sequence[tuple[int, int]], decode_rows: int) -> list[Share]:
        """Split one quantum over `remaining`, (slot, prompt tokens left) in slot order.

        Begins after the slot served last. What a short rest leaves over goes to the next in turn.
        """
        left = self.quantum(decode_rows)
        after = [one for one in remaining if one[0] > self._last]
        turn = after + [one for one in remaining if one[0] <= self._last]
        shares: list[Share] = []
        for slot, tokens in turn:
            take = tokens if tokens <= left else _round_down(left)
            if not take:
                break
            shares.append(Share(slot, take))
            self._last = slot
            left -= take
        return shares


def _round_down(tokens: int) -> int:
    return tokens - tokens % QUANTUM_UNIT


def _bucket(rows: int) -> int:
    """Width bucket: 1, 2, 3-4, 5-8, 9-16, ..."""
    return (rows - 1).bit_length()
