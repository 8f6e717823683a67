"""The weights of a Hugging Face directory: config.json, and safetensors in one file or in shards.

Owns the table of Hugging Face tensor names and the check of every shard's header. Importing it imports no torch: only
loading a tensor does.

FP8 matrices are e4m3 codes with a scale for each square of 128 x 128 in a tensor `weight_scale_inv` beside them, which multiplies
the codes in spite of its name.

Format: https://github.com/huggingface/safetensors (8-byte little-endian header length, JSON header, data).
"""

from __future__ import annotations

import json
import math
import os
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from ds4batch.engine.weights.config import ModelConfig, ModelError
from ds4batch.engine.weights.hf_config import config_from_hf
from ds4batch.engine.weights.hybrid_layout import HybridConfig, as_stored, hf_block_name, text_tensors
from ds4batch.engine.weights.layout import Extent, Shape, check_tensors, tensor_shapes

if TYPE_CHECKING:
    import torch

    from ds4batch.engine.weights.raw import Raw
    from ds4batch.engine.weights.staging import Staging

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_JSON_BYTES = 64 << 20  # a tokenizer.json of 250,000 tokens has about 20 MB
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
READABLE = frozenset({"F32", "F16", "BF16", "F8_E4M3"})
FP8_SQUARE = 128
_DTYPE_BITS = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "F64": 64,
    "I64": 64,
    "U64": 64,
    "C64": 64,
}
_TOP = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
# Rotary tables repeat what the configuration says; the head of a tied model is the embedding once more.
_HARMLESS = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")


class ShardTensor(NamedTuple):
    """One entry of a safetensors header, checked against the shard's size."""

    file: str  # path of the shard
    type: str  # "F32", "BF16", ...
    shape: Shape
    offset: int  # of its first byte in the shard
    nbytes: int


