"""RMSNorm of the residual stream.

hidden: fp32 [R, H], rows contiguous. weight: fp32 [H]. out: [R, H], bf16, fp16 or fp32. finite: bool [R], or none.

    out = hidden * rsqrt(mean(hidden^2) + eps) * weight  (fp32, rounded once)
    finite = whether the sum of the row is

The residual is added by the product before (triton_kernels.linear, ADD).

Reduction order: one row a program, the whole row in one block of H rounded up to a power of two; the order inside the block
follows from the block and the warps, which follow from H alone, and from the tensors' alignment, which is required.

Bytes a row: 4 H read, the output written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_TYPES = (torch.bfloat16, torch.float16, torch.float32)


@triton.jit
def _rms_norm(hidden, weight, out, finite, eps, H: tl.constexpr, FINITE: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """One row."""
    column = tl.arange(0, BLOCK)
    inside = column < H
    at = tl.program_id(0).to(tl.int64) * H + column
    if EARLY:
        gdc_launch_dependents()
    scale = tl.load(weight + column, mask=inside, other=0.0)
    if EARLY:
        gdc_wait()
    x = tl.load(hidden + at, mask=inside, other=0.0)
    mean = tl.sum(x * x, axis=0) / H
    tl.store(out + at, (x * tl.rsqrt(mean + eps) * scale).to(out.dtype.element_ty), mask=inside)
    if FINITE:
        tl.store(finite + tl.program_id(0), tl.abs(tl.sum(x, axis=0)) < float("inf"))  # false for NaN


def warps(width: int) -> int:
    """Warps of a row's program, a rule of the width alone because it decides the order of the sum."""
    return min(max(int(triton.next_power_of_2(width)) // 512, 1), 16)


def rms_norm(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    *,
    finite: torch.Tensor | None = None,
    early: bool = False,
) -> torch.Tensor:
    """The normed rows, into `out`, which is returned. out may be hidden itself. `early`: see triton_kernels.linear."""
    rows, width = hidden.shape
    if rows:
        _rms_norm[(rows,)](
            hidden, weight, out, finite, eps, width, finite is not None, triton.next_power_of_2(width), early,
            num_warps=warps(width), **({"launch_pdl": True} if early else {}),
        )  # fmt: skip
    return out


def supported(hidden: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> str:
    """Why the norm cannot be taken here; "" when it can."""
    tensors = [hidden, weight, out]
    if hidden.dtype != torch.float32 or weight.dtype != torch.float32:
        return f"hidden of {hidden.dtype} and weight of {weight.dtype}; both are fp32"
    if out.dtype not in _TYPES:
        return f"an output of {out.dtype}"
    if out.shape != hidden.shape or weight.shape != hidden.shape[1:]:
        return f"shapes {[tuple(t.shape) for t in tensors]}"
    if hidden.shape[1] > 65536 or hidden.shape[1] % 8:
        return f"width {hidden.shape[1]}: at most 65536 and a multiple of 8, so that every row is aligned alike"
    if not all(t.is_contiguous() and t.data_ptr() % 16 == 0 for t in tensors):
        return "tensors must be contiguous and 16-byte aligned"
    return ""


def rms_norm_reference(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The same in plain torch, in fp64."""
    x = hidden.double()
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()
