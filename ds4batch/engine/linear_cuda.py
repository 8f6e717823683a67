"""A Linear through our kernels: which kernel multiplies which part, and where its columns go.

A row's bits depend on the row and the weights alone, for any number of rows, and not on whether weights that stay quantised are
unpacked on the way or written out before: see triton_kernels.linear, linear_stream, linear_quant and expand.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ds4batch.engine.linear import Linear
from triton_kernels.activation import silu_mul
from triton_kernels.expand import expand
from triton_kernels.linear import ADD, SILU_MUL, STORE, describable, linear
from triton_kernels.linear_quant import Sums, chains, linear_quant
from triton_kernels.linear_stream import linear_stream, supported
from triton_kernels.quant_formats import Format, PackedWeight

__all__ = ["ADD", "EXPAND_ROWS", "SILU_MUL", "STORE", "Scratch", "multiply", "quantised_formats"]

EXPAND_ROWS = 128
"""Above, a quantised weight is written out before it is multiplied; up to here its tiles are unpacked for each tile of rows."""


class Scratch:
    """Room for the values of one weight, and for sums, which the products of one stream use in turn. Made before a graph is captured."""

    def __init__(self, linears: Iterable[Linear]) -> None:
        """Room for any of `linears`. Larger weights are multiplied as they are stored. The sums take 8 MiB beside."""
        every = list(linears)
        count = max(linear.shape[0] * linear.shape[1] for linear in every)
        self.values = torch.empty(count, dtype=every[0].dtype, device=every[0].device)
        self.sums = Sums(every[0].device)


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
    products of one stream; without it quantised products of many rows are slower. `early`: see triton_kernels.linear.
    """
    parts = weights.quantised
    if not parts:
        return linear(x, weights.weight, out, bias=weights.bias, epilogue=epilogue, early=early)
    count = chains(*weights.shape)  # of the whole weight, whatever its parts
    if len(x) > EXPAND_ROWS and scratch is not None and weights.shape[0] * weights.shape[1] <= scratch.values.numel():
        whole = scratch.values[: weights.shape[0] * weights.shape[1]].view(weights.shape)
        if count == 1 or describable(x, whole):
            return linear(x, _expanded(parts, whole), out, bias=weights.bias, epilogue=epilogue, chains=count)
    sums = scratch.sums if scratch is not None else None
    if len(parts) == 1:
        return _as_stored(x, parts[0], out, weights.bias, epilogue, early, sums, count)
    if epilogue == SILU_MUL:  # a tile holds one format, and here the halves have two; fp32, as a tile holds them
        both = torch.empty(len(x), weights.shape[0], dtype=torch.float32, device=out.device)
        return silu_mul(multiply(x, weights, both, scratch=scratch, early=early), out)
    at = 0
    for part in parts:
        columns = slice(at, at + part.n)
        bias = weights.bias[columns] if weights.bias is not None else None
        _as_stored(x, part, out[:, columns], bias, epilogue, early, sums, count)
        at += part.n
    return out


def _as_stored(
    x: torch.Tensor,
    part: PackedWeight,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    epilogue: int,
    early: bool,
    sums: Sums | None,
    count: int,
) -> torch.Tensor:
    """The product with a weight that is unpacked on the way."""
    if not supported(x, part, sums, count, epilogue):
        return linear_stream(x, part, out, bias=bias, epilogue=epilogue, early=early, sums=sums, count=count)
    return linear_quant(x, part, out, bias=bias, epilogue=epilogue, early=early, sums=sums, count=count)


def _expanded(parts: Sequence[PackedWeight], whole: torch.Tensor) -> torch.Tensor:
    """`whole`, [out, in], with the parts' values."""
    at = 0
    for part in parts:
        expand(part, whole[at : at + part.n])
        at += part.n
    return whole
