"""What the tests of attention share: sessions in a page pool, and launches over them with small blocks.

Under the interpreter a dot is numpy's product, whose order of sums may depend on the number of lines; `dots_in_key_order` replaces it with
a chain in key order, which is what a tensor core's line is: independent of its neighbours. On a card nothing is replaced.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from triton_kernels.attention_decode import DecodeWorkspace, attention_decode, decode_workspace
from triton_kernels.attention_prefill import PrefillWorkspace, Segment, attention_prefill, prefill_tiles, prefill_workspace

ON_CARD = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_CARD else "cpu")
TYPES = [torch.float16, torch.bfloat16] if ON_CARD else [torch.float16, torch.float32]
E4M3 = torch.float8_e4m3fn
PAGE, SPLIT, LATER, STRETCH, BLOCK_K = 32, 64, 128, 128, 16


def dots_in_key_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the interpreter's dot add in the order of the keys."""
    if ON_CARD:
        return
    from triton.runtime import interpreter

    def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        left, right = a.data.astype(np.float32), b.data.astype(np.float32)
        total = d.data.astype(np.float32)
        for k in range(left.shape[1]):
            total = total + left[:, k, None] * right[k, None, :]
        return interpreter.TensorHandle(total, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


class Pool(NamedTuple):
    """A layer's pool with sessions of given lengths in scattered pages; everything no session wrote is NaN or infinite."""

    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor


def make_pool(
    lengths: list[int], dtype: torch.dtype, *, kv_heads: int = 2, head_dim: int = 64, page: int = PAGE, placement: int = 0,
    alike: bool = False, stored: torch.dtype | None = None,
) -> Pool:  # fmt: skip
    """Session i holds keys of its own random stream (the same for all if `alike`), whatever the placement and the company.

    `stored` is the type of the pool where it is not the queries'.
    """
    counts = [-(-length // page) for length in lengths]
    order = torch.randperm(sum(counts) + 3, generator=torch.Generator().manual_seed(placement)).tolist()
    k, v = (torch.full((len(order), kv_heads, page, head_dim), bad, dtype=dtype) for bad in (float("nan"), float("inf")))
    table = torch.full((len(lengths), max([1, *counts]) + 1), 10**9, dtype=torch.int32)  # an id that must not be followed
    for session, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        pages = [order.pop() for _ in range(count)]
        table[session, :count] = torch.tensor(pages, dtype=torch.int32)
        stream = torch.Generator().manual_seed(0 if alike else session + 1)
        for position in range(length):
            row = torch.randn(2, kv_heads, head_dim, generator=stream).to(dtype)
            k[pages[position // page], :, position % page], v[pages[position // page], :, position % page] = row
    if stored is not None:
        k, v = (torch.where(x.isinf(), float("nan"), x).to(stored) for x in (k, v))
    return Pool(k.to(DEVICE), v.to(DEVICE), table.to(DEVICE))


def queries(rows: int, dtype: torch.dtype, heads: int = 6, head_dim: int = 64, seed: int = 99) -> torch.Tensor:
    source = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randn(heads, head_dim, generator=source) for _ in range(rows)]).mul(2).to(DEVICE, dtype)


def workspace_for(q: torch.Tensor, pool: Pool, max_splits: int) -> DecodeWorkspace:
    """A workspace whose partials are NaN, so that reading one before it is written shows."""
    workspace = decode_workspace(q.shape[0], q.shape[1], pool.k.shape[1], q.shape[2], max_splits, DEVICE)
    for partial in workspace[:3]:
        partial.fill_(float("nan"))
    return workspace


def prefill_workspace_for(tiles: int, pool: Pool, max_stretches: int, tile_lines: int) -> PrefillWorkspace:
    """Likewise."""
    workspace = prefill_workspace(tiles, pool.k.shape[1], pool.k.shape[3], max_stretches, DEVICE, tile_lines)
    for partial in workspace[:3]:
        partial.fill_(float("nan"))
    return workspace


def decode(
    q: torch.Tensor, pool: Pool, lengths: Sequence[int], *, max_splits: int = 8, rows_per_session: int = 1,
    split_programs: int | None = None, slots: int | None = None, workspace: DecodeWorkspace | None = None, page: int = PAGE,
    split: int = SPLIT, later: int = LATER, stretch: int = STRETCH, block_k: int = BLOCK_K, per_program: int | None = None,
) -> torch.Tensor:  # fmt: skip
    out = torch.full((q.shape[0], q.shape[1] * q.shape[2]), 7.0, dtype=q.dtype, device=DEVICE)
    attention_decode(
        q, pool.k, pool.v, pool.table, torch.tensor(lengths, dtype=torch.int32, device=DEVICE), out,
        workspace or workspace_for(q, pool, max_splits), scale=q.shape[2] ** -0.5, page_tokens=page, split=split,
        later=later, stretch=stretch, max_splits=max_splits, rows_per_session=rows_per_session, split_programs=split_programs, slots=slots,
        block_k=block_k, per_program=per_program,
    )  # fmt: skip
    return out


def prefill(
    q: torch.Tensor, pool: Pool, segments: Sequence[Segment], *, tile_lines: int = 64, pad_to: int = 0, max_stretches: int = 4,
    parts: int | None = None, workspace: PrefillWorkspace | None = None, later: int = LATER, stretch: int = STRETCH,
) -> torch.Tensor:  # fmt: skip
    heads, kv_heads = q.shape[1], pool.k.shape[1]
    tiles = prefill_tiles(segments, heads=heads, kv_heads=kv_heads, device=DEVICE, tile_lines=tile_lines, pad_to=pad_to)
    out = torch.full((q.shape[0], heads * q.shape[2]), 7.0, dtype=q.dtype, device=DEVICE)
    attention_prefill(
        q, pool.k, pool.v, pool.table, tiles, out,
        workspace or prefill_workspace_for(len(tiles.rows), pool, max_stretches, tile_lines), scale=q.shape[2] ** -0.5,
        page_tokens=PAGE, split=SPLIT, later=later, stretch=stretch, max_stretches=max_stretches, parts=parts, tile_lines=tile_lines,
        block_k=BLOCK_K,
    )  # fmt: skip
    return out


def close(out: torch.Tensor, reference: torch.Tensor) -> None:
    tolerance = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}[out.dtype]
    torch.testing.assert_close(out.double(), reference, rtol=tolerance, atol=tolerance)
