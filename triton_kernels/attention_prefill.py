"""Causal attention for prefill chunks of several sessions in one launch, on the page pool.

q [rows, heads, head_dim] (bf16, fp16 or fp32), k, v [pages, kv_heads, page_tokens, head_dim] (q's dtype or e4m3), page_table int32
[tables, max_pages] -> out [rows, heads*head_dim]. The row at position p of its session sees the keys 0..p, which are in the pool
already.

The grid is (tiles, kv_heads). A tile is up to `tile_lines` // group consecutive rows of one segment; its query lines are (row,
head of the group), so one read of a key block serves all of them. `prefill_tiles` cuts segments into tiles on the host. Rows
outside the tiles are not written; a tile of no rows does nothing, so a launch may be padded.

Order of the sums: see attention_parts; the size of a tile, warps and stages do not change bits. Key blocks that every row of the
tile sees skip the mask. Bytes moved: K and V up to the tile's last position, once per tile and kv head (mostly from L2), q and
out once.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, type-arg"

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from triton_kernels.attention_parts import (
    DEFAULT_SPLIT,
    KEY_BLOCK,
    LOG2_E,
    attend_block,
    key_block,
    merge_split,
    normalised,
    packed,
    padded,
    page_of,
    queries_of,
    reference_row,
    unsupported_reason,
)

TILE_LINES = (16, 32, 64, 128)
DEFAULT_TILE_LINES = 64


class Segment(NamedTuple):
    """Consecutive rows of one session in a launch."""

    start_row: int  # first row in q
    rows: int
    position: int  # of the first row in its session
    table_index: int  # row of the page table


class PrefillTiles(NamedTuple):
    """The tiles of a launch; four int32 vectors [tiles], the rows of one [4, tiles] tensor."""

    first_row: torch.Tensor
    rows: torch.Tensor
    position: torch.Tensor
    table_index: torch.Tensor


def prefill_tiles(
    segments: Iterable[Segment],
    *,
    heads: int,
    kv_heads: int,
    device: torch.device | str,
    tile_lines: int = DEFAULT_TILE_LINES,
    pad_to: int = 0,
) -> PrefillTiles:
    """Cut segments into tiles of `tile_lines` query lines, those with most keys first (they take longest), in one copy to `device`.

    `pad_to` adds empty tiles up to that number, for launches of a fixed grid. Raises ValueError on a segment with a negative field.
    """
    rows_per_tile = tile_lines // (heads // kv_heads)
    tiles: list[tuple[int, int, int, int]] = []
    for segment in segments:
        if min(segment) < 0:
            raise ValueError(f"a segment's fields must not be negative, got {segment}")
        start_row, rows, position, table_index = segment
        tiles += [
            (start_row + done, min(rows_per_tile, rows - done), position + done, table_index)
            for done in range(0, rows, rows_per_tile)
        ]
    tiles.sort(key=lambda tile: -(tile[1] + tile[2]))
    tiles += [(0, 0, 0, 0)] * (pad_to - len(tiles))
    packed = torch.tensor(tiles, dtype=torch.int32).reshape(-1, 4).t().contiguous().to(device)
    return PrefillTiles(packed[0], packed[1], packed[2], packed[3])


# The vectors of the tiles start anywhere in their tensor, and no address may cost a compile while serving.
@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["table_ptr", "first_row_ptr", "rows_ptr", "position_ptr", "table_index_ptr"],
)
def _attention_prefill(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    first_row_ptr,
    rows_ptr,
    position_ptr,
    table_index_ptr,
    out_ptr,
    scale_log2,
    table_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LINES: tl.constexpr,
    PACK: tl.constexpr,
):
    STORED: tl.constexpr = HEAD_DIM // PACK  # elements that hold a head in the pool
    BLOCK_S: tl.constexpr = BLOCK_D // PACK
    tile = tl.program_id(0)
    head = tl.program_id(1)
    rows = tl.load(rows_ptr + tile)
    if rows > 0:
        position = tl.load(position_ptr + tile)
        table = table_ptr + tl.load(table_index_ptr + tile).to(tl.int64) * table_stride

        line = tl.arange(0, LINES)
        dim = tl.arange(0, BLOCK_D)
        row = (tl.load(first_row_ptr + tile) + line // GROUP).to(tl.int64)
        element = ((row * KV_HEADS + head) * GROUP + line % GROUP)[:, None] * HEAD_DIM + dim[None, :]
        written = (line < rows * GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
        q, q_odd = queries_of(tl.load(q_ptr + element, mask=written, other=0.0), PACK)

        last = position + line // GROUP
        keys = position + rows
        seen_by_all = (position + 1) // BLOCK_K * BLOCK_K
        m_run = tl.full([LINES], float("-inf"), tl.float32)
        sum_run = tl.zeros([LINES], tl.float32)
        acc_run = tl.zeros([LINES, BLOCK_D], tl.float32)
        for split_start in tl.range(0, keys, SPLIT, num_stages=1):
            m = tl.full([LINES], float("-inf"), tl.float32)
            row_sum = tl.zeros([LINES, 8], tl.float32)
            acc = tl.zeros([LINES, BLOCK_S], tl.float32)
            acc_odd = acc
            split_end = tl.minimum(split_start + SPLIT, keys)
            plain_end = tl.maximum(split_start, tl.minimum(split_end, seen_by_all))
            page = page_of(table, split_start, keys, PAGE_TOKENS)
            for start in range(split_start, plain_end, BLOCK_K):
                k = key_block(k_ptr, page, head, start, keys, KV_HEADS, PAGE_TOKENS, STORED, BLOCK_S, BLOCK_K, False)
                v = key_block(v_ptr, page, head, start, keys, KV_HEADS, PAGE_TOKENS, STORED, BLOCK_S, BLOCK_K, False)
                m, row_sum, acc, acc_odd = attend_block(
                    q, q_odd, k, v, m, row_sum, acc, acc_odd, True, scale_log2, False, PACK
                )  # fmt: skip
                page = page_of(table, start + BLOCK_K, keys, PAGE_TOKENS)
            for start in tl.range(plain_end, split_end, BLOCK_K, num_stages=1):
                k = key_block(k_ptr, page, head, start, keys, KV_HEADS, PAGE_TOKENS, STORED, BLOCK_S, BLOCK_K, True)
                v = key_block(v_ptr, page, head, start, keys, KV_HEADS, PAGE_TOKENS, STORED, BLOCK_S, BLOCK_K, True)
                visible = (start + tl.arange(0, BLOCK_K))[None, :] <= last[:, None]
                m, row_sum, acc, acc_odd = attend_block(
                    q, q_odd, k, v, m, row_sum, acc, acc_odd, visible, scale_log2, True, PACK
                )  # fmt: skip
                page = page_of(table, start + BLOCK_K, keys, PAGE_TOKENS)
            if PACK == 2:
                acc = tl.interleave(acc, acc_odd)
            m_run, sum_run, acc_run = merge_split(m_run, sum_run, acc_run, m, tl.max(row_sum, 1), acc)
        tl.store(out_ptr + element, normalised(sum_run, acc_run).to(out_ptr.dtype.element_ty), mask=written)


def attention_prefill_supported(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    page_table: torch.Tensor,
    *,
    page_tokens: int,
    split: int = DEFAULT_SPLIT,
    tile_lines: int = DEFAULT_TILE_LINES,
    block_k: int = KEY_BLOCK,
) -> str:
    """Why `attention_prefill` cannot take these arguments; "" if it can."""
    if tile_lines not in TILE_LINES:
        return f"tile_lines must be one of {TILE_LINES}, got {tile_lines}"
    return unsupported_reason(q, k, v, page_table, page_tokens, split, block_k)


def attention_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    page_table: torch.Tensor,
    tiles: PrefillTiles,
    out: torch.Tensor,
    *,
    scale: float,
    page_tokens: int,
    split: int = DEFAULT_SPLIT,
    tile_lines: int = DEFAULT_TILE_LINES,
    block_k: int = KEY_BLOCK,
    num_warps: int | None = None,
    num_stages: int | None = None,
) -> None:
    """Attention of the rows in `tiles` into `out` [all rows, heads*head_dim]; shapes in the module docstring.

    `tiles` must have been cut with the same `tile_lines`. Raises ValueError where `attention_prefill_supported` has a reason, or
    if the scale is not positive.
    """
    reason = attention_prefill_supported(
        q, k, v, page_table, page_tokens=page_tokens, split=split, tile_lines=tile_lines, block_k=block_k
    )
    if reason:
        raise ValueError(reason)
    rows, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    if out.shape != (rows, heads * head_dim) or out.dtype != q.dtype or not out.is_contiguous():
        raise ValueError(f"out must be contiguous {q.dtype} [{rows}, {heads * head_dim}], got {out.dtype} {tuple(out.shape)}")
    if scale <= 0:
        raise ValueError(f"scale must be positive, got {scale}")
    n_tiles = tiles.rows.shape[0]
    if n_tiles == 0:
        return
    # A wgmma warp group owns 64 lines; a second one keeps the two accumulators of 128 lines in registers.
    warps = num_warps if num_warps is not None else (8 if tile_lines == 128 else 4)
    stages = num_stages if num_stages is not None else (3 if q.element_size() == 2 else 2)
    keys, pack = packed(k)
    _attention_prefill[(n_tiles, kv_heads)](
        q, keys, packed(v)[0], page_table, tiles.first_row, tiles.rows, tiles.position, tiles.table_index, out,
        scale * LOG2_E, page_table.stride(0),
        KV_HEADS=kv_heads, GROUP=heads // kv_heads, HEAD_DIM=head_dim, BLOCK_D=padded(head_dim),
        PAGE_TOKENS=page_tokens, SPLIT=split, BLOCK_K=block_k, LINES=tile_lines, PACK=pack,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip


def attention_prefill_reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, page_table: torch.Tensor, segments: Iterable[Segment], *, scale: float
) -> torch.Tensor:
    """The same attention, plain, in fp64 [rows, heads*head_dim]; rows outside the segments are zeros."""
    out = torch.zeros(q.shape[0], q.shape[1] * q.shape[2], dtype=torch.float64, device=q.device)
    for start_row, rows, position, table_index in segments:
        for done in range(rows):
            row = start_row + done
            out[row] = reference_row(q[row], k, v, page_table[table_index], position + done + 1, scale=scale)
    return out
