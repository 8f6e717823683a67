"""The trailer that maps ids of calls to the text they were sampled as. Bytes only: which calls belong to a checkpoint is not decided here.

Little endian: `KTM`, u8 version 1, u32 number of entries; an entry is u32 bytes of the id, u32 bytes of the text, id, text, both UTF-8.
A turn with several calls is one text under several ids. A checkpoint without calls has no trailer.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import NamedTuple

MAGIC = b"KTM\x01"
MAX_ID = 256  # bytes
MAX_TEXT = 512 << 20  # bytes
_COUNT_PER_ID = 4  # a map of more than so many times the ids that are kept is no map of ours
_HEAD = struct.Struct("<4sI")
_ENTRY = struct.Struct("<II")


class ToolMap(NamedTuple):
    """What a trailer says."""

    texts: dict[str, str]  # by id, in order; equal texts are one object
    problem: str = ""  # why it was not read to its end; what came before is good


def pack_tool_map(calls: Iterable[tuple[str, str]]) -> bytes:
    """The trailer for ids and their texts; b"" for none. What a reader would refuse is left out."""
    parts, count = [b""], 0
    for call_id, text in calls:
        name, body = call_id.encode("utf-8", "replace"), text.encode("utf-8", "replace")
        if 1 <= len(name) <= MAX_ID and 1 <= len(body) <= MAX_TEXT:
            parts += [_ENTRY.pack(len(name), len(body)), name, body]
            count += 1
    parts[0] = _HEAD.pack(MAGIC, count)
    return b"".join(parts) if count else b""


def read_tool_map(data: bytes, most: int) -> ToolMap:
    """The calls of a trailer, whatever it is. `most` is how many ids the caller keeps.

    Takes no more memory than `data`, whatever sizes it states. Of an id that comes twice the last text counts.
    """
    if len(data) < _HEAD.size or not data.startswith(MAGIC):
        return ToolMap({}, "it is no map of calls")
    count = _HEAD.unpack_from(data)[1]
    if count > _COUNT_PER_ID * most:
        return ToolMap({}, f"it states {count} calls")
    texts: dict[str, str] = {}
    same: dict[str, str] = {}
    at = _HEAD.size
    for i in range(count):
        if at + _ENTRY.size > len(data):
            return ToolMap(texts, f"it ends before call {i} of {count}")
        id_bytes, text_bytes = _ENTRY.unpack_from(data, at)
        middle = at + _ENTRY.size + id_bytes
        at = middle + text_bytes
        if not (1 <= id_bytes <= MAX_ID and 1 <= text_bytes <= MAX_TEXT and at <= len(data)):
            return ToolMap(texts, f"call {i} of {count} states sizes that cannot be")
        try:
            call_id, text = data[middle - id_bytes : middle].decode(), data[middle:at].decode()
        except UnicodeDecodeError:
            return ToolMap(texts, f"call {i} of {count} is no UTF-8")
        texts[call_id] = same.setdefault(text, text)
    return ToolMap(texts)
