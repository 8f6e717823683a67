"""Quantised weights: repacking keeps every value, products are right, and each row's bits are its own.

gguf-py is the oracle for the block formats, and the plain product on the dequantised weight for sums. Under the interpreter a tile's
product is numpy's, whose order of sums is its own; the bitwise tests there use values whose sums are exact, which still shows what
masks, tiles and company do. On a card the values are random.
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
from triton_kernels.expand import expand
from triton_kernels.linear import linear
from triton_kernels.linear_quant import (
    ADD,
    SILU_MUL,
    STORE,
    Sums,
    Tile,
    chains,
    config,
    linear_quant,
    linear_quant_reference,
    supported,
)
from triton_kernels.quant_formats import LAYOUTS, Format, PackedWeight, dequantise, pack_fp8, pack_gguf
from triton_kernels.quant_unpack import (
    CODE,
    byte_numbers,
    crumb_place,
    e4m3_numbers,
    nibble_numbers,
    nibble_values,
    one_byte,
    six_bit_numbers,
)

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


def run(
    x: torch.Tensor, weight: PackedWeight, tile: Tile = TILE, sums: Sums | None = None, count: int | None = None
) -> torch.Tensor:
    out = torch.full((x.shape[0], weight.n), float("nan"), device=DEVICE)
    return linear_quant(x, weight, out, tile=tile, sums=sums, count=count)


def few_sums() -> Sums:
    """Sums of chains, so small that what is written beside them would show."""
    sums = Sums(DEVICE, floats=1 << 14, tiles=4)
    sums.partial.fill_(float("nan"))
    return sums


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
def test_every_weight_is_unpacked_to_its_value_rounded_once(fmt: Format) -> None:
    weight = packed(fmt, 40, 512)
    for dtype in TYPES:
        expected = dequantise(weight).to(dtype)
        assert torch.equal(run(torch.eye(512, device=DEVICE, dtype=dtype), weight, Tile(128, 64, 8, 2)).t(), expected.float())
        assert torch.equal(expand(weight, torch.full_like(expected, float("nan"))), expected)


def test_values_are_written_out_for_shapes_that_fill_no_block_and_into_a_part_of_a_tensor() -> None:
    for fmt in (Format.Q4_1, Format.FP8):
        weight = packed(fmt, 130, 288)
        whole = torch.full((140, 288), -7.0, device=DEVICE)
        expand(weight, whole[5:135])
        assert torch.equal(whole[5:135], dequantise(weight))
        assert (whole[:5] == -7).all()
        assert (whole[135:] == -7).all()
    with pytest.raises(ValueError, match="expand: out"):
        expand(weight, torch.empty(288, 130, device=DEVICE).t())


@pytest.mark.parametrize("fmt", list(Format))
def test_products_have_the_bits_of_plain_ones_on_the_dequantised_weight(fmt: Format) -> None:
    x, weight = settled(fmt, 33)
    plain = linear(x, dequantise(weight).to(x.dtype), torch.empty(33, 64, device=DEVICE))
    assert torch.equal(run(x, weight), plain)
    assert torch.equal(
        linear(x, expand(weight, torch.empty(64, 512, device=DEVICE, dtype=x.dtype)), torch.empty_like(plain)), plain
    )


@pytest.mark.parametrize("fmt", list(Format))
def test_chains_with_programs_of_their_own_or_in_turn_have_the_bits_of_a_plain_product_in_chains(fmt: Format) -> None:
    x, weight = settled(fmt, 17, 64, 1280)  # of two runs the second is shorter
    sums = few_sums()
    whole = linear(x, dequantise(weight).to(x.dtype), torch.empty(17, 64, device=DEVICE), chains=2)
    assert torch.equal(run(x, weight, Tile(32, 64, 4, 3), count=2), whole)
    for first, rows, tile in [(0, 17, TILE), (16, 1, TILE), (5, 3, Tile(16, 64, 4, 2, weight_first=True))]:
        assert torch.equal(run(x[first : first + rows].contiguous(), weight, tile, sums, 2), whole[first : first + rows])
        assert not sums.arrived.any()
    assert torch.isfinite(sums.partial).any()  # they were used
    shorter = linear(x, dequantise(weight).to(x.dtype), torch.empty(17, 64, device=DEVICE), chains=5)
    assert torch.equal(run(x, weight, Tile(32, 64, 4, 2), sums, 5), shorter)


def test_chains_are_added_in_ascending_order_each_from_zero() -> None:
    """Sums that round: chains of 1, 2^-24, 2^-24 and 0 are 1 from the first to the last, and more in any other order."""
    weight = pack_gguf("Q8_0", torch.from_numpy(raw_blocks(Format.Q8_0, 32, 1024)).clone())
    weight.meta.fill_(0x3C003C00)  # scales of 1
    weight.payload.fill_(-0x7F7F)  # codes of 1
    weight = weight.to(DEVICE)
    x = torch.zeros(3, 1024, device=DEVICE, dtype=torch.bfloat16 if DEVICE.type == "cuda" else torch.float32)
    x[0, [5, 256, 600]] = torch.tensor([1.0, 2.0**-24, 2.0**-24], device=DEVICE, dtype=x.dtype)
    x[1, [5, 256, 600]] = torch.tensor([2.0**-24, 2.0**-24, 1.0], device=DEVICE, dtype=x.dtype)
    x[2, [256, 257, 900]] = torch.tensor([2.0**-24, 2.0**-24, 1.0], device=DEVICE, dtype=x.dtype)
    expected = torch.tensor([1.0, 1 + 2.0**-23, 1 + 2.0**-23], device=DEVICE)[:, None].expand(3, 32)
    for sums in (None, few_sums()):
        assert torch.equal(run(x, weight, TILE, sums, 4), expected)
    values = dequantise(weight).to(x.dtype)
    assert torch.equal(linear(x, values, torch.empty(3, 32, device=DEVICE), chains=4), expected)


def test_the_number_of_chains_is_a_rule_of_shapes_and_leaves_no_run_empty() -> None:
    assert [chains(*shape) for shape in ((24576, 4096), (6144, 4096), (4096, 4096), (4096, 12288))] == [1, 4, 4, 8]
    for n in (8, 576, 4096, 16384):
        for blocks in range(1, 60):
            count = chains(n, 256 * blocks - 32)
            each = -(-blocks // count)
            assert 1 <= count <= 8
            assert (count - 1) * each < blocks <= count * each


def test_sums_that_do_not_fit_leave_the_chains_to_one_program() -> None:
    x, weight = settled(Format.Q4_0, 5, 64, 1024)
    sums = few_sums()
    assert torch.equal(run(x, weight, Tile(16, 64, 4, 2), Sums(DEVICE, floats=1024, tiles=4), 2), run(x, weight, TILE, sums, 2))
    many = activations(80, 1024, exact=True)
    sums.partial.fill_(float("nan"))
    run(many, weight, TILE, sums, 2)  # ten tiles
    assert sums.partial.isnan().all()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("fmt", list(Format))
def test_products_are_right(fmt: Format, dtype: torch.dtype) -> None:
    weight = packed(fmt, 64, 512)
    for rows in (1, 3, 16, 17, 33):
        x = activations(rows, 512, dtype=dtype)
        expected = linear_quant_reference(x, weight)
        out = run(x, weight, Tile(16, 64, 4, 2))
        assert torch.isfinite(out).all()
        assert (out - expected).norm() / expected.norm() < 1e-5


@pytest.mark.parametrize("fmt", [*SHORT, Format.FP8])
def test_shapes_that_fill_no_block_are_right(fmt: Format) -> None:
    weight = packed(fmt, 130, 288)
    x = activations(5, 288)
    bias = torch.randn(130, device=DEVICE)
    stream = torch.randn(5, 130, device=DEVICE)
    expected = linear_quant_reference(x, weight, bias, stream)
    for tile in (TILE, TILE._replace(blocks=2)):  # which K has no multiple of
        out = linear_quant(x, weight, stream.clone(), bias=bias, epilogue=ADD, tile=tile)
        assert (out - expected).norm() / expected.norm() < 1e-5


@pytest.mark.parametrize("fmt", [Format.Q8_0, Format.Q4_K, Format.FP8])
def test_a_gate_is_applied_to_its_own_projection(fmt: Format) -> None:
    weight = packed(fmt, 148, 512)  # 74 gates: the last tile is not full
    x = activations(5, 512)
    x /= linear_quant_reference(x, weight).std()
    bias = torch.randn(148, device=DEVICE)
    expected = linear_quant_reference(x, weight, bias, epilogue=SILU_MUL)
    for tile in (TILE, Tile(16, 64, 4, 2, weight_first=True)):
        out = torch.full((5, 74), float("nan"), device=DEVICE)
        linear_quant(x, weight, out, bias=bias, epilogue=SILU_MUL, tile=tile)
        assert (out - expected).norm() / expected.norm() < 1e-5


@pytest.mark.parametrize("epilogue", [STORE, ADD, SILU_MUL])
def test_a_range_of_columns_of_a_wider_tensor_can_be_the_output(epilogue: int) -> None:
    x, weight = settled(Format.Q4_K, 17)
    x /= 256  # gates of moderate size
    cols = 32 if epilogue == SILU_MUL else 64
    start = torch.randn(17, cols, device=DEVICE)
    alone = linear_quant(x, weight, start.clone(), epilogue=epilogue, tile=TILE)
    wide = torch.full((17, cols + 16), -7.0, device=DEVICE)
    wide[:, 8 : 8 + cols] = start
    linear_quant(x, weight, wide[:, 8 : 8 + cols], epilogue=epilogue, tile=TILE)
    assert torch.equal(wide[:, 8 : 8 + cols], alone)
    assert (wide[:, :8] == -7).all()
    assert (wide[:, 8 + cols :] == -7).all()


@pytest.mark.parametrize("fmt", list(Format))
def test_a_rows_bits_do_not_depend_on_tiles_or_company(fmt: Format) -> None:
    x, weight = settled(fmt, 33)
    decode = [Tile(16, 64, 4, 4), Tile(16, 64, 4, 3, 2), Tile(16, 32, 4, 2, weight_first=True), Tile(32, 64, 4, 3)]
    prefill = [Tile(64, 64, 4, 2), Tile(128, 64, 8, 2, weight_first=True)]
    whole = run(x, weight, decode[0])
    for tile in decode[1:] + prefill:
        assert torch.equal(run(x, weight, tile), whole)
    for first, rows in [(0, 1), (32, 1), (5, 3), (7, 16), (1, 17)]:
        part = x[first : first + rows].contiguous()
        assert torch.equal(run(part, weight, config(fmt, 64, 512, rows)), whole[first : first + rows])


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's own words on inf x 0 under the interpreter
@pytest.mark.parametrize("fmt", list(Format))
def test_neighbours_that_are_not_numbers_stay_with_themselves(fmt: Format) -> None:
    x, weight = settled(fmt, 17)
    whole = run(x, weight)
    x[3], x[16] = float("nan"), float("inf")
    spoiled = run(x, weight)
    kept = [r for r in range(17) if r not in (3, 16)]
    assert torch.equal(spoiled[kept], whole[kept])
    assert not torch.isfinite(spoiled[[3, 16]]).any()


def test_activations_past_the_last_row_are_not_read() -> None:
    _, weight = settled(Format.Q4_0, 16)
    memory = activations(16, 512, exact=True)
    expected = run(memory[:5].clone(), weight)
    memory[5:] = float("nan")
    assert torch.equal(run(memory[:5], weight), expected)


def numbers_of(words: np.ndarray) -> np.ndarray:
    """The two bf16 numbers of each word, in fp64, [..., 2]."""
    halves = np.stack([words << np.uint32(16), words & np.uint32(0xFFFF0000)], axis=-1)
    return halves.view(np.float32).astype(np.float64)


def machine(code: str, **inputs: np.ndarray) -> dict[str, np.ndarray]:
    """What a handful of PTX instructions leave in the registers: a second reading of the strings the kernels hand to the compiler.

    Halves and fp32 numbers are kept as bit patterns.
    """
    registers: dict[str, np.ndarray] = dict(inputs)

    def value(name: str) -> np.ndarray:
        return np.asarray(int(name, 0), dtype=np.uint32) if name[0].isdigit() else registers[name]

    for line in code.strip("{} ").split(";"):
        operation, _, rest = line.strip().partition(" ")
        if operation in ("", ".reg"):
            continue
        if rest.startswith("{"):  # a register into its halves
            names, source = rest.removeprefix("{").split("},")
            low, high = (name.strip() for name in names.split(","))
            registers[low], registers[high] = value(source.strip()) & 0xFFFF, value(source.strip()) >> 16
            continue
        target, *sources = (name.strip() for name in rest.split(","))
        a, *more = (value(name) for name in sources)
        if operation == "cvt.f32.f16":
            result = a.astype(np.uint16).view(np.float16).astype(np.float32).view(np.uint32)
        elif operation == "cvt.rn.f16x2.e4m3x2":
            pair = torch.from_numpy(a.astype(np.uint16).view(np.uint8).copy()).view(torch.float8_e4m3fn)
            result = pair.half().numpy().view(np.uint32)
        elif operation == "prmt.b32":
            pool = a.astype(np.uint64) | (more[0].astype(np.uint64) << np.uint64(32))
            picks = [(pool >> np.uint64(8 * ((int(more[1]) >> 4 * i) & 7))) & np.uint64(255) for i in range(4)]
            result = np.bitwise_or.reduce([pick << np.uint64(8 * i) for i, pick in enumerate(picks)]).astype(np.uint32)
        elif operation == "lop3.b32":
            assert int(more[2]) == 0xEA  # (a & b) | c
            result = (a & more[0]) | more[1]
        elif operation == "fma.rn.bf16x2":
            exact = numbers_of(a) * numbers_of(more[0]) + numbers_of(more[1])
            assert np.array_equal(exact, exact.astype(np.float32))  # else it would be rounded twice here
            result = torch.from_numpy(exact.astype(np.float32)).bfloat16().view(torch.uint16).numpy().view(np.uint32)[..., 0]
        elif operation == "and.b32":
            result = a & more[0]
        elif operation == "shl.b32":
            result = a << more[0]
        elif operation == "shr.u32":
            result = a >> more[0]
        else:
            assert operation == "mov.b32"
            result = a
        registers[target] = np.asarray(result, dtype=np.uint32)
    return registers


def both(code: str, words: np.ndarray, other: np.ndarray) -> np.ndarray:
    """The two numbers that the code makes of the two halves of a word, [words, 2]."""
    registers = machine(code.replace("$", "p"), p2=words, p3=other)
    return np.stack([registers[name].view(np.float32) for name in ("p0", "p1")], axis=-1)


def test_the_machine_code_for_two_codes_at_once_unpacks_every_code() -> None:
    source = np.random.default_rng(3)
    words, other = (source.integers(0, 1 << 32, 1 << 13, dtype=np.uint64).astype(np.uint32) for _ in range(2))
    low, high = (w.view(np.uint16).reshape(-1, 2).astype(np.int64) for w in (words, other))
    for field in range(4):
        unit = 2.0**20 if field % 2 else 2.0**24
        assert np.array_equal(both(nibble_numbers(field), words, other) * unit, (low >> 4 * field) & 15)
    for segment in range(8):
        six = ((low >> 4 * (segment % 4)) & 15) | (((high >> crumb_place(segment)) & 3) << 4)
        assert np.array_equal(both(six_bit_numbers(segment), words, other) - 128, six)
    for field in range(2):
        codes = (low >> 8 * field) & 255
        assert np.array_equal(both(byte_numbers(field), words, other) - 32768, codes)
        numbers = torch.from_numpy(codes.astype(np.uint8)).view(torch.float8_e4m3fn).float().numpy()
        assert np.array_equal(both(e4m3_numbers(field), words, other), numbers, equal_nan=True)


def test_the_machine_code_for_two_values_of_q4_0_rounds_each_once() -> None:
    source = np.random.default_rng(3)
    words = source.integers(0, 1 << 32, 1 << 16, dtype=np.uint64).astype(np.uint32)
    scale = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    kept = np.isfinite(scale)
    words, scale = words[kept], scale[kept]
    upper = scale.view(np.uint32) & np.uint32(0xFFFF0000)
    rest = (scale - upper.view(np.float32)).view(np.uint32)
    assert not (rest & 0xFFFF).any()
    twice = {f"p{i}": (part >> np.uint32(16)) * np.uint32(0x10001) for i, part in ((2, upper), (4, rest))}
    for field in range(4):
        codes = (words.view(np.uint16).reshape(-1, 2).astype(np.int64) >> 4 * field) & 15
        expected = torch.from_numpy((codes - 8).astype(np.float32) * scale[:, None]).bfloat16().double().numpy()
        found = machine(nibble_values(field).replace("$", "p"), p1=words, **twice)["p0"]
        assert np.array_equal(numbers_of(found), expected)


def test_the_machine_code_for_a_byte_gives_its_number() -> None:
    words = np.random.default_rng(3).integers(0, 1 << 32, 1 << 10, dtype=np.uint64).astype(np.uint32)
    for byte in range(4):
        number = machine(one_byte(byte).replace("$", "p"), p1=words)["p0"].view(np.float32)
        assert np.array_equal(number - 32768, (words >> 8 * byte) & 255)


def test_what_is_not_supported_is_said() -> None:
    weight = packed(Format.Q8_0, 8, 32)
    assert supported(activations(1, 32), weight) == ""
    assert "int32" in supported(torch.zeros(1, 32, dtype=torch.int32, device=DEVICE), weight)


def variant(fmt: Format, tile: Tile, epilogue: int = STORE, count: int = 1) -> Variant:
    sums: dict[str, str] = {"partial": "*fp32", "arrived": "*i32"} if count > 1 else {}
    signature = sums | {
        "x": "*bf16", "payload": "*i16", "meta": "*fp32" if fmt == Format.FP8 else "*i32", "bias": "*bf16",
        "out": "*fp32" if epilogue == ADD else "*bf16", "stride": "i32", "M": "i32", "N": "i32", "K": "i32",
    }  # fmt: skip
    constexprs = {
        "FORMAT": CODE[fmt], "EPILOGUE": epilogue, "HAS_BIAS": False, "EARLY": tile.rows <= 64, "PAIRS": True, "EVEN_K": True,
        "WEIGHT_FIRST": tile.weight_first, "BM": tile.rows, "BN": tile.cols, "BLOCKS": tile.blocks,
        "CHAINS": count, "SHARED": count > 1,
    } | ({} if sums else {"partial": None, "arrived": None})  # fmt: skip
    multiples = ("stride", "N", "K")
    return Variant("triton_kernels.linear_quant", "_linear_quant", signature, constexprs, tile.warps, tile.stages, multiples)


def test_default_tiles_compile_for_hopper_and_unpack_in_registers() -> None:
    few = [(fmt, config(fmt, 4096, 4096, 16), ADD, 4) for fmt in Format]
    few.append((Format.Q8_0, config(Format.Q8_0, 4096, 12288, 16), ADD, 8))
    wide = [(fmt, config(fmt, 24576, 4096, 16), SILU_MUL, 1) for fmt in (Format.Q4_0, Format.Q6_K)]
    more = [
        (Format.Q4_1, config(Format.Q4_1, 4096, 4096, 32), STORE, 4),
        (Format.Q4_0, config(Format.Q4_0, 4096, 4096, 64), STORE, 4),
    ]
    asked = [*few, *wide, *more]
    for (fmt, tile, *_), built in zip(asked, compile_for_hopper([variant(*each) for each in asked]), strict=True):
        assert built.async_copy
        assert built.stack_bytes == 0, (fmt, tile)
        assert built.wgmma == tile.weight_first
        if not tile.weight_first:  # nothing lies in shared memory but what was copied there
            layout = LAYOUTS[fmt]
            words = 2 * layout.planes * layout.width * tile.cols
            stage = words + 4 * (layout.meta_words or 2) * tile.cols + 2 * 256 * tile.rows
            assert built.shared_bytes <= tile.stages * tile.blocks * stage, (fmt, tile)


def test_writing_values_out_compiles_for_hopper() -> None:
    signature = {"payload": "*i16", "meta": "*i32", "out": "*bf16", "N": "i32", "K": "i32"}
    asked = [
        Variant("triton_kernels.expand", "_expand", signature | {"meta": "*fp32" if fmt == Format.FP8 else "*i32"},
                {"FORMAT": CODE[fmt], "PAIRS": True, "EVEN_K": True, "BN": 32}, multiples=("N", "K"))
        for fmt in Format
    ]  # fmt: skip
    assert all(built.stack_bytes == 0 for built in compile_for_hopper(asked))
