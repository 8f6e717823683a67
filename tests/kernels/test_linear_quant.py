"""Quantised weights: repacking keeps every value, products are right, and each row's bits are its own.

gguf-py is the oracle for the block formats. Under the interpreter a tile's product is numpy's, whose order of sums is its own;
the bitwise tests there use values whose sums are exact, which still shows what masks, tiles, splits and company do. On a card
the values are random.
"""

from __future__ import annotations

import os

import gguf
import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from tests.kernels.compiling import Variant, compile_for_hopper
from triton_kernels.linear_quant import (
    ADD,
    SILU_MUL,
    STORE,
    Scratch,
    Tile,
    config,
    linear_quant,
    linear_quant_reference,
    splits,
    supported,
)
from triton_kernels.quant_formats import LAYOUTS, Format, PackedWeight, dequantise, pack_fp8, pack_gguf
from triton_kernels.quant_unpack import CODE, or_in, or_six_in, spread_e4m3, twice_in

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TYPES = [torch.float16, torch.float32] + ([torch.bfloat16] if torch.cuda.is_available() else [])
GGUF = [f for f in Format if f != Format.FP8]
SHORT = [Format.Q8_0, Format.Q4_0, Format.Q4_1]  # 32-value groups, which need not fill a block of the kernel
HALVES = {Format.Q8_0: (0,), Format.Q4_0: (0,), Format.Q4_1: (0, 2), Format.Q4_K: (0, 2), Format.Q6_K: (208,)}
TILE = Tile(16, 32, 4, 2)


