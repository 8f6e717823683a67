"""Quantised weight formats: reading GGUF blocks, repacking for the kernel, exact reference dequantisation.

Owns the meaning of the bytes. It launches nothing and chooses no tile: `linear_stream`, `linear_quant` and `expand` do.

A weight is W [n, k], quantised along k. `pack_gguf` takes the raw blocks of a GGUF tensor (uint8 [n, bytes per row]),
`pack_fp8` an e4m3 tensor [n, k] with one fp32 scale a 128 x 128 square. Both give a `PackedWeight`: k is cut into blocks of
BK = 256 values, a block into SEGMENTS runs of WIDTH consecutive values, and

    payload  int16 [k / BK, PLANES, n, WIDTH]   word [b, p, r, c] holds the codes of W[r, b*BK + s*WIDTH + c] for several s
    meta     int32 [k / BK, META, n]            the scales of row r in block b (FP8: fp32 [2 k / BK, ceil(n / 128)])

so that a plane of a tile of rows is one contiguous range, two neighbouring words are one register of the tensor cores' operand, and
field f of plane p is a segment of the row in natural k order: unpacking works on two codes at a time and moves none of them. A
segment has one scale (FP8: four segments have).

    format  BK   SEGMENTS x WIDTH  planes x fields             meta words a row and block           bits a weight (GGUF)
    Q8_0    256   8 x 32           4 x 2 of 8 bits, + 128      4: fp16 d of groups 2j | 2j+1 << 16     8.5    (8.5)
    Q4_0    256   8 x 32           2 x 4 of q, 4 bits          4: fp16 d of groups 2j | 2j+1 << 16     4.5    (4.5)
    Q4_1    256   8 x 32           2 x 4 of q, 4 bits          8: fp16 d | fp16 m << 16, each group    5.0    (5.0)
    Q4_K    256   8 x 32           2 x 4 of q, 4 bits          1: fp16 d | dmin << 16; then 4: sc | m << 8 | sc | m
                                                                                                       4.625  (4.5)
    Q6_K    256  16 x 16           4 x 4 of the low 4 bits,    1: fp32 d; then 4: int8 scales + 128    6.625  (6.5625)
                                   then 2 x 8 of the high 2
    FP8     256   8 x 32           4 x 2 of e4m3               none                                    8.002

The two high bits of Q6_K's segment s lie at bit 8 (s % 4 / 2) + 2 (s % 2) + 4 (s % 8 / 4), so that those of segments s and s + 2
are as far apart as their low bits. k is padded to a multiple of BK with codes whose scale is zero; no kernel reads an activation there.

Values: every product of a scale, a sub-scale and a code is exact in fp32 (at most 11 + 8 + 8 significant bits, and 24 for Q6_K),
and formats with a minimum round once, in the final addition, so `dequantise` equals gguf-py's own dequantisation bit for bit. For
FP8 the product code x scale rounds once. Kernels round this value once more, to the type of the activations (quant_unpack).

Block layouts after the GGML format descriptions (block_q8_0, block_q4_0, block_q4_1, block_q4_K, block_q6_K).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import torch

FP8_TILE = 128
"""Side of the square of weights that shares one FP8 scale."""

_ROWS_AT_A_TIME = 4096  # bounds the transient memory of repacking a large head


class Format(StrEnum):
    Q8_0 = "Q8_0"
    Q4_0 = "Q4_0"
    Q4_1 = "Q4_1"
    Q4_K = "Q4_K"
    Q6_K = "Q6_K"
    FP8 = "FP8"


class Layout(NamedTuple):
    """How one format is stored for the kernel; see the table above."""

    segments: int
    width: int
    planes: int
    bits: int  # of a field
    meta_words: int  # int32 words a row and block; 0 for FP8, whose scales belong to squares
    group: int  # values that share a scale
    raw_values: int  # values in a raw GGUF block (0: not a GGUF format)
    raw_bytes: int  # bytes of that block

    @property
    def block_k(self) -> int:
        return self.segments * self.width


LAYOUTS: dict[Format, Layout] = {
    Format.Q8_0: Layout(8, 32, 4, 8, 4, 32, 32, 34),
    Format.Q4_0: Layout(8, 32, 2, 4, 4, 32, 32, 18),
    Format.Q4_1: Layout(8, 32, 2, 4, 8, 32, 32, 20),
    Format.Q4_K: Layout(8, 32, 2, 4, 5, 32, 256, 144),
    Format.Q6_K: Layout(16, 16, 6, 4, 5, 16, 256, 210),
    Format.FP8: Layout(8, 32, 4, 8, 0, 128, 0, 0),
}


@dataclass(frozen=True)
class PackedWeight:
    """W [n, k] in the kernel's layout. `payload` is int16, `meta` int32 (fp32 for FP8)."""

    format: Format
    n: int
    k: int
    payload: torch.Tensor
    meta: torch.Tensor

    @property
    def blocks(self) -> int:
        return int(self.payload.shape[0])

    @property
    def bytes(self) -> int:
        """Bytes in memory, which are also the bytes one product over up to a tile of rows must read."""
        return self.payload.numel() * self.payload.element_size() + self.meta.numel() * self.meta.element_size()

    @property
    def bits_per_weight(self) -> float:
        return 8.0 * self.bytes / (self.n * self.k)

    def to(self, device: torch.device | str) -> PackedWeight:
        return PackedWeight(self.format, self.n, self.k, self.payload.to(device), self.meta.to(device))


