"""y = x W^T where W stays quantised in memory and is unpacked in registers on its way to the tensor cores.

x: [M, K] bf16 or fp16 (fp32 under the interpreter), contiguous. W: a `PackedWeight` [N, K]. y: [M, N] of any float type.

Arithmetic: each weight is computed in fp32 (exactly, or with one rounding: see quant_formats), rounded to x's type, and
multiplied with fp32 accumulation.

Reduction order: K ascending in one chain from zero; where the weight's shape asks for it (`splits`), K is cut into that many runs
of whole blocks, each a chain of its own, and the runs' sums are added in ascending order. Tile shapes, warps, stages, which
operand comes first and whether the runs have programs of their own do not enter the order: a row's bits are those of the
unquantised product on weights rounded to x's type, for any number of rows, beside any company.

Unpacking: a word holds a code of each of several runs of K (quant_formats). The code is masked where it lies and or'ed into the
mantissa of 2^23, that constant is subtracted, and the scale, itself times the power of two that the code's place left over, is
multiplied: one logical operation, one exact subtraction, one multiplication. No integer-to-float conversion, and no value changes
place.

Bytes: the packed weight once for up to a tile of rows; x once a column tile through the L2; with program-a-split also
8 bytes x splits x rows x N of partial sums, which stay in the L2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from triton_kernels.quant_formats import LAYOUTS, Format, PackedWeight, dequantise

STORE, ADD = 0, 1

_Q8_0, _Q4_0, _Q4_1, _Q4_K, _Q6_K, _FP8 = (tl.constexpr(i) for i in range(6))
_CODE = {Format.Q8_0: 0, Format.Q4_0: 1, Format.Q4_1: 2, Format.Q4_K: 3, Format.Q6_K: 4, Format.FP8: 5}


class Tile(NamedTuple):
    """Launch parameters that change speed and no bits."""

    rows: int
    cols: int
    warps: int
    stages: int
    weight_first: bool = False  # W x^T, else x W^T. From 64 rows the latter sends the unpacked weight through shared memory
    program_a_split: bool = True  # a program for each split (few rows), else one program does them in turn


class Scratch:
    """What the split products of one stream share: partial sums and arrival counters. Made before a graph is captured."""

    def __init__(self, device: torch.device, floats: int = 1 << 23, tiles: int = 4096) -> None:
        self.partial = torch.empty(floats, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(tiles, dtype=torch.int32, device=device)


Chooser = Callable[[Format, int, int, int], "Tile | None"]
_chooser: list[Chooser] = []


@triton.jit
def _field(words, SHIFT: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr):
    """(the unsigned field of BITS bits at SHIFT, less ZERO) x 2^(SHIFT % 16), exact, fp32."""
    PLACE: tl.constexpr = SHIFT % 16
    KEEP: tl.constexpr = ((1 << BITS) - 1) << PLACE | 0x4B000000
    BIAS: tl.constexpr = 8388608.0 + ZERO * (1 << PLACE)
    half = words
    if SHIFT >= 16:
        half = words >> 16
    # Or first: fields of one half word share it, and each is then a single operation with one constant.
    return ((half | 0x4B000000) & KEEP).to(tl.float32, bitcast=True) - BIAS


@triton.jit
def _six_bits(low, high, SHIFT: tl.constexpr, HIGH_SHIFT: tl.constexpr):
    """(the low nibble at SHIFT with the two bits at HIGH_SHIFT above it, less 32) x 2^(SHIFT % 16), exact, fp32."""
    PLACE: tl.constexpr = SHIFT % 16
    KEEP: tl.constexpr = 15 << PLACE | 0x4B000000
    HIGH_MASK: tl.constexpr = 3 << (PLACE + 4)
    MOVE: tl.constexpr = PLACE + 4 - HIGH_SHIFT
    BIAS: tl.constexpr = 8388608.0 + 32 * (1 << PLACE)
    if SHIFT >= 16:
        low = low >> 16
    if MOVE > 0:
        high = high << MOVE
    elif MOVE < 0:
        high = high >> -MOVE
    return (((low | 0x4B000000) & KEEP) | (high & HIGH_MASK)).to(tl.float32, bitcast=True) - BIAS


@triton.jit
def _half_float(words, SHIFT: tl.constexpr):
    """The fp16 in bits SHIFT .. SHIFT + 15, as fp32."""
    return (words >> SHIFT).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _product(x, w, total, WEIGHT_FIRST: tl.constexpr):
    """total + x w^T, x [BM, WIDTH] and w [BN, WIDTH]; total is [BN, BM] when the weight comes first."""
    if x.dtype == tl.float32:
        if WEIGHT_FIRST:
            total = tl.dot(w, x.T, total, input_precision="ieee")
        else:
            total = tl.dot(x, w.T, total, input_precision="ieee")
    else:
        if WEIGHT_FIRST:
            total = tl.dot(w.to(x.dtype), x.T, total)
        else:
            total = tl.dot(x, w.to(x.dtype).T, total)
    return total


@triton.jit
def _activations(x, row, at, M, K, EVEN_K: tl.constexpr, WIDTH: tl.constexpr):
    """x[row, at : at + WIDTH], zero outside."""
    k = at + tl.arange(0, WIDTH)
    inside = row[:, None] < M
    if not EVEN_K:
        inside = inside & (k[None, :] < K)
    return tl.load(x + row[:, None].to(tl.int64) * K + k[None, :], mask=inside, other=0.0)


@triton.jit
def _group_of_32(words, scales, d, d_min, FORMAT: tl.constexpr, S: tl.constexpr):
    """Group S of the block, [BN, 32] fp32: its codes from `words`, its scale from the word `scales` [BN] (of groups S and S ^ 1,
    or of S alone for Q4_1), for Q4_K times the block's d and d_min."""
    BITS: tl.constexpr = 8 if FORMAT == _Q8_0 else 4
    SHIFT: tl.constexpr = BITS * S
    UNPLACE: tl.constexpr = 1.0 / (1 << SHIFT % 16)
    HALF: tl.constexpr = 16 * (S % 2)
    if FORMAT == _Q4_1:
        scale = _half_float(scales, 0) * UNPLACE
        w = _field(words, SHIFT, BITS, 0) * scale[:, None] + _half_float(scales, 16)[:, None]
    elif FORMAT == _Q4_K:
        scale = _field(scales, HALF, 8, 0) * (d * UNPLACE)
        minimum = _field(scales, HALF + 8, 8, 0) * (d_min * (1.0 / 256))
        w = _field(words, SHIFT, BITS, 0) * scale[:, None] - minimum[:, None]
    else:
        w = _field(words, SHIFT, BITS, 128 if FORMAT == _Q8_0 else 8) * (_half_float(scales, HALF) * UNPLACE)[:, None]
    return w


