"""Streamed products without a card: every format's kernels build for one, and no launch asks for more than a program has.

What they compute is compared on a card (tests/gpu/test_products.py): the interpreter runs no machine code.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import triton_kernels
from tests.kernels.compiling import Variant, compile_for_hopper
from triton_kernels.linear import ADD, SILU_MUL, STORE
from triton_kernels.linear_quant import chains
from triton_kernels.linear_stream import linear_stream, supported
from triton_kernels.quant_formats import Format, PackedWeight, pack_gguf
from triton_kernels.quant_unpack import CODE
from triton_kernels.stream_plan import ROWS, Plan, fits, plan

LAYER = ((6144, 4096, STORE), (4096, 4096, ADD), (24576, 4096, SILU_MUL), (4096, 12288, ADD))


def variant(fmt: Format, n: int, k: int, epilogue: int, chosen: Plan, rows: int) -> Variant:
    meta = {Format.Q4_0: "*i16", Format.FP8: "*fp32"}.get(fmt, "*i32")
    out = "*fp32" if epilogue == ADD else "*bf16"
    signature = {"x": "*bf16", "payload": "*i64", "meta": meta, "bias": "*bf16", "out": out, "partial": "*fp32", "arrived": "*i32",
                 "stride": "i32", "M": "i32"}  # fmt: skip
    count = chains(n, k)
    constexprs = {"N": n, "K": k, "FORMAT": CODE[fmt], "EPILOGUE": epilogue, "HAS_BIAS": True, "EARLY": True, "EIGHTS": -(-rows // 8),
                  "GROUPS": chosen.groups, "CHAINS": count, "SPLIT": chosen.split, "TURN": chosen.turn, "PART": chosen.part,
                  "AHEAD": chosen.ahead, "SPREAD": chosen.spread, "ROOMS": chosen.rooms}  # fmt: skip
    warps = chosen.groups * count // chosen.split
    return Variant("triton_kernels.linear_stream", "_linear_stream", signature, constexprs, warps, 1, ("stride",))


def chosen_for(fmt: Format, n: int, k: int, epilogue: int) -> Plan:
    chosen = plan(fmt, n, k, chains(n, k), epilogue)
    assert chosen is not None
    return chosen


def test_default_launches_compile_for_hopper_and_spill_nothing() -> None:
    asked = [(fmt, *LAYER[i % 4], 16) for i, fmt in enumerate(Format)]
    asked += [(Format.Q4_0, *LAYER[3], 8), (Format.Q6_K, *LAYER[0], 8)]
    variants = [variant(fmt, n, k, epilogue, chosen_for(fmt, n, k, epilogue), rows) for fmt, n, k, epilogue, rows in asked]
    asked.append((Format.Q4_K, *LAYER[2], 16))
    variants.append(variant(*asked[-1][:4], Plan(4, 1, 8, 128, True, True), 16))
    for each, built in zip(asked, compile_for_hopper(variants), strict=True):
        assert built.stack_bytes == 0, each
        assert built.async_copy, each


@pytest.mark.parametrize("fmt", list(Format))
@pytest.mark.parametrize("k", [256, 512, 1024, 2048, 3584, 4096, 12288, 14336, 18944, 29568])
def test_a_default_launch_fits_wherever_there_is_one(fmt: Format, k: int) -> None:
    for n in (64, 1024, 4096, 24576, 151936):
        count = chains(n, k)
        chosen = plan(fmt, n, k, count)
        if chosen is None:  # K in chains of unequal length, or of half a block
            assert k % (256 * count)
        else:
            assert fits(chosen, fmt, k, count)


def test_measured_launches_fit_their_products() -> None:
    for path in Path(triton_kernels.__file__).parent.joinpath("tuned").glob("*_stream.json"):
        for key, entry in json.loads(path.read_text()).items():
            fmt, shape, epilogue = key.split(":")
            n, k = map(int, shape.split("x"))
            assert fmt in Format.__members__
            assert int(epilogue) in (STORE, ADD, SILU_MUL)
            assert all(fits(Plan(*entry), Format(fmt), k, chains(n, k), rows) for rows in (8, 16)), key


def test_launches_that_ask_for_too_much_or_miss_values_do_not_fit() -> None:
    good = Plan(2, 1, 4, 128, True)
    assert fits(good, Format.Q8_0, 4096, 4)
    assert not fits(good._replace(groups=3), Format.Q8_0, 4096, 4)  # warps come in powers of two
    assert not fits(good._replace(groups=8), Format.Q8_0, 4096, 4)  # 32 warps
    assert not fits(good._replace(split=2), Format.Q8_0, 4096, 4)  # two chains a program, added in another order
    assert not fits(good._replace(turn=3), Format.Q8_0, 4096, 4)
    assert not fits(good._replace(rooms=1), Format.Q8_0, 4096, 4)  # a part is read while the next one comes
    assert not fits(good._replace(turn=6), Format.Q8_0, 4096, 4)  # of 8 steps
    assert not fits(Plan(1, 1, 2, 128, True), Format.Q8_0, 12288, 8)  # 73,728 bytes of activations
    assert not fits(good, Format.Q8_0, 4096 + 128, 4)
    assert fits(good, Format.Q4_K, 4096, 4)
    assert not fits(
        good._replace(spread=True), Format.Q4_K, 4096, 4
    )  # 36,864 bytes of activations, 10,240 of terms, 6,144 of sums
    assert fits(good._replace(spread=True, part=64), Format.Q4_K, 4096, 4)
    assert not fits(good._replace(spread=True, part=64), Format.Q8_0, 4096, 4)


def test_what_is_not_supported_says_why_and_is_refused() -> None:
    weight = pack_gguf("Q8_0", torch.zeros(32, 8 * 34, dtype=torch.uint8))
    assert "cpu" in supported(torch.zeros(1, 256, dtype=torch.bfloat16), weight)
    assert "float64" in supported(torch.zeros(1, 256, dtype=torch.float64), weight)
    with pytest.raises(ValueError, match="contiguous"):
        linear_stream(torch.zeros(1, 512), weight, torch.zeros(1, 32))
    with pytest.raises(ValueError, match=f"{ROWS + 1} rows"):
        linear_stream(torch.zeros(ROWS + 1, 256), weight, torch.zeros(ROWS + 1, 32))
    with pytest.raises(ValueError, match="do not fit"):
        linear_stream(torch.zeros(1, 256), weight, torch.zeros(1, 32), count=2)
    payload, meta = torch.zeros(16, 4, 4096, 32, dtype=torch.int16), torch.zeros(16, 4, 4096, dtype=torch.int32)
    long = PackedWeight(Format.Q8_0, 4096, 4096, payload, meta)
    with pytest.raises(ValueError, match="need sums"):
        linear_stream(torch.zeros(1, 4096), long, torch.zeros(1, 4096), chosen=Plan(4, 4, 4, 128, True))
