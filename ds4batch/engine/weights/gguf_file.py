"""The GGUF container: metadata, tensor table, and the bytes of one tensor at a time.

Owns every check that a file is what it says it is. Knows no model family, no canonical names, and imports no torch, so
that a process that never touches a device can read metadata and vocabulary. Types, block sizes and dequantisation come
from the `gguf` package; its reader is not used because it trusts the header's counts and takes seconds on a large
vocabulary.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian).
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType, GGUFValueType
from gguf.quants import dequantize

from ds4batch.engine.weights.config import ModelError
from ds4batch.engine.weights.reading import fill

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMS = 4  # GGML_MAX_DIMS

# A header that needs more than these is not a model's. They bound the work a lying count can cause on a file so large
# that "fits in the rest of the file" no longer bounds it; the largest vocabularies known are below 300,000 tokens and
# 20 MB.
MAX_HEADER_BYTES = 256 << 20
MAX_STRING_BYTES = 16 << 20
MAX_ARRAY_ITEMS = 4 << 20
MAX_ENTRIES = 1 << 20  # metadata keys, and tensors

Value = str | int | float | bool | list[str] | npt.NDArray[Any]

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_SCALARS: dict[int, tuple[struct.Struct, str]] = {
    int(GGUFValueType.UINT8): (struct.Struct("<B"), "<u1"),
    int(GGUFValueType.INT8): (struct.Struct("<b"), "<i1"),
    int(GGUFValueType.UINT16): (struct.Struct("<H"), "<u2"),
    int(GGUFValueType.INT16): (struct.Struct("<h"), "<i2"),
    int(GGUFValueType.UINT32): (struct.Struct("<I"), "<u4"),
    int(GGUFValueType.INT32): (struct.Struct("<i"), "<i4"),
    int(GGUFValueType.FLOAT32): (struct.Struct("<f"), "<f4"),
    int(GGUFValueType.BOOL): (struct.Struct("<?"), "?"),
    int(GGUFValueType.UINT64): (struct.Struct("<Q"), "<u8"),
    int(GGUFValueType.INT64): (struct.Struct("<q"), "<i8"),
    int(GGUFValueType.FLOAT64): (struct.Struct("<d"), "<f8"),
}
_MIN_KEY_BYTES = 8 + 4 + 1  # name length, type, the smallest value
_MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8  # name length, rank, one dimension, type, offset
_PLAIN = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
_CHUNK_VALUES = 4 << 20  # values dequantised at a time: bounds the temporaries next to a large embedding


class GGUFTensor(NamedTuple):
    """One entry of the tensor table, checked against the file's size."""

    name: str
    type: str  # GGML type name: "F32", "Q4_K", ...
    shape: tuple[int, ...]  # slowest axis first: [out, in], as numpy and torch write it
    offset: int  # of its first byte in the file
    nbytes: int


