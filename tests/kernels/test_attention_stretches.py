"""Stretches: a row deep in a session has the same bits whoever computes its stretches, and in whatever company."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from bench.shapes import QWEN3_8B
from ds4batch.engine.memory import estimate
from ds4batch.engine.pages import PageShape
from tests.kernels.attention_pool import (
    BLOCK_K,
    DEVICE,
    E4M3,
    SPLIT,
    STRETCH,
    TYPES,
    Pool,
    close,
    decode,
    dots_in_key_order,
    make_pool,
    prefill,
    prefill_workspace_for,
    queries,
    workspace_for,
)
from triton_kernels.attention_decode import attention_decode_reference, decode_workspace
from triton_kernels.attention_prefill import PARALLEL_PAIRS, Segment, attention_prefill_reference, prefill_workspace

TOTAL = 3 * STRETCH + SPLIT + 5
BORDERS = (STRETCH - 1, STRETCH, STRETCH + 1, 2 * STRETCH - 1, 2 * STRETCH, 2 * STRETCH + 1, TOTAL)


@pytest.fixture(autouse=True)
def _in_key_order(monkeypatch: pytest.MonkeyPatch) -> None:
    dots_in_key_order(monkeypatch)


def few_rows(lengths: tuple[int, ...], table: int = 0) -> list[Segment]:
    """One-row segments: row i sees lengths[i] keys."""
    return [Segment(i, 1, length - 1, table) for i, length in enumerate(lengths)]


def shared_table(pool: Pool, rows: int) -> Pool:
    return pool._replace(table=pool.table.expand(rows, -1).contiguous())


@pytest.mark.parametrize("stored", [None, E4M3])
@pytest.mark.parametrize("dtype", TYPES)
def test_decode_and_prefill_agree_across_stretches_and_with_the_reference(dtype: torch.dtype, stored: torch.dtype | None) -> None:
    pool = make_pool([TOTAL], dtype, kv_heads=1, stored=stored)
    q = queries(len(BORDERS), dtype, 3)
    singles = decode(q, shared_table(pool, len(BORDERS)), BORDERS)
    for parts in (1, 2, 4):
        assert torch.equal(prefill(q, pool, few_rows(BORDERS), parts=parts), singles), parts
    values = shared_table(Pool(pool.k.to(dtype), pool.v.to(dtype), pool.table), len(BORDERS))
    close(singles, attention_decode_reference(q, values.k, values.v, values.table, torch.tensor(BORDERS), scale=64**-0.5))


def test_the_programs_that_share_a_decode_row_do_not_change_it() -> None:
    pool = shared_table(make_pool([TOTAL], TYPES[0], kv_heads=1), 4)
    q = queries(4, TYPES[0], 3)
    lengths = [TOTAL, 2 * STRETCH, STRETCH + 1, 7]
    alone = decode(q, pool, lengths, split_programs=1)  # merges in registers
    workspace = workspace_for(q, pool, 8)
    for programs, slots in [(2, 100), (3, 100), (5, 100), (8, 100), (8, 12)]:
        shared = decode(q, pool, lengths, split_programs=programs, slots=slots, workspace=workspace)
        assert torch.equal(shared, alone), (programs, slots)
        assert not workspace.counters.any()


@pytest.mark.parametrize("stored", [None, E4M3])
def test_two_key_heads_of_a_session_in_one_program_keep_their_bits(stored: torch.dtype | None) -> None:
    lengths = [TOTAL, 2 * STRETCH, STRETCH + 1, SPLIT, 7, 0]
    pool = shared_table(make_pool([TOTAL], TYPES[0], kv_heads=2, stored=stored), len(lengths))
    q = queries(len(lengths), TYPES[0], 6)
    apart = decode(q, pool, lengths, split_programs=1, per_program=1)
    workspace = workspace_for(q, pool, 8)
    for programs, slots in [(1, 100), (2, 100), (5, 100), (8, 12)]:
        together = decode(q, pool, lengths, split_programs=programs, slots=slots, per_program=2, workspace=workspace)
        assert torch.equal(together, apart), (programs, slots)
        assert not workspace.counters.any()


def test_check_rows_on_both_sides_of_a_stretch_border_equal_single_rows() -> None:
    pool = make_pool([2 * STRETCH + 2], TYPES[-1], kv_heads=1)
    q = queries(4, TYPES[-1], 3)
    lengths = [2 * STRETCH - 1, 2 * STRETCH, 2 * STRETCH + 1, 2 * STRETCH + 2]
    apart = decode(q, shared_table(pool, 4), lengths)
    for programs in (1, 8):
        assert torch.equal(decode(q, pool, lengths, rows_per_session=4, split_programs=programs), apart)


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_a_chunk_over_a_stretch_border_equals_the_same_rows_in_pieces(parts: int) -> None:
    first, rows = 2 * STRETCH - 9, 40
    pool = make_pool([first + rows], TYPES[-1], kv_heads=1)
    q = queries(rows, TYPES[-1], 3)
    whole = prefill(q, pool, [Segment(0, rows, first, 0)], parts=parts)
    cuts = [0, 5, 9, 10, 31, rows]
    pieces = [Segment(at, end - at, first + at, 0) for at, end in pairwise(cuts)]
    for tile_lines in (16, 64):
        assert torch.equal(prefill(q, pool, pieces, tile_lines=tile_lines, parts=5 - parts), whole)
    assert torch.equal(decode(q[7:12].contiguous(), shared_table(pool, 5), [first + i + 1 for i in range(7, 12)]), whole[7:12])


@pytest.mark.parametrize("parts", [1, 3, 4])
def test_company_placement_and_padding_change_nothing_and_one_workspace_serves_all(parts: int) -> None:
    dtype = TYPES[0]
    lengths = [TOTAL, 2 * STRETCH, 9, STRETCH + 1]
    q = queries(40, dtype)
    segments = [
        Segment(0, 11, TOTAL - 11, 0),
        Segment(12, 20, 2 * STRETCH - 20, 1),
        Segment(33, 3, 0, 2),
        Segment(38, 1, STRETCH, 3),
    ]
    pool = make_pool(lengths, dtype)  # beyond each session's keys: NaN, and pages that must not be followed
    workspace = prefill_workspace_for(9, pool, 4, 64)
    out = prefill(q, pool, segments, parts=parts, pad_to=9, workspace=workspace)
    assert not workspace.counters.any()
    reference = attention_prefill_reference(q, pool.k, pool.v, pool.table, segments, scale=64**-0.5)
    reference[[11, 32, 36, 37, 39]] = 7.0  # rows of no segment stay as they were
    close(out, reference)
    moved = make_pool(lengths, dtype, placement=3)
    again = prefill(q, moved, segments[::-1], parts=parts, pad_to=9, workspace=workspace)
    assert torch.equal(again, out)
    for segment in segments:
        here = slice(segment.start_row, segment.start_row + segment.rows)
        alone = prefill(q, pool, [segment], parts=parts, pad_to=9, workspace=workspace)
        assert torch.equal(alone[here], out[here])
    assert not workspace.counters.any()


def test_longer_splits_behind_the_first_stretch_are_the_same_from_either_kernel() -> None:
    wide: dict[str, Any] = {"later": 2 * SPLIT, "stretch": 4 * SPLIT}
    lengths = (4 * SPLIT - 1, 4 * SPLIT + 1, 5 * SPLIT + 3, 6 * SPLIT, 8 * SPLIT, 8 * SPLIT + 1, 9 * SPLIT + 20)
    pool = make_pool([lengths[-1]], TYPES[0], kv_heads=1)
    q = queries(len(lengths), TYPES[0], 3)
    table = shared_table(pool, len(lengths))
    whole = prefill(q, pool, few_rows(lengths), **wide)
    workspace = workspace_for(q, pool, 16)
    for programs, slots in [(1, 100), (2, 100), (3, 100), (7, 100), (16, 100), (16, 5)]:
        rows = decode(q, table, lengths, max_splits=16, split_programs=programs, slots=slots, workspace=workspace, **wide)
        assert torch.equal(rows, whole), (programs, slots)
        assert not workspace.counters.any()
    short = prefill(q, pool, few_rows(lengths), later=SPLIT, stretch=4 * SPLIT)
    assert torch.equal(short[0], whole[0])  # inside the first stretch
    assert not torch.equal(short[-1], whole[-1])


def test_up_to_one_stretch_its_size_cannot_be_seen_and_beyond_it_can() -> None:
    pool = make_pool([TOTAL], TYPES[-1], kv_heads=1)
    lengths = (BLOCK_K, SPLIT + 1, STRETCH - 1, STRETCH)
    q = queries(4, TYPES[-1], 3)
    assert torch.equal(prefill(q, pool, few_rows(lengths)), prefill(q, pool, few_rows(lengths), stretch=16 * STRETCH))
    table = shared_table(pool, 4)
    assert torch.equal(decode(q, table, lengths), decode(q, table, lengths, stretch=16 * STRETCH))
    deep = [TOTAL] * 4
    assert not torch.equal(decode(q, table, deep), decode(q, table, deep, stretch=16 * STRETCH))


def test_keys_beyond_the_last_stretch_are_not_seen() -> None:
    pool = make_pool([TOTAL], TYPES[0], kv_heads=1)
    q = queries(1, TYPES[0], 3)
    expected = decode(q, pool, [2 * STRETCH])
    for parts in (1, 2, 5):
        assert torch.equal(prefill(q, pool, few_rows((TOTAL,)), max_stretches=2, parts=parts), expected)


def test_each_stretch_of_each_pair_has_room_of_its_own() -> None:
    """The interpreter runs one pair's programs after another's, so that bits alone would not show an overlap."""
    pool = make_pool([2 * STRETCH + 1], TYPES[0])
    q = queries(2, TYPES[0])
    workspace = prefill_workspace_for(2, pool, 4, 64)
    prefill(q, pool, few_rows((2 * STRETCH + 1, STRETCH + 1)), parts=2, workspace=workspace)
    written = ~workspace.m[: 2 * 2 * 4 * 64].view(2, 2, 4, 64).isnan().any(3)  # tile, kv head, stretch
    assert written.tolist() == [[[True, True, True, False]] * 2, [[True, True, False, False]] * 2]


def test_parts_follow_from_the_number_of_tiles_and_the_workspace_is_bounded() -> None:
    few, many = (prefill_workspace(tiles, 8, 128, 8, DEVICE) for tiles in (PARALLEL_PAIRS // 8, PARALLEL_PAIRS))
    assert few.m.numel() == PARALLEL_PAIRS * 8 * 64
    assert many.m.numel() == few.m.numel()  # eight times the tiles, one slot each
    assert few.acc.numel() == few.m.numel() * 128
    assert prefill_workspace(4096, 8, 128, 1, DEVICE).m.numel() == 0  # a context of one stretch needs none
    pool = make_pool([5], TYPES[0], kv_heads=1)
    q = queries(1, TYPES[0], 3)
    with pytest.raises(ValueError, match="too small"):
        prefill(q, pool, few_rows((5,)), max_stretches=3, workspace=prefill_workspace_for(1, pool, 2, 64))
    prefill(q, pool, few_rows((5,)), max_stretches=3, parts=1, workspace=prefill_workspace_for(1, pool, 2, 64))


@pytest.mark.parametrize("ctx", [4096, 32768, 131072])
def test_the_workspaces_are_within_the_scratch_that_is_planned_for(ctx: int) -> None:
    config = QWEN3_8B
    page = PageShape(config.layers, config.kv_heads, 256, config.head_dim, torch.bfloat16)
    planned = estimate(config, page, ctx // 256, 16, 0, 0).scratch  # without the transients of a row
    tiles = -(-4096 // 16) + 16
    workspaces = [
        decode_workspace(16, config.heads, config.kv_heads, config.head_dim, ctx // 256, "meta"),
        prefill_workspace(tiles, config.kv_heads, config.head_dim, -(-ctx // 4096), "meta"),
    ]
    assert sum(part.nbytes for workspace in workspaces for part in workspace) < planned / 2