@triton.jit
def _group_of_16(low, high, scales, d, S: tl.constexpr):
    """Group S of a Q6_K block, [BN, 16] fp32: `low` and `high` hold its codes, byte S % 4 of the word `scales` [BN] its scale."""
    BYTE: tl.constexpr = 8 * (S % 4)
    UNPLACE: tl.constexpr = 1.0 / (1 << (BYTE % 16 + 4 * S % 16))
    scale = _field(scales, BYTE, 8, 128) * (d * UNPLACE)
    return _six_bits(low, high, 4 * (S % 8), 2 * S) * scale[:, None]


@triton.jit
def _block(
    total, x, payload, meta, block, row, near, M, N, K,
    FORMAT: tl.constexpr, WEIGHT_FIRST: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """total + the product over one block of K. The payload's and the scales' layout is quant_formats'."""
    wide = tl.cast(N, tl.int64)
    if FORMAT == _FP8:
        codes = tl.load(payload + (block * wide + near[:, None]) * 128 + tl.arange(0, 128)[None, :])
        scale = tl.load(meta + block * tl.cdiv(N, 128) + near // 128)
        w = codes.to(tl.float32) * scale[:, None]
        total = _product(_activations(x, row, block * 128, M, K, EVEN_K, 128), w, total, WEIGHT_FIRST)
    elif FORMAT == _Q6_K:
        words = payload + (block * 3 * wide + near[:, None]) * 16 + tl.arange(0, 16)[None, :]
        scales = meta + block * 5 * wide + near
        d = tl.load(scales).to(tl.float32, bitcast=True)
        high = tl.load(words + 2 * wide * 16)
        for half in tl.static_range(2):
            low = tl.load(words + half * wide * 16)
            for quarter in tl.static_range(2):
                four = tl.load(scales + (1 + 2 * half + quarter) * wide)
                for j in tl.static_range(4):
                    w = _group_of_16(low, high, four, d, 8 * half + 4 * quarter + j)
                    at = block * 256 + (8 * half + 4 * quarter + j) * 16
                    total = _product(_activations(x, row, at, M, K, EVEN_K, 16), w, total, WEIGHT_FIRST)
    else:
        GROUPS: tl.constexpr = 4 if FORMAT == _Q8_0 else 8
        META: tl.constexpr = 2 if FORMAT == _Q8_0 else (4 if FORMAT == _Q4_0 else (8 if FORMAT == _Q4_1 else 5))
        A_WORD: tl.constexpr = 1 if FORMAT == _Q4_1 else 2  # groups whose scales share a word
        words = tl.load(payload + (block * wide + near[:, None]) * 32 + tl.arange(0, 32)[None, :])
        scales = meta + block * META * wide + near
        d = 0.0
        d_min = 0.0
        if FORMAT == _Q4_K:
            whole = tl.load(scales)
            d = _half_float(whole, 0)
            d_min = _half_float(whole, 16)
            scales += wide
        for word in tl.static_range(GROUPS // A_WORD):
            scale = tl.load(scales + word * wide)
            for j in tl.static_range(A_WORD):
                w = _group_of_32(words, scale, d, d_min, FORMAT, word * A_WORD + j)
                at = (block * GROUPS + word * A_WORD + j) * 32
                total = _product(_activations(x, row, at, M, K, EVEN_K, 32), w, total, WEIGHT_FIRST)
    return total


@triton.jit
def _write(total, bias, out, row, col, near, M, N, WEIGHT_FIRST: tl.constexpr, EPILOGUE: tl.constexpr, HAS_BIAS: tl.constexpr):
    if WEIGHT_FIRST:
        total = total.T
    if HAS_BIAS:
        total += tl.load(bias + near)[None, :].to(tl.float32)
    where = out + row[:, None].to(tl.int64) * N + col[None, :]
    inside = (row[:, None] < M) & (col[None, :] < N)
    if EPILOGUE == 1:
        total = tl.load(where, mask=inside, other=0.0) + total
    tl.store(where, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _linear_quant(
    x, payload, meta, bias, out, M, N, K, blocks,
    SPLITS: tl.constexpr, FORMAT: tl.constexpr, EPILOGUE: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """One [BM, BN] tile, all of K. Row tiles are neighbours in time, so that the weight tile is read once."""
    tile = tl.program_id(0)
    row_tiles = tl.cdiv(M, BM)
    row = tile % row_tiles * BM + tl.arange(0, BM)
    col = tile // row_tiles * BN + tl.arange(0, BN)
    near = tl.minimum(col, N - 1)  # columns past the end repeat the last one and are not stored
    each = tl.cdiv(blocks, SPLITS)
    total = tl.zeros((BN, BM) if WEIGHT_FIRST else (BM, BN), tl.float32)
    for block in range(tl.minimum(each, blocks)):
        total = _block(total, x, payload, meta, block, row, near, M, N, K, FORMAT, WEIGHT_FIRST, EVEN_K)
    for split in range(1, SPLITS):
        part = tl.zeros((BN, BM) if WEIGHT_FIRST else (BM, BN), tl.float32)
        for block in range(split * each, tl.minimum(split * each + each, blocks)):
            part = _block(part, x, payload, meta, block, row, near, M, N, K, FORMAT, WEIGHT_FIRST, EVEN_K)
        total += part
    _write(total, bias, out, row, col, near, M, N, WEIGHT_FIRST, EPILOGUE, HAS_BIAS)


@triton.jit
def _linear_quant_split(
    x, payload, meta, bias, out, partial, arrived, M, N, K, blocks,
    SPLITS: tl.constexpr, FORMAT: tl.constexpr, EPILOGUE: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The same sums with a program a split: the last program of a tile to arrive adds the splits in order.

    partial: fp32 [tiles, SPLITS, BM * BN]. arrived: int32 [tiles], zero before and after.
    """
    tile = tl.program_id(0)
    split = tl.program_id(1)
    row_tiles = tl.cdiv(M, BM)
    row = tile % row_tiles * BM + tl.arange(0, BM)
    col = tile // row_tiles * BN + tl.arange(0, BN)
    near = tl.minimum(col, N - 1)
    each = tl.cdiv(blocks, SPLITS)
    total = tl.zeros((BN, BM) if WEIGHT_FIRST else (BM, BN), tl.float32)
    for block in range(split * each, tl.minimum(split * each + each, blocks)):
        total = _block(total, x, payload, meta, block, row, near, M, N, K, FORMAT, WEIGHT_FIRST, EVEN_K)
    # Rows that do not exist are neither written nor read back: their sums are dropped by the last mask.
    if WEIGHT_FIRST:
        spot = tl.arange(0, BM)[None, :] * BN + tl.arange(0, BN)[:, None]
        used = (row[None, :] < M) & (col[:, None] < N)
    else:
        spot = tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
        used = (row[:, None] < M) & (col[None, :] < N)
    mine = partial + tile.to(tl.int64) * SPLITS * BM * BN
    tl.store(mine + split * BM * BN + spot, total, mask=used)
    tl.debug_barrier()  # every thread's part is written before the arrival is
    if tl.atomic_add(arrived + tile, 1, sem="acq_rel") == SPLITS - 1:
        total = tl.load(mine + spot, mask=used, other=0.0, cache_modifier=".cg")
        for s in tl.static_range(1, SPLITS):
            total += tl.load(mine + s * BM * BN + spot, mask=used, other=0.0, cache_modifier=".cg")
        tl.store(arrived + tile, 0)
        _write(total, bias, out, row, col, near, M, N, WEIGHT_FIRST, EPILOGUE, HAS_BIAS)


def splits(fmt: Format, n: int, k: int) -> int:
    """Into how many runs K is cut: a rule of the weight alone, the same on every card and for every number of rows.

    About three programs of 64 columns for each of 132 multiprocessors, each with at least four blocks to keep loads in flight.
    """
    blocks = -(-k // LAYOUTS[fmt].block_k)
    count = 1
    while count < 16 and 2 * count * -(-n // 64) <= 528 and blocks >= 8 * count:
        count *= 2
    return count


def config(fmt: Format, n: int, k: int, rows: int) -> Tile:
    """The tile of a product: the installed chooser's, or a safe default."""
    for choose in _chooser:
        tile = choose(fmt, n, k, rows)
        if tile is not None:
            return tile
    if rows <= 16:
        return Tile(16, 64, 4, 4)
    if rows <= 32:
        return Tile(32, 64, 4, 4)
    if rows <= 64:
        return Tile(64, 64, 4, 3)
    return Tile(128, 64 if fmt == Format.FP8 else 128, 8, 2, program_a_split=False)


def use_table(choose: Chooser | None) -> None:
    """Install what `config` asks first, `choose(format, n, k, rows) -> Tile | None` (None: default); None removes it.

    Tiles change speed and no bits, so a table of measured ones may be installed at any time.
    """
    _chooser[:] = [] if choose is None else [choose]


def linear_quant(
    x: torch.Tensor,
    weight: PackedWeight,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    epilogue: int = STORE,
    scratch: Scratch | None = None,
    tile: Tile | None = None,
    parts: int | None = None,
) -> torch.Tensor:
    """Compute into `out` and return it.

    x [M, K], out [M, N] (STORE: any float type; ADD: fp32, added to), bias [N]. `scratch` lets a weight with splits use a program
    for each when there are few rows; without it, or when it is too small, one program does them in turn, with the same bits.
    `parts` replaces `splits(...)` and with it the reduction order: for measurements.
    """
    rows, inner = x.shape
    n, k = weight.n, weight.k
    if inner != k or tuple(out.shape) != (rows, n) or not x.is_contiguous() or not out.is_contiguous():
        raise ValueError(f"linear_quant: x {tuple(x.shape)} and out {tuple(out.shape)} must be contiguous [M, {k}] and [M, {n}]")
    if rows == 0:
        return out
    tile = tile or config(weight.format, n, k, rows)
    count = parts or splits(weight.format, n, k)
    count = -(-weight.blocks // -(-weight.blocks // count))  # no empty run
    even_k = k % LAYOUTS[weight.format].block_k == 0
    tiles = triton.cdiv(rows, tile.rows) * triton.cdiv(n, tile.cols)
    options = {
        "SPLITS": count, "FORMAT": _CODE[weight.format], "EPILOGUE": epilogue, "HAS_BIAS": bias is not None, "EVEN_K": even_k,
        "WEIGHT_FIRST": tile.weight_first, "BM": tile.rows, "BN": tile.cols, "num_warps": tile.warps, "num_stages": tile.stages,
    }  # fmt: skip
    shape = (rows, n, k, weight.blocks)
    if count > 1 and tile.program_a_split and scratch is not None and _fits(scratch, tiles, count * tile.rows * tile.cols):
        _linear_quant_split[(tiles, count)](
            x, weight.payload, weight.meta, bias, out, scratch.partial, scratch.arrived, *shape, **options
        )
    else:
        _linear_quant[(tiles,)](x, weight.payload, weight.meta, bias, out, *shape, **options)
    return out


def _fits(scratch: Scratch, tiles: int, floats: int) -> bool:
    return tiles <= scratch.arrived.numel() and tiles * floats <= scratch.partial.numel()


def supported(x: torch.Tensor, weight: PackedWeight) -> str:
    """Why the product cannot be taken here; "" when it can."""
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"activations of type {x.dtype}"
    if x.device != weight.payload.device:
        return f"activations on {x.device}, weight on {weight.payload.device}"
    if x.is_cuda:
        needed = (8, 9) if weight.format == Format.FP8 else (8, 0)
        if torch.cuda.get_device_capability(x.device) < needed:
            return f"{weight.format} needs compute capability {needed[0]}.{needed[1]}"
    return ""


def linear_quant_reference(
    x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None, add: torch.Tensor | None = None
) -> torch.Tensor:
    """The same in plain torch: weights dequantised and rounded to x's type, the product in fp64, rounded to fp32."""
    y = x.double() @ dequantise(weight).to(x.dtype).double().t()
    if bias is not None:
        y = y + bias.double()
    if add is not None:
        y = add.double() + y
    return y.float()
