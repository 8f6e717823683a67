"""Split-KV attention for decode rows and for the few rows of a draft check, on the page pool. One launch.

q [rows, heads, head_dim] (bf16, fp16 or fp32), k, v [pages, kv_heads, page_tokens, head_dim] (q's dtype or e4m3), page_table int32
[rows / rows_per_session, max_pages], lengths int32 [rows] (keys a row sees, itself included; 0 = padding row)
-> out [rows, heads*head_dim].

Order of the sums: see attention_parts. The grid is (sessions, kv_heads, split_programs). The splits below the longest length of a
session's rows are dealt out in consecutive runs, one run a program; programs without one leave at once. How long the runs are follows
from all lengths of the launch and `slots`, the programs that should share the work. A program walks all key blocks of its run in one
loop, so that loads stay in flight across the borders of splits and stretches. When one program has
all splits it merges them as it goes. Otherwise a split's (m, row_sum, acc) goes to the workspace in fp32; the last program of a
(session, kv head) to finish, found by an integer counter, merges them in the same ascending order and sets the counter back to zero,
so the workspace can be used by the next launch or graph replay without clearing. Where pairs are many a program may take two key
heads of a session, one after the other in the same loop (`per_program`), so that the second one's loads do not wait for a new
program to start. `split_programs`, `slots`, `per_program`, warps and stages do not change bits.

Bytes moved: K and V of every visible key once per session and kv head, plus (writing and reading) 2 * heads * (head_dim + 2) * 4
bytes per row and split where several programs share a row.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, type-arg"

from __future__ import annotations

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
    ends_split,
    key_block,
    merge_split,
    normalised,
    packed,
    padded,
    page_of,
    queries_of,
    reference_row,
    split_of,
    unsupported_reason,
)

MAX_CHECK_ROWS = 4
"""Rows of one session in one program at most: 4 rows x 16 heads = 64 lines."""

TARGET_PROGRAMS = 1024
"""Programs that fill a card with some to spare for uneven lengths; more would only start and leave."""


RESIDENT = 2
"""Programs that a multiprocessor runs at once."""

REGISTERS_OF_TWO = 232
"""Registers a thread where two programs of 128 threads share a multiprocessor's 65,536, with some to spare."""


class DecodeWorkspace(NamedTuple):
    """Scratch memory of `attention_decode`; one serves all layers in turn. Counters are zero between launches."""

    acc: torch.Tensor  # fp32 [max_rows * heads * max_splits * head_dim]
    m: torch.Tensor  # fp32 [max_rows * heads * max_splits]
    row_sum: torch.Tensor  # fp32 [max_rows * heads * max_splits]
    counters: torch.Tensor  # int32 [max_rows * kv_heads]


def decode_workspace(
    max_rows: int, heads: int, kv_heads: int, head_dim: int, max_splits: int, device: torch.device | str
) -> DecodeWorkspace:
    """Workspace for launches of up to `max_rows` rows (check rows counted singly) with up to `max_splits` splits each."""
    partials = max_rows * heads * max_splits
    m, row_sum = (torch.empty(partials, dtype=torch.float32, device=device) for _ in range(2))
    acc = torch.empty(partials * head_dim, dtype=torch.float32, device=device)
    return DecodeWorkspace(acc, m, row_sum, torch.zeros(max_rows * kv_heads, dtype=torch.int32, device=device))