@dataclass(frozen=True)
class GGUFFile:
    """An opened GGUF: everything but the tensors' bytes is in memory and checked; no file stays open."""

    path: str
    size: int  # bytes
    version: int
    metadata: dict[str, Value]
    tensors: dict[str, GGUFTensor]

    @property
    def architecture(self) -> str:
        """`general.architecture`. Raises ModelError when it is missing or no string."""
        value = self.metadata.get("general.architecture")
        if not isinstance(value, str):
            raise ModelError(f"{self.path}: key general.architecture is missing or not a string")
        return value

    def read(self, name: str) -> npt.NDArray[Any]:
        """The values of one tensor, in its shape, in memory of their own.

        float32 for F32, float16 for F16, the bit patterns as uint16 for BF16, and float32 for every quantised type.
        Raises ModelError when the type cannot be dequantised or the file got shorter since it was opened.
        """
        tensor = self.tensors[name]
        try:
            with open(self.path, "rb", buffering=0) as file:
                file.seek(tensor.offset)
                if tensor.type in _PLAIN:
                    plain = np.empty(tensor.shape, dtype=_PLAIN[tensor.type])
                    fill(file, self.path, name, plain.data.cast("B"), tensor.offset)
                    return plain
                return self._dequantised(file, tensor)
        except OSError as error:
            raise ModelError(f"{self.path}: cannot read tensor {name}: {error.strerror}") from error

    def _dequantised(self, file: Any, tensor: GGUFTensor) -> npt.NDArray[np.float32]:
        kind = GGMLQuantizationType[tensor.type]
        block, block_bytes = GGML_QUANT_SIZES[kind]
        columns = tensor.shape[-1]
        rows = math.prod(tensor.shape[:-1])
        row_bytes = columns // block * block_bytes
        out = np.empty((rows, columns), dtype=np.float32)
        step = max(1, _CHUNK_VALUES // columns)
        for start in range(0, rows, step):
            stop = min(rows, start + step)
            raw = np.empty((stop - start, row_bytes), dtype=np.uint8)
            fill(file, self.path, tensor.name, raw.data.cast("B"), tensor.offset + start * row_bytes)
            try:
                out[start:stop] = dequantize(raw, kind)
            except NotImplementedError:
                raise ModelError(
                    f"{self.path}: tensor {tensor.name} has type {tensor.type}, which cannot be dequantised"
                ) from None
        return out.reshape(tensor.shape)


def open_gguf(path: str) -> GGUFFile:
    """Read and check the header of the GGUF at `path`; no tensor is read.

    Raises ModelError, naming the file, the key or tensor, and the byte, for anything but a whole, consistent GGUF.
    """
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < 24:
                raise ModelError(f"{path}: {size} bytes is too short for a GGUF header (24 bytes)")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Walker(path, data, size).file()
    except OSError as error:
        raise ModelError(f"{path}: cannot open the model: {error.strerror}") from error


class _Walker:
    """One pass over the header. Every length is compared with what is left before a byte behind it is touched."""

    def __init__(self, path: str, data: mmap.mmap, size: int) -> None:
        self.path = path
        self.data = data
        self.size = size
        self.limit = min(size, MAX_HEADER_BYTES)
        self.pos = 0

    def file(self) -> GGUFFile:
        if self.data[:4] != MAGIC:
            self.fail(0, f"is no GGUF: it begins with {self.data[:4]!r}")
        (version,) = _U32.unpack_from(self.data, 4)
        if version not in VERSIONS:
            hint = " (a big-endian file)" if version & 0xFFFF == 0 and version else ""
            self.fail(4, f"GGUF version {version}{hint} is not supported, only {VERSIONS[0]} and {VERSIONS[1]}")
        self.pos = 8
        tensor_count = self.count("tensors", _MIN_TENSOR_BYTES)
        key_count = self.count("metadata keys", _MIN_KEY_BYTES)
        metadata = self.metadata(key_count)
        alignment = self.alignment(metadata)
        entries = [self.tensor_entry(i) for i in range(tensor_count)]
        base = -(-self.pos // alignment) * alignment
        return GGUFFile(self.path, self.size, version, metadata, self.place(entries, base, alignment))

    def metadata(self, count: int) -> dict[str, Value]:
        out: dict[str, Value] = {}
        for i in range(count):
            at = self.pos
            key = self.string(f"the name of metadata key {i}")
            if key in out:
                self.fail(at, f"metadata key {key} appears twice")
            out[key] = self.value(f"key {key}", self.u32(f"the type of key {key}"))
        return out

    def alignment(self, metadata: dict[str, Value]) -> int:
        value = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
        if not isinstance(value, int) or value <= 0 or value & (value - 1) or value > 1 << 20:
            raise ModelError(f"{self.path}: key general.alignment is {value!r}, not a power of two up to {1 << 20}")
        return value

    def value(self, what: str, kind: int) -> Value:
        at = self.pos
        if kind == GGUFValueType.STRING:
            return self.string(what)
        if kind == GGUFValueType.ARRAY:
            return self.array(what)
        if kind not in _SCALARS:
            self.fail(at - 4, f"{what} has unknown value type {kind}")
        form, _ = _SCALARS[kind]
        self.need(form.size, what)
        (scalar,) = form.unpack_from(self.data, self.pos)
        self.pos += form.size
        return scalar  # type: ignore[no-any-return]

    def array(self, what: str) -> list[str] | npt.NDArray[Any]:
        at = self.pos
        kind = self.u32(f"the item type of {what}")
        if kind != GGUFValueType.STRING and kind not in _SCALARS:
            self.fail(at, f"{what} is an array of unknown item type {kind}")
        form = None if kind == GGUFValueType.STRING else np.dtype(_SCALARS[kind][1])
        count = self.count(f"items of {what}", form.itemsize if form else 8, MAX_ARRAY_ITEMS)
        if form is None:
            return self.strings(what, count)
        # A copy: a view would keep the map of the whole file open.
        out = np.frombuffer(self.data, dtype=form, count=count, offset=self.pos).copy()
        self.pos += count * form.itemsize
        return out

    def strings(self, what: str, count: int) -> list[str]:
        # Spelled out instead of calling string(): with vocabularies and merges this is the loop start-up waits for.
        data, pos, limit, unpack = self.data, self.pos, self.limit, _U64.unpack_from
        out: list[str] = []
        for i in range(count):
            if pos + 8 > limit:
                self.fail(pos, f"item {i} of {what} begins past the end of the header")
            (length,) = unpack(data, pos)
            end = pos + 8 + length
            if end > limit or length > MAX_STRING_BYTES:
                self.fail(pos, f"item {i} of {what} says it has {length} bytes, {limit - pos - 8} are left")
            try:
                out.append(data[pos + 8 : end].decode())
            except UnicodeDecodeError:
                self.fail(pos + 8, f"item {i} of {what} is not UTF-8")
            pos = end
        self.pos = pos
        return out

    def tensor_entry(self, i: int) -> tuple[str, GGMLQuantizationType, tuple[int, ...], int, int]:
        at = self.pos
        name = self.string(f"the name of tensor {i}")
        rank = self.u32(f"the rank of tensor {name}")
        if not 1 <= rank <= MAX_DIMS:
            self.fail(self.pos - 4, f"tensor {name} has {rank} dimensions, not 1 to {MAX_DIMS}")
        dims = tuple(self.u64(f"the dimensions of tensor {name}") for _ in range(rank))
        if 0 in dims:
            self.fail(at, f"tensor {name} has an empty dimension: {list(dims)}")
        raw = self.u32(f"the type of tensor {name}")
        try:
            kind = GGMLQuantizationType(raw)
        except ValueError:
            self.fail(self.pos - 4, f"tensor {name} has unknown type {raw}")
        block, _ = GGML_QUANT_SIZES[kind]
        if dims[0] % block:
            self.fail(at, f"tensor {name} has rows of {dims[0]} values, no multiple of {kind.name}'s block, {block}")
        return name, kind, dims[::-1], self.u64(f"the offset of tensor {name}"), at

    def place(
        self, entries: list[tuple[str, GGMLQuantizationType, tuple[int, ...], int, int]], base: int, alignment: int
    ) -> dict[str, GGUFTensor]:
        out: dict[str, GGUFTensor] = {}
        for name, kind, shape, relative, at in entries:
            block, block_bytes = GGML_QUANT_SIZES[kind]
            nbytes = math.prod(shape) // block * block_bytes
            begin = base + relative
            if name in out:
                self.fail(at, f"tensor {name} appears twice")
            if relative % alignment:
                self.fail(at, f"tensor {name} has offset {relative}, not a multiple of the alignment {alignment}")
            if begin + nbytes > self.size:
                self.fail(
                    at,
                    f"tensor {name} {list(shape)} {kind.name} needs bytes {begin} to {begin + nbytes}, "
                    f"but the file ends at byte {self.size}",
                )
            out[name] = GGUFTensor(name, kind.name, shape, begin, nbytes)
        # Two tensors that share bytes are an offset or a shape that lies although it stays inside the file.
        ordered = sorted(out.values(), key=lambda tensor: tensor.offset)
        for left, right in pairwise(ordered):
            if left.offset + left.nbytes > right.offset:
                self.fail(right.offset, f"tensors {left.name} and {right.name} overlap")
        return out

    def count(self, what: str, item_bytes: int, most: int = MAX_ENTRIES) -> int:
        at = self.pos
        value = self.u64(f"the number of {what}")
        if value > most or value * item_bytes > self.limit - self.pos:
            self.fail(
                at,
                f"the file says it has {value} {what}, more than the remaining {self.limit - self.pos} "
                "bytes of the header can hold",
            )
        return value

    def string(self, what: str) -> str:
        at = self.pos
        length = self.u64(f"the length of {what}")
        if length > MAX_STRING_BYTES or length > self.limit - self.pos:
            self.fail(at, f"{what} says it has {length} bytes, {self.limit - self.pos} are left")
        raw = self.data[self.pos : self.pos + length]
        self.pos += length
        try:
            return raw.decode()
        except UnicodeDecodeError:
            self.fail(at + 8, f"{what} is not UTF-8")

    def u32(self, what: str) -> int:
        self.need(4, what)
        (value,) = _U32.unpack_from(self.data, self.pos)
        self.pos += 4
        return int(value)

    def u64(self, what: str) -> int:
        self.need(8, what)
        (value,) = _U64.unpack_from(self.data, self.pos)
        self.pos += 8
        return int(value)

    def need(self, count: int, what: str) -> None:
        if self.pos + count > self.limit:
            self.fail(self.pos, f"{what} runs past the end of the file ({self.size} bytes)")

    def fail(self, at: int, message: str) -> NoReturn:
        raise ModelError(f"{self.path}: {message} (at byte {at})")