class _Fields(NamedTuple):
    """Unsigned codes [n, k] (uint8) and the scale words of some rows, before they are laid out for the kernel."""

    codes: torch.Tensor
    block: torch.Tensor | None  # int32 [n, k / 256]: the word of the whole block (Q4_K, Q6_K)
    group: torch.Tensor  # [n, k / group]: int32, each element `bits` wide
    bits: int


def pack_gguf(name: str, raw: torch.Tensor) -> PackedWeight:
    """Repack the raw blocks of a GGUF tensor, uint8 [n, bytes per row], on the tensor's own device.

    Raises ValueError for a format that is not a GGUF one of this module or a row that is not a whole number of blocks.
    """
    if name not in Format.__members__ or name == Format.FP8:
        raise ValueError(f"{name}: not a GGUF format this module reads ({', '.join(f for f in Format if f != Format.FP8)})")
    fmt = Format(name)
    layout = LAYOUTS[fmt]
    if raw.dtype != torch.uint8 or raw.dim() != 2:
        raise ValueError(f"{name}: raw blocks must be uint8 [n, bytes per row], got {raw.dtype} {tuple(raw.shape)}")
    n, row_bytes = raw.shape
    if n == 0 or row_bytes == 0 or row_bytes % layout.raw_bytes:
        raise ValueError(f"{name}: a row of {row_bytes} bytes is not a whole number of {layout.raw_bytes}-byte blocks")
    k = row_bytes // layout.raw_bytes * layout.raw_values
    blocks = -(-k // layout.block_k)
    payload = torch.empty(blocks, layout.planes, n, layout.width, dtype=torch.int16, device=raw.device)
    meta = torch.empty(blocks, layout.meta_words, n, dtype=torch.int32, device=raw.device)
    for start in range(0, n, _ROWS_AT_A_TIME):
        rows = slice(start, min(start + _ROWS_AT_A_TIME, n))
        fields = _pad(_read(fmt, raw[rows]), blocks * layout.block_k, layout.group)
        payload[:, :, rows] = _payload_words(fmt, fields.codes, blocks)
        meta[:, :, rows] = _meta_words(fields, blocks)
    return PackedWeight(fmt, n, k, payload, meta)


def pack_fp8(weight: torch.Tensor, scales: torch.Tensor) -> PackedWeight:
    """Repack e4m3 W [n, k] with scales [ceil(n/128), ceil(k/128)]; value = code * scale of its 128 x 128 square.

    Raises ValueError for other dtypes or shapes, or a weight that is not a number.
    """
    if weight.dtype != torch.float8_e4m3fn or weight.dim() != 2:
        raise ValueError(f"FP8: the weight must be float8_e4m3fn [n, k], got {weight.dtype} {tuple(weight.shape)}")
    n, k = weight.shape
    layout = LAYOUTS[Format.FP8]
    blocks = -(-k // layout.block_k)
    expected = (-(-n // FP8_TILE), -(-k // FP8_TILE))
    if tuple(scales.shape) != expected or not scales.is_floating_point():
        raise ValueError(f"FP8: scales must be floating point {expected}, got {scales.dtype} {tuple(scales.shape)}")
    codes = weight.view(torch.uint8)
    if bool(((codes & 127) == 127).any()):
        raise ValueError("FP8: the weight holds values that are not numbers")
    codes = torch.nn.functional.pad(codes, (0, blocks * layout.block_k - k))
    meta = torch.nn.functional.pad(scales.float().t(), (0, 0, 0, 2 * blocks - scales.shape[1])).contiguous()
    return PackedWeight(Format.FP8, n, k, _payload_words(Format.FP8, codes, blocks), meta)


def unsupported(weight: PackedWeight, other: torch.Tensor, what: str) -> str:
    """Why kernels cannot read the weight beside `other`, which holds `what`; "" when they can."""
    if other.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"{what} of type {other.dtype}"
    if other.device != weight.payload.device:
        return f"{what} on {other.device}, weight on {weight.payload.device}"
    if other.is_cuda:
        needed = (8, 9) if weight.format == Format.FP8 else (8, 0)
        if torch.cuda.get_device_capability(other.device) < needed:
            return f"{weight.format} needs compute capability {needed[0]}.{needed[1]}"
    return ""


def dequantise(weight: PackedWeight) -> torch.Tensor:
    """The values of a packed weight, fp32 [n, k]."""
    n, layout = weight.n, LAYOUTS[weight.format]
    codes = _codes_of(weight)  # [blocks, segments, n, width]
    if weight.format == Format.FP8:
        squares = weight.meta.repeat_interleave(FP8_TILE, dim=1)[:, :n].unflatten(0, (weight.blocks, 2))
        return _rows(codes * squares.repeat_interleave(layout.segments // 2, dim=1)[..., None], weight.k)
    scale, minimum = _scales_of(weight)  # [blocks, segments, n]: every layout has one group a segment
    return _rows(codes * scale[..., None] + minimum[..., None], weight.k)


def _rows(values: torch.Tensor, k: int) -> torch.Tensor:
    """[blocks, segments, n, width] -> [n, k]"""
    return values.permute(2, 0, 1, 3).reshape(values.shape[2], -1)[:, :k].contiguous()


# ---- raw GGUF blocks -> codes and scales


def _read(fmt: Format, raw: torch.Tensor) -> _Fields:
    layout = LAYOUTS[fmt]
    blocks = raw.reshape(raw.shape[0], -1, layout.raw_bytes)
    return {Format.Q8_0: _read_q8_0, Format.Q4_0: _read_q4_0, Format.Q4_1: _read_q4_1, Format.Q4_K: _read_q4_k,
            Format.Q6_K: _read_q6_k}[fmt](blocks)  # fmt: skip


def _word16(pair: torch.Tensor) -> torch.Tensor:
    """Little-endian 16-bit pattern of the last axis (two bytes) as int32."""
    return pair[..., 0].int() | (pair[..., 1].int() << 8)


def _flat(values: torch.Tensor) -> torch.Tensor:
    return values.reshape(values.shape[0], -1)


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """[..., b] bytes -> [..., 2 * b]: all low nibbles, then all high ones."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def _read_q8_0(b: torch.Tensor) -> _Fields:
    return _Fields(_flat(b[..., 2:] ^ 128), None, _word16(b[..., :2]), 16)


def _read_q4_0(b: torch.Tensor) -> _Fields:
    return _Fields(_flat(_nibbles(b[..., 2:])), None, _word16(b[..., :2]), 16)


def _read_q4_1(b: torch.Tensor) -> _Fields:
    group = _word16(b[..., :2]) | (_word16(b[..., 2:4]) << 16)
    return _Fields(_flat(_nibbles(b[..., 4:])), None, group, 32)


def _read_q4_k(b: torch.Tensor) -> _Fields:
    # 12 bytes hold eight 6-bit scales and minima: the first four of each in the low bits of bytes 0-3 and 4-7, the last four
    # as nibbles of bytes 8-11 topped up by the two high bits of bytes 0-3 (scales) and 4-7 (minima).
    first, second, third = b[..., 4:8], b[..., 8:12], b[..., 12:16]
    sc = torch.cat((first & 63, (third & 15) | ((first >> 6) << 4)), dim=-1).int()
    mins = torch.cat((second & 63, (third >> 4) | ((second >> 6) << 4)), dim=-1).int()
    block = _word16(b[..., :2]) | (_word16(b[..., 2:4]) << 16)
    codes = _nibbles(b[..., 16:].unflatten(-1, (4, 32)))
    return _Fields(_flat(codes), block, _flat(sc | (mins << 8)), 16)


def _read_q6_k(b: torch.Tensor) -> _Fields:
    # Per half of 128 values: 64 bytes of low nibbles and 32 bytes with four crumbs each, all in runs of 32 values.
    low = _nibbles(b[..., :128].unflatten(-1, (2, 64))).unflatten(-1, (4, 32))
    crumbs = b[..., 128:192].unflatten(-1, (2, 32))
    high = torch.stack([(crumbs >> shift) & 3 for shift in (0, 2, 4, 6)], dim=-2)
    d = _word16(b[..., 208:210]).to(torch.int16).view(torch.float16).float().view(torch.int32)
    return _Fields(_flat(low | (high << 4)), d, _flat((b[..., 192:208] ^ 128).int()), 8)


# ---- codes and scales -> words, and back


def _pad(fields: _Fields, k: int, group: int) -> _Fields:
    pad = k - fields.codes.shape[1]
    if not pad:
        return fields
    grow = torch.nn.functional.pad
    # Only 32-value formats can be short of a block, and theirs have no block word: zero scales make the codes zero.
    return fields._replace(codes=grow(fields.codes, (0, pad)), group=grow(fields.group, (0, pad // group)))


def _payload_words(fmt: Format, codes: torch.Tensor, blocks: int) -> torch.Tensor:
    layout = LAYOUTS[fmt]
    n = codes.shape[0]
    parts = codes.view(n, blocks, layout.segments, layout.width).permute(2, 1, 0, 3)  # [segment, block, n, width]
    words = torch.zeros(blocks, layout.planes, n, layout.width, dtype=torch.int16, device=codes.device)
    low = (1 << layout.bits) - 1
    for s in range(layout.segments):
        plane, shift = _place(layout, s)
        words[:, plane] |= (parts[s] & low).short() << shift
        if fmt == Format.Q6_K:
            words[:, 4 + s // 8] |= (parts[s] >> 4).short() << _crumb(s)
    return words


def _place(layout: Layout, segment: int) -> tuple[int, int]:
    """Plane and bit of a segment's field."""
    fields = 16 // layout.bits
    return segment // fields, layout.bits * (segment % fields)


def _crumb(segment: int) -> int:
    """Bit of the two high bits of a Q6_K segment; see the module's words."""
    return 8 * (segment % 4 // 2) + 2 * (segment % 2) + 4 * (segment % 8 // 4)


def _meta_words(fields: _Fields, blocks: int) -> torch.Tensor:
    per_word = 32 // fields.bits
    n = fields.codes.shape[0]
    group = fields.group.view(n, blocks, -1, per_word)
    words = torch.zeros(group.shape[:-1], dtype=torch.int32, device=group.device)
    for i in range(per_word):
        words |= group[..., i] << (fields.bits * i)
    if fields.block is not None:
        words = torch.cat((fields.block[..., None], words), dim=-1)
    return words.permute(1, 2, 0)


def _codes_of(weight: PackedWeight) -> torch.Tensor:
    """What the codes stand for before scaling, fp32 [blocks, segments, n, width]."""
    layout, words = LAYOUTS[weight.format], weight.payload
    parts = []
    for s in range(layout.segments):
        plane, shift = _place(layout, s)
        code = (words[:, plane] >> shift) & ((1 << layout.bits) - 1)
        if weight.format == Format.Q6_K:
            code = code | (((words[:, 4 + s // 8] >> _crumb(s)) & 3) << 4)
        parts.append(code)
    codes = torch.stack(parts, dim=1)
    if weight.format == Format.FP8:
        return codes.to(torch.uint8).view(torch.float8_e4m3fn).float()
    zero = {Format.Q8_0: 128, Format.Q4_0: 8, Format.Q6_K: 32}.get(weight.format, 0)
    return (codes - zero).float()


def _fp16(words: torch.Tensor, shift: int) -> torch.Tensor:
    bits = (words >> shift) & 0xFFFF
    return torch.where(bits >= 1 << 15, bits - (1 << 16), bits).to(torch.int16).view(torch.float16).float()


def _scales_of(weight: PackedWeight) -> tuple[torch.Tensor, torch.Tensor]:
    """(scale, minimum to add), fp32 [blocks, segments, n]."""
    meta = weight.meta
    if weight.format == Format.Q4_1:
        return _fp16(meta, 0), _fp16(meta, 16)
    if weight.format == Format.Q4_K:
        pairs = torch.stack((meta[:, 1:] & 0xFFFF, (meta[:, 1:] >> 16) & 0xFFFF), dim=2).flatten(1, 2)
        block = meta[:, :1]
        return _fp16(block, 0) * (pairs & 255).float(), -_fp16(block, 16) * (pairs >> 8).float()
    if weight.format == Format.Q6_K:
        sub = torch.stack([((meta[:, 1:] >> shift) & 255) - 128 for shift in (0, 8, 16, 24)], dim=2).flatten(1, 2)
        scale = meta[:, :1].contiguous().view(torch.float32) * sub.float()
    else:
        scale = torch.stack((_fp16(meta, 0), _fp16(meta, 16)), dim=2).flatten(1, 2)
    return scale, torch.zeros_like(scale)