def raw_blocks(fmt: Format, n: int, k: int, *, exact: bool = False) -> np.ndarray:
    """Random blocks with finite scales; `exact`: small powers of two and small sub-scales, for sums that round nowhere."""
    source = np.random.default_rng(n * k + len(fmt))
    layout = LAYOUTS[fmt]
    blocks = source.integers(0, 256, (n, k // layout.raw_values, layout.raw_bytes), dtype=np.uint8)
    if exact and fmt == Format.Q4_K:
        blocks[..., 4:16] &= 3
    elif exact and fmt == Format.Q6_K:
        blocks[..., 192:208] &= 7
    for at in HALVES[fmt]:
        scales = 2.0 ** -source.integers(4, 7, blocks.shape[:2]) if exact else source.normal(size=blocks.shape[:2]) / 64
        blocks[..., at : at + 2] = scales.astype("<f2")[..., None].view(np.uint8)
    return blocks.reshape(n, -1)


def packed(fmt: Format, n: int, k: int, *, exact: bool = False) -> PackedWeight:
    if fmt != Format.FP8:
        return pack_gguf(fmt, torch.from_numpy(raw_blocks(fmt, n, k, exact=exact))).to(DEVICE)
    source = torch.Generator().manual_seed(n * k)
    values = torch.randn(n, k, generator=source)
    values = values.mul(4).round().clamp(-8, 8) if exact else values
    scales = torch.rand(-(-n // 128), -(-k // 128), generator=source) + 0.25
    scales = 2.0 ** scales.mul(4).round() if exact else scales
    return pack_fp8(values.to(torch.float8_e4m3fn), scales).to(DEVICE)


def activations(rows: int, k: int, *, exact: bool = False, dtype: torch.dtype | None = None) -> torch.Tensor:
    x = torch.randn(rows, k, generator=torch.Generator().manual_seed(rows * k))
    x = x.mul(2).round().clamp(-4, 4) if exact else x
    return x.to(DEVICE, dtype or (torch.bfloat16 if DEVICE.type == "cuda" else torch.float16))


def settled(fmt: Format, rows: int, n: int = 64, k: int = 512) -> tuple[torch.Tensor, PackedWeight]:
    """Operands for bitwise comparisons."""
    exact = DEVICE.type == "cpu"
    return activations(rows, k, exact=exact), packed(fmt, n, k, exact=exact)


def scratch() -> Scratch:
    made = Scratch(DEVICE, 1 << 18, 256)
    made.partial.fill_(float("nan"))
    return made


def run(x: torch.Tensor, weight: PackedWeight, tile: Tile = TILE, parts: int = 2, shared: Scratch | None = None) -> torch.Tensor:
    out = torch.full((x.shape[0], weight.n), float("nan"), device=DEVICE)
    return linear_quant(x, weight, out, tile=tile, parts=parts, scratch=shared)


@pytest.mark.parametrize("fmt", GGUF)
def test_repacked_blocks_hold_the_values_gguf_reads(fmt: Format) -> None:
    for n, k in [(40, 768), (3, 288 if fmt in SHORT else 256)]:
        raw = raw_blocks(fmt, n, k)
        expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[fmt])
        weight = pack_gguf(fmt, torch.from_numpy(raw))
        assert (weight.n, weight.k) == (n, k)
        assert np.array_equal(dequantise(weight).numpy(), expected)


@pytest.mark.parametrize("fmt", SHORT)
def test_quantised_weights_come_back_as_gguf_reads_them(fmt: Format) -> None:
    kind = gguf.GGMLQuantizationType[fmt]
    values = np.random.default_rng(5).normal(size=(16, 256)).astype(np.float32)
    raw = gguf.quants.quantize(values, kind)
    restored = dequantise(pack_gguf(fmt, torch.from_numpy(raw))).numpy()
    assert np.array_equal(restored, gguf.quants.dequantize(raw, kind))
    assert np.abs(restored - values).max() < (0.05 if fmt == Format.Q8_0 else 0.5)


@pytest.mark.parametrize("fmt", GGUF)
def test_repacking_costs_no_more_than_a_twentieth(fmt: Format) -> None:
    layout = LAYOUTS[fmt]
    assert packed(fmt, 8, 512).bits_per_weight <= 1.05 * 8 * layout.raw_bytes / layout.raw_values


def test_large_weights_are_repacked_in_parts() -> None:
    raw = raw_blocks(Format.Q4_0, 4099, 32)
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType.Q4_0)
    assert np.array_equal(dequantise(pack_gguf("Q4_0", torch.from_numpy(raw))).numpy(), expected)


def test_fp8_squares_keep_their_scales() -> None:
    n, k = 200, 300
    values = torch.randn(n, k).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 3) + 0.5
    expected = values.float() * scales.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    assert torch.equal(dequantise(pack_fp8(values, scales)), expected)


def test_bad_blocks_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="Q5_K: not a GGUF format"):
        pack_gguf("Q5_K", torch.zeros(1, 34, dtype=torch.uint8))
    with pytest.raises(ValueError, match="35 bytes is not a whole number of 34-byte"):
        pack_gguf("Q8_0", torch.zeros(1, 35, dtype=torch.uint8))
    with pytest.raises(ValueError, match="uint8"):
        pack_gguf("Q8_0", torch.zeros(1, 34))
    with pytest.raises(ValueError, match=r"scales must be floating point \(1, 2\)"):
        pack_fp8(torch.zeros(8, 256).to(torch.float8_e4m3fn), torch.ones(2, 1))
    with pytest.raises(ValueError, match="float8_e4m3fn"):
        pack_fp8(torch.zeros(8, 256), torch.ones(1, 2))
    with pytest.raises(ValueError, match="not numbers"):
        pack_fp8(torch.full((8, 128), float("nan")).to(torch.float8_e4m3fn), torch.ones(1, 1))
    with pytest.raises(ValueError, match="contiguous"):
        run(activations(2, 64), packed(Format.Q8_0, 8, 32))
    with pytest.raises(ValueError, match="contiguous"):
        linear_quant(activations(8, 32), packed(Format.Q8_0, 8, 32), torch.empty(8, 8, device=DEVICE).t())


@pytest.mark.parametrize("fmt", list(Format))
def test_the_kernel_unpacks_every_weight_to_its_exact_value(fmt: Format) -> None:
    weight = packed(fmt, 40, 512)
    one_each = torch.eye(512, device=DEVICE)
    out = run(one_each, weight, Tile(128, 64, 8, 2), parts=1)
    assert torch.equal(out.t(), dequantise(weight))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("fmt", list(Format))
