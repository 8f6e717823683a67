"""Attention on the page pool: right, and a row's bits its own, from decode, check and prefill alike."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from tests.kernels.attention_pool import (
    BLOCK_K,
    E4M3,
    PAGE,
    SPLIT,
    TYPES,
    Pool,
    close,
    decode,
    dots_in_key_order,
    make_pool,
    prefill,
    queries,
    workspace_for,
)
from tests.kernels.compiling import Variant, compile_for_hopper
from triton_kernels.attention_decode import attention_decode_reference, attention_decode_supported
from triton_kernels.attention_parts import padded
from triton_kernels.attention_prefill import PrefillTiles, Segment, attention_prefill_reference, prefill_tiles

BORDERS = (1, SPLIT - 1, SPLIT, SPLIT + 1, 2 * SPLIT + 3)


@pytest.fixture(autouse=True)
def _in_key_order(monkeypatch: pytest.MonkeyPatch) -> None:
    dots_in_key_order(monkeypatch)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("kv_heads", "group", "head_dim"), [(2, 3, 64), (1, 16, 128), (3, 1, 80)])
def test_decode_equals_the_reference(dtype: torch.dtype, kv_heads: int, group: int, head_dim: int) -> None:
    lengths = [2 * SPLIT + 3, 1, 0, SPLIT + 1]
    pool = make_pool(lengths, dtype, kv_heads=kv_heads, head_dim=head_dim)
    q = queries(len(lengths), dtype, kv_heads * group, head_dim)
    out = decode(q, pool, lengths)
    close(out, attention_decode_reference(q, pool.k, pool.v, pool.table, torch.tensor(lengths), scale=head_dim**-0.5))


@pytest.mark.parametrize(("page", "block_k"), [(16, 16), (32, 32), (64, 32)])
def test_decode_takes_any_page_size_and_its_bits_do_not_depend_on_it(page: int, block_k: int) -> None:
    lengths = [SPLIT + 7, 19]
    dtype = TYPES[-1]
    q = queries(2, dtype)
    out = decode(q, make_pool(lengths, dtype, page=page), lengths, page=page, block_k=block_k)
    same = decode(q, make_pool(lengths, dtype, page=64), lengths, page=64, block_k=block_k)
    assert torch.equal(out, same)


@pytest.mark.parametrize("dtype", TYPES)
def test_prefill_of_several_sessions_equals_the_reference(dtype: torch.dtype) -> None:
    pool = make_pool([SPLIT + 9, 40, 5], dtype)
    segments = [Segment(0, 12, SPLIT - 3, 0), Segment(14, 40, 0, 1), Segment(54, 1, 4, 2)]
    q = queries(56, dtype)
    out = prefill(q, pool, segments, pad_to=9)
    reference = attention_prefill_reference(q, pool.k, pool.v, pool.table, segments, scale=64**-0.5)
    reference[[12, 13, 55]] = 7.0  # rows of no segment stay as they were
    close(out, reference)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("kv_heads", "group", "head_dim"), [(2, 3, 64), (1, 4, 80)])
def test_an_e4m3_pool_gives_the_attention_of_its_values(dtype: torch.dtype, kv_heads: int, group: int, head_dim: int) -> None:
    lengths = [2 * SPLIT + 3, 1, 0, SPLIT + 1]
    pool = make_pool(lengths, dtype, kv_heads=kv_heads, head_dim=head_dim, stored=E4M3)
    pool.k[:, :, 3] = (pool.k[:, :, 3].float() * 2.0**-7).to(E4M3)  # below the smallest normal number
    q = queries(len(lengths), dtype, kv_heads * group, head_dim)
    values = Pool(pool.k.to(dtype), pool.v.to(dtype), pool.table)
    expected = attention_decode_reference(q, values.k, values.v, pool.table, torch.tensor(lengths), scale=head_dim**-0.5)
    close(decode(q, pool, lengths), expected)
    segments = [Segment(0, 1, 2 * SPLIT + 2, 0), Segment(1, 1, 0, 1), Segment(3, 1, SPLIT, 3)]
    expected = attention_prefill_reference(q, values.k, values.v, pool.table, segments, scale=head_dim**-0.5)
    expected[2] = 7.0
    close(prefill(q, pool, segments), expected)


@pytest.mark.parametrize("stored", [None, E4M3])
@pytest.mark.parametrize("dtype", TYPES)
def test_decode_and_prefill_give_a_row_the_same_bits(dtype: torch.dtype, stored: torch.dtype | None) -> None:
    total = BORDERS[-1]
    pool = make_pool([total], dtype, stored=stored)
    q = queries(total, dtype)
    whole = prefill(q, pool, [Segment(0, total, 0, 0)])
    lengths = [*BORDERS, 2, BLOCK_K, BLOCK_K + 1, 2 * SPLIT - 1, 2 * SPLIT]
    rows = [length - 1 for length in lengths]
    shared = pool._replace(table=pool.table.expand(len(rows), -1).contiguous())
    assert torch.equal(decode(q[rows].contiguous(), shared, lengths), whole[rows])


@pytest.mark.parametrize("dtype", TYPES)
def test_the_tile_and_the_chunk_do_not_change_a_prefill_row(dtype: torch.dtype) -> None:
    total = SPLIT + 20
    pool = make_pool([total], dtype)
    q = queries(total, dtype)
    whole = prefill(q, pool, [Segment(0, total, 0, 0)], tile_lines=128)
    cuts = [0, 1, 14, SPLIT - 1, SPLIT + 2, total]
    chunks = [Segment(at, end - at, at, 0) for at, end in pairwise(cuts)]
    for tile_lines in (16, 64, 128):
        assert torch.equal(prefill(q, pool, chunks, tile_lines=tile_lines), whole)


@pytest.mark.parametrize("dtype", TYPES)
def test_company_order_and_placement_do_not_change_a_decode_row(dtype: torch.dtype) -> None:
    lengths = list(BORDERS)
    pool = make_pool(lengths, dtype)
    q = queries(len(lengths), dtype)
    out = decode(q, pool, lengths)
    order = [3, 0, 4, 2, 1]
    moved = make_pool(lengths, dtype, placement=5)
    again = decode(q[order].contiguous(), moved._replace(table=moved.table[order].contiguous()), [lengths[i] for i in order])
    assert torch.equal(again, out[order])
    for row in (1, 4):
        alone = decode(q[row : row + 1], pool._replace(table=pool.table[row : row + 1]), [lengths[row]])
        assert torch.equal(alone[0], out[row])


def test_the_grid_does_not_change_a_decode_row() -> None:
    lengths = list(BORDERS)
    pool = make_pool(lengths, TYPES[0])
    q = queries(len(lengths), TYPES[0])
    out = decode(q, pool, lengths, max_splits=3, split_programs=3, slots=100)
    for max_splits, programs, slots in [(3, 1, 100), (3, 2, 100), (3, 3, 1), (3, 3, 7), (8, 8, 100), (8, 5, 12)]:
        dealt: dict[str, Any] = {"max_splits": max_splits, "split_programs": programs, "slots": slots}
        assert torch.equal(decode(q, pool, lengths, **dealt), out), dealt


@pytest.mark.parametrize("stored", [None, E4M3])
def test_keys_beyond_a_decode_rows_length_are_never_read(stored: torch.dtype | None) -> None:
    total = SPLIT + 17
    full = make_pool([total], TYPES[0], alike=True, stored=stored)
    q = queries(1, TYPES[0])
    for length in (1, 18, SPLIT, SPLIT + 1):
        cut = make_pool([length], TYPES[0], alike=True, stored=stored)  # NaN and unfollowable pages from `length` on
        out = decode(q, cut, [length])
        assert torch.isfinite(out).all()
        assert torch.equal(out, decode(q, full, [length]))


@pytest.mark.parametrize("rows", [2, 3, 4])
def test_check_rows_equal_single_rows(rows: int) -> None:
    ends = [SPLIT + 1, 2 * SPLIT + 3, 9]
    dtype = TYPES[-1]
    pool = make_pool(ends, dtype)
    q = queries(len(ends) * rows, dtype)
    lengths = [end - rows + 1 + row for end in ends for row in range(rows)]
    lengths[-1] = 0  # a session that checks one row fewer than the others
    together = decode(q, pool, lengths, rows_per_session=rows)
    apart = pool._replace(table=pool.table.repeat_interleave(rows, 0))
    assert torch.equal(together, decode(q, apart, lengths))
    assert not together[-1].any()


def test_a_workspace_serves_launch_after_launch() -> None:
    lengths = [2 * SPLIT + 3, 0, SPLIT + 1]
    pool = make_pool(lengths, TYPES[0])
    q = queries(3, TYPES[0])
    workspace = workspace_for(q, pool, 8)
    first = decode(q, pool, lengths, workspace=workspace)
    assert not workspace.counters.any()
    for _ in range(2):
        assert torch.equal(decode(q, pool, lengths, workspace=workspace), first)
    assert not workspace.counters.any()
    assert not first[1].any()


def test_tiles_cover_each_row_once_and_start_with_the_longest() -> None:
    segments = [Segment(0, 50, 100, 3), Segment(50, 1, 900, 1), Segment(60, 43, 0, 2), Segment(0, 0, 5, 0)]
    tiles: PrefillTiles = prefill_tiles(segments, heads=6, kv_heads=2, device="cpu", tile_lines=64, pad_to=10)
    listed = list(zip(*(column.tolist() for column in tiles), strict=True))
    covered = sorted((first + i, position + i, table) for first, rows, position, table in listed for i in range(rows))
    assert covered == sorted((s.start_row + i, s.position + i, s.table_index) for s in segments for i in range(s.rows))
    assert len(listed) == 10
    keys = [rows + position for _, rows, position, _ in listed]
    assert keys == sorted(keys, reverse=True)
    with pytest.raises(ValueError, match="negative"):
        prefill_tiles([Segment(0, 1, -1, 0)], heads=6, kv_heads=2, device="cpu")


def test_what_the_kernels_cannot_take_is_said() -> None:
    pool = make_pool([5], torch.float16)
    q = queries(1, torch.float16)

    def reason(q: torch.Tensor = q, page: int = PAGE, split: int = SPLIT, rows: int = 1) -> str:
        return attention_decode_supported(
            q,
            pool.k,
            pool.v,
            pool.table,
            page_tokens=page,
            split=split,
            later=split,
            stretch=2 * split,
            rows_per_session=rows,
            block_k=BLOCK_K,
        )

    assert reason() == ""
    assert "share one of" in reason(q.float())
    mixed = attention_decode_supported(q, pool.k.to(E4M3), pool.v, pool.table, page_tokens=PAGE, split=SPLIT, block_k=BLOCK_K)
    assert "float8_e4m3fn" in mixed
    assert "page_tokens" in reason(page=16)
    assert "page_tokens" in reason(split=SPLIT + 16)
    odd = attention_decode_supported(
        q, pool.k, pool.v, pool.table, page_tokens=PAGE, split=SPLIT, later=64, stretch=96, block_k=BLOCK_K
    )
    assert "multiple of later" in odd
    assert "heads / kv_heads" in reason(queries(1, torch.float16, 5))
    assert "head_dim" in reason(queries(1, torch.float16, 6, 128))
    assert "rows_per_session" in reason(rows=2)
    with pytest.raises(ValueError, match="too small"):
        decode(q, pool, [5], max_splits=4, workspace=workspace_for(q, pool, 3))


def _pointers(dtype: str, pack: int) -> dict[str, str]:
    return dict.fromkeys(("q_ptr", "out_ptr"), f"*{dtype}") | dict.fromkeys(
        ("k_ptr", "v_ptr"), "*i16" if pack == 2 else f"*{dtype}"
    )


def _decode_variant(group: int, head_dim: int, rows: int, dtype: str, pack: int = 1, per: int = 1) -> Variant:
    lines = rows * group
    pointers = _pointers(dtype, pack)
    integers = dict.fromkeys(("table_ptr", "lengths_ptr", "counter_ptr"), "*i32")
    partials = dict.fromkeys(("acc_ptr", "m_ptr", "sum_ptr"), "*fp32")
    constants = {
        "KV_HEADS": 8, "GROUP": group, "ROWS": rows, "ROWS_BLOCK": 16, "HEAD_DIM": head_dim,
        "BLOCK_D": padded(head_dim), "PAGE_TOKENS": 256,
        "SPLIT": 256, "LATER": 512, "STRETCH": 4096, "BLOCK_K": 64, "LINES": padded(lines), "MERGE_LINES": 1 << (lines - 1).bit_length(),
        "MERGE_UNROLL": 8 if lines <= 8 else 4, "PACK": pack, "PER": per, "EARLY": True,
    }  # fmt: skip
    scalars = {"scale_log2": "fp32", "table_stride": "i32", "max_splits": "i32", "slots": "i32"}
    return Variant("triton_kernels.attention_decode", "_attention_decode", pointers | integers | partials | scalars, constants)


def _prefill_variant(group: int, head_dim: int, lines: int, dtype: str, pack: int = 1, shared: bool = True) -> Variant:
    pointers = _pointers(dtype, pack)
    tiles = ("first_row_ptr", "rows_ptr", "position_ptr", "table_index_ptr")
    integers = dict.fromkeys(("table_ptr", *tiles, "counter_ptr"), "*i32")
    partials = dict.fromkeys(("acc_ptr", "m_ptr", "sum_ptr"), "*fp32")
    constants = {
        "KV_HEADS": 8, "GROUP": group, "HEAD_DIM": head_dim, "BLOCK_D": padded(head_dim), "PAGE_TOKENS": 256, "SPLIT": 256,
        "LATER": 512, "STRETCH": 4096, "BLOCK_K": 64, "LINES": lines, "PACK": pack, "SHARED": shared, "EARLY": True,
    }  # fmt: skip
    scalars = {"scale_log2": "fp32", "table_stride": "i32", "max_stretches": "i32"}
    warps = 8 if lines == 128 else 4
    return Variant(
        "triton_kernels.attention_prefill", "_attention_prefill", pointers | integers | partials | scalars, constants, warps
    )


def test_the_kernels_compile_for_a_hopper_card() -> None:
    decodes = [_decode_variant(4, 128, 1, "bf16", per=2), _decode_variant(4, 128, 2, "bf16"), _decode_variant(7, 64, 1, "fp16")]
    prefills = [
        _prefill_variant(group, head_dim, lines, "bf16", 1, shared)
        for group, head_dim, lines in [(4, 128, 64), (4, 128, 128), (3, 96, 64)]
        for shared in (False, True)
    ]
    packed_decodes = [_decode_variant(4, 128, 1, "bf16", 2), _decode_variant(3, 64, 1, "bf16", 2)]
    packed_prefills = [_prefill_variant(4, 128, 64, "bf16", 2, shared) for shared in (False, True)]
    packed_prefills.append(_prefill_variant(4, 128, 128, "bf16", 2))
    compiled = compile_for_hopper([*decodes, *prefills, *packed_decodes, *packed_prefills])
    assert all(kernel.async_copy for kernel in compiled)
    plain, tiles, packed, packed_tiles = compiled[:3], compiled[3:9], compiled[9:11], compiled[11:]
    for kernel in plain:
        assert kernel.stack_bytes <= 64
        assert kernel.shared_bytes > 2 * 2 * 64 * 64 * 2  # more than one block of keys and values in flight
    assert all(kernel.stack_bytes == 0 for kernel in packed)
    assert packed[0].shared_bytes > 2 * 2 * 64 * 128  # likewise
    for kernel in [*tiles, *packed_tiles]:
        assert kernel.wgmma
        assert kernel.stack_bytes <= 128  # touched once a split
    for kernel in (*tiles[:2], *packed_tiles[:2]):
        assert 2 * kernel.shared_bytes <= 227 << 10  # two programs on a multiprocessor