class HFWeights:
    """A checked Hugging Face directory. Implements WeightSource."""

    def __init__(self, path: str) -> None:
        """Open and check. Raises ModelError."""
        self.path = path
        self._tensors, self.bytes_on_disk = _read_shards(path)
        where = os.path.join(path, CONFIG)
        name = os.path.basename(os.path.abspath(path))
        self.config: ModelConfig = config_from_hf(read_json(where), where, name, len(self._tensors))
        if isinstance(self.config, HybridConfig):
            self._tensors = text_tensors(self._tensors)
            self.config = as_stored(self.config, self._tensors)
        self._shapes = tensor_shapes(self.config)
        wanted = {hf_name(name): shape for name, shape in self._shapes.items()}
        for name, shape in list(wanted.items()):
            if name in self._tensors and self._tensors[name].type == "F8_E4M3":
                wanted[scale_name(name)] = tuple(-(-side // FP8_SQUARE) for side in shape)
        found = {name: (tensor.type, tensor.shape) for name, tensor in self._tensors.items()}
        harmless = {"lm_head.weight"} if self.config.tied else set()
        leftovers = [name for name in found if name not in wanted and name not in harmless and not _HARMLESS.fullmatch(name)]
        check_tensors(path, wanted, found, READABLE, leftovers)
        self.parameters = sum(math.prod(shape) for shape in self._shapes.values())
        self._staging: Staging | None = None

    def names(self) -> list[str]:
        return list(self._shapes)

    def shape(self, name: str) -> Shape:
        return self._shapes[name]

    def stored_type(self, name: str) -> str:
        return self._tensors[hf_name(name)].type

    def extent(self, name: str) -> Extent:
        tensor = self._tensors[hf_name(name)]
        return Extent(tensor.file, tensor.nbytes)

    def raw(self, name: str, device: torch.device) -> Raw:
        from ds4batch.engine.weights.staging import Staging

        if self._staging is None or self._staging.device != device:
            self._staging = Staging(device)
        raw = self._read(self._staging, hf_name(name))
        if raw.type == "F8_E4M3":
            raw = raw._replace(scales=self._read(self._staging, scale_name(hf_name(name))).data.float())
        return raw

    def load(self, name: str) -> torch.Tensor:
        import torch

        from ds4batch.engine.weights.raw import PLAIN, values

        raw = self.raw(name, torch.device("cpu"))
        return values(raw, self._shapes[name], PLAIN.get(raw.type, torch.float32))

    def _read(self, staging: Staging, name: str) -> Raw:
        from ds4batch.engine.weights.raw import raw_of

        tensor = self._tensors[name]
        return raw_of(tensor.type, staging.read(tensor.file, name, tensor.offset, tensor.nbytes), tensor.shape)


def hf_name(name: str) -> str:
    """The safetensors tensor that holds the canonical `name`."""
    parts = name.split(".")
    if parts[0] == "layers":
        inner = hf_block_name(parts[2:]) or f"{_BLOCK[parts[2]]}.{parts[3]}"
        return f"model.layers.{parts[1]}.{inner}"
    return f"{_TOP[parts[0]]}.{parts[1]}"


def scale_name(name: str) -> str:
    """The tensor with the scales of an FP8 matrix."""
    return name + "_scale_inv"


def read_json(path: str) -> dict[str, Any]:
    """The object in a JSON file of bounded size. Raises ModelError."""
    try:
        with open(path, "rb") as file:
            body = file.read(MAX_JSON_BYTES + 1)
    except OSError as error:
        raise ModelError(f"{path}: cannot open: {error.strerror}") from error
    if len(body) > MAX_JSON_BYTES:
        raise ModelError(f"{path}: more than {MAX_JSON_BYTES} bytes")
    return _json_object(path, body, 0)


def _json_object(path: str, body: bytes, at: int) -> dict[str, Any]:
    try:
        value = json.loads(body)
    except RecursionError:
        raise ModelError(f"{path}: JSON is nested too deep") from None
    except UnicodeDecodeError as error:
        raise ModelError(f"{path}: JSON is not UTF-8 (at byte {at + error.start})") from error
    except ValueError as error:
        raise ModelError(f"{path}: broken JSON: {error} (from byte {at})") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: a JSON object is expected")
    return value


def _read_shards(path: str) -> tuple[dict[str, ShardTensor], int]:
    """Every tensor of the directory, and the bytes of all its shards."""
    single, index = os.path.join(path, SINGLE), os.path.join(path, INDEX)
    if os.path.exists(single):
        return read_header(single), os.path.getsize(single)
    if not os.path.exists(index):
        raise ModelError(f"{path}: neither {SINGLE} nor {INDEX} is in the directory")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise ModelError(f"{index}: weight_map is missing or does not map tensors to file names")
    tensors: dict[str, ShardTensor] = {}
    total = 0
    for shard in sorted(set(weight_map.values())):
        if shard != os.path.basename(shard) or shard in ("", ".", ".."):
            raise ModelError(f"{index}: weight_map names {shard!r}, which is not a file of this directory")
        file = os.path.join(path, shard)
        for name, tensor in read_header(file).items():
            if weight_map.get(name) != shard:
                raise ModelError(f"{file}: tensor {name} is here, but {INDEX} puts it in {weight_map.get(name)!r}")
            tensors[name] = tensor
        total += os.path.getsize(file)
    lost = [name for name in weight_map if name not in tensors]
    if lost:
        raise ModelError(f"{index}: tensor {lost[0]} is not in {weight_map[lost[0]]} ({len(lost)} such tensors)")
    return tensors, total


def read_header(path: str) -> dict[str, ShardTensor]:
    """The tensors of one safetensors file; its size is checked, its data is not read. Raises ModelError."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < 8:
                raise ModelError(f"{path}: {size} bytes is too short for a safetensors header")
            length = int.from_bytes(file.read(8), "little")
            if length > min(MAX_HEADER_BYTES, size - 8):
                raise ModelError(f"{path}: the header says it has {length} bytes, {size - 8} are left (at byte 0)")
            if file.read(1) != b"{":
                raise ModelError(f"{path}: is no safetensors file: the header does not begin with {{ (at byte 8)")
            file.seek(8)
            header = _json_object(path, file.read(length), 8)
    except OSError as error:
        raise ModelError(f"{path}: cannot open: {error.strerror}") from error
    header.pop("__metadata__", None)
    return _checked(path, header, 8 + length, size)


def _checked(path: str, header: dict[str, Any], base: int, size: int) -> dict[str, ShardTensor]:
    out: dict[str, ShardTensor] = {}
    spans: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        try:
            kind, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
            numbers = [*shape, begin, end]
        except (KeyError, TypeError, ValueError):
            raise ModelError(f"{path}: the header lacks dtype, shape or data_offsets of tensor {name}") from None
        if any(isinstance(number, bool) or not isinstance(number, int) or number < 0 for number in numbers):
            raise ModelError(f"{path}: tensor {name} has a shape or an offset that is not a whole number")
        if not isinstance(kind, str) or kind not in _DTYPE_BITS:
            raise ModelError(f"{path}: tensor {name} has unknown dtype {kind!r}")
        if base + end > size:
            raise ModelError(
                f"{path}: tensor {name} {shape} {kind} needs bytes {base + begin} to {base + end}, but "
                f"the file ends at byte {size}"
            )
        if (end - begin) * 8 != math.prod(shape) * _DTYPE_BITS[kind]:
            raise ModelError(f"{path}: tensor {name} {shape} {kind} does not fill its bytes {base + begin} to {base + end}")
        spans.append((begin, end, name))
        out[name] = ShardTensor(path, kind, tuple(shape), base + begin, end - begin)
    at = 0
    for begin, end, name in sorted(spans):  # the format allows neither gaps nor overlaps
        if begin != at:
            raise ModelError(f"{path}: tensor {name} begins at byte {base + begin}, the one before it ends at byte {base + at}")
        at = end
    if base + at != size:
        raise ModelError(f"{path}: {size - base - at} bytes after the last tensor (at byte {base + at})")
    return out
