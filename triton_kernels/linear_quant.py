"""y = x W^T where W stays quantised in memory and is unpacked in registers on its way to the tensor cores.

x: [M, K] bf16 or fp16 (fp32 under the interpreter), contiguous. W: a `PackedWeight` [N, K]. y: [M, N] of any float type, or
[M, N / 2] with SILU_MUL; its rows may be apart, so that it can be a range of columns of a wider tensor.

Arithmetic: the codes are small integers (FP8: e4m3 values), exact in x's type, and are multiplied as they are. A scale belongs to a
group of 16 or 32 values (FP8: 128) and is applied to the group's sum, in fp32; no weight is ever rounded. With P(g) the sum of
x[k] code[k] over the group g and S(g) that of x[k], both on the tensor cores from zero:

    Q8_0, Q4_0, FP8   total = fma(d(g), P(g), total)                   group by group
    Q4_1              the same, and total = fma(m(g), S(g), total)
    Q6_K              part = fma(sc(g), P(g), part) over 256 values;   then total = fma(d, part, total)
    Q4_K              so, and least = least + sum of x[k] m(g) beside  then also total = fma(-dmin, least, total)
                      it, one chain on the tensor cores;

Reduction order: K ascending in one chain from zero; where the weight's shape asks for it (`splits`), K is cut into that many runs
of whole blocks, each a chain of its own, and the runs' sums are added in ascending order. Tile shapes, warps, stages, which
operand comes first and whether the runs have programs of their own do not enter the order: a row has the same bits for any number
of rows, beside any company.

Unpacking: see quant_unpack. A scale is read one block ahead, straight into the registers it is used in.

Bytes: the packed weight once for up to a tile of rows; x once a column tile through the L2; with program-a-split also
8 bytes x splits x rows x N of partial sums, which stay in the L2.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from triton_kernels import card
from triton_kernels.linear import ADD, FEW_ROWS, ROW_BUCKETS, SILU_MUL, STORE
from triton_kernels.quant_formats import LAYOUTS, Format, PackedWeight, dequantise
from triton_kernels.quant_unpack import (
    CODE,
    FP8,
    Q4_1,
    Q4_K,
    Q6_K,
    Q8_0,
    codes_of,
    constant_along_k,
    group_scale,
    half_float,
    minimum_words,
    scale_words,
)

__all__ = ["ADD", "SILU_MUL", "STORE", "Scratch", "Tile", "bucket_of", "config", "linear_quant", "splits", "tile_key"]


class Tile(NamedTuple):
    """Launch parameters that change speed and no bits."""

    rows: int
    cols: int  # rows of W; with SILU_MUL half of them gates
    warps: int
    stages: int
    weight_first: bool = False  # W x^T, else x W^T. From 64 rows on the latter sends the unpacked weight through shared memory
    program_a_split: bool = True  # a program for each split (few rows), else one program does them in turn


class Scratch:
    """What the split products of one stream share: partial sums and arrival counters. Made before a graph is captured."""

    def __init__(self, device: torch.device, floats: int = 1 << 23, tiles: int = 4096) -> None:
        self.partial = torch.empty(floats, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(tiles, dtype=torch.int32, device=device)


@triton.jit
def _add_scaled(total, part, scale, WEIGHT_FIRST: tl.constexpr):
    """fma(scale, part, total), scale [BN]."""
    if WEIGHT_FIRST:
        across = tl.broadcast_to(scale[:, None], total.shape)
    else:
        across = tl.broadcast_to(scale[None, :], total.shape)
    return tl.fma(part, across, total)


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
            total = tl.dot(w, x.T, total)
        else:
            total = tl.dot(x, w.T, total)
    return total


@triton.jit
def _activations(x, row, at, M, K, EVEN_K: tl.constexpr, WIDTH: tl.constexpr):
    """x[row, at : at + WIDTH], zero outside."""
    k = at + tl.arange(0, WIDTH)
    where = x + row[:, None].to(tl.int64) * K + k[None, :]
    inside = row[:, None] < M
    if not EVEN_K:
        inside = inside & (k[None, :] < K)
    return tl.load(where, mask=inside, other=0.0)


@triton.jit
def _chain(
    x, payload, meta, begin, end, row, near, first, second, M, N, K,
    FORMAT: tl.constexpr, PAIRS: tl.constexpr, TWINS: tl.constexpr, EVEN_K: tl.constexpr, WEIGHT_FIRST: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The product over the blocks begin .. end - 1 of K, at least one. The payload's and the scales' layout is quant_formats'."""
    WIDTH: tl.constexpr = 16 if FORMAT == Q6_K else 32
    BYTES: tl.constexpr = (FORMAT == Q8_0) | (FORMAT == FP8)
    SEGMENTS: tl.constexpr = 256 // WIDTH
    FIELDS: tl.constexpr = 2 if BYTES else 4
    PLANES: tl.constexpr = 6 if FORMAT == Q6_K else SEGMENTS // FIELDS
    TWO_STEPS: tl.constexpr = (FORMAT == Q4_K) | (FORMAT == Q6_K)
    zero = tl.zeros((BN, BM) if WEIGHT_FIRST else (BM, BN), tl.float32)
    spot = near[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    plane = tl.cast(N, tl.int64) * WIDTH
    total = zero
    coming = scale_words(meta, begin, near, first, second, N, FORMAT, PAIRS, TWINS, WEIGHT_FIRST, BN)
    for block in range(begin, end):
        scales = coming
        if FORMAT == Q4_K:
            minima = minimum_words(meta, block, near, N)
        following = tl.minimum(block + 1, end - 1)
        coming = scale_words(meta, following, near, first, second, N, FORMAT, PAIRS, TWINS, WEIGHT_FIRST, BN)
        words = payload + plane * (block * PLANES) + spot
        part = zero
        least = zero
        low = tl.load(words)
        high = low
        for s in tl.static_range(SEGMENTS):
            if s % FIELDS == 0 and s > 0:
                low = tl.load(words + plane * (s // FIELDS))
            if FORMAT == Q6_K and s % 8 == 0:
                high = tl.load(words + plane * (4 + s // 8))
            a = _activations(x, row, (block * SEGMENTS + s) * WIDTH, M, K, EVEN_K, WIDTH)
            w = codes_of(a, low, high, FORMAT, s, PAIRS)
            if FORMAT == FP8:
                part = _product(a, w, zero if s % 4 == 0 else part, WEIGHT_FIRST)
                if s % 4 == 3:
                    total = _add_scaled(total, part, scales[s // 4], WEIGHT_FIRST)
            elif TWO_STEPS:
                part = _add_scaled(part, _product(a, w, zero, WEIGHT_FIRST), group_scale(scales, FORMAT, s), WEIGHT_FIRST)
            else:
                total = _add_scaled(total, _product(a, w, zero, WEIGHT_FIRST), group_scale(scales, FORMAT, s), WEIGHT_FIRST)
            if FORMAT == Q4_1:
                sums = _product(a, tl.full((BN, WIDTH), 1, a.dtype), zero, WEIGHT_FIRST)
                total = _add_scaled(total, sums, half_float(scales[s], True), WEIGHT_FIRST)
            elif FORMAT == Q4_K:
                m = constant_along_k(a, minima[s // 2], 2 * (s % 2) + 1, PAIRS, WIDTH)
                least = _product(a, m, least, WEIGHT_FIRST)
        if FORMAT == Q6_K:
            total = _add_scaled(total, part, scales[0].to(tl.float32, bitcast=True), WEIGHT_FIRST)
        elif FORMAT == Q4_K:
            total = _add_scaled(total, part, half_float(scales[0], False), WEIGHT_FIRST)
            total = _add_scaled(total, least, -half_float(scales[0], True), WEIGHT_FIRST)
    return total


@triton.jit
def _weight_rows(strip, N, j, EPILOGUE: tl.constexpr, BN: tl.constexpr):
    """The rows of W of a tile's columns j. With SILU_MUL a gate and its up-projection are neighbours. Columns past the end repeat
    the last one and are not stored."""
    if EPILOGUE == 2:
        near = tl.minimum(strip * (BN // 2) + j // 2, N // 2 - 1) + j % 2 * (N // 2)
    else:
        near = tl.minimum(strip * BN + j, N - 1)
    return near


@triton.jit
def _write(
    total, bias, out, stride, row, strip, near, M, N,
    WEIGHT_FIRST: tl.constexpr, EPILOGUE: tl.constexpr, HAS_BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    if WEIGHT_FIRST:
        total = total.T
    if HAS_BIAS:
        total += tl.load(bias + near)[None, :].to(tl.float32)
    if EPILOGUE == 2:
        gate, up = tl.split(tl.reshape(total, (BM, BN // 2, 2)))
        total = gate / (1.0 + tl.exp(-gate)) * up
        col = strip * (BN // 2) + tl.arange(0, BN // 2)
        inside = (row[:, None] < M) & (col[None, :] < N // 2)
    else:
        col = strip * BN + tl.arange(0, BN)
        inside = (row[:, None] < M) & (col[None, :] < N)
    where = out + row[:, None].to(tl.int64) * stride + col[None, :]
    if EPILOGUE == 1:
        total = tl.load(where, mask=inside, other=0.0) + total
    tl.store(where, total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M", "blocks", "splits"])
def _linear_quant(
    x, payload, meta, bias, out, stride, M, N, K, blocks, splits,
    FORMAT: tl.constexpr, EPILOGUE: tl.constexpr, HAS_BIAS: tl.constexpr, EARLY: tl.constexpr,
    PAIRS: tl.constexpr, TWINS: tl.constexpr, EVEN_K: tl.constexpr, WEIGHT_FIRST: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """One [BM, BN] tile, all of K. Row tiles are neighbours in time, so that the weight tile is read once."""
    tile = tl.program_id(0)
    row_tiles = tl.cdiv(M, BM)
    row = tile % row_tiles * BM + tl.arange(0, BM)
    strip = tile // row_tiles
    near = _weight_rows(strip, N, tl.arange(0, BN), EPILOGUE, BN)
    first = _weight_rows(strip, N, 2 * tl.arange(0, BN // 2), EPILOGUE, BN)
    second = _weight_rows(strip, N, 2 * tl.arange(0, BN // 2) + 1, EPILOGUE, BN)
    each = tl.cdiv(blocks, splits)
    total = tl.zeros((BN, BM) if WEIGHT_FIRST else (BM, BN), tl.float32)
    if EARLY:
        gdc_wait()
    for split in range(splits):
        last = tl.minimum(split * each + each, blocks)
        total += _chain(x, payload, meta, split * each, last, row, near, first, second, M, N, K,
                        FORMAT, PAIRS, TWINS, EVEN_K, WEIGHT_FIRST, BM, BN)  # fmt: skip
    if EARLY:
        gdc_launch_dependents()  # not before: programs that wait would take the places of programs still to come
    _write(total, bias, out, stride, row, strip, near, M, N, WEIGHT_FIRST, EPILOGUE, HAS_BIAS, BM, BN)


@triton.jit(do_not_specialize=["M", "blocks", "splits"])
def _linear_quant_split(
    x, payload, meta, bias, out, partial, arrived, stride, M, N, K, blocks, splits,
    FORMAT: tl.constexpr, EPILOGUE: tl.constexpr, HAS_BIAS: tl.constexpr, EARLY: tl.constexpr,
    PAIRS: tl.constexpr, TWINS: tl.constexpr, EVEN_K: tl.constexpr, WEIGHT_FIRST: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The same sums with a program a split: the last program of a tile to arrive adds the splits in order.

    partial: fp32 [tiles, splits, BM * BN]. arrived: int32 [tiles], zero before and after.
    """
    tile = tl.program_id(0)
    split = tl.program_id(1)
    row_tiles = tl.cdiv(M, BM)
    row = tile % row_tiles * BM + tl.arange(0, BM)
    strip = tile // row_tiles
    near = _weight_rows(strip, N, tl.arange(0, BN), EPILOGUE, BN)
    first = _weight_rows(strip, N, 2 * tl.arange(0, BN // 2), EPILOGUE, BN)
    second = _weight_rows(strip, N, 2 * tl.arange(0, BN // 2) + 1, EPILOGUE, BN)
    each = tl.cdiv(blocks, splits)
    last = tl.minimum(split * each + each, blocks)
    if EARLY:
        gdc_wait()
    total = _chain(x, payload, meta, split * each, last, row, near, first, second, M, N, K,
                   FORMAT, PAIRS, TWINS, EVEN_K, WEIGHT_FIRST, BM, BN)  # fmt: skip
    if EARLY:
        gdc_launch_dependents()
    # Rows that do not exist are neither written nor read back: their sums are dropped by the last mask.
    if WEIGHT_FIRST:
        spot = tl.arange(0, BM)[None, :] * BN + tl.arange(0, BN)[:, None]
        used = row[None, :] < M
    else:
        spot = tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
        used = row[:, None] < M
    mine = partial + tile.to(tl.int64) * splits * (BM * BN)
    tl.store(mine + split * BM * BN + spot, total, mask=used)
    tl.debug_barrier()  # every thread's part is written before the arrival is
    if tl.atomic_add(arrived + tile, 1, sem="acq_rel") == splits - 1:
        total = tl.zeros((BN, BM) if WEIGHT_FIRST else (BM, BN), tl.float32)
        for s in range(splits):
            total += tl.load(mine + s * BM * BN + spot, mask=used, other=0.0, cache_modifier=".cg")
        tl.store(arrived + tile, 0)
        _write(total, bias, out, stride, row, strip, near, M, N, WEIGHT_FIRST, EPILOGUE, HAS_BIAS, BM, BN)


def splits(fmt: Format, n: int, k: int) -> int:
    """Into how many runs K is cut: a rule of the weight alone, the same on every card and for every number of rows.

    Up to four programs of 64 columns for each of 132 multiprocessors, each with at least two blocks, which are then both in flight.
    """
    blocks = -(-k // LAYOUTS[fmt].block_k)
    count = 1
    while count < 16 and 2 * count * -(-n // 64) <= 528 and blocks >= 4 * count:
        count *= 2
    return count


def config(fmt: Format, n: int, k: int, rows: int, epilogue: int = STORE) -> Tile:
    """The tile for a product: this card's measured one, or a safe default."""
    bucket = bucket_of(rows)
    measured = _measured().get(tile_key(fmt, n, k, bucket, epilogue))
    if measured is not None:
        return measured
    if bucket <= FEW_ROWS:
        # With x first a thread holds the scales of twice as many outputs, and these formats have the most.
        heavy = fmt == Format.Q4_K or (fmt in (Format.Q4_1, Format.Q6_K) and bucket > 16)
        return Tile(bucket, 64, 4, 3 if bucket <= 32 else 2, weight_first=heavy or bucket == FEW_ROWS)
    return Tile(128 if fmt == Format.FP8 else 64, 128, 8, 2, weight_first=True, program_a_split=False)


def bucket_of(rows: int) -> int:
    """The largest number of rows that shares a tile with this one."""
    return next(b for b in ROW_BUCKETS if rows <= b)


def tile_key(fmt: Format, n: int, k: int, bucket: int, epilogue: int) -> str:
    """The name of a product in the table of measured tiles."""
    return f"{fmt}:{n}x{k}:{bucket}:{epilogue}"


@lru_cache
def _measured() -> dict[str, Tile]:
    """Tiles measured on this card by bench/kernels/linear_quant.py, by `tile_key`."""
    path = Path(__file__).with_name("tuned") / f"{card.name()}_quant.json"
    if not path.exists():
        return {}
    return {key: Tile(*tile) for key, tile in json.loads(path.read_text()).items()}


def linear_quant(
    x: torch.Tensor,
    weight: PackedWeight,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    epilogue: int = STORE,
    scratch: Scratch | None = None,
    early: bool = False,
    tile: Tile | None = None,
    parts: int | None = None,
) -> torch.Tensor:
    """Compute into `out` and return it.

    x [M, K], out [M, N] (STORE: any float type; ADD: fp32, added to) or [M, N / 2] (SILU_MUL, the weight's rows being [gate; up]),
    bias [N]. The rows of `out` may be apart, its columns not. `scratch` lets a weight with splits use a program for each when there
    are few rows; without it, or when it is too small, one program does them in turn, with the same bits. `early` lets a product of
    few rows begin while the kernel before it in the stream ends; that kernel must allow it. `parts` replaces `splits(...)` and with
    it the reduction order: for measurements.
    """
    rows, inner = x.shape
    n, k = weight.n, weight.k
    cols = n // 2 if epilogue == SILU_MUL else n
    if inner != k or tuple(out.shape) != (rows, cols) or not x.is_contiguous() or (cols > 1 and out.stride(1) != 1):
        raise ValueError(f"linear_quant: x {tuple(x.shape)} and out {tuple(out.shape)} must be [M, {k}] and [M, {cols}] "
                         "with contiguous rows")  # fmt: skip
    if rows == 0:
        return out
    tile = tile or config(weight.format, n, k, rows, epilogue)
    if weight.format == Format.Q4_K:  # with x first, Triton 3.6 compiles it to other bits
        tile = tile._replace(weight_first=True)
    count = parts or splits(weight.format, n, k)
    count = -(-weight.blocks // -(-weight.blocks // count))  # no empty run
    tiles = triton.cdiv(rows, tile.rows) * triton.cdiv(n, tile.cols)
    early = early and rows <= FEW_ROWS
    options = {
        "FORMAT": CODE[weight.format], "EPILOGUE": epilogue, "HAS_BIAS": bias is not None, "EARLY": early,
        "PAIRS": x.is_cuda and x.dtype != torch.float32, "TWINS": n % 2 == 0 and epilogue != SILU_MUL,
        "EVEN_K": k % LAYOUTS[weight.format].block_k == 0, "WEIGHT_FIRST": tile.weight_first, "BM": tile.rows, "BN": tile.cols,
        "num_warps": tile.warps, "num_stages": tile.stages,
    }  # fmt: skip
    if early:
        options["launch_pdl"] = True
    if tile.rows <= 32 and tile.warps >= 4:
        options["maxnreg"] = 128  # 16 warps a multiprocessor, as `splits` counts on; hardly a value moves to memory for it
    shape = (out.stride(0), rows, n, k, weight.blocks, count)
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
    x: torch.Tensor,
    weight: PackedWeight,
    bias: torch.Tensor | None = None,
    add: torch.Tensor | None = None,
    epilogue: int = STORE,
) -> torch.Tensor:
    """The same in plain torch, in fp64 on the dequantised weights, rounded to fp32. `add`: what ADD adds to."""
    y = x.double() @ dequantise(weight).double().t()
    if bias is not None:
        y = y + bias.double()
    if add is not None:
        y = add.double() + y
    if epilogue == SILU_MUL:
        gate, up = y.chunk(2, dim=-1)
        y = torch.nn.functional.silu(gate) * up
    return y.float()
