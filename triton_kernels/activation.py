"""The gated activation of a feed-forward block.

gate_up: [R, 2 F], the gate's F columns first, any float type, rows contiguous. out: [R, F].

    out = silu(gate) * up        (fp32, rounded once)

No reduction: an element depends on its own two inputs, so the blocks may follow the row count. Bytes a row: 2 F read, F written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_TYPES = (torch.bfloat16, torch.float16, torch.float32)


@triton.jit
def _silu_mul(gate_up, out, F: tl.constexpr, BLOCK: tl.constexpr):
    """One block of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < F
    gate = tl.load(gate_up + row * (2 * F) + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * (2 * F) + F + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * F + column, (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=inside)


def silu_mul(gate_up: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Into `out`, which is returned."""
    rows, width = out.shape
    block, warps = (1024, 4) if rows <= 64 else (4096, 8)  # few rows: more programs; many: fewer, longer ones
    if rows:
        _silu_mul[(rows, triton.cdiv(width, block))](gate_up, out, width, block, num_warps=warps)
    return out


def supported(gate_up: torch.Tensor, out: torch.Tensor) -> str:
    """Why the activation cannot be taken here; "" when it can."""
    if gate_up.dtype not in _TYPES or out.dtype not in _TYPES:
        return f"types {gate_up.dtype} and {out.dtype}"
    if gate_up.shape != (out.shape[0], 2 * out.shape[1]):
        return f"shapes {tuple(gate_up.shape)} and {tuple(out.shape)}"
    if not (gate_up.is_contiguous() and out.is_contiguous()):
        return "tensors must be contiguous"
    return ""


def silu_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """The same in plain torch, in fp64."""
    gate, up = gate_up.double().chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up