@triton.jit
def _merge_partials(
    acc_ptr,
    m_ptr,
    sum_ptr,
    out_ptr,
    n_splits,
    row0,
    head,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    FIRST: tl.constexpr,
    OTHERS: tl.constexpr,
    MERGE_LINES: tl.constexpr,
    MERGE_UNROLL: tl.constexpr,
):
    """Merge splits 0..n_splits-1 of one (session, kv head), each stretch by itself, and write its rows. The first stretch has
    FIRST splits, each other one OTHERS.

    acc_ptr, m_ptr and sum_ptr point at its first partial; row0 is its first row.
    """
    line = tl.arange(0, MERGE_LINES)
    dim = tl.arange(0, BLOCK_D)
    valid = line < ROWS * GROUP
    m = tl.full([MERGE_LINES], float("-inf"), tl.float32)
    row_sum = tl.zeros([MERGE_LINES], tl.float32)
    acc = tl.zeros([MERGE_LINES, BLOCK_D], tl.float32)
    for stretch in range(1 + tl.cdiv(tl.maximum(n_splits - FIRST, 0), OTHERS)):
        begin = tl.where(stretch == 0, 0, FIRST + (stretch - 1) * OTHERS)
        end = tl.minimum(FIRST + stretch * OTHERS, n_splits)
        m_run = tl.full([MERGE_LINES], float("-inf"), tl.float32)
        sum_run = tl.zeros([MERGE_LINES], tl.float32)
        acc_run = tl.zeros([MERGE_LINES, BLOCK_D], tl.float32)
        for first in range(begin, end, MERGE_UNROLL):
            # Several splits' loads in flight at once; a split past the last reads as empty, which merges as a no-op.
            for step in tl.static_range(MERGE_UNROLL):
                split = first + step
                mask = valid & (split < end)
                at = split * (ROWS * GROUP) + line
                # .cg: other multiprocessors wrote these; this one's L1 must not answer.
                m_split = tl.load(m_ptr + at, mask=mask, other=float("-inf"), cache_modifier=".cg")
                sum_split = tl.load(sum_ptr + at, mask=mask, other=0.0, cache_modifier=".cg")
                acc_split = tl.load(
                    acc_ptr + at[:, None] * HEAD_DIM + dim[None, :],
                    mask=mask[:, None] & (dim < HEAD_DIM)[None, :],
                    other=0.0,
                    cache_modifier=".cg",
                )
                m_run, sum_run, acc_run = merge_split(m_run, sum_run, acc_run, m_split, sum_split, acc_split)
        m, row_sum, acc = merge_split(m, row_sum, acc, m_run, sum_run, acc_run)
    row = row0 + line // GROUP
    out = out_ptr + ((row * KV_HEADS + head) * GROUP + line % GROUP)[:, None] * HEAD_DIM + dim[None, :]
    tl.store(out, normalised(row_sum, acc).to(out_ptr.dtype.element_ty), mask=valid[:, None] & (dim < HEAD_DIM)[None, :])


@triton.jit
def _write(out_ptr, element, written, m_all, sum_all, acc_all, m_run, sum_run, acc_run):
    """The last stretch merged and the lines of a pair stored."""
    m_all, sum_all, acc_all = merge_split(m_all, sum_all, acc_all, m_run, sum_run, acc_run)
    tl.store(out_ptr + element, normalised(sum_all, acc_all).to(out_ptr.dtype.element_ty), mask=written)


