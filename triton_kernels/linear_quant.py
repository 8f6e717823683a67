"""y = x W^T where W stays quantised in memory and is unpacked in registers on its way to the tensor cores.

x: [M, K] bf16 or fp16 (fp32 under the interpreter), contiguous. W: a `PackedWeight` [N, K]. y: [M, N] of any float type, or
[M, N / 2] with SILU_MUL; its rows may be apart, so that it can be a range of columns of a wider tensor.

Arithmetic: a weight is its value in fp32 (quant_formats.dequantise) rounded once to x's type; the product is that of
triton_kernels.linear in `chains(n, k)` chains: K is cut into that many runs of whole blocks, each a chain of multiply-accumulates
from zero, K ascending, and the chains' sums are added in ascending order; all in fp32. So the bits are those of `linear` on the
dequantised weight, for any number of rows, beside any company. Tile shapes, warps, stages, which operand comes first and whether
chains have programs of their own do not enter the order.

Few rows: a program a tile and chain. Blocks of 256 values of K come through shared memory, words, scales and activations alike;
words and scales are read from there straight into the registers of the tensor cores' operand and unpacked in them (quant_unpack).
The last program of a tile to arrive, found by an integer counter, adds the chains. Several chains are there for narrow weights,
whose tiles are too few to keep a card busy. Many rows: see expand, which costs less than to unpack a tile of weights for every
tile of rows.

On a card up to 16 rows of bf16 and whole blocks of K are mostly linear_stream's, with the same bits.

Bytes: the packed weight once for up to a tile of rows; x once a column tile through the L2; with several chains also
8 bytes x chains x rows x N of partial sums, which stay in the L2.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from triton_kernels import card
from triton_kernels.linear import ADD, FEW_ROWS, ROW_BUCKETS, RUN_BLOCK, SILU_MUL, STORE, linear_reference
from triton_kernels.quant_formats import LAYOUTS, Format, PackedWeight, dequantise, unsupported
from triton_kernels.quant_unpack import CODE, FP8, Q6_K, Q8_0, scale_words, values_of

__all__ = [
    "ADD",
    "SILU_MUL",
    "STORE",
    "Sums",
    "Tile",
    "bucket_of",
    "chains",
    "check_shapes",
    "config",
    "linear_quant",
    "linear_quant_reference",
    "supported",
    "table",
    "tile_key",
]


class Tile(NamedTuple):
    """Launch parameters that change speed and no bits."""

    rows: int
    cols: int  # rows of W; with SILU_MUL half of them gates
    warps: int
    stages: int
    blocks: int = 1  # of 256 values of K at a time, where K has a multiple of them
    weight_first: bool = False  # W x^T, else x W^T. From 64 rows on the latter sends the unpacked weight through shared memory
    shared: bool = True  # a program for each chain (few rows), else one program does them in turn


class Sums:
    """What the products of one stream share: the sums of chains, and arrival counters, zero between launches.

    Made before a graph is captured. A product that does not fit does its chains in turn.
    """

    def __init__(self, device: torch.device, floats: int = 1 << 21, tiles: int = 4096) -> None:
        self.partial = torch.empty(floats, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(tiles, dtype=torch.int32, device=device)

    def hold(self, tiles: int, floats: int) -> bool:
        """Whether there is room for `tiles` tiles of `floats` values each."""
        return tiles <= self.arrived.numel() and tiles * floats <= self.partial.numel()


@triton.jit
def _product(x, w, total, WEIGHT_FIRST: tl.constexpr):
    """total + x w^T, x [BM, WIDTH] and w [BN, WIDTH]; total is [BN, BM] when the weight comes first. fp32 operands are not rounded."""
    if WEIGHT_FIRST:
        total = tl.dot(w, x.T, total, input_precision="ieee")
    else:
        total = tl.dot(x, w.T, total, input_precision="ieee")
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


@triton.jit
def _block(
    total, x, payload, meta, block, row, near, M, N, K,
    FORMAT: tl.constexpr, PAIRS: tl.constexpr, WHOLE: tl.constexpr, WEIGHT_FIRST: tl.constexpr,
):  # fmt: skip
    """The product of one block of K added to `total`; where it is not WHOLE, K may end in it. The payload's and the scales' layout is
    quant_formats'."""
    BYTES: tl.constexpr = (FORMAT == Q8_0) | (FORMAT == FP8)
    WIDTH: tl.constexpr = 16 if FORMAT == Q6_K else 32
    SEGMENTS: tl.constexpr = 256 // WIDTH
    FIELDS: tl.constexpr = 2 if BYTES else 4
    PLANES: tl.constexpr = 6 if FORMAT == Q6_K else SEGMENTS // FIELDS
    plane = tl.cast(N, tl.int64) * WIDTH
    inner = tl.arange(0, WIDTH)
    here = payload + near[:, None] * WIDTH + inner[None, :] + plane * (block * PLANES)
    xs = x + row[:, None].to(tl.int64) * K + inner[None, :] + block * 256
    scales = scale_words(meta, block, near, N, FORMAT)
    low = tl.load(here)
    high = low
    for s in tl.static_range(SEGMENTS):
        if s % FIELDS == 0 and s > 0:
            low = tl.load(here + plane * (s // FIELDS))
        if FORMAT == Q6_K and s % 8 == 0:
            high = tl.load(here + plane * (4 + s // 8))
        inside = row[:, None] < M
        if not WHOLE:
            inside = inside & (block * 256 + s * WIDTH + inner[None, :] < K)
        a = tl.load(xs + s * WIDTH, mask=inside, other=0.0)
        total = _product(a, values_of(low, high, scales, a.dtype, FORMAT, s, PAIRS), total, WEIGHT_FIRST)
    return total


@triton.jit
def _chain(
    x, payload, meta, begin, end, row, near, M, N, K,
    FORMAT: tl.constexpr, PAIRS: tl.constexpr, EVEN_K: tl.constexpr, WEIGHT_FIRST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """The product over the blocks begin .. end - 1 of K.

    A block in which K ends comes after the loop: loads whose masks run along K give wrong values when a loop is pipelined (seen on an
    H200 with triton 3.6, where a thread reads 16 bytes of x at a time).
    """
    total = tl.zeros((BN, BM) if WEIGHT_FIRST else (BM, BN), tl.float32)
    whole = end if EVEN_K else tl.minimum(end, K // 256)
    for start in range(begin, whole, BLOCKS):
        for i in tl.static_range(BLOCKS):
            total = _block(total, x, payload, meta, start + i, row, near, M, N, K, FORMAT, PAIRS, True, WEIGHT_FIRST)
    if not EVEN_K:
        if whole < end:
            total = _block(total, x, payload, meta, whole, row, near, M, N, K, FORMAT, PAIRS, False, WEIGHT_FIRST)
    return total


@triton.jit
def _all_chains(
    total, partial, arrived, place, chain, row, M,
    CHAINS: tl.constexpr, WEIGHT_FIRST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """For the last program of a tile to arrive, the chains' sums added in order, and True. partial: fp32 [tiles, CHAINS, BM * BN].

    Rows that do not exist are neither written nor read back.
    """
    if WEIGHT_FIRST:
        spot = tl.arange(0, BM)[None, :] * BN + tl.arange(0, BN)[:, None]
        used = row[None, :] < M
    else:
        spot = tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
        used = row[:, None] < M
    spot += place * (CHAINS * BM * BN)
    tl.store(partial + chain * (BM * BN) + spot, total, mask=used)
    tl.debug_barrier()  # every thread's part is written before the arrival is
    last = tl.atomic_add(arrived + place, 1, sem="acq_rel") == CHAINS - 1
    if last:
        tl.store(arrived + place, 0)
        total = tl.zeros((BN, BM) if WEIGHT_FIRST else (BM, BN), tl.float32)
        for i in tl.static_range(CHAINS):
            total += tl.load(partial + i * (BM * BN) + spot, mask=used, other=0.0, cache_modifier=".cg")
    return total, last


@triton.jit(do_not_specialize=["M"])
def _linear_quant(
    x, payload, meta, bias, out, partial, arrived, stride, M, N, K,
    FORMAT: tl.constexpr, EPILOGUE: tl.constexpr, HAS_BIAS: tl.constexpr, EARLY: tl.constexpr,
    PAIRS: tl.constexpr, EVEN_K: tl.constexpr, WEIGHT_FIRST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BLOCKS: tl.constexpr, CHAINS: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """One [BM, BN] tile, all of K or, when SHARED, one chain of it. Row tiles are neighbours in time, so that the weight tile is read
    once; then come the chains of a tile."""
    program = tl.program_id(0)
    row_tiles = tl.cdiv(M, BM)
    row = program % row_tiles * BM + tl.arange(0, BM)
    strip = program // row_tiles
    chain = 0
    if SHARED:
        chain = strip % CHAINS
        strip = strip // CHAINS
    near = _weight_rows(strip, N, tl.arange(0, BN), EPILOGUE, BN)
    blocks = tl.cdiv(K, RUN_BLOCK)
    each = tl.cdiv(blocks, CHAINS)
    if EARLY:
        gdc_wait()
    if SHARED or CHAINS == 1:
        total = _chain(
            x, payload, meta, chain * each, tl.minimum(chain * each + each, blocks), row, near, M, N, K,
            FORMAT, PAIRS, EVEN_K, WEIGHT_FIRST, BM, BN, BLOCKS,
        )  # fmt: skip
    else:
        total = tl.zeros((BN, BM) if WEIGHT_FIRST else (BM, BN), tl.float32)
        for i in range(CHAINS):
            total += _chain(
                x, payload, meta, i * each, tl.minimum(i * each + each, blocks), row, near, M, N, K,
                FORMAT, PAIRS, EVEN_K, WEIGHT_FIRST, BM, BN, BLOCKS,
            )  # fmt: skip
    if EARLY:
        gdc_launch_dependents()  # not before: programs that wait would take the places of programs still to come
    if SHARED:
        place = strip * row_tiles + program % row_tiles
        total, last = _all_chains(total, partial, arrived, place, chain, row, M, CHAINS, WEIGHT_FIRST, BM, BN)
        if last:
            _write(total, bias, out, stride, row, strip, near, M, N, WEIGHT_FIRST, EPILOGUE, HAS_BIAS, BM, BN)
    else:
        _write(total, bias, out, stride, row, strip, near, M, N, WEIGHT_FIRST, EPILOGUE, HAS_BIAS, BM, BN)


def chains(n: int, k: int) -> int:
    """Into how many chains K is cut: a rule of the weight's shape alone, the same on every card and for every number of rows.

    A power of two up to 8, as large as leaves each chain four blocks or more and no more than 4,096 warps of eight columns, eight for
    each scheduler of 128 multiprocessors; then only as many as have a block at ceil(blocks / chains) blocks each.
    """
    blocks = triton.cdiv(k, 256)
    count = 1
    while count < 8 and 2 * count * n <= 32768 and blocks >= 8 * count:
        count *= 2
    return int(triton.cdiv(blocks, triton.cdiv(blocks, count)))


def config(fmt: Format, n: int, k: int, rows: int, epilogue: int = STORE) -> Tile:
    """The tile for a product: this card's measured one, or a safe default."""
    bucket = bucket_of(rows)
    measured = table().get(tile_key(fmt, n, k, bucket, epilogue))
    if measured is not None:
        return measured
    if (
        bucket == 16 and n * chains(n, k) <= 16384 and fmt != Format.Q6_K
    ):  # whose activations are too few bytes for so many threads
        return Tile(16, 64, 8, 4)
    if bucket < FEW_ROWS:
        return Tile(bucket, 64, 4, 3)
    return Tile(FEW_ROWS, 64, 4, 3, weight_first=True)


def bucket_of(rows: int) -> int:
    """The largest number of rows that shares a tile with this one."""
    return next(b for b in ROW_BUCKETS if rows <= b)


def tile_key(fmt: Format, n: int, k: int, bucket: int, epilogue: int) -> str:
    """The name of a product in the table of measured tiles."""
    return f"{fmt}:{n}x{k}:{bucket}:{epilogue}"


@lru_cache
def table() -> dict[str, Tile]:
    """This card's tiles by `tile_key`, as bench/kernels/linear_quant.py measured them. An entry set here is used at once."""
    return {key: Tile(*tile) for key, tile in card.launches("_quant").items()}


def check_shapes(kernel: str, x: torch.Tensor, weight: PackedWeight, out: torch.Tensor, epilogue: int) -> None:
    """Raises ValueError, in `kernel`'s name, unless x is [M, K] and `out` what the epilogue makes of [M, N], with contiguous rows."""
    cols = weight.n // 2 if epilogue == SILU_MUL else weight.n
    apart = cols > 1 and out.stride(1) != 1
    if x.shape[1] != weight.k or tuple(out.shape) != (len(x), cols) or not x.is_contiguous() or apart:
        raise ValueError(f"{kernel}: x {tuple(x.shape)} and out {tuple(out.shape)} must be [M, {weight.k}] and [M, {cols}] "
                         "with contiguous rows")  # fmt: skip


def linear_quant(
    x: torch.Tensor,
    weight: PackedWeight,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    epilogue: int = STORE,
    early: bool = False,
    tile: Tile | None = None,
    sums: Sums | None = None,
    count: int | None = None,
) -> torch.Tensor:
    """Compute into `out` and return it.

    x [M, K], out [M, N] (STORE: any float type; ADD: fp32, added to) or [M, N / 2] (SILU_MUL, the weight's rows being [gate; up]),
    bias [N]. The rows of `out` may be apart, its columns not. Any M is right; many rows are quicker through `expand`. `early` lets a
    product of few rows begin while the kernel before it in the stream ends; that kernel must allow it. With `sums`, chains have programs
    of their own where rows are few. `count`: the chains, where not those of this weight alone but of one that it is a part of.
    """
    check_shapes("linear_quant", x, weight, out, epilogue)
    rows, n, k = len(x), weight.n, weight.k
    if rows == 0:
        return out
    tile = tile or config(weight.format, n, k, rows, epilogue)
    early = early and rows <= FEW_ROWS
    count = count or chains(n, k)
    each = triton.cdiv(weight.blocks, count)
    even = k % LAYOUTS[weight.format].block_k == 0
    blocks = tile.blocks if even and each % tile.blocks == 0 and weight.blocks % tile.blocks == 0 else 1
    tiles = triton.cdiv(rows, tile.rows) * triton.cdiv(n, tile.cols)
    if sums is not None and not (tile.shared and count > 1 and sums.hold(tiles, count * tile.rows * tile.cols)):
        sums = None
    options = {"launch_pdl": True} if early else {}
    _linear_quant[(tiles * (count if sums is not None else 1),)](
        x, weight.payload, weight.meta, bias, out, sums.partial if sums is not None else None,
        sums.arrived if sums is not None else None, out.stride(0), rows, n, k,
        CODE[weight.format], epilogue, bias is not None, early,
        x.is_cuda and x.dtype != torch.float32, even, tile.weight_first, tile.rows, tile.cols, blocks,
        count, sums is not None,
        num_warps=tile.warps, num_stages=tile.stages, **options,
    )  # fmt: skip
    return out


def supported(x: torch.Tensor, weight: PackedWeight) -> str:
    """Why the product cannot be taken here; "" when it can."""
    return unsupported(weight, x, "activations")


def linear_quant_reference(
    x: torch.Tensor,
    weight: PackedWeight,
    bias: torch.Tensor | None = None,
    add: torch.Tensor | None = None,
    epilogue: int = STORE,
) -> torch.Tensor:
    """The same in plain torch, in fp64 on the dequantised weight in x's type, rounded to fp32. `add`: what ADD adds to."""
    return linear_reference(x, dequantise(weight).to(x.dtype), bias, epilogue if add is None else ADD, add)
