"""A tensor as its file stores it, on the device that will use it; and what can be made of it there.

Owns the two ways on from there: into the layout that a kernel multiplies with (the tensor stays quantised), or into values of the
model's type. Both run on the tensor's own device and a few rows at a time, so that neither takes much memory beside its result.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch

from triton_kernels.quant_formats import FP8_TILE, LAYOUTS, Format, PackedWeight, dequantise, pack_fp8, pack_gguf

if TYPE_CHECKING:
    from ds4batch.engine.weights.source import WeightSource

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
FP8 = "F8_E4M3"
"""safetensors' name of e4m3."""

_ROWS = 32 * FP8_TILE  # converted at a time; whole squares of FP8 scales


class Raw(NamedTuple):
    """data: values of a plain type, or as uint8 the e4m3 codes [out, in] or quantised blocks [out, bytes a row] of the rows."""

    type: str
    data: torch.Tensor
    scales: torch.Tensor | None = None  # of FP8: one a square, [out / 128, in / 128] rounded up
    paired: bool = False  # rows of q and k: rotated dimensions are neighbours (2i, 2i + 1), not half a head apart


def kernel_format(stored_type: str) -> Format | None:
    """The kernels' format that a stored type is, or None."""
    if stored_type == FP8:
        return Format.FP8
    return Format(stored_type) if stored_type in Format.__members__ and stored_type != Format.FP8 else None


def on_device(stored_type: str) -> bool:
    """Whether a device can take the bytes of this type as they are; others become values on the host."""
    return stored_type in PLAIN or kernel_format(stored_type) is not None


def kept_formats(source: WeightSource, names: Sequence[str], keep: Collection[Format], rotated: bool = False) -> list[Format]:
    """The formats in which the matrices of one product stay, or [] when they are converted. `rotated`: q and k are among them.

    All or none: a product of quantised and plain parts would need two kinds of kernels.
    """
    formats = [kernel_format(source.stored_type(name)) for name in names]
    kept = [f for f in formats if f is not None and f in keep]
    if len(kept) < len(names):
        return []
    # Rows of q and k change place inside their head, which has to lie inside the square that shares a scale.
    fixed = rotated and Format.FP8 in kept and FP8_TILE % source.config.head_dim
    return [] if fixed else kept


@lru_cache
def packed_bytes(fmt: Format, shape: tuple[int, int]) -> int:
    """What a weight [out, in] takes once packed: its rows take the same each, so one is packed."""
    n, k = shape
    if fmt == Format.FP8:
        row = pack_fp8(torch.zeros(1, k).to(torch.float8_e4m3fn), torch.ones(1, -(-k // FP8_TILE)))
        return row.payload.nbytes * n + row.meta.nbytes * -(-n // FP8_TILE)
    layout = LAYOUTS[fmt]
    return n * pack_gguf(fmt, torch.zeros(1, k // layout.raw_values * layout.raw_bytes, dtype=torch.uint8)).bytes


def joinable(raws: Sequence[Raw]) -> bool:
    """Whether matrices may be put one below the other: one type, and FP8 scales that stay with their rows."""
    same = len({raw.type for raw in raws}) == 1
    return same and (raws[0].type != FP8 or all(len(raw.data) % FP8_TILE == 0 for raw in raws[:-1]))


def pack(raws: Sequence[Raw]) -> PackedWeight:
    """The matrices one below the other, in the kernels' layout. They are joinable()."""
    data = raws[0].data if len(raws) == 1 else torch.cat([raw.data for raw in raws])
    if raws[0].type != FP8:
        return pack_gguf(raws[0].type, data)
    return pack_fp8(data.view(torch.float8_e4m3fn), torch.cat([_scales(raw) for raw in raws]))


def convert(raw: Raw, out: torch.Tensor) -> None:
    """Write the tensor's values into `out`, of its shape and any float type."""
    if raw.type in PLAIN:
        out.copy_(raw.data)
        return
    for start in range(0, len(out), _ROWS):
        rows = slice(start, start + _ROWS)
        part = raw._replace(data=raw.data[rows])
        if raw.scales is not None:
            part = part._replace(scales=raw.scales[start // FP8_TILE : -(-(start + _ROWS) // FP8_TILE)])
        out[rows] = dequantise(pack([part]))


def values(raw: Raw, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """The tensor's values, in memory of their own."""
    if PLAIN.get(raw.type) == dtype:
        return raw.data
    out = torch.empty(tuple(shape), dtype=dtype, device=raw.data.device)
    convert(raw, out)
    return out


def of_values(tensor: torch.Tensor) -> Raw:
    """A tensor that is no file's."""
    return Raw(next(name for name, dtype in PLAIN.items() if dtype == tensor.dtype), tensor)


def raw_of(stored_type: str, data: torch.Tensor, shape: Sequence[int], scales: torch.Tensor | None = None) -> Raw:
    """Give the bytes of a tensor (uint8, [bytes]) their type and shape."""
    if stored_type in PLAIN:
        return Raw(stored_type, data.view(PLAIN[stored_type]).view(tuple(shape)))
    if stored_type == FP8:
        return Raw(stored_type, data.view(tuple(shape)), scales)
    return Raw(stored_type, data.view(math.prod(shape[:-1]), -1))


def _scales(raw: Raw) -> torch.Tensor:
    assert raw.scales is not None, "FP8 without scales"
    return raw.scales
