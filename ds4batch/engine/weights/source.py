"""One door to a model's weights, whatever file they come from.

Owns the choice of the reader and the contract every reader keeps. Importing it imports no torch; `load` does.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Protocol

from ds4batch.engine.weights.config import ModelConfig, ModelError
from ds4batch.engine.weights.gguf_weights import GGUFWeights
from ds4batch.engine.weights.hf_dir import HFWeights

if TYPE_CHECKING:
    import torch

    from ds4batch.engine.weights.layout import Extent
    from ds4batch.engine.weights.raw import Raw


class WeightSource(Protocol):
    """A model file or directory that has been checked: every tensor is present, in its shape, in a type that can be
    read.

    Canonical names: `embed.weight`, `norm.weight`, `head.weight` (absent when tied) and, for layer i, `layers.{i}.`
    followed by `attn_norm`, `q`, `k`, `v`, `o`, `q_norm`, `k_norm`, `mlp_norm`, `gate`, `up`, `down`, then `.weight`
    or `.bias`.
    """

    path: str
    config: ModelConfig
    bytes_on_disk: int
    parameters: int  # values the model consists of; a tied head counts once

    def names(self) -> list[str]:
        """Canonical names of all tensors, in the order in which a forward meets them."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor; matrices are [out, in]. Raises KeyError for a name that is not in names()."""
        ...

    def stored_type(self, name: str) -> str:
        """How the file stores the tensor: "F32", "BF16", "Q4_1", ..."""
        ...

    def extent(self, name: str) -> Extent:
        """The file that holds the tensor, and how many of its bytes."""
        ...

    def raw(self, name: str, device: torch.device) -> Raw:
        """The tensor as it is stored, on `device`, in memory of its own; the host holds no more than a small piece of it at a time.

        For types that raw.on_device knows. Raises ModelError when the file changed since it was opened.
        """
        ...

    def load(self, name: str) -> torch.Tensor:
        """The tensor, contiguous, on the CPU, in memory of its own.

        fp32, fp16 or bf16 as stored; fp32 where the file is quantised. Rows of q and k are in the half-split rotary
        order: value j of a head is rotated with value j + head_dim/2. Raises ModelError when the file changed since
        it was opened.
        """
        ...


def open_weights(path: str) -> WeightSource:
    """Open and check the GGUF file or the Hugging Face directory at `path`; no tensor is read.

    Raises ModelError naming the file and what is wrong in it, before memory in proportion to anything the file says
    is taken.
    """
    if os.path.isdir(path):
        return HFWeights(path)
    if path.endswith(".safetensors"):
        raise ModelError(f"{path}: give the directory that holds it and its config.json")
    return GGUFWeights(path)
