"""What a payload holds: the exact tokens, and named arrays of state, each of one of two kinds.

Owns the manifest and the places of the arrays. It moves no tensors (tensors.py does) and reads no files (reader.py does).

- `append`: state that grows by one row a token, keys and values above all: [layers, kv_heads, tokens, head_dim]. Axis 2 is exactly
  the checkpoint's tokens; the layout knows nothing of pages, so a server with another page size reads it as well.
- `fixed`: state of a constant size at one position: a recurrent state, a convolution's tail, the logits of the last token. Any
  shape. The same name may occur at several positions: the end, and saved points a session can return to.

A kind's layout has a version, written with it. Arrays are in C order, little endian. Types that numpy lacks travel as
unsigned integers of their width.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np

from ds4batch.kvstore.format import TAIL_BYTES, BadFile, Verdict, padding

Kind = Literal["append/1", "fixed/1"]
APPEND: Kind = "append/1"
FIXED: Kind = "fixed/1"
TOKEN_AXIS = 2

CARRIERS: dict[str, np.dtype[Any]] = {
    "f32": np.dtype("<f4"),
    "f16": np.dtype("<f2"),
    "bf16": np.dtype("<u2"),
    "f8_e4m3": np.dtype("u1"),
    "f8_e5m2": np.dtype("u1"),
    "u8": np.dtype("u1"),
    "i8": np.dtype("i1"),
    "i32": np.dtype("<i4"),
    "i64": np.dtype("<i8"),
}
"""Element types by name, with the numpy type that carries their bits."""

Buffer = bytes | bytearray | memoryview


class ArraySpec(msgspec.Struct, frozen=True):
    """One array of state, without its bytes."""

    name: str
    kind: str
    dtype: str  # a key of CARRIERS
    shape: tuple[int, ...]
    position: int  # tokens the state stands at; the checkpoint's length for `append`

    @property
    def size(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * CARRIERS[self.dtype].itemsize


@dataclass(frozen=True)
class StateArray:
    """One array to be written. `chunks()` gives its bytes in order, in pieces of any size; it is called once, by the writer.

    So a device can copy a large state out layer by layer, and nobody needs the whole of it in host memory.
    """

    spec: ArraySpec
    chunks: Callable[[], Iterable[Buffer]]


def state_array(name: str, array: np.ndarray, dtype: str, *, kind: Kind, position: int) -> StateArray:
    """A StateArray over a numpy array of `dtype`'s carrier. Raises ValueError when the array's type is another."""
    carrier = CARRIERS.get(dtype)
    if carrier is None or array.dtype != carrier:
        raise ValueError(f"{name}: a numpy {array.dtype} array does not carry {dtype}")
    spec = ArraySpec(name, kind, dtype, tuple(array.shape), position)
    return StateArray(spec, lambda: [np.ascontiguousarray(array).reshape(-1).view(np.uint8).data])


class _Manifest(msgspec.Struct, frozen=True):
    arrays: list[ArraySpec]


_decoder = msgspec.json.Decoder(_Manifest)


class Placed(msgspec.Struct, frozen=True):
    """Where an array lies: `start` is its offset in the file."""

    spec: ArraySpec
    start: int


class Layout(msgspec.Struct, frozen=True):
    """A payload's front (tokens and manifest), its arrays' places, and its size. All offsets count from the start of the file."""

    front: bytes
    arrays: tuple[Placed, ...]
    start: int
    end: int

    @property
    def size(self) -> int:
        """Bytes of the payload, front, padding and tail included."""
        return self.end - self.start


def lay_out(start: int, tokens: Sequence[int] | np.ndarray, specs: Sequence[ArraySpec]) -> Layout:
    """The payload that begins at offset `start`. Raises ValueError for arrays that do not belong to `tokens`."""
    ids = np.asarray(tokens, dtype="<u4")
    problem = _problem(specs, len(ids))
    if problem:
        raise ValueError(problem)
    manifest = msgspec.json.encode(_Manifest(list(specs)))
    front = struct.pack("<I", len(ids)) + ids.tobytes() + struct.pack("<I", len(manifest)) + manifest
    return _place(front, start, specs)


def _place(front: bytes, start: int, specs: Sequence[ArraySpec]) -> Layout:
    at = start + len(front)
    placed = []
    for spec in specs:
        at += padding(at)
        placed.append(Placed(spec, at))
        at += spec.size
    return Layout(front, tuple(placed), start, at + padding(at) + TAIL_BYTES)


def read_layout(body: memoryview, start: int) -> tuple[np.ndarray, Layout]:
    """Tokens (u32) and layout of the payload `body`, which begins at offset `start`. Raises BadFile."""
    (count,) = struct.unpack_from("<I", body, 0)
    at = 4 + 4 * count
    if at + 4 > len(body):
        raise BadFile(Verdict.CORRUPT, f"payload: {count} tokens do not fit")
    (size,) = struct.unpack_from("<I", body, at)
    if at + 4 + size > len(body):
        raise BadFile(Verdict.CORRUPT, "payload: the manifest does not fit")
    try:
        specs = _decoder.decode(body[at + 4 : at + 4 + size]).arrays
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadFile(Verdict.CORRUPT, f"payload: manifest: {error}") from None
    for spec in specs:
        if spec.kind not in (APPEND, FIXED) or spec.dtype not in CARRIERS:
            raise BadFile(Verdict.FUTURE, f"payload: array {spec.name}: {spec.kind} of {spec.dtype} is not known here")
    problem = _problem(specs, count)
    if problem:
        raise BadFile(Verdict.CORRUPT, f"payload: {problem}")
    layout = _place(bytes(body[: at + 4 + size]), start, specs)
    if layout.size != len(body):
        raise BadFile(Verdict.CORRUPT, f"payload: {len(body)} bytes, its arrays need {layout.size}")
    return np.frombuffer(body, "<u4", count, 4), layout


def _problem(specs: Sequence[ArraySpec], tokens: int) -> str:
    """What is wrong with arrays that claim to be the state after `tokens` tokens, or ""."""
    seen: set[tuple[str, int]] = set()
    for spec in specs:
        if (spec.name, spec.position) in seen:
            return f"array {spec.name} occurs twice at position {spec.position}"
        seen.add((spec.name, spec.position))
        if any(n < 0 for n in spec.shape):
            return f"array {spec.name}: shape {spec.shape}"
        if not 0 < spec.position <= tokens:
            return f"array {spec.name}: position {spec.position} is not in 1..{tokens}"
        if spec.kind == APPEND and (len(spec.shape) != 4 or spec.shape[TOKEN_AXIS] != tokens or spec.position != tokens):
            return f"array {spec.name}: shape {spec.shape} at position {spec.position} is not that of {tokens} tokens"
    return ""
