"""y = x W^T on tensor cores, with what follows it fused in.

x: [M, K] bf16 or fp16 (fp32 under the interpreter), contiguous. weight: [N, K] of the same type, contiguous. Sums are fp32.

Reduction order: K ascending, one chain of multiply-accumulates from zero. Tile shapes, warps, stages, which operand comes first and
the way tiles reach shared memory do not enter it, so a row has the same bits in a tile of 16 rows (decode) and of 128 (prefill),
whatever else the tile holds. The values of a weight that is stored quantised may be asked for in several chains (linear_quant): K is
then cut into that many runs, each a chain from zero, whose sums are added in ascending order.

Epilogues: STORE writes y in the output's type; ADD adds y to an fp32 tensor in place (the residual stream); SILU_MUL takes the weight
as [gate; up], N / 2 rows each, and writes silu(gate) * up.

Few rows: a program a tile, bound by the weight's bytes. On Hopper it may be set up while its predecessor ends (programmatic dependent
launch), tiles may come through tensor descriptors, and the weight may be the first operand, W x^T, which lets 16 rows use the
warp-group instruction straight from shared memory. Asking for weights before the predecessor has ended was measured in several
ways and always lost. Many rows: a persistent kernel over tensor descriptors.

Bytes: the weight once for up to 64 rows, x and y beside it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from triton_kernels import card

STORE, ADD, SILU_MUL = 0, 1, 2

FEW_ROWS = 64
"""Up to here a product is bound by the weight's bytes."""

RUN_BLOCK = tl.constexpr(256)
"""Where K is cut into several chains, each has whole blocks of so many values, and as many of them as any other but the last."""


class Tile(NamedTuple):
    """Launch parameters that change speed and no bits."""

    rows: int
    cols: int  # outputs; with SILU_MUL of each half
    inner: int
    warps: int
    stages: int
    weight_first: bool = False  # W x^T, else x W^T: for few rows, 64 columns or more
    described: bool = False  # tiles come through tensor descriptors: for few rows; many rows always use them