def test_products_are_right(fmt: Format, dtype: torch.dtype) -> None:
    weight = packed(fmt, 64, 512)
    for rows in (1, 3, 16, 17, 33):
        x = activations(rows, 512, dtype=dtype)
        expected = linear_quant_reference(x, weight)
        out = run(x, weight, Tile(16, 64, 4, 2), shared=scratch())
        assert torch.isfinite(out).all()
        assert (out - expected).norm() / expected.norm() < 1e-5


@pytest.mark.parametrize("fmt", [*SHORT, Format.FP8])
def test_shapes_that_fill_no_block_are_right(fmt: Format) -> None:
    weight = packed(fmt, 130, 288)
    x = activations(5, 288)
    bias = torch.randn(130, device=DEVICE)
    stream = torch.randn(5, 130, device=DEVICE)
    expected = linear_quant_reference(x, weight, bias, stream)
    out = linear_quant(x, weight, stream, bias=bias, epilogue=ADD, tile=TILE, parts=2, scratch=scratch())
    assert (out - expected).norm() / expected.norm() < 1e-5


@pytest.mark.parametrize("fmt", [Format.Q8_0, Format.Q4_K, Format.FP8])
def test_a_gate_is_applied_to_its_own_projection(fmt: Format) -> None:
    weight = packed(fmt, 148, 512)  # 74 gates: the last tile is not full
    x = activations(5, 512)
    x /= linear_quant_reference(x, weight).std()
    bias = torch.randn(148, device=DEVICE)
    expected = linear_quant_reference(x, weight, bias, epilogue=SILU_MUL)
    for parts, tile in [(2, TILE), (1, Tile(16, 64, 4, 2, weight_first=True))]:
        out = torch.full((5, 74), float("nan"), device=DEVICE)
        linear_quant(x, weight, out, bias=bias, epilogue=SILU_MUL, tile=tile, parts=parts, scratch=scratch())
        assert (out - expected).norm() / expected.norm() < 1e-5


@pytest.mark.parametrize("epilogue", [STORE, ADD, SILU_MUL])
def test_a_range_of_columns_of_a_wider_tensor_can_be_the_output(epilogue: int) -> None:
    x, weight = settled(Format.Q4_K, 17)
    x /= 256  # gates of moderate size
    cols = 32 if epilogue == SILU_MUL else 64
    start = torch.randn(17, cols, device=DEVICE)
    alone = linear_quant(x, weight, start.clone(), epilogue=epilogue, tile=TILE, parts=2, scratch=scratch())
    wide = torch.full((17, cols + 16), -7.0, device=DEVICE)
    wide[:, 8 : 8 + cols] = start
    linear_quant(x, weight, wide[:, 8 : 8 + cols], epilogue=epilogue, tile=TILE, parts=2, scratch=scratch())
    assert torch.equal(wide[:, 8 : 8 + cols], alone)
    assert (wide[:, :8] == -7).all()
    assert (wide[:, 8 + cols :] == -7).all()


@pytest.mark.parametrize("fmt", list(Format))
def test_a_rows_bits_do_not_depend_on_tiles_or_company(fmt: Format) -> None:
    x, weight = settled(fmt, 33)
    decode = [Tile(16, 64, 4, 4), Tile(16, 32, 4, 2, weight_first=True), Tile(32, 64, 4, 3)]
    prefill = [Tile(64, 64, 4, 2, program_a_split=False), Tile(128, 64, 8, 2, True, program_a_split=False)]
    whole = run(x, weight, decode[0], shared=scratch())
    for tile in decode[1:] + prefill:
        assert torch.equal(run(x, weight, tile, shared=scratch()), whole)
    for first, rows in [(0, 1), (32, 1), (5, 3), (7, 16), (1, 17)]:
        part = x[first : first + rows].contiguous()
        assert torch.equal(run(part, weight, config(fmt, 64, 512, rows), shared=scratch()), whole[first : first + rows])


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's own words on inf x 0 under the interpreter
@pytest.mark.parametrize("fmt", list(Format))
def test_neighbours_that_are_not_numbers_stay_with_themselves(fmt: Format) -> None:
    x, weight = settled(fmt, 17)
    whole = run(x, weight, shared=scratch())
    x[3], x[16] = float("nan"), float("inf")
    spoiled = run(x, weight, shared=scratch())
    kept = [r for r in range(17) if r not in (3, 16)]
    assert torch.equal(spoiled[kept], whole[kept])
    assert not torch.isfinite(spoiled[[3, 16]]).any()


