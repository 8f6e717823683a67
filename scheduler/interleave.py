"""How many prompt tokens a step takes, and whose.

Every step decodes all that can decode and takes one prefill quantum, so neither side starves. The quantum is sized by
what steps were seen to cost: beside decoders the step must fit the ITL budget, without them it must end soon enough to
hear of cancels and arrivals.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from scheduler.cost import CostModel, Load
from scheduler.options import Options

QUANTUM_UNIT = 16  # tokens: quanta are multiples of it, which keeps chunk borders on kernel tiles
IDLE_FLOOR = 128  # tokens without decoders, however slow the device is


class Rest(NamedTuple):
    """What is left of one slot's prompt."""

    slot: int
    position: int  # of the next token
    tokens: int


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

    def shares(self, rests: Sequence[Rest], decode_rows: int) -> list[Share]:
        """One quantum of `rests`, which are in slot order: at least 16 tokens, whatever the budget says, or a prompt's last.

        Begins after the slot served last. What a short rest leaves over goes to the next in turn.
        """
        options, cost = self._options, self._cost
        if decode_rows:
            high, low, seconds = min(options.mixed_prefill_quantum, cost.limit), QUANTUM_UNIT, options.itl_budget
        else:
            high, seconds = options.idle_prefill_quantum, options.idle_budget
            low = min(IDLE_FLOOR, high)
        turn = [one for one in rests if one.slot > self._last] + [one for one in rests if one.slot <= self._last]
        shares: list[Share] = []
        load = Load(decode_rows, 0, 0.0)
        for slot, position, tokens in turn:
            left = min(high - load.tokens, max(low - load.tokens, cost.chunk(load, position, seconds)))
            take = tokens if tokens <= left else left - left % QUANTUM_UNIT
            if take <= 0:
                break
            shares.append(Share(slot, take))
            self._last = slot
            load = Load(decode_rows, load.tokens + take, load.reach + take * (position + (take - 1) / 2))
        return shares