@triton.jit
def _border(key, LATER: tl.constexpr, STRETCH: tl.constexpr):
    """The end of a split at a multiple of the shorter ones, or the last one before it."""
    return tl.where(key <= STRETCH, key, key // LATER * LATER)


# A page table or a vector of lengths may start anywhere in a larger buffer, and no such address may cost a compile while serving.
@triton.jit(
    do_not_specialize=["table_stride", "max_splits", "slots"],
    do_not_specialize_on_alignment=["table_ptr", "lengths_ptr", "counter_ptr"],
)
def _attention_decode(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    lengths_ptr,
    out_ptr,
    acc_ptr,
    m_ptr,
    sum_ptr,
    counter_ptr,
    scale_log2,
    table_stride,
    max_splits,
    slots,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    ROWS_BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    SPLIT: tl.constexpr,
    LATER: tl.constexpr,
    STRETCH: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LINES: tl.constexpr,
    MERGE_LINES: tl.constexpr,
    MERGE_UNROLL: tl.constexpr,
    PACK: tl.constexpr,
    PER: tl.constexpr = 1,
    EARLY: tl.constexpr = False,
):
    STORED: tl.constexpr = HEAD_DIM // PACK  # elements that hold a head in the pool
    BLOCK_S: tl.constexpr = BLOCK_D // PACK
    session = tl.program_id(0)
    head0 = tl.program_id(1) * PER
    part = tl.program_id(2)

    line = tl.arange(0, LINES)
    dim = tl.arange(0, BLOCK_D)
    valid = line < ROWS * GROUP
    row = session * ROWS + line // GROUP
    length = tl.load(lengths_ptr + row, mask=valid, other=0)
    longest = tl.minimum(tl.max(length, 0), max_splits * SPLIT)
    pieces = tl.maximum(tl.cdiv(longest, SPLIT), 1)  # what is dealt out; a session of padding rows has one, whose result is zeros
    every = tl.arange(0, ROWS_BLOCK)
    lengths = tl.load(lengths_ptr + every, mask=every < tl.num_programs(0) * ROWS, other=0)
    all_pieces = tl.sum(tl.cdiv(lengths, SPLIT)) // ROWS * (KV_HEADS // PER)
    run = tl.maximum(tl.cdiv(all_pieces * 5, slots * 4), 1)  # a fair share and a quarter: rather one long program than two
    parts = tl.minimum(tl.num_programs(2), tl.cdiv(pieces, run))

    if part < parts:
        table = table_ptr + session.to(tl.int64) * table_stride
        first = _border(part * pieces // parts * SPLIT, LATER, STRETCH)
        end = tl.where(part + 1 == parts, longest, _border((part + 1) * pieces // parts * SPLIT, LATER, STRETCH))
        page = page_of(table, first, end, PAGE_TOKENS)
        if EARLY:
            gdc_wait()  # lengths and pages are as they were when the step began
        element = ((row * KV_HEADS + head0) * GROUP + line % GROUP)[:, None] * HEAD_DIM + dim[None, :]
        written = valid[:, None] & (dim < HEAD_DIM)[None, :]
        q_first = tl.load(q_ptr + element, mask=written, other=0.0)
        q_last = q_first
        if PER == 2:
            q_last = tl.load(q_ptr + element + GROUP * HEAD_DIM, mask=written, other=0.0)
        q, q_odd = queries_of(q_first, PACK)
        pair = session * KV_HEADS + head0
        lines_of_pair = max_splits * (ROWS * GROUP)
        partial = pair.to(tl.int64) * lines_of_pair

        empty = tl.full([LINES], float("-inf"), tl.float32)
        m_all, sum_all, acc_all = empty, tl.zeros([LINES], tl.float32), tl.zeros([LINES, BLOCK_D], tl.float32)
        m_run, sum_run, acc_run = m_all, sum_all, acc_all
        m, row_sum, acc = empty, tl.zeros([LINES, 8], tl.float32), tl.zeros([LINES, BLOCK_S], tl.float32)
        acc_odd = acc
        span = tl.cdiv(end - first, BLOCK_K) * BLOCK_K
        for at in range(first, first + span * PER, BLOCK_K):
            start = at
            head = head0
            if PER == 2:
                second = at >= first + span
                start = tl.where(second, at - span, at)
                head = tl.where(second, head0 + 1, head0)
                q, q_odd = queries_of(tl.where(second, q_last, q_first), PACK)
            k = key_block(k_ptr, page, head, start, end, KV_HEADS, PAGE_TOKENS, STORED, BLOCK_S, BLOCK_K, True)
            v = key_block(v_ptr, page, head, start, end, KV_HEADS, PAGE_TOKENS, STORED, BLOCK_S, BLOCK_K, True)
            visible = (start + tl.arange(0, BLOCK_K))[None, :] < length[:, None]
            m, row_sum, acc, acc_odd = attend_block(q, q_odd, k, v, m, row_sum, acc, acc_odd, visible, scale_log2, True, PACK)
            after = start + BLOCK_K
            following = after
            if PER == 2:
                following = tl.where(after >= end, first, after)
            page = page_of(table, following, end, PAGE_TOKENS)
            if ends_split(after, SPLIT, LATER, STRETCH) | (after >= end):
                whole = acc
                if PACK == 2:
                    whole = tl.interleave(acc, acc_odd)
                total = tl.max(row_sum, 1)
                if parts == 1:
                    m_run, sum_run, acc_run = merge_split(m_run, sum_run, acc_run, m, total, whole)
                    if after % STRETCH == 0:
                        m_all, sum_all, acc_all = merge_split(m_all, sum_all, acc_all, m_run, sum_run, acc_run)
                        m_run, sum_run, acc_run = empty, tl.zeros([LINES], tl.float32), tl.zeros([LINES, BLOCK_D], tl.float32)
                    if PER == 2:
                        if (after >= end) & (head == head0):
                            _write(out_ptr, element, written, m_all, sum_all, acc_all, m_run, sum_run, acc_run)
                            m_run, sum_run, acc_run = empty, tl.zeros([LINES], tl.float32), tl.zeros([LINES, BLOCK_D], tl.float32)
                            m_all, sum_all, acc_all = m_run, sum_run, acc_run
                else:
                    spot = (
                        partial + (head - head0) * lines_of_pair + split_of(start, SPLIT, LATER, STRETCH) * (ROWS * GROUP) + line
                    )
                    tl.store(m_ptr + spot, m, mask=valid)
                    tl.store(sum_ptr + spot, total, mask=valid)
                    tl.store(acc_ptr + spot[:, None] * HEAD_DIM + dim[None, :], whole, mask=written)
                m, row_sum, acc = empty, tl.zeros([LINES, 8], tl.float32), tl.zeros([LINES, BLOCK_S], tl.float32)
                acc_odd = acc

        if EARLY:
            gdc_launch_dependents()
        if parts == 1:
            _write(out_ptr, element + (PER - 1) * GROUP * HEAD_DIM, written, m_all, sum_all, acc_all, m_run, sum_run, acc_run)
            if PER == 2:
                if longest == 0:  # the loop has not run
                    _write(out_ptr, element, written, m_all, sum_all, acc_all, m_run, sum_run, acc_run)
        else:
            # All threads' partials before the one thread's release; its acquire before all threads' reads.
            tl.debug_barrier()
            arrived = tl.atomic_add(counter_ptr + pair, 1, sem="acq_rel", scope="gpu")
            tl.debug_barrier()
            if arrived == parts - 1:
                for head in tl.range(0, PER, num_stages=1):
                    _merge_partials(
                        acc_ptr + (partial + head * lines_of_pair) * HEAD_DIM,
                        m_ptr + partial + head * lines_of_pair,
                        sum_ptr + partial + head * lines_of_pair,
                        out_ptr,
                        split_of(longest - 1, SPLIT, LATER, STRETCH) + 1,
                        session * ROWS,
                        head0 + head,
                        KV_HEADS,
                        GROUP,
                        ROWS,
                        HEAD_DIM,
                        BLOCK_D,
                        STRETCH // SPLIT,
                        STRETCH // LATER,
                        MERGE_LINES,
                        MERGE_UNROLL,
                    )
                tl.store(counter_ptr + pair, 0)


def attention_decode_supported(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    page_table: torch.Tensor,
    *,
    page_tokens: int,
    split: int = DEFAULT_SPLIT,
    later: int = DEFAULT_LATER,
    stretch: int = DEFAULT_STRETCH,
    rows_per_session: int = 1,
    block_k: int = KEY_BLOCK,
) -> str:
    """Why `attention_decode` cannot take these arguments; "" if it can."""
    reason = unsupported_reason(q, k, v, page_table, page_tokens, split, later, stretch, block_k)
    if reason:
        return reason
    if not 1 <= rows_per_session <= MAX_CHECK_ROWS or q.shape[0] != page_table.shape[0] * rows_per_session:
        return (
            f"rows_per_session must be 1..{MAX_CHECK_ROWS} with one page table each, "
            f"got {rows_per_session} for {q.shape[0]} rows and {page_table.shape[0]} tables"
        )
    return ""


def attention_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor,
    workspace: DecodeWorkspace,
    *,
    scale: float,
    page_tokens: int,
    split: int = DEFAULT_SPLIT,
    later: int = DEFAULT_LATER,
    stretch: int = DEFAULT_STRETCH,
    max_splits: int,
    rows_per_session: int = 1,
    split_programs: int | None = None,
    slots: int | None = None,
    per_program: int | None = None,
    block_k: int = KEY_BLOCK,
    num_warps: int = 4,
    num_stages: int | None = None,
    early: bool = False,
) -> None:
    """Attention of decode or check rows into `out` [rows, heads*head_dim]; shapes in the module docstring.

    Nothing is allocated or awaited. With `rows_per_session` > 1 the rows of a session lie one after another and share its page
    table; each has its own length, and a session with fewer rows fills up with length 0. `max_splits` bounds the splits of any
    row: a length above max_splits * split is cut there. `split_programs` is the third side of the grid, which
    bounds the programs of a pair; `slots` is how many should share the work (default: the card's multiprocessors);
    `per_program`, 1 or 2, are the key heads of a session in one program.
    `early`: see triton_kernels.linear. Raises ValueError where `attention_decode_supported` has a reason, or if the
    scale is not positive or the workspace is too small.
    """
    reason = attention_decode_supported(
        q, k, v, page_table, page_tokens=page_tokens, split=split, later=later, stretch=stretch,
        rows_per_session=rows_per_session, block_k=block_k,
    )  # fmt: skip
    if reason:
        raise ValueError(reason)
    rows, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    sessions = page_table.shape[0]
    if lengths.shape != (rows,) or lengths.dtype != torch.int32 or not lengths.is_contiguous():
        raise ValueError(f"lengths must be contiguous int32 [{rows}], got {lengths.dtype} {tuple(lengths.shape)}")
    if out.shape != (rows, heads * head_dim) or out.dtype != q.dtype or not out.is_contiguous():
        raise ValueError(f"out must be contiguous {q.dtype} [{rows}, {heads * head_dim}], got {out.dtype} {tuple(out.shape)}")
    if scale <= 0:
        raise ValueError(f"scale must be positive, got {scale}")
    if workspace.m.numel() < rows * heads * max_splits or workspace.acc.numel() < rows * heads * max_splits * head_dim:
        raise ValueError(f"the workspace is too small for {rows} rows of {max_splits} splits")
    if workspace.counters.numel() < sessions * kv_heads:
        raise ValueError(f"the workspace has {workspace.counters.numel()} counters, {sessions * kv_heads} are needed")
    if rows == 0:
        return
    group = heads // kv_heads
    pairs = sessions * kv_heads
    slots = slots or card.processors(q.device)
    if split_programs is None:
        split_programs = max(4, triton.cdiv(TARGET_PROGRAMS, pairs))
    keys, pack = packed(k)
    if per_program is None:
        # Where it was seen to keep the bits on a card. An e4m3 pool of 64 dimensions once failed a test there.
        proven = q.dtype == k.dtype == torch.bfloat16 and head_dim == 128 and rows_per_session == 1
        per_program = 2 if proven and pairs > RESIDENT * slots and kv_heads % 2 == 0 else 1
    grid = (sessions, kv_heads // per_program, min(split_programs, max_splits))
    lines = rows_per_session * group
    # Blocks of 64 keys and values in flight: five where a multiprocessor has one program, two where it has two; fp32 leaves
    # shared memory for one.
    deep = 6 if pairs <= slots else 3
    stages = num_stages if num_stages is not None else (deep if q.element_size() == 2 else 2)
    # Shared memory holds two such programs on a multiprocessor, and not three: with the registers of two, the compiler does not
    # compute addresses anew for every block to fit three.
    registers = {"maxnreg": REGISTERS_OF_TWO} if padded(head_dim) * k.element_size() >= 256 and padded(lines) == 16 else {}
    _attention_decode[grid](
        q, keys, packed(v)[0], page_table, lengths, out, workspace.acc, workspace.m, workspace.row_sum, workspace.counters,
        scale * LOG2_E, page_table.stride(0), max_splits, slots,
        KV_HEADS=kv_heads, GROUP=group, ROWS=rows_per_session, ROWS_BLOCK=max(64, triton.next_power_of_2(rows)), HEAD_DIM=head_dim,
        BLOCK_D=padded(head_dim), PAGE_TOKENS=page_tokens, SPLIT=split, LATER=later, STRETCH=stretch, BLOCK_K=block_k, LINES=padded(lines),
        MERGE_LINES=triton.next_power_of_2(lines), MERGE_UNROLL=8 if lines <= 8 else 4, PACK=pack,
        PER=per_program, EARLY=early, num_warps=num_warps, num_stages=stages, **registers, **({"launch_pdl": True} if early else {}),
    )  # fmt: skip


def attention_decode_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    *,
    scale: float,
    rows_per_session: int = 1,
) -> torch.Tensor:
    """The same attention, plain, in fp64 [rows, heads*head_dim]."""
    rows = [
        reference_row(q[row], k, v, page_table[row // rows_per_session], length, scale=scale)
        for row, length in enumerate(lengths.tolist())
    ]
    return torch.stack(rows)
