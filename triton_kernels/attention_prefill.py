"""Causal attention for prefill chunks of several sessions in one launch, on the page pool.

q [rows, heads, head_dim] (bf16, fp16 or fp32), k, v [pages, kv_heads, page_tokens, head_dim] (q's dtype or e4m3), page_table int32
[tables, max_pages] -> out [rows, heads*head_dim]. The row at position p of its session sees the keys 0..p, which are in the pool
already.

The grid is (tiles, kv_heads, parts). A tile is up to `tile_lines` // group consecutive rows of one segment; its query lines are (row,
head of the group), so one read of a key block serves all of them. `prefill_tiles` cuts segments into tiles on the host. Rows
outside the tiles are not written; a tile of no rows does nothing, so a launch may be padded.

Order of the sums: see attention_parts; the size of a tile, parts, warps and stages do not change bits. Key blocks that every row of the
tile sees skip the mask. The parts of a (tile, kv head) share out its stretches, and those without one leave at once. A stretch's
(m, row_sum, acc) goes to the workspace in fp32, and the last part to finish, found by an integer counter, merges them in ascending order
and sets the counter back to zero. With one part the running merge is in the workspace while the next stretch is computed, because
registers hold two accumulators and not three. A tile of one stretch never touches the workspace.

Parts exist because a program walks its keys one after another: a short chunk deep in a prompt has too few programs to fill the card.
Each part beyond the first moves on in dim 2 of the grid, which starts last: the stretches that are full come first.

Bytes moved: K and V up to the tile's last position, once per tile and kv head (mostly from L2), q and out once, and for tiles of several
stretches 2 * tile_lines * (head_dim + 2) * 4 per kv head and stretch (L2 again).
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, type-arg"

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from triton_kernels import card
from triton_kernels.attention_parts import (
    DEFAULT_LATER,
    DEFAULT_SPLIT,
    DEFAULT_STRETCH,
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

PARALLEL_PAIRS = 320
"""(tile, kv head) pairs up to which several programs share the stretches of a pair: somewhat more than the programs that a card of 132
multiprocessors holds at once. With more pairs the card is full anyway, and a partial per stretch would take too much memory."""

RESIDENT = 2
"""Programs that a multiprocessor runs at once."""

DEEP = 8
"""Stretches of a prompt for which the parts are chosen."""


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


class PrefillWorkspace(NamedTuple):
    """Scratch memory of `attention_prefill`; one serves all layers in turn. Counters are zero between launches."""

    acc: torch.Tensor  # fp32 [slots * tile_lines * head_dim]; a slot is a (tile, kv head), or one stretch of it
    m: torch.Tensor  # fp32 [slots * tile_lines]
    row_sum: torch.Tensor  # fp32 [slots * tile_lines]
    counters: torch.Tensor  # int32 [max_tiles * kv_heads]


def prefill_workspace(
    max_tiles: int,
    kv_heads: int,
    head_dim: int,
    max_stretches: int,
    device: torch.device | str,
    tile_lines: int = DEFAULT_TILE_LINES,
) -> PrefillWorkspace:
    """Workspace for launches of up to `max_tiles` tiles whose rows see up to `max_stretches` stretches, with the default parts."""
    pairs = max_tiles * kv_heads
    slots = max(pairs, min(pairs, PARALLEL_PAIRS) * max_stretches) if max_stretches > 1 else 0
    m, row_sum = (torch.empty(slots * tile_lines, dtype=torch.float32, device=device) for _ in range(2))
    acc = torch.empty(slots * tile_lines * head_dim, dtype=torch.float32, device=device)
    return PrefillWorkspace(acc, m, row_sum, torch.zeros(pairs, dtype=torch.int32, device=device))


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


@triton.jit
def _attend_stretch(
    q,
    q_odd,
    k_ptr,
    v_ptr,
    table,
    head,
    first,
    end,
    keys,
    seen_by_all,
    last,
    scale_log2,
    KV_HEADS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    STORED: tl.constexpr,
    SPLIT: tl.constexpr,
    LATER: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LINES: tl.constexpr,
    BLOCK_S: tl.constexpr,
    PACK: tl.constexpr,
):
    """(m, row_sum, acc) of the keys [first, end) of one stretch; line i sees the keys up to last[i], and all those below seen_by_all."""
    m_run = tl.full([LINES], float("-inf"), tl.float32)
    sum_run = tl.zeros([LINES], tl.float32)
    acc_run = tl.zeros([LINES, BLOCK_S * PACK], tl.float32)
    page = page_of(table, first, keys, PAGE_TOKENS)
    size = tl.where(first == 0, SPLIT, LATER)
    for split_start in tl.range(first, end, size, num_stages=1):
        m = tl.full([LINES], float("-inf"), tl.float32)
        row_sum = tl.zeros([LINES, 8], tl.float32)
        acc = tl.zeros([LINES, BLOCK_S], tl.float32)
        acc_odd = acc
        split_end = tl.minimum(split_start + size, keys)
        plain_end = tl.maximum(split_start, tl.minimum(split_end, seen_by_all))
        for start in range(split_start, plain_end, BLOCK_K):
            k = key_block(k_ptr, page, head, start, keys, KV_HEADS, PAGE_TOKENS, STORED, BLOCK_S, BLOCK_K, False)
            v = key_block(v_ptr, page, head, start, keys, KV_HEADS, PAGE_TOKENS, STORED, BLOCK_S, BLOCK_K, False)
            m, row_sum, acc, acc_odd = attend_block(q, q_odd, k, v, m, row_sum, acc, acc_odd, True, scale_log2, False, PACK)
            page = page_of(table, start + BLOCK_K, keys, PAGE_TOKENS)
        for start in tl.range(plain_end, split_end, BLOCK_K, num_stages=1):
            k = key_block(k_ptr, page, head, start, keys, KV_HEADS, PAGE_TOKENS, STORED, BLOCK_S, BLOCK_K, True)
            v = key_block(v_ptr, page, head, start, keys, KV_HEADS, PAGE_TOKENS, STORED, BLOCK_S, BLOCK_K, True)
            visible = (start + tl.arange(0, BLOCK_K))[None, :] <= last[:, None]
            m, row_sum, acc, acc_odd = attend_block(q, q_odd, k, v, m, row_sum, acc, acc_odd, visible, scale_log2, True, PACK)
            page = page_of(table, start + BLOCK_K, keys, PAGE_TOKENS)
        if PACK == 2:
            acc = tl.interleave(acc, acc_odd)
        m_run, sum_run, acc_run = merge_split(m_run, sum_run, acc_run, m, tl.max(row_sum, 1), acc)
    return m_run, sum_run, acc_run


@triton.jit
def _store_partial(acc_ptr, m_ptr, sum_ptr, slot, m, row_sum, acc, HEAD_DIM: tl.constexpr):
    """Write (m, row_sum, acc) of a tile's lines into `slot` of the workspace."""
    line = slot * acc.shape[0] + tl.arange(0, acc.shape[0])
    dim = tl.arange(0, acc.shape[1])
    tl.store(m_ptr + line, m)
    tl.store(sum_ptr + line, row_sum)
    tl.store(acc_ptr + line[:, None] * HEAD_DIM + dim[None, :], acc, mask=(dim < HEAD_DIM)[None, :])


