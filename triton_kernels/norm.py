"""RMSNorm of the residual stream, with or without an addition to it first.

hidden: fp32 [R, H], rows contiguous. weight: fp32 [H]. delta: [R, H], any float type. out: [R, H], bf16, fp16 or fp32.

    hidden += delta                                      (add_rms_norm only)
    out = hidden * rsqrt(mean(hidden^2) + eps) * weight  (fp32, rounded once)

Reduction order: one row a program, the whole row in one block of H rounded up to a power of two; the order inside the block
follows from the block and the warps, which follow from H alone, and from the tensors' alignment, which is required.

Bytes a row: 4 H read, the output written; add_rms_norm also reads delta and writes 4 H.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_TYPES = (torch.bfloat16, torch.float16, torch.float32)


@triton.jit
def _rms_norm(
    hidden, delta, weight, out, eps, H: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr = False
):
    """One row."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    column = tl.arange(0, BLOCK)
    inside = column < H
    at = tl.program_id(0).to(tl.int64) * H + column
    x = tl.load(hidden + at, mask=inside, other=0.0)
    scale = tl.load(weight + column, mask=inside, other=0.0)
    if ADD:
        x += tl.load(delta + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(hidden + at, x, mask=inside)
    mean = tl.sum(x * x, axis=0) / H
    tl.store(out + at, (x * tl.rsqrt(mean + eps) * scale).to(out.dtype.element_ty), mask=inside)


def warps(width: int) -> int:
    """Warps of a row's program, a rule of the width alone because it decides the order of the sum."""
    return min(max(int(triton.next_power_of_2(width)) // 512, 1), 16)


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor, early: bool = False) -> torch.Tensor:
    """The normed rows, into `out`, which is returned. out may be hidden itself.

    `early`: see triton_kernels.linear.
    """
    return _launch(hidden, None, weight, eps, out, early)


def add_rms_norm(hidden: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> torch.Tensor:
    """Add delta to hidden in place, and the normed sum into `out`, which is returned."""
    return _launch(hidden, delta, weight, eps, out, False)


def _launch(
    hidden: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float, out: torch.Tensor, early: bool
) -> torch.Tensor:
    rows, width = hidden.shape
    if rows:
        block = triton.next_power_of_2(width)
        options = {"launch_pdl": True} if early else {}
        _rms_norm[(rows,)](
            hidden, delta, weight, out, eps, width, delta is not None, block, early, num_warps=warps(width), **options
        )
    return out


def supported(hidden: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, delta: torch.Tensor | None = None) -> str:
    """Why the norm cannot be taken here; "" when it can."""
    tensors = [hidden, weight, out] + ([] if delta is None else [delta])
    if hidden.dtype != torch.float32 or weight.dtype != torch.float32:
        return f"hidden of {hidden.dtype} and weight of {weight.dtype}; both are fp32"
    if any(t.dtype not in _TYPES for t in tensors):
        return f"types {[t.dtype for t in tensors]}"
    if any(t.shape != hidden.shape for t in tensors if t is not weight) or weight.shape != hidden.shape[1:]:
        return f"shapes {[tuple(t.shape) for t in tensors]}"
    if hidden.shape[1] > 65536 or hidden.shape[1] % 8:
        return f"width {hidden.shape[1]}: at most 65536 and a multiple of 8, so that every row is aligned alike"
    if not all(t.is_contiguous() and t.data_ptr() % 16 == 0 for t in tensors):
        return "tensors must be contiguous and 16-byte aligned"
    return ""


def rms_norm_reference(
    hidden: torch.Tensor, weight: torch.Tensor, eps: float, delta: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(the new hidden in fp32, the normed rows in fp64) in plain torch."""
    if delta is not None:
        hidden = hidden + delta.float()
    x = hidden.double()
    return hidden, x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()
