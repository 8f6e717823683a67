"""y = x W^T on tensor cores, with what follows it fused in.

x: [M, K] bf16 or fp16 (fp32 under the interpreter), rows contiguous. weight: [N, K] of the same type, contiguous. Sums are fp32.

Reduction order: K ascending, in one chain of multiply-accumulates from zero. Where the weight's shape asks for it (`segments`), K is
cut into equal segments, each a chain of its own, and the segments' sums are added in ascending order. The tile shapes, warps and
stages do not enter the order, so a row has the same bits in a tile of 16 rows (decode) and of 128 (prefill), whatever the rest of the tile holds.

Epilogues: STORE writes y in the output's type; ADD adds y to an fp32 tensor in place (the residual stream); SILU_MUL treats the weight
as [gate; up], each N / 2 rows, and writes silu(gate) * up.

Bytes: the weight once for up to 64 rows, x and y beside it.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
import triton
import triton.language as tl

STORE, ADD, SILU_MUL = 0, 1, 2


class Tile(NamedTuple):
    """Launch parameters that change speed and no bits."""

    rows: int
    cols: int  # outputs; with SILU_MUL of each half
    inner: int
    warps: int
    stages: int


@triton.jit
def _linear(
    x, w, bias, out, M, N, K,
    SEGMENTS: tl.constexpr, EPILOGUE: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr, EVEN_M: tl.constexpr,
    IEEE: tl.constexpr, GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One [BM, BN] tile of the result. Tiles go GROUP row tiles at a time, so that a weight tile is read by neighbours in time."""
    program = tl.program_id(0)
    cols = N // 2 if EPILOGUE == 2 else N
    in_group = GROUP * tl.cdiv(cols, BN)
    first = program // in_group * GROUP
    height = tl.minimum(tl.cdiv(M, BM) - first, GROUP)
    row = (first + program % in_group % height) * BM + tl.arange(0, BM)
    col = program % in_group // height * BN + tl.arange(0, BN)
    near = tl.minimum(col, cols - 1)  # columns past the end repeat the last one and are not stored
    inner = tl.arange(0, BK)
    xs = x + row[:, None].to(tl.int64) * K + inner[None, :]
    ws = w + near[None, :].to(tl.int64) * K + inner[:, None]
    half = cols.to(tl.int64) * K
    length = K // SEGMENTS
    total = tl.zeros((BM, BN), tl.float32)
    other = tl.zeros((BM, BN), tl.float32)
    for segment in tl.static_range(SEGMENTS):
        sum0 = tl.zeros((BM, BN), tl.float32)
        sum1 = tl.zeros((BM, BN), tl.float32)
        for at in range(0, length, BK):
            k = segment * length + at
            if EVEN_K:
                if EVEN_M:
                    a = tl.load(xs + k)
                else:
                    a = tl.load(xs + k, mask=row[:, None] < M, other=0.0)
                b = tl.load(ws + k)
            else:
                inside = at + inner < length
                a = tl.load(xs + k, mask=(row[:, None] < M) & inside[None, :], other=0.0)
                b = tl.load(ws + k, mask=inside[:, None], other=0.0)
            if IEEE:
                sum0 = tl.dot(a, b, sum0, input_precision="ieee")
            else:
                sum0 = tl.dot(a, b, sum0)
            if EPILOGUE == 2:
                if EVEN_K:
                    b = tl.load(ws + half + k)
                else:
                    b = tl.load(ws + half + k, mask=inside[:, None], other=0.0)
                if IEEE:
                    sum1 = tl.dot(a, b, sum1, input_precision="ieee")
                else:
                    sum1 = tl.dot(a, b, sum1)
        if segment == 0:
            total = sum0
            other = sum1
        else:
            total += sum0
            other += sum1
    if HAS_BIAS:
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
def _linear_split(
    x, w, bias, out, partial, arrived, M, N, K,
    SEGMENTS: tl.constexpr, EPILOGUE: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr, IEEE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The same sums with a program a segment, for few rows: the last program of a tile to arrive adds the segments in order.

    partial: fp32 [tiles, SEGMENTS, BM, BN]. arrived: int32 [tiles], zero before and after.
    """
    tile = tl.program_id(0)
    segment = tl.program_id(1)
    row_tiles = tl.cdiv(M, BM)
    row = tile % row_tiles * BM + tl.arange(0, BM)
    col = tile // row_tiles * BN + tl.arange(0, BN)
    near = tl.minimum(col, N - 1)
    inner = tl.arange(0, BK)
    length = K // SEGMENTS
    xs = x + row[:, None].to(tl.int64) * K + segment * length + inner[None, :]
    ws = w + near[None, :].to(tl.int64) * K + segment * length + inner[:, None]
    total = tl.zeros((BM, BN), tl.float32)
    for at in range(0, length, BK):
        if EVEN_K:
            a = tl.load(xs + at, mask=row[:, None] < M, other=0.0)
            b = tl.load(ws + at)
        else:
            inside = at + inner < length
            a = tl.load(xs + at, mask=(row[:, None] < M) & inside[None, :], other=0.0)
            b = tl.load(ws + at, mask=inside[:, None], other=0.0)
        if IEEE:
            total = tl.dot(a, b, total, input_precision="ieee")
        else:
            total = tl.dot(a, b, total)
    spot = tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
    mine = partial + tile.to(tl.int64) * SEGMENTS * BM * BN
    tl.store(mine + segment * BM * BN + spot, total)
    tl.debug_barrier()  # every thread's part is written before the arrival is
    if tl.atomic_add(arrived + tile, 1, sem="acq_rel") == SEGMENTS - 1:
        total = tl.load(mine + spot, cache_modifier=".cg")
        for s in tl.static_range(1, SEGMENTS):
            total += tl.load(mine + s * BM * BN + spot, cache_modifier=".cg")
        tl.store(arrived + tile, 0)
        if HAS_BIAS:
            total += tl.load(bias + near)[None, :].to(tl.float32)
        where = out + row[:, None].to(tl.int64) * N + col[None, :]
        inside = (row[:, None] < M) & (col[None, :] < N)
        if EPILOGUE == 1:
            total = tl.load(where, mask=inside, other=0.0) + total
        tl.store(where, total.to(out.dtype.element_ty), mask=inside)


def segments(n: int, k: int) -> int:
    """Into how many parts K is cut: a rule of the weight's shape, the same on every card.

    A narrow weight with a long K gives too few programs to draw the memory's full speed otherwise.
    """
    return 2 if n <= 4096 and k >= 8192 and k % 512 == 0 else 1


class Scratch:
    """What split products of one stream share: partial sums and arrival counters. Grown before a graph is captured, never in one."""

    def __init__(self, device: torch.device, floats: int = 1 << 22, tiles: int = 4096) -> None:
        self.partial = torch.empty(floats, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(tiles, dtype=torch.int32, device=device)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    epilogue: int = STORE,
    scratch: Scratch | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """Compute into `out` and return it.

    x [M, K], weight [N, K], out [M, N] (STORE: any float type; ADD: fp32, added to) or [M, N / 2] (SILU_MUL). `scratch` lets a weight
    with segments use a program for each when there are few rows; without it one program does them in turn, with the same bits.
    """
    rows, inner = x.shape
    cols = weight.shape[0]
    parts = 1 if epilogue == SILU_MUL else segments(cols, inner)
    tile = tile or choose(cols, inner, rows, epilogue)
    ieee = x.dtype == torch.float32
    even_k = inner // parts % tile.inner == 0
    row_tiles = triton.cdiv(rows, tile.rows)
    if parts > 1 and scratch is not None and rows <= 64:
        tiles = row_tiles * triton.cdiv(cols, tile.cols)
        if tiles <= scratch.arrived.numel() and tiles * parts * tile.rows * tile.cols <= scratch.partial.numel():
            _linear_split[(tiles, parts)](
                x, weight, bias, out, scratch.partial, scratch.arrived, rows, cols, inner, parts, epilogue, bias is not None,
                even_k, ieee, tile.rows, tile.cols, tile.inner, num_warps=tile.warps, num_stages=tile.stages,
            )  # fmt: skip
            return out
    width = cols // 2 if epilogue == SILU_MUL else cols
    grid = (row_tiles * triton.cdiv(width, tile.cols),)
    _linear[grid](
        x, weight, bias, out, rows, cols, inner, parts, epilogue, bias is not None, even_k, rows % tile.rows == 0, ieee, 8,
        tile.rows, tile.cols, tile.inner, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


_BUCKETS = (16, 32, 64, 128, 1 << 30)
"""Row counts up to which one tile choice serves."""


def choose(n: int, k: int, rows: int, epilogue: int) -> Tile:
    """The tile for a product: this card's measured one, or a safe default."""
    bucket = next(b for b in _BUCKETS if rows <= b)
    measured = _measured(_card()).get(f"{n}x{k}:{bucket}:{epilogue}")
    if measured is not None:
        return Tile(*measured)
    gated = epilogue == SILU_MUL
    if bucket <= 64:
        wide = n >= 16384
        return Tile(bucket, 32 if wide and not gated else 16, 128 if k % 128 == 0 else 64, 4, 4)
    if bucket == 128:
        return Tile(64, 64, 64, 4, 4)
    return Tile(128, 64 if gated else 128, 64, 8, 3)


@lru_cache
def _card() -> str:
    return torch.cuda.get_device_name().replace(" ", "_") if torch.cuda.is_available() else ""


@lru_cache
def _measured(card: str) -> dict[str, list[int]]:
    """Tiles measured on this card by bench/kernels/tune.py, by `NxK:rows:epilogue`."""
    path = Path(__file__).with_name("tuned") / f"{card}.json"
    if not card or not path.exists():
        return {}
    found: dict[str, list[int]] = json.loads(path.read_text())
    return found


def supported(x: torch.Tensor, weight: torch.Tensor) -> str:
    """Why the product cannot be taken here; "" when it can."""
    if x.dtype != weight.dtype or x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"types {x.dtype} and {weight.dtype}"
    if x.is_cuda and torch.cuda.get_device_capability(x.device) < (8, 0):
        return "compute capability below 8.0"
    return ""


def linear_reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, epilogue: int = STORE, out: torch.Tensor | None = None
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
