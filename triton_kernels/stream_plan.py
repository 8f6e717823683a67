"""Which launch of linear_stream serves a product: what a launch is, which ones fit, and the table of this card's measured ones.

Launches nothing. No choice here changes a bit.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from triton_kernels import card
from triton_kernels.linear import STORE
from triton_kernels.quant_formats import Format
from triton_kernels.stream_code import TERMS_ROW

ROWS = 16
"""The most rows of x."""

_STEP = 128  # values of K
_SHARED = 48 * 1024 - 64  # bytes that a program may take without asking, less what an arrival takes


class Plan(NamedTuple):
    """Launch parameters that change speed and no bits."""

    groups: int  # of 16 rows of W, a program; a warp for each and each of the program's chains
    split: int  # programs that a tile's chains are shared by: 1 or as many as chains
    turn: int  # steps of one turn of the loop, even
    part: int  # values of K, 64, 128 or 256, whose activations are copied at a time
    ahead: bool  # the next kernel may begin when this one does, else at its end
    spread: bool = False  # a warp's threads share the work on its scales, through shared memory: Q4_K
    rooms: int = 2  # for parts, all but one of which are on their way


def fits(chosen: Plan, fmt: Format, k: int, count: int, rows: int = ROWS) -> bool:
    """Whether `rows` rows of a weight [any, k] in `count` chains can be multiplied so."""
    groups, split, turn, part, _, spread, rooms = chosen
    if rooms < 2 or (spread and fmt != Format.Q4_K):
        return False
    if split not in (1, count) or turn % max(2, part // 64) or part not in (64, 128, 256) or k % (2 * _STEP * count):
        return False
    local, eights = count // split, -(-rows // 8)
    warps = groups * local
    room = rooms * local * eights * 8 * (2 * part + 32) + (warps * 16 * TERMS_ROW.value if spread else 0)
    sums = (local - 1) * groups * 32 * 4 * eights * 4
    return warps & (warps - 1) == 0 and 1 <= warps <= 16 and k // _STEP // count % turn == 0 and room + sums <= _SHARED


def plan(fmt: Format, n: int, k: int, count: int, epilogue: int = STORE) -> Plan | None:
    """The launch of a product: this card's measured one, or a safe default. None: K is not cut into `count` runs of whole blocks."""
    measured = table().get(plan_key(fmt, n, k, epilogue))
    if measured is not None and fits(measured, fmt, k, count):
        return measured
    turns = (8, 4, 2) if fmt == Format.Q4_0 else (4, 2)  # steps in flight: as many as registers hold
    if count == 1:
        choices = [Plan(4, 1, turn, 128, True) for turn in turns]
    else:
        choices = [Plan(groups, 1, turn, 128, True) for groups in (2, 1) for turn in turns]
        choices += [Plan(4, count, turn, 128, True) for turn in turns]
    return next((choice for choice in choices if fits(choice, fmt, k, count)), None)


def plan_key(fmt: Format, n: int, k: int, epilogue: int) -> str:
    """The name of a product in the table of measured launches."""
    return f"{fmt}:{n}x{k}:{epilogue}"


@lru_cache
def table() -> dict[str, Plan]:
    """This card's launches by `plan_key`, for which bench/kernels/linear_quant.py searches. An entry set here is used at once."""
    return {key: Plan(*each) for key, each in card.launches("_stream").items()}
