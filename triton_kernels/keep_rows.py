"""Rows of one tensor into places of another: what a drafter keeps of a forward's hidden states.

rows: fp32 [R, H], contiguous. places: int32 [R]; a row whose place is negative is not kept. kept: fp32 [P, H]. No two rows of a launch
may have the same place.

No arithmetic, so no order. Bytes a row: 4 H read and written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_BLOCK = 1024


@triton.jit
def _keep_rows(rows, places, kept, H: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr = False):
    """One block of one row."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    place = tl.load(places + row)
    if place >= 0:
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < H
        x = tl.load(rows + row.to(tl.int64) * H + column, mask=inside, other=0.0)
        tl.store(kept + place.to(tl.int64) * H + column, x, mask=inside)


def keep_rows(rows: torch.Tensor, places: torch.Tensor, kept: torch.Tensor, early: bool = False) -> torch.Tensor:
    """Into `kept`, which is returned. `early`: see triton_kernels.linear."""
    count, width = rows.shape
    if count:
        _keep_rows[(count, triton.cdiv(width, _BLOCK))](
            rows, places, kept, width, _BLOCK, early, num_warps=4, **({"launch_pdl": True} if early else {})
        )  # fmt: skip
    return kept


def supported(rows: torch.Tensor, places: torch.Tensor, kept: torch.Tensor) -> str:
    """Why the rows cannot be kept here; "" when they can."""
    if rows.dtype != torch.float32 or kept.dtype != torch.float32 or places.dtype != torch.int32:
        return f"types {rows.dtype}, {places.dtype} and {kept.dtype}"
    if places.shape != rows.shape[:1] or kept.shape[1:] != rows.shape[1:]:
        return f"shapes {tuple(rows.shape)}, {tuple(places.shape)} and {tuple(kept.shape)}"
    if not all(t.is_contiguous() for t in (rows, places, kept)):
        return "tensors must be contiguous"
    return ""


def keep_rows_reference(rows: torch.Tensor, places: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """The same in plain torch."""
    chosen = places >= 0
    kept[places[chosen].long()] = rows[chosen]
    return kept
