"""Matrix products with weights: one class, whatever the device keeps them as.

On a CPU, bf16 weights are kept in the blocked layout of oneDNN when torch offers it: the same bits as the plain product at three
quarters of the time for few rows. (The two operators are the ones torch's compiler emits; there is no public name for them.)

Quantised weights stay quantised for the kernels of ds4batch.engine.linear_cuda. The products here, in plain torch, dequantise them for
every call: correct anywhere, and no way to serve.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from triton_kernels.quant_formats import PackedWeight, dequantise


class Linear:
    """y = x W^T + b. W: [out, in]; x: [rows, in] of `dtype`, and so is y; sums are fp32."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.shape = (weight.shape[0], weight.shape[1])
        self.dtype = weight.dtype
        self.device = weight.device
        self.bias = bias
        self.bytes = weight.nbytes + (bias.nbytes if bias is not None else 0)
        self.quantised: tuple[PackedWeight, ...] = ()
        """W's rows in order, cut where the format changes; () where W is not quantised."""
        self._onednn = _reorder(weight) if reorders(weight.device, weight.dtype) else None
        self.plain = weight if self._onednn is None else None
        """W as one tensor, where it is kept as one."""

    @classmethod
    def of_quantised(cls, parts: Sequence[PackedWeight], dtype: torch.dtype, bias: torch.Tensor | None = None) -> Linear:
        """A product with weights that stay quantised. `dtype` is that of x."""
        self = cls.__new__(cls)
        self.shape = (sum(part.n for part in parts), parts[0].k)
        self.dtype = dtype
        self.device = parts[0].payload.device
        self.bias = bias
        self.bytes = sum(part.bytes for part in parts) + (bias.nbytes if bias is not None else 0)
        self.quantised = tuple(parts)
        self._onednn = self.plain = None
        return self

    @property
    def weight(self) -> torch.Tensor:
        """[out, in] of `dtype`, made on the spot where W is quantised. Raises ValueError where the device keeps another layout."""
        if self.quantised:
            return torch.cat([dequantise(part).to(self.dtype) for part in self.quantised])
        if self.plain is None:
            raise ValueError("these weights are kept in oneDNN's layout")
        return self.plain

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether W is this tensor and takes no memory of its own."""
        return self.plain is tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, out]."""
        if self._onednn is not None:
            y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._onednn, self.bias, "none", [], "")
            return y
        return F.linear(x, self.weight, self.bias)

    def precise(self, x: torch.Tensor) -> torch.Tensor:
        """fp32 [rows, out], without a bias, although a bf16 product returns bf16.

        The product is taken twice: the second subtracts the rounded first before it rounds itself, which leaves the rounding
        error of the first. Their sum carries 16 bits; with 8, near-ties collapse into wrong tokens.
        """
        if self.dtype == torch.float32:
            return self(x)
        if x.is_cuda:
            return torch.mm(x, self.weight.t(), out_dtype=torch.float32)
        rounded = self(x)
        return rounded.float().add_(self._rest(x, rounded))

    def _rest(self, x: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
        """x W^T - rounded, subtracted in fp32."""
        if self._onednn is not None:
            rest: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, rounded, self._onednn, None, "sub")
            return rest
        return torch.addmm(rounded, x, self.weight.t(), beta=-1)


def reorders(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether plain weights of this type are kept in a layout of their own, apart from the tensor they came as."""
    return (
        device.type == "cpu"
        and dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )


def _reorder(weight: torch.Tensor) -> torch.Tensor:
    blocked: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    return blocked