@triton.jit
def _load_partial(acc_ptr, m_ptr, sum_ptr, slot, HEAD_DIM: tl.constexpr, LINES: tl.constexpr, BLOCK_D: tl.constexpr):
    """What `_store_partial` wrote into `slot`, on whatever multiprocessor: .cg keeps this one's L1 from answering."""
    line = slot * LINES + tl.arange(0, LINES)
    dim = tl.arange(0, BLOCK_D)
    m = tl.load(m_ptr + line, cache_modifier=".cg")
    row_sum = tl.load(sum_ptr + line, cache_modifier=".cg")
    address = acc_ptr + line[:, None] * HEAD_DIM + dim[None, :]
    acc = tl.load(address, mask=(dim < HEAD_DIM)[None, :], other=0.0, cache_modifier=".cg")
    return m, row_sum, acc


# The vectors of the tiles start anywhere in their tensor, and no address may cost a compile while serving.
@triton.jit(
    do_not_specialize=["table_stride", "max_stretches"],
    do_not_specialize_on_alignment=["table_ptr", "first_row_ptr", "rows_ptr", "position_ptr", "table_index_ptr", "counter_ptr"],
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
    acc_ptr,
    m_ptr,
    sum_ptr,
    counter_ptr,
    scale_log2,
    table_stride,
    max_stretches,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    SPLIT: tl.constexpr,
    LATER: tl.constexpr,
    STRETCH: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LINES: tl.constexpr,
    PACK: tl.constexpr,
    SHARED: tl.constexpr,
    EARLY: tl.constexpr = False,
):
    if EARLY:
        gdc_wait()  # programs that have nothing to do as well: whoever waits for this launch relies on it
    tile = tl.program_id(0)
    head = tl.program_id(1)
    part = tl.program_id(2)
    rows = tl.load(rows_ptr + tile)
    position = tl.load(position_ptr + tile)
    keys = tl.minimum(position + rows, max_stretches * STRETCH)
    stretches = tl.where(rows > 0, tl.cdiv(keys, STRETCH), 0)
    if part < stretches:
        table = table_ptr + tl.load(table_index_ptr + tile).to(tl.int64) * table_stride
        line = tl.arange(0, LINES)
        dim = tl.arange(0, BLOCK_D)
        row = (tl.load(first_row_ptr + tile) + line // GROUP).to(tl.int64)
        element = ((row * KV_HEADS + head) * GROUP + line % GROUP)[:, None] * HEAD_DIM + dim[None, :]
        written = (line < rows * GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
        q, q_odd = queries_of(tl.load(q_ptr + element, mask=written, other=0.0), PACK)
        last = position + line // GROUP
        seen_by_all = (position + 1) // BLOCK_K * BLOCK_K
        pair = tile * KV_HEADS + head
        slot = pair.to(tl.int64)
        if SHARED:
            slot *= max_stretches

        for stretch in tl.range(part, stretches, tl.num_programs(2), num_stages=1):
            first = stretch * STRETCH
            end = tl.minimum(first + STRETCH, keys)
            m, row_sum, acc = _attend_stretch(
                q, q_odd, k_ptr, v_ptr, table, head, first, end, keys, seen_by_all, last, scale_log2,
                KV_HEADS, PAGE_TOKENS, HEAD_DIM // PACK, SPLIT, LATER, BLOCK_K, LINES, BLOCK_D // PACK, PACK,
            )  # fmt: skip
            if SHARED:
                if stretches == 1:
                    tl.store(out_ptr + element, normalised(row_sum, acc).to(out_ptr.dtype.element_ty), mask=written)
                else:
                    _store_partial(acc_ptr, m_ptr, sum_ptr, slot + stretch, m, row_sum, acc, HEAD_DIM)
            else:
                if stretch > 0:
                    m_all, sum_all, acc_all = _load_partial(acc_ptr, m_ptr, sum_ptr, slot, HEAD_DIM, LINES, BLOCK_D)
                    m, row_sum, acc = merge_split(m_all, sum_all, acc_all, m, row_sum, acc)
                if stretch == stretches - 1:
                    tl.store(out_ptr + element, normalised(row_sum, acc).to(out_ptr.dtype.element_ty), mask=written)
                else:
                    tl.debug_barrier()  # what is in the slot has been read by all threads
                    _store_partial(acc_ptr, m_ptr, sum_ptr, slot, m, row_sum, acc, HEAD_DIM)
                    tl.debug_barrier()

        if EARLY:
            gdc_launch_dependents()
        if SHARED:
            if stretches > 1:
                # All threads' partials before the one thread's release; its acquire before all threads' reads.
                tl.debug_barrier()
                arrived = tl.atomic_add(counter_ptr + pair, 1, sem="acq_rel", scope="gpu")
                tl.debug_barrier()
                if arrived == tl.minimum(stretches, tl.num_programs(2)) - 1:
                    # The next partial's loads are in flight while one is merged.
                    m, row_sum, acc = _load_partial(acc_ptr, m_ptr, sum_ptr, slot, HEAD_DIM, LINES, BLOCK_D)
                    m_next, sum_next, acc_next = _load_partial(acc_ptr, m_ptr, sum_ptr, slot + 1, HEAD_DIM, LINES, BLOCK_D)
                    for stretch in tl.range(1, stretches, num_stages=1):
                        ahead = slot + tl.minimum(stretch + 1, stretches - 1)
                        m_ahead, sum_ahead, acc_ahead = _load_partial(
                            acc_ptr, m_ptr, sum_ptr, ahead, HEAD_DIM, LINES, BLOCK_D
                        )  # fmt: skip
                        m, row_sum, acc = merge_split(m, row_sum, acc, m_next, sum_next, acc_next)
                        m_next, sum_next, acc_next = m_ahead, sum_ahead, acc_ahead
                    tl.store(out_ptr + element, normalised(row_sum, acc).to(out_ptr.dtype.element_ty), mask=written)
                    tl.store(counter_ptr + pair, 0)


def attention_prefill_supported(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    page_table: torch.Tensor,
    *,
    page_tokens: int,
    split: int = DEFAULT_SPLIT,
    later: int = DEFAULT_LATER,
    stretch: int = DEFAULT_STRETCH,
    tile_lines: int = DEFAULT_TILE_LINES,
    block_k: int = KEY_BLOCK,
) -> str:
    """Why `attention_prefill` cannot take these arguments; "" if it can."""
    if tile_lines not in TILE_LINES:
        return f"tile_lines must be one of {TILE_LINES}, got {tile_lines}"
    return unsupported_reason(q, k, v, page_table, page_tokens, split, later, stretch, block_k)


def attention_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    page_table: torch.Tensor,
    tiles: PrefillTiles,
    out: torch.Tensor,
    workspace: PrefillWorkspace,
    *,
    scale: float,
    page_tokens: int,
    split: int = DEFAULT_SPLIT,
    later: int = DEFAULT_LATER,
    stretch: int = DEFAULT_STRETCH,
    max_stretches: int,
    busy: int | None = None,
    parts: int | None = None,
    tile_lines: int = DEFAULT_TILE_LINES,
    block_k: int = KEY_BLOCK,
    num_warps: int | None = None,
    num_stages: int | None = None,
    early: bool = False,
) -> None:
    """Attention of the rows in `tiles` into `out` [all rows, heads*head_dim]; shapes in the module docstring.

    `tiles` must have been cut with the same `tile_lines`. `max_stretches` bounds the stretches of any row: keys from
    max_stretches * stretch on are not seen. `parts` is the third side of the grid; the default follows from `max_stretches` and the numbers
    of tiles and kv heads, so it is the same for every replay of a recorded launch; `busy` is how many of the tiles will hold rows, as a
    rule (default: all). `early`: see triton_kernels.linear. Raises ValueError
    where `attention_prefill_supported` has a reason, or if the scale is not positive or the workspace is too small.
    """
    reason = attention_prefill_supported(
        q, k, v, page_table, page_tokens=page_tokens, split=split, later=later, stretch=stretch, tile_lines=tile_lines,
        block_k=block_k,
    )  # fmt: skip
    if reason:
        raise ValueError(reason)
    rows, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    if out.shape != (rows, heads * head_dim) or out.dtype != q.dtype or not out.is_contiguous():
        raise ValueError(f"out must be contiguous {q.dtype} [{rows}, {heads * head_dim}], got {out.dtype} {tuple(out.shape)}")
    if scale <= 0:
        raise ValueError(f"scale must be positive, got {scale}")
    n_tiles = tiles.rows.shape[0]
    pairs = n_tiles * kv_heads
    if parts is None:
        live = (n_tiles if busy is None else busy) * kv_heads
        parts = _parts(live, max_stretches, RESIDENT * card.processors(q.device)) if pairs <= PARALLEL_PAIRS else 1
    lines = pairs * tile_lines * (max_stretches if parts > 1 else min(max_stretches - 1, 1))
    if workspace.m.numel() < lines or workspace.acc.numel() < lines * head_dim or workspace.counters.numel() < pairs:
        raise ValueError(f"the workspace is too small for {n_tiles} tiles of {max_stretches} stretches in {parts} parts")
    if n_tiles == 0:
        return
    # A wgmma warp group owns 64 lines; a second one keeps the two accumulators of 128 lines in registers.
    warps = num_warps if num_warps is not None else (8 if tile_lines == 128 else 4)
    stages = num_stages if num_stages is not None else (3 if q.element_size() == 2 else 2)
    keys, pack = packed(k)
    _attention_prefill[(n_tiles, kv_heads, parts)](
        q, keys, packed(v)[0], page_table, tiles.first_row, tiles.rows, tiles.position, tiles.table_index, out,
        workspace.acc, workspace.m, workspace.row_sum, workspace.counters, scale * LOG2_E, page_table.stride(0), max_stretches,
        KV_HEADS=kv_heads, GROUP=heads // kv_heads, HEAD_DIM=head_dim, BLOCK_D=padded(head_dim),
        PAGE_TOKENS=page_tokens, SPLIT=split, LATER=later, STRETCH=stretch, BLOCK_K=block_k, LINES=tile_lines, PACK=pack,
        SHARED=parts > 1, EARLY=early, num_warps=warps, num_stages=stages, **({"launch_pdl": True} if early else {}),
    )  # fmt: skip


def _parts(pairs: int, most: int, resident: int) -> int:
    """Programs a pair: as many as make the rounds short that the card needs, in a deep prompt.

    Of equals the most while two of each pair run at once, because they also share out what is not so deep; else the fewest.
    """
    deep = min(DEEP, most)
    rounds = {parts: triton.cdiv(parts * pairs, resident) * triton.cdiv(deep, parts) for parts in range(1, deep + 1)}
    equal = [parts for parts, count in rounds.items() if count == min(rounds.values())]
    return equal[-1] if 2 * pairs <= resident else equal[0]


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
