"""Matrix products with weights: one class, whatever the device keeps them as.

On a CPU, bf16 weights are kept in the blocked layout of oneDNN when torch offers it: the same bits as the plain product at three
quarters of the time for few rows. (The two operators are the ones torch's compiler emits; there is no public name for them.)
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


class Linear:
    """y = x W^T + b. weight: [out, in]; x: [rows, in] of the weight's type, and so is y; sums are fp32."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.shape = (weight.shape[0], weight.shape[1])
        self.dtype = weight.dtype
        self.device = weight.device
        self.bias = bias
        self.bytes = weight.nbytes + (bias.nbytes if bias is not None else 0)
        self._packed = _pack(weight)
        self._plain = weight if self._packed is None else None

    @property
    def weight(self) -> torch.Tensor:
        """[out, in], as kernels take it. Raises ValueError where the device keeps another layout."""
        if self._plain is None:
            raise ValueError("these weights are kept in oneDNN's layout")
        return self._plain

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, out]."""
        if self._packed is not None:
            return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")  # type: ignore[no-any-return]
        return F.linear(x, self._plain, self.bias)  # type: ignore[arg-type]

    def precise(self, x: torch.Tensor) -> torch.Tensor:
        """fp32 [rows, out], without a bias, although a bf16 product returns bf16.

        The product is taken twice: the second subtracts the rounded first before it rounds itself, which leaves the rounding
        error of the first. Their sum carries 16 bits; with 8, near-ties collapse into wrong tokens.
        """
        if self.dtype == torch.float32:
            return self(x)
        if self._packed is None and x.is_cuda:
            return torch.mm(x, self._plain.t(), out_dtype=torch.float32)  # type: ignore[union-attr]
        rounded = self(x)
        return rounded.float().add_(self._rest(x, rounded))

    def _rest(self, x: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
        """x W^T - rounded, subtracted in fp32."""
        if self._packed is not None:
            return torch.ops.mkldnn._linear_pointwise.binary(x, rounded, self._packed, None, "sub")  # type: ignore[no-any-return]
        return torch.addmm(rounded, x, self._plain.t(), beta=-1)  # type: ignore[union-attr]


def _pack(weight: torch.Tensor) -> torch.Tensor | None:
    usable = (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )
    return torch.ops.mkldnn._reorder_linear_weight(weight, None) if usable else None