def test_activations_past_the_last_row_are_not_read() -> None:
    _, weight = settled(Format.Q4_0, 16)
    memory = activations(16, 512, exact=True)
    expected = run(memory[:5].clone(), weight)
    memory[5:] = float("nan")
    assert torch.equal(run(memory[:5], weight), expected)


@pytest.mark.parametrize("parts", [2, 3])
def test_splits_side_by_side_and_in_turn_agree_and_leave_the_counters_at_zero(parts: int) -> None:
    x, weight = settled(Format.Q8_0, 17)
    shared = scratch()
    in_turn = run(x, weight, parts=parts)
    for _ in range(2):
        assert torch.equal(run(x, weight, parts=parts, shared=shared), in_turn)
        assert not shared.arrived.any()
    assert torch.isfinite(shared.partial).any()  # the splits did have programs of their own
    assert torch.equal(run(x, weight, parts=parts, shared=Scratch(DEVICE, 8, 8)), in_turn)  # too small: in turn


@pytest.mark.parametrize("fmt", list(Format))
def test_every_split_has_blocks_to_itself(fmt: Format) -> None:
    for n in (64, 4096, 6144, 24576, 151936):
        for k in (256, 4096, 12288):
            count = splits(fmt, n, k)
            blocks = k // LAYOUTS[fmt].block_k
            assert count == 1 or (blocks // count >= 2 and count * n // 64 <= 528)


def machine(code: str, **inputs: np.ndarray) -> np.ndarray:
    """What a handful of PTX instructions leave in $0: a second reading of the strings the kernel hands to the compiler."""
    registers: dict[str, np.ndarray] = dict(inputs)

    def value(name: str) -> np.ndarray:
        return np.asarray(int(name, 0), dtype=np.uint32) if name[0].isdigit() else registers[name]

    for line in code.replace("$", "p").strip("{} ").split(";"):
        operation, _, rest = line.strip().partition(" ")
        names = [name.strip() for name in rest.split(",")]
        if operation in ("", ".reg"):
            continue
        target, *sources = names
        a, *more = (value(name) for name in sources)
        result: np.ndarray
        if operation == "mov.b32":
            result = a
        elif operation == "shr.u32":
            result = a >> more[0]
        elif operation == "shl.b32":
            result = a << more[0]
        elif operation == "and.b32":
            result = a & more[0]
        elif operation == "lop3.b32":
            assert int(more[2]) == 0xEA  # (a & b) | c
            result = (a & more[0]) | more[1]
        else:
            assert operation == "prmt.b32"
            pool = a.astype(np.uint64) | (np.uint64(more[0]) << np.uint64(32))
            picks = [(pool >> np.uint64(8 * ((int(more[1]) >> 4 * i) & 7))) & np.uint64(255) for i in range(4)]
            result = np.bitwise_or.reduce([pick << np.uint64(8 * i) for i, pick in enumerate(picks)]).astype(np.uint32)
        registers[target] = np.asarray(result, dtype=np.uint32)
    return np.asarray(registers["p0"])


def halves(words: np.ndarray, kind: torch.dtype) -> np.ndarray:
    """The two 16-bit floats of each word, [words, 2]."""
    return torch.from_numpy(words.view(np.int16).copy()).view(kind).double().numpy().reshape(-1, 2)


@pytest.mark.parametrize(
    ("kind", "magic", "base", "mantissa"), [(torch.bfloat16, 0x4300, 128, 7), (torch.float16, 0x6400, 1024, 10)]
)
def test_the_machine_code_for_two_codes_at_once_unpacks_every_code(
    kind: torch.dtype, magic: int, base: int, mantissa: int
) -> None:
    source = np.random.default_rng(3)
    words, other = (source.integers(0, 1 << 32, 1 << 13, dtype=np.uint64).astype(np.uint32) for _ in range(2))
    low, high = (w.view(np.uint16).reshape(-1, 2).astype(np.int64) for w in (words, other))
    for shift in (0, 4, 8, 12):
        nibbles = (low >> shift) & 15
        assert np.array_equal(halves(machine(or_in(shift, 15, magic), p1=words), kind) - base, nibbles)
        for crumb in range(0, 16, 2):
            six = halves(machine(or_six_in(shift, crumb, magic), p1=words, p2=other), kind) - base
            assert np.array_equal(six, nibbles | (((high >> crumb) & 3) << 4))
    for shift in (0, 8):
        codes = (low >> shift) & 255
        below, sign = (halves(machine(or_in(shift, keep, magic), p1=words), kind) for keep in (0x7F, 0x80))
        assert np.array_equal(below - sign, codes.astype(np.uint8).view(np.int8))
        numbers = torch.from_numpy(codes.astype(np.uint8)).view(torch.float8_e4m3fn).double().numpy()
        spread = halves(machine(spread_e4m3(shift, mantissa), p1=words), kind) * 2.0 ** (120 if mantissa == 7 else 8)
        assert np.array_equal(spread[codes & 127 != 127], numbers[codes & 127 != 127])
    small = words & 0x7F7F7F7F
    for byte in range(4):
        twice = halves(machine(twice_in(byte, magic), p1=small), kind) - base
        assert np.array_equal(twice, np.repeat(((small >> 8 * byte) & 255)[:, None], 2, 1))


def test_what_is_not_supported_is_said() -> None:
    weight = packed(Format.Q8_0, 8, 32)
    assert supported(activations(1, 32), weight) == ""
    assert "int32" in supported(torch.zeros(1, 32, dtype=torch.int32, device=DEVICE), weight)


def variant(fmt: Format, tile: Tile, epilogue: int = STORE) -> Variant:
    signature = {
        "x": "*bf16", "payload": "*i16", "meta": "*fp32" if fmt == Format.FP8 else "*i32", "bias": "*bf16",
        "out": "*fp32" if epilogue == ADD else "*bf16", "M": "i32", "blocks": "i32", "splits": "i32",
    }  # fmt: skip
    if tile.program_a_split:
        signature |= {"partial": "*fp32", "arrived": "*i32"}
    # A launch tells the compiler that 16 divides N and K; here constants do.
    constexprs = {
        "FORMAT": CODE[fmt], "EPILOGUE": epilogue, "HAS_BIAS": False, "EARLY": tile.rows <= 64, "PAIRS": True,
        "TWINS": epilogue != SILU_MUL, "EVEN_K": True, "N": 4096, "K": 4096, "stride": 4096,
        "WEIGHT_FIRST": tile.weight_first, "BM": tile.rows, "BN": tile.cols,
    }  # fmt: skip
    kernel = "_linear_quant_split" if tile.program_a_split else "_linear_quant"
    return Variant("triton_kernels.linear_quant", kernel, signature, constexprs, tile.warps, tile.stages)


def test_default_tiles_compile_for_hopper_without_spills() -> None:
    few = [variant(fmt, config(fmt, 4096, 4096, 16)) for fmt in Format]
    others = [variant(fmt, config(fmt, 4096, 4096, rows)) for fmt, rows in [(Format.Q4_1, 32), (Format.Q4_0, 64)]]
    gated = [variant(Format.Q8_0, config(Format.Q8_0, 4096, 4096, 4096), SILU_MUL)]
    added = [variant(Format.Q6_K, config(Format.Q6_K, 4096, 4096, 16)._replace(program_a_split=False), ADD)]
    for asked, built in zip(few + others + gated + added, compile_for_hopper(few + others + gated + added), strict=True):
        assert built.async_copy
        # A few registers of a prefill tile may wait in memory: its splits are summed beside the chain of the next one.
        assert built.stack_bytes <= (64 if asked.kernel == "_linear_quant" else 0), asked
        assert built.shared_bytes <= 227 << 10
        assert built.wgmma == asked.constexprs["WEIGHT_FIRST"]
