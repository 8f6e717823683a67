"""Causal attention over the page pool, in plain torch: the reference every kernel is held to, and what the CPU runs.

Arithmetic of one query row, whatever tile it lies in: scores q . k over the head dimension in fp32; a softmax over all keys,
where masked keys are exact zeros; the weighted values summed split by split in ascending order (SPLIT keys each). A split that
is wholly masked adds exact zeros, so the length of a neighbour's context changes nothing. Matrix products run on query counts
that are multiples of four, which is where fp32 products are row-invariant (ds4batch.engine.exact tests it at start).
"""

from __future__ import annotations

import torch

from ds4batch.engine.pages import PagePool
from ds4batch.engine.rows import SPLIT, Rows, Tile


def store(keys: torch.Tensor, values: torch.Tensor, rows: Rows, pool: PagePool, layer: int) -> None:
    """Write one layer's keys, rotated, and values of the real rows into the pool. keys, values: [real rows, kv_heads, head_dim]."""
    keys, values = keys.to(pool.k.dtype), values.to(pool.v.dtype)
    if rows.run is not None:
        page, start, end = rows.run
        pool.k[layer, page, :, start:end] = keys.transpose(0, 1)
        pool.v[layer, page, :, start:end] = values.transpose(0, 1)
    else:
        pool.k[layer][rows.pages, :, rows.offsets] = keys
        pool.v[layer][rows.pages, :, rows.offsets] = values


def query_space(tile: Tile, kv_heads: int, head_dim: int, device: torch.device) -> torch.Tensor:
    """Where a tile's queries are laid out for all layers in turn: [sessions, kv_heads, padded queries, head_dim], zero."""
    return torch.zeros(tile.sessions, kv_heads, tile.mask.shape[2], head_dim, device=device)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tile: Tile, scale: float, out: torch.Tensor, queries: torch.Tensor
) -> None:
    """Attend one tile's rows and write them into `out`.

    q: [R, heads, head_dim] fp32, rotated. k, v: [pages, kv_heads, page_tokens, head_dim] fp32, one layer of the pool, with the
    tile's own rows already written. out: [R, heads * head_dim], any dtype. queries: from `query_space`; its padding stays zero.
    """
    heads, dim = q.shape[1:]
    kv_heads = k.shape[1]
    group = heads // kv_heads
    live = tile.rows * group
    rows = q[tile.where].view(tile.sessions, tile.rows, kv_heads, group, dim)
    queries[:, :, :live].view(tile.sessions, kv_heads, tile.rows, group, dim).copy_(rows.transpose(1, 2))
    keys, values = _keys_of(k, tile), _keys_of(v, tile)
    flat = queries.view(tile.sessions * kv_heads, -1, dim)
    scores = torch.baddbmm(flat.new_empty(1), flat, keys.transpose(1, 2), beta=0, alpha=scale)
    scores.view(tile.sessions, kv_heads, -1, tile.keys)[..., tile.mask_start :].add_(tile.mask)
    weights = torch.softmax(scores, dim=-1)
    total = torch.bmm(weights[..., :SPLIT], values[:, :SPLIT])
    for at in range(SPLIT, tile.keys, SPLIT):
        total.baddbmm_(weights[..., at : at + SPLIT], values[:, at : at + SPLIT])
    done = total.view(tile.sessions, kv_heads, -1, dim)[:, :, :live]
    done = done.reshape(tile.sessions, kv_heads, tile.rows, group, dim).transpose(1, 2)
    out[tile.where] = done.reshape(-1, heads * dim).to(out.dtype)


def _keys_of(pool: torch.Tensor, tile: Tile) -> torch.Tensor:
    """[sessions * kv_heads, keys, head_dim]: a view when sessions are adjacent pages, else gathered."""
    kv_heads, size, dim = pool.shape[1:]
    if isinstance(tile.pages, int):
        return pool[tile.pages : tile.pages + tile.sessions].view(-1, size, dim)[:, : tile.keys]
    pages = pool[tile.pages].transpose(1, 2)  # [sessions, kv_heads, pages, page_tokens, head_dim]
    return pages.reshape(tile.sessions * kv_heads, -1, dim)[:, : tile.keys]
