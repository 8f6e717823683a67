"""How many prompt tokens a step takes, and whose.

Every step decodes all that can decode and takes one prefill quantum, so neither side starves. The quantum is sized by
what steps were seen to cost: beside decoders the step must fit the ITL budget, without them it must end soon enough to
hear of cancels and arrivals.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
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
    owner: str = ""


class Share(NamedTuple):
    """Prompt tokens of one slot for the coming step."""

    slot: int
    tokens: int


class Interleaver:
    """Divides the prefill quantum among the owners that have slots in prefill, in turn, and among an owner's slots, in turn."""

    def __init__(self, options: Options, cost: CostModel) -> None:
        self._options = options
        self._cost = cost
        self._last: dict[str, int] = {}  # owner -> its slot served last; who was served last is the last

    def shares(self, rests: Sequence[Rest], decode_rows: int) -> list[Share]:
        """One quantum of `rests`, which are in slot order: at least 16 tokens, whatever the budget says, or a prompt's last.

        An owner's turn comes as often as any other's, however many slots it has there. Within an owner it begins after the slot
        served last. What a short rest leaves over goes to the next in turn.
        """
        options, cost = self._options, self._cost
        if decode_rows:
            high, low, seconds = min(options.mixed_prefill_quantum, cost.limit), QUANTUM_UNIT, options.itl_budget
        else:
            high, seconds = options.idle_prefill_quantum, options.idle_budget
            low = min(IDLE_FLOOR, high)
        shares: list[Share] = []
        load = Load(decode_rows, 0, 0.0)
        for slot, position, tokens, owner in self._in_turn(rests):
            left = min(high - load.tokens, max(low - load.tokens, cost.chunk(load, position, seconds)))
            take = tokens if tokens <= left else left - left % QUANTUM_UNIT
            if take <= 0:
                break
            shares.append(Share(slot, take))
            self._last.pop(owner, None)
            self._last[owner] = slot
            load = Load(decode_rows, load.tokens + take, load.reach + take * (position + (take - 1) / 2))
        return shares

    def _in_turn(self, rests: Sequence[Rest]) -> list[Rest]:
        """One rest of each owner after the other, as long as there are any. Those served longest ago, or never, come first."""
        lines: dict[str, list[Rest]] = {}
        for one in rests:
            lines.setdefault(one.owner, []).append(one)
        for owner, line in lines.items():
            last = self._last.get(owner, -1)
            line.sort(key=lambda one: one.slot <= last)  # stable: what lies behind the last keeps its order
        places = {owner: place for place, owner in enumerate(self._last)}
        owners = sorted(lines, key=lambda owner: places.get(owner, -1))
        return [one for round_ in zip_longest(*(lines[owner] for owner in owners)) for one in round_ if one is not None]
