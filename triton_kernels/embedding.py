"""Token embeddings: rows of a table, as fp32.

tokens: int64 or int32 [R]; the caller has checked that they lie in the table. table: [V, H], any float type, rows contiguous.
out: fp32 [R, H]. Where `drawn`, int64, is given, a token may be negative and names one of it: -1 the first, -2 the second. So a
step can be launched before the host knows what the last one drew.

No arithmetic, so no order. Bytes a row: H of the table read, 4 H written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

_BLOCK = 1024


@triton.jit
def _embed(tokens, table, out, drawn, H: tl.constexpr, DRAWN: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr = False):
    """One block of one row."""
    if EARLY:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < H
    token = tl.load(tokens + row).to(tl.int64)
    if DRAWN:
        if token < 0:
            token = tl.load(drawn - 1 - token)
    x = tl.load(table + token * H + column, mask=inside, other=0.0)
    tl.store(out + row * H + column, x.to(tl.float32), mask=inside)


def embed(
    tokens: torch.Tensor, table: torch.Tensor, out: torch.Tensor, drawn: torch.Tensor | None = None, early: bool = False
) -> torch.Tensor:
    """Into `out`, which is returned. `early` lets the next kernel begin before this one ends; see triton_kernels.linear."""
    rows, width = out.shape
    if rows:
        _embed[(rows, triton.cdiv(width, _BLOCK))](
            tokens, table, out, drawn, width, drawn is not None, _BLOCK, early, num_warps=4
        )  # fmt: skip
    return out


def supported(tokens: torch.Tensor, table: torch.Tensor, out: torch.Tensor) -> str:
    """Why the rows cannot be fetched here; "" when they can."""
    if tokens.dtype not in (torch.int64, torch.int32) or out.dtype != torch.float32 or not table.is_floating_point():
        return f"types {tokens.dtype}, {table.dtype} and {out.dtype}"
    if out.shape != (*tokens.shape, table.shape[1]):
        return f"shapes {tuple(tokens.shape)}, {tuple(table.shape)} and {tuple(out.shape)}"
    if not all(t.is_contiguous() for t in (tokens, table, out)):
        return "tensors must be contiguous"
    return ""


def embed_reference(tokens: torch.Tensor, table: torch.Tensor, drawn: torch.Tensor | None = None) -> torch.Tensor:
    """The same in plain torch."""
    return table[named(tokens.long(), drawn)].float()


def named(tokens: torch.Tensor, drawn: torch.Tensor | None) -> torch.Tensor:
    """int64 [R] with the tokens that `drawn` holds in the places that name them."""
    return tokens if drawn is None else torch.where(tokens < 0, drawn[(-1 - tokens).clamp(min=0)], tokens)
