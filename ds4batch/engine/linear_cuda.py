"""A Linear through our kernels: which kernel multiplies which part, and where its columns go.

A row's bits depend on the row and the weights alone, for any number of rows: see triton_kernels.linear and linear_quant.
"""

from __future__ import annotations

import torch

from ds4batch.engine.linear import Linear
from triton_kernels.activation import silu_mul
from triton_kernels.linear import ADD, SILU_MUL, STORE, linear
from triton_kernels.linear_quant import Scratch, linear_quant
from triton_kernels.quant_formats import Format

__all__ = ["ADD", "SILU_MUL", "STORE", "Scratch", "multiply", "quantised_formats"]


def quantised_formats(device: torch.device) -> frozenset[Format]:
    """The formats that this device multiplies as they are stored."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
        return frozenset()
    e4m3 = torch.cuda.get_device_capability(device) >= (8, 9)
    return frozenset(f for f in Format if f != Format.FP8 or e4m3)


def multiply(
    x: torch.Tensor,
    weights: Linear,
    out: torch.Tensor,
    *,
    epilogue: int = STORE,
    scratch: Scratch | None = None,
    early: bool = False,
) -> torch.Tensor:
    """Compute into `out` and return it.

    x [M, in]. out [M, out], fp32 and added to with ADD; [M, out / 2] with SILU_MUL, where W is [gate; up]. `scratch` is shared by the
    products of one stream; without it quantised products of few rows are slower. `early`: see triton_kernels.linear.
    """
    parts = weights.quantised
    if not parts:
        return linear(x, weights.weight, out, bias=weights.bias, epilogue=epilogue, early=early)
    if len(parts) == 1:
        return linear_quant(x, parts[0], out, bias=weights.bias, epilogue=epilogue, scratch=scratch, early=early)
    if epilogue == SILU_MUL:  # a tile holds one format, and here the halves have two
        both = torch.empty(len(x), weights.shape[0], dtype=out.dtype, device=out.device)
        return silu_mul(multiply(x, weights, both, scratch=scratch, early=early), out)
    at = 0
    for part in parts:
        columns = slice(at, at + part.n)
        bias = weights.bias[columns] if weights.bias is not None else None
        linear_quant(x, part, out[:, columns], bias=bias, epilogue=epilogue, scratch=scratch, early=early)
        at += part.n
    return out
