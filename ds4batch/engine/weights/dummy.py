"""Random weights of a model's shape, made on the device: what a step costs, and how a server starts, do not depend on their values.

Owns the random blocks of every format that a kernel reads. Their scales are chosen so that a matrix keeps the size of what it
multiplies, as trained ones do.
"""

from __future__ import annotations

import math
import os

import torch

from ds4batch.engine.weights.config import ModelConfig, ModelError
from ds4batch.engine.weights.hf_config import config_from_hf
from ds4batch.engine.weights.hf_dir import CONFIG, read_json
from ds4batch.engine.weights.layout import Extent, Shape, tensor_shapes
from ds4batch.engine.weights.raw import FP8, PLAIN, Raw, raw_of, values
from ds4batch.engine.weights.source import open_weights
from triton_kernels.quant_formats import FP8_TILE, LAYOUTS, Format

MIXED = "Q4_K_M"
"""llama.cpp's mixture: Q4_K, with Q6_K for the head and, in some layers, for v and down."""

_MOST_LAYERS = 1 << 16  # there are no tensors to count

# (byte of an fp16 scale in a raw block, what it is times 1 / sqrt(in)): with uniform codes the weights' deviation is about 1 / sqrt(in).
_SCALES: dict[Format, tuple[tuple[int, float], ...]] = {
    Format.Q8_0: ((0, 1 / 74),),
    Format.Q4_0: ((0, 1 / 4.6),),
    Format.Q4_1: ((0, 1 / 4.6), (2, -7.5 / 4.6)),
    Format.Q4_K: ((0, 1 / 245), (2, 7.5 / 245)),
    Format.Q6_K: ((208, 1 / 1370),),
}


class RandomWeights:
    """Weights of a shape, the same for the same seed and device. Implements WeightSource."""

    path = "random weights"

    def __init__(
        self, config: ModelConfig, device: torch.device, seed: int = 0, dtype: torch.dtype = torch.bfloat16, format: str = ""
    ) -> None:
        """`format` is that of the matrices: "" for `dtype`, a name in Format, or MIXED; a FP8 model's embedding and head are not FP8."""
        if format and format != MIXED and format not in Format.__members__:
            raise ValueError(f"{format!r} is none of {', '.join([*Format, MIXED])}")
        self.config = config
        self._device = device
        self._dtype = dtype
        self._format = format
        self._seed = seed
        self._shapes = tensor_shapes(config)
        self._number = {name: i for i, name in enumerate(self._shapes)}
        self.parameters = sum(math.prod(shape) for shape in self._shapes.values())
        self.bytes_on_disk = 0

    def names(self) -> list[str]:
        return list(self._shapes)

    def shape(self, name: str) -> Shape:
        return self._shapes[name]

    def stored_type(self, name: str) -> str:
        plain = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}[self._dtype]
        if not self._format or len(self._shapes[name]) == 1:
            return plain
        if self._format == Format.FP8:
            return plain if name in ("embed.weight", "head.weight") else FP8
        return self._mixed(name) if self._format == MIXED else self._format

    def extent(self, name: str) -> Extent:
        shape, kind = self._shapes[name], self.stored_type(name)
        if kind in Format.__members__:
            layout = LAYOUTS[Format(kind)]
            return Extent(self.path, math.prod(shape) // layout.raw_values * layout.raw_bytes)
        return Extent(self.path, math.prod(shape) * (1 if kind == FP8 else self._dtype.itemsize))

    def raw(self, name: str, device: torch.device) -> Raw:
        shape, kind = self._shapes[name], self.stored_type(name)
        source = torch.Generator(self._device).manual_seed(self._seed * 1000003 + self._number[name])
        if kind == FP8:
            return self._squares(shape, source)
        if kind in Format.__members__:
            return raw_of(kind, self._blocks(Format(kind), shape, source).to(device), shape)
        drawn = torch.randn(shape, generator=source, device=self._device, dtype=self._dtype)
        if name.endswith(".bias"):
            drawn.mul_(0.1)
        elif len(shape) == 1:
            drawn.mul_(0.1).add_(1)
        else:
            drawn.mul_(shape[-1] ** -0.5)
        return Raw(kind, drawn.to(device))

    def load(self, name: str) -> torch.Tensor:
        raw = self.raw(name, self._device)
        return values(raw, self._shapes[name], PLAIN.get(raw.type, torch.float32))

    def _mixed(self, name: str) -> str:
        if name == "head.weight":
            return Format.Q6_K
        part = name.split(".")
        if part[0] != "layers" or part[2] not in ("v", "down"):
            return Format.Q4_K
        layer, eighth = int(part[1]), self.config.layers // 8
        more = layer < eighth or layer >= 7 * self.config.layers // 8 or (layer - eighth) % 3 == 2
        return Format.Q6_K if more else Format.Q4_K

    def _blocks(self, fmt: Format, shape: Shape, source: torch.Generator) -> torch.Tensor:
        layout = LAYOUTS[fmt]
        if shape[1] % layout.raw_values:
            raise ModelError(f"rows of {shape[1]} values are no whole number of {fmt}'s blocks of {layout.raw_values}")
        blocks = torch.empty(math.prod(shape) // layout.raw_values, layout.raw_bytes, dtype=torch.uint8, device=self._device)
        blocks.random_(0, 256, generator=source)
        jitter = torch.rand(len(blocks), generator=source, device=self._device) + 0.5
        for at, factor in _SCALES[fmt]:
            halves = (jitter * (factor * shape[1] ** -0.5)).to(torch.float16)
            blocks[:, at : at + 2] = halves.view(torch.uint8).view(-1, 2)
        return blocks.view(-1)

    def _squares(self, shape: Shape, source: torch.Generator) -> Raw:
        codes = torch.randn(shape, generator=source, device=self._device, dtype=torch.bfloat16).mul_(16)
        sides = [-(-side // FP8_TILE) for side in shape]
        scales = (torch.rand(sides, generator=source, device=self._device) + 0.5) * (shape[1] ** -0.5 / 16)
        return Raw(FP8, codes.to(torch.float8_e4m3fn).view(torch.uint8), scales)


def open_dummy(path: str, device: torch.device, dtype: torch.dtype) -> RandomWeights:
    """Random weights for the model at `path`: a directory needs its config.json alone, a GGUF file is opened for its shape.

    A directory's matrices are FP8 where its quantization_config says so. Raises ModelError.
    """
    if not os.path.isdir(path):
        return RandomWeights(open_weights(path).config, device, dtype=dtype)
    where = os.path.join(path, CONFIG)
    raw = read_json(where)
    config = config_from_hf(raw, where, os.path.basename(os.path.abspath(path)), _MOST_LAYERS)
    return RandomWeights(config, device, dtype=dtype, format=Format.FP8 if raw.get("quantization_config") else "")
