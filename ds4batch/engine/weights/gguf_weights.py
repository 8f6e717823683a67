"""The weights of a GGUF under the engine's names.

Owns the table of GGUF tensor names and the row order of q and k. Everything is checked when the file is opened; a
tensor's bytes are read when it is asked for, one tensor at a time.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ds4batch.engine.weights.config import ModelConfig
from ds4batch.engine.weights.gguf_config import ROPE_FREQS, config_from_gguf
from ds4batch.engine.weights.gguf_file import open_gguf
from ds4batch.engine.weights.layout import Extent, Shape, check_tensors, tensor_shapes

if TYPE_CHECKING:
    import torch

    from ds4batch.engine.weights.raw import Raw
    from ds4batch.engine.weights.staging import Staging

READABLE = frozenset(
    {
        "F32",
        "F16",
        "BF16",
        "Q8_0",
        "Q4_0",
        "Q4_1",
        "Q5_0",
        "Q5_1",
        "Q2_K",
        "Q3_K",
        "Q4_K",
        "Q5_K",
        "Q6_K",
        "IQ4_NL",
        "IQ4_XS",
        "IQ1_S",
        "IQ1_M",
        "IQ2_XXS",
        "IQ2_XS",
        "IQ2_S",
        "IQ3_XXS",
        "IQ3_S",
        "TQ1_0",
        "TQ2_0",
        "MXFP4",
    }
)
_TOP = {"embed": "token_embd", "norm": "output_norm", "head": "output"}
_BLOCK = {
    "attn_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "mlp_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}
# Tables of rotary frequencies: rope_freqs is read into the configuration, attn_rot_embd repeats what theta says.
_HARMLESS = re.compile(rf"{re.escape(ROPE_FREQS)}|blk\.\d+\.attn_rot_embd\.weight")
_ROTATED = re.compile(r"layers\.\d+\.([qk])\.(weight|bias)")


class GGUFWeights:
    """A checked GGUF. Implements WeightSource."""

    def __init__(self, path: str) -> None:
        """Open and check. Raises ModelError."""
        self.path = path
        self._file = open_gguf(path)
        self.config: ModelConfig = config_from_gguf(self._file)
        self._shapes = tensor_shapes(self.config)
        wanted = {gguf_name(name): shape for name, shape in self._shapes.items()}
        found = {tensor.name: (tensor.type, tensor.shape) for tensor in self._file.tensors.values()}
        leftovers = [name for name in found if name not in wanted and not _HARMLESS.fullmatch(name)]
        check_tensors(path, wanted, found, READABLE, leftovers)
        self.bytes_on_disk = self._file.size
        self.parameters = sum(math.prod(shape) for shape in self._shapes.values())
        self._staging: Staging | None = None

    def names(self) -> list[str]:
        return list(self._shapes)

    def shape(self, name: str) -> Shape:
        return self._shapes[name]

    def stored_type(self, name: str) -> str:
        return self._file.tensors[gguf_name(name)].type

    def extent(self, name: str) -> Extent:
        return Extent(self.path, self._file.tensors[gguf_name(name)].nbytes)

    def raw(self, name: str, device: torch.device) -> Raw:
        from ds4batch.engine.weights.raw import raw_of
        from ds4batch.engine.weights.staging import Staging

        if self._staging is None or self._staging.device != device:
            self._staging = Staging(device)
        tensor = self._file.tensors[gguf_name(name)]
        data = self._staging.read(self.path, tensor.name, tensor.offset, tensor.nbytes)
        paired = bool(_ROTATED.fullmatch(name)) and self.config.family == "llama"
        return raw_of(tensor.type, data, tensor.shape)._replace(paired=paired)

    def load(self, name: str) -> torch.Tensor:
        import torch  # here, so that opening a file needs no torch

        values = self._file.read(gguf_name(name))
        rotated = _ROTATED.fullmatch(name)
        if rotated and self.config.family == "llama":
            values = half_split(values, self.config.heads if rotated[1] == "q" else self.config.kv_heads)
        if self.stored_type(name) == "BF16":
            return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(values)


def gguf_name(name: str) -> str:
    """The GGUF tensor that holds the canonical `name`."""
    parts = name.split(".")
    if parts[0] == "layers":
        return f"blk.{parts[1]}.{_BLOCK[parts[2]]}.{parts[3]}"
    return f"{_TOP[parts[0]]}.{parts[1]}"


def half_split(values: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """q or k rows from the pairwise rotary order of llama GGUFs to the half-split order.

    values: [heads * head_dim, ...]. In the file rows 2j and 2j + 1 of a head are rotated together; the result holds
    pair j in rows j and j + head_dim/2, as Hugging Face's rotate_half expects. The inverse of the permutation that
    llama.cpp's converter applies to q_proj and k_proj.
    """
    pairs = values.reshape(heads, -1, 2, *values.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)
