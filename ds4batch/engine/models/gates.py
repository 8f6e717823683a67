"""SiLU, sigmoid and softplus whose bits do not depend on where in a tensor a value lies.

torch computes its own versions of these in vectors and what is left over at an end, of a row or of a thread's share, one by one
with another exponential. Its exp and log1p have no such ends, and sums and quotients are exactly rounded.
"""

from __future__ import annotations

import torch


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + e^-x). x: fp32; so is the result."""
    return x.neg().exp_().add_(1).reciprocal_()


def silu(x: torch.Tensor) -> torch.Tensor:
    """x / (1 + e^-x). x: fp32; so is the result."""
    return x / x.neg().exp_().add_(1)


def softplus(x: torch.Tensor) -> torch.Tensor:
    """log(1 + e^x); x itself above 20, where the difference is below its rounding. x: fp32; so is the result."""
    return torch.where(x > 20, x, x.clamp(max=20).exp_().log1p_())