@triton.jit
def _epilogue(total, other, bias, out, row, col, M, cols, EPILOGUE: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Write one tile. row: [BM] and col: [BN], those outside are not stored."""
    if HAS_BIAS:
        near = tl.minimum(col, cols - 1)
        total += tl.load(bias + near)[None, :].to(tl.float32)
        if EPILOGUE == 2:
            other += tl.load(bias + cols + near)[None, :].to(tl.float32)
    where = out + row[:, None].to(tl.int64) * cols + col[None, :]
    inside = (row[:, None] < M) & (col[None, :] < cols)
    if EPILOGUE == 1:
        total = tl.load(where, mask=inside, other=0.0) + total
    elif EPILOGUE == 2:
        total = total / (1.0 + tl.exp(-total)) * other
    tl.store(where, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _accumulate(total, a, b, WEIGHT_FIRST: tl.constexpr):
    """total + a b^T, a [BM, BK] and b [BN, BK]; total is [BN, BM] when the weight comes first. fp32 operands are not rounded."""
    if WEIGHT_FIRST:
        total = tl.dot(b, a.T, total, input_precision="ieee")
    else:
        total = tl.dot(a, b.T, total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["M"])
def _linear_few(
    x, w, bias, out, M, N, K,
    EPILOGUE: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr, EVEN_M: tl.constexpr, EARLY: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr, DESCRIBED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One [BM, BN] tile a program; the row tiles of a column strip are neighbours, so that they share its weights in the cache.

    x and w are descriptors when DESCRIBED, else pointers.
    """
    program = tl.program_id(0)
    cols = N // 2 if EPILOGUE == 2 else N
    row_tiles = tl.cdiv(M, BM)
    row_start = program % row_tiles * BM
    col_start = program // row_tiles * BN
    row = row_start + tl.arange(0, BM)
    col = col_start + tl.arange(0, BN)
    if not DESCRIBED:
        inner = tl.arange(0, BK)
        near = tl.minimum(col, cols - 1)  # columns past the end repeat the last one and are not stored
        xs = x + row[:, None].to(tl.int64) * K + inner[None, :]
        ws = w + near[:, None].to(tl.int64) * K + inner[None, :]
        half = cols.to(tl.int64) * K
    if EARLY:
        gdc_wait()
    total = tl.zeros((BN, BM) if WEIGHT_FIRST else (BM, BN), tl.float32)
    other = tl.zeros((BN, BM) if WEIGHT_FIRST else (BM, BN), tl.float32)
    whole = K if DESCRIBED or EVEN_K else K // BK * BK
    for k in range(0, whole, BK):
        if DESCRIBED:
            a = x.load([row_start, k])
            b = w.load([col_start, k])
        else:
            if EVEN_M:
                a = tl.load(xs + k)
            else:
                a = tl.load(xs + k, mask=row[:, None] < M, other=0.0)
            b = tl.load(ws + k)
        total = _accumulate(total, a, b, WEIGHT_FIRST)
        if EPILOGUE == 2:
            if DESCRIBED:
                b = w.load([cols + col_start, k])
            else:
                b = tl.load(ws + half + k)
            other = _accumulate(other, a, b, WEIGHT_FIRST)
    if not DESCRIBED and not EVEN_K:  # not in the loop: see linear_quant._chain
        inside = whole + inner < K
        a = tl.load(xs + whole, mask=(row[:, None] < M) & inside[None, :], other=0.0)
        total = _accumulate(total, a, tl.load(ws + whole, mask=inside[None, :], other=0.0), WEIGHT_FIRST)
        if EPILOGUE == 2:
            other = _accumulate(other, a, tl.load(ws + half + whole, mask=inside[None, :], other=0.0), WEIGHT_FIRST)
    if EARLY:
        gdc_launch_dependents()  # not before: programs that wait would take the places of programs still to come
    if WEIGHT_FIRST:
        total = total.T
        other = other.T
    _epilogue(total, other, bias, out, row, col, M, cols, EPILOGUE, HAS_BIAS)


@triton.jit
def _place(tile, M, cols, GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """First row and column of a tile. Tiles go GROUP row tiles at a time, so that weights are shared in the cache."""
    row_tiles = tl.cdiv(M, BM)
    in_group = GROUP * tl.cdiv(cols, BN)
    first = tile // in_group * GROUP
    height = tl.minimum(row_tiles - first, GROUP)
    return (first + tile % in_group % height) * BM, tile % in_group // height * BN


@triton.jit(do_not_specialize=["M"])
def _linear_many(
    x, w, bias, out, M, N, K,
    EPILOGUE: tl.constexpr, HAS_BIAS: tl.constexpr, EARLY: tl.constexpr, GROUP: tl.constexpr, CHAINS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Tiles from tensor descriptors, every so many for a program as there are programs."""
    cols = N // 2 if EPILOGUE == 2 else N
    tiles = tl.cdiv(M, BM) * tl.cdiv(cols, BN)
    if EARLY:
        gdc_wait()
    if CHAINS == 1:
        for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=EPILOGUE != 2):
            row, col = _place(tile, M, cols, GROUP, BM, BN)
            total = tl.zeros((BM, BN), tl.float32)
            other = tl.zeros((BM, BN), tl.float32)
            for k in range(0, K, BK):
                a = x.load([row, k])
                total = _accumulate(total, a, w.load([col, k]), False)
                if EPILOGUE == 2:
                    other = _accumulate(other, a, w.load([cols + col, k]), False)
            rows_here = row + tl.arange(0, BM)
            _epilogue(total, other, bias, out, rows_here, col + tl.arange(0, BN), M, cols, EPILOGUE, HAS_BIAS)
    else:  # a step a chain, so that the flattened loop loads across chains and tiles alike; BK divides a run of K
        run = tl.cdiv(tl.cdiv(K, RUN_BLOCK), CHAINS) * RUN_BLOCK
        total = tl.zeros((BM, BN), tl.float32)
        other = tl.zeros((BM, BN), tl.float32)
        steps = tl.cdiv(tiles - tl.program_id(0), tl.num_programs(0)) * CHAINS
        for step in tl.range(0, steps, flatten=EPILOGUE != 2):
            row, col = _place(tl.program_id(0) + step // CHAINS * tl.num_programs(0), M, cols, GROUP, BM, BN)
            start = step % CHAINS * run
            part = tl.zeros((BM, BN), tl.float32)
            other_part = tl.zeros((BM, BN), tl.float32)
            for k in range(start, tl.minimum(start + run, K), BK):
                a = x.load([row, k])
                part = _accumulate(part, a, w.load([col, k]), False)
                if EPILOGUE == 2:
                    other_part = _accumulate(other_part, a, w.load([cols + col, k]), False)
            total += part
            if EPILOGUE == 2:
                other += other_part
            if step % CHAINS == CHAINS - 1:
                rows_here = row + tl.arange(0, BM)
                _epilogue(total, other, bias, out, rows_here, col + tl.arange(0, BN), M, cols, EPILOGUE, HAS_BIAS)
                total = tl.zeros((BM, BN), tl.float32)
                other = tl.zeros((BM, BN), tl.float32)
    if EARLY:
        gdc_launch_dependents()


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    epilogue: int = STORE,
    early: bool = False,
    tile: Tile | None = None,
    chains: int = 1,
) -> torch.Tensor:
    """Compute into `out` and return it.

    x [M, K], weight [N, K], out [M, N] (STORE: any float type; ADD: fp32, added to) or [M, N / 2] (SILU_MUL). `early` lets the product
    begin while the kernel before it in the stream ends; that kernel must allow it. `chains` is part of the order of the sums and so
    must be a rule of the weight alone; more than one need tensor descriptors (ValueError where `describable` is false).
    """
    rows, inner = x.shape
    cols = weight.shape[0]
    tile = tile or choose(cols, inner, rows, epilogue)
    if chains > 1:
        tile = _with_room(tile, epilogue)
    row_tiles = triton.cdiv(rows, tile.rows)
    tiles = row_tiles * triton.cdiv(cols // 2 if epilogue == SILU_MUL else cols, tile.cols)
    many = rows > FEW_ROWS or chains > 1
    described = (many or tile.described) and describable(x, weight)
    if chains > 1 and not described:
        raise ValueError(
            f"linear: no tensor descriptor can name x {tuple(x.shape)} {x.dtype} and its weight, as {chains} chains need"
        )
    operands: tuple[Any, Any] = (x, weight)
    if described:
        operands = (TensorDescriptor(x, [rows, inner], [inner, 1], [tile.rows, tile.inner]),
                    TensorDescriptor(weight, [cols, inner], [inner, 1], [tile.cols, tile.inner]))  # fmt: skip
    options = {"launch_pdl": True} if early else {}
    if many and described:
        programs = min(tiles, card.processors(x.device) * resident(tile, epilogue, chains))
        _linear_many[(programs,)](
            *operands, bias, out, rows, cols, inner, epilogue, bias is not None, early, 8, chains,
            tile.rows, tile.cols, tile.inner, num_warps=tile.warps, num_stages=tile.stages, **options,
        )  # fmt: skip
        return out
    even = described or rows % tile.rows == 0
    _linear_few[(tiles,)](
        *operands, bias, out, rows, cols, inner, epilogue, bias is not None, inner % tile.inner == 0, even,
        early, tile.weight_first, described, tile.rows, tile.cols, tile.inner,
        num_warps=tile.warps, num_stages=tile.stages, **options,
    )  # fmt: skip
    return out


ROW_BUCKETS = (16, 32, 64, 128, 192, 256, 320, 384, 448, 512, 1024, 1 << 30)
"""Row counts up to which one tile choice serves."""

SHARED_MEMORY, REGISTERS = 225 << 10, 1 << 16  # of a Hopper multiprocessor


def _with_room(tile: Tile, epilogue: int) -> Tile:
    """The tile, narrow enough for the sums of two chains in the registers."""
    cols = tile.cols
    while tile.rows * cols * (2 if epilogue == SILU_MUL else 1) > 64 * 32 * tile.warps:
        cols //= 2
    return tile._replace(cols=cols)


def resident(tile: Tile, epilogue: int, chains: int = 1) -> int:
    """Programs of many rows that a multiprocessor holds at once: as many as its registers and shared memory have room for."""
    halves = 2 if epilogue == SILU_MUL else 1
    memory = tile.stages * tile.inner * (tile.rows + halves * tile.cols) * 2
    threads = 32 * tile.warps
    sums = tile.rows * tile.cols * halves * min(chains, 2)
    registers = threads * 72 + sums  # and what addresses and operands take
    return max(1, min(SHARED_MEMORY // memory, REGISTERS // registers, 4))


def choose(n: int, k: int, rows: int, epilogue: int) -> Tile:
    """The tile for a product: this card's measured one, or a safe default."""
    larger = [b for b in ROW_BUCKETS if rows <= b]
    bucket = larger[0]
    for b in larger:
        measured = table().get(f"{n}x{k}:{b}:{epilogue}")
        if measured is not None and (b <= FEW_ROWS or bucket > FEW_ROWS):  # another kernel's tile will not do
            return Tile(*measured)
    if bucket <= FEW_ROWS:
        return Tile(bucket, 32 if n >= 2048 else 16, 128 if k % 128 == 0 else 64, 4, 3)
    return Tile(128, 64 if epilogue == SILU_MUL else 128, 64, 8, 3)


@lru_cache
def table() -> dict[str, Any]:
    """This card's tiles by `NxK:rows:epilogue`, as bench/kernels/tune.py measured them. An entry set here is used at once."""
    return card.launches("")


def describable(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether tensor descriptors can name these operands: a card of the Hopper line, and rows of whole 16-byte pieces."""
    if x.is_cuda and torch.cuda.get_device_capability(x.device) < (9, 0):
        return False
    aligned = x.shape[1] * x.dtype.itemsize % 16 == 0
    return aligned and x.data_ptr() % 16 == 0 and weight.data_ptr() % 16 == 0


def supported(x: torch.Tensor, weight: torch.Tensor) -> str:
    """Why the product cannot be taken here; "" when it can."""
    if x.dtype != weight.dtype or x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"types {x.dtype} and {weight.dtype}"
    if x.is_cuda and torch.cuda.get_device_capability(x.device) < (8, 0):
        return "compute capability below 8.0"
    return ""


def linear_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    epilogue: int = STORE,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same in plain torch, in fp64, rounded to fp32."""
    y = x.double() @ weight.double().t()
    if bias is not None:
        y = y + bias.double()
    if epilogue == ADD:
        assert out is not None
        y = out.double() + y
    elif epilogue == SILU_MUL:
        gate, up = y.chunk(2, dim=-1)
        y = torch.nn.functional.silu(gate) * up
    return y.float()
