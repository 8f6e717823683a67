"""Between torch tensors and the numpy arrays of a payload. The one module of the store that knows torch.

numpy has no bf16 and no fp8: their bits travel in unsigned integers of the same width, so nothing is ever rounded.
"""

from __future__ import annotations

import numpy as np
import torch

from ds4batch.kvstore.payload import CARRIERS

NAMES = {
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "f8_e4m3",
    torch.float8_e5m2: "f8_e5m2",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int32: "i32",
    torch.int64: "i64",
}
"""A payload's name for each element type."""

_CARRYING = {torch.bfloat16: torch.uint16, torch.float8_e4m3fn: torch.uint8, torch.float8_e5m2: torch.uint8}


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's bits as an array of its carrier type. Shares memory with a tensor on the CPU; copies from a device."""
    host = tensor.detach().cpu()
    return host.view(_CARRYING.get(host.dtype, host.dtype)).numpy()


def fill(target: torch.Tensor, array: np.ndarray) -> None:
    """Copy an array of a payload into a CPU tensor of the same shape, which may be a strided view of a larger one.

    Raises ValueError when type or shape differ, with `target` as it was.
    """
    if target.device.type != "cpu":
        raise ValueError(f"fill: the target is on {target.device}; copy through a tensor on the CPU, pinned at best")
    carrier = CARRIERS[NAMES[target.dtype]]
    if array.dtype != carrier or array.shape != tuple(target.shape):
        raise ValueError(f"fill: {array.dtype} {array.shape} does not go into {target.dtype} {tuple(target.shape)}")
    np.copyto(target.view(_CARRYING.get(target.dtype, target.dtype)).numpy(), array)
