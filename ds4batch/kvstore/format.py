"""The bytes of a checkpoint file. Owns every offset and constant of the format; knows no files, no policy and no device.

A file is named `<SHA-1 of the text, 40 lower-case hex>.kv`, and all numbers in it are little endian:

    0         header, 48 bytes (`Header`)
    48        u32 text bytes T
    52        text
    52+T      payload, P bytes: u32 token count, u32 ids, u32 manifest bytes, manifest (JSON, see payload.py),
              the arrays, each at a multiple of 64 from the start of the file, and last a `Tail` of 64 bytes, likewise aligned
    52+T+P    trailer, whatever the caller hung on (see trailer.py); it may be absent, and damage to it costs nothing else

Every byte is under a checksum, CRC-32 throughout: it finds any damage of up to 32 consecutive bits, and zlib computes it at
several GB/s where SHA-1 and BLAKE2 stay near 1 to 2. The tail has one over text, tokens, manifest and arrays, one over the
header, one over the trailer, and one over itself.

The header changes in place (hits, last use), and a process may die between two writes. So the tail holds two header checksums, of
the header that is and of the one that was, and is written first: whichever header the crash left, one of them fits.
"""

from __future__ import annotations

import struct
import zlib
from enum import Enum, IntEnum
from typing import NamedTuple

MAGIC = b"KVC"
VERSION = 1
PAYLOAD_ABI = 2
ALIGN = 64
SUFFIX = ".kv"
HEAD_BYTES = 52
TAIL_BYTES = 64
MAX_TEXT = (1 << 32) - 1

FLAG_TOOL_MAP = 1  # the trailer is a map of tool calls
FLAG_RESPONSES_KEY = 2  # the text is what a Responses client sees
FLAG_THINKING_KEY = 4  # the text is what a client that drops reasoning sees
FLAG_TITLE = 8  # the trailer is a session's title
TRAILER_FLAGS = FLAG_TOOL_MAP | FLAG_TITLE

_HEAD = struct.Struct("<3sBBBBBIIIB3sQQQI")
_TAIL = struct.Struct("<4sIIIQI16s16sI")
_TAIL_MAGIC = b"SEAL"
_U32 = 0xFFFFFFFF


class Reason(IntEnum):
    """Why a checkpoint was written."""

    UNKNOWN = 0
    COLD = 1
    CONTINUED = 2
    EVICT = 3
    SHUTDOWN = 4
    AGENT_SYSTEM = 5
    AGENT_SESSION = 6


class Verdict(Enum):
    """Why a file is not used, and with it what happens to it."""

    CORRUPT = "corrupt"  # truncated, damaged, or not what its name says: removed
    FUTURE = "future"  # another version of the format: left for whoever writes it
    FOREIGN = "foreign"  # another model, or a larger context: left for its owner
    UNREADABLE = "unreadable"  # the system does not let us read it: left
    BUSY = "busy"  # another process holds its lock: left, and tried again
    VANISHED = "vanished"  # another process removed it


class BadFile(Exception):
    """A file that must not be used. The message says what is wrong, without the path."""

    def __init__(self, verdict: Verdict, message: str) -> None:
        super().__init__(message)
        self.verdict = verdict


class Header(NamedTuple):
    """What stands in front of a checkpoint, the length of its text included."""

    quant_bits: int
    reason: Reason
    flags: int
    model_id: int
    tokens: int
    hits: int
    ctx: int  # of the writer
    created: int  # Unix seconds
    last_used: int  # Unix seconds
    payload_bytes: int
    text_bytes: int

    @property
    def payload_start(self) -> int:
        """Offset of the payload."""
        return HEAD_BYTES + self.text_bytes

    @property
    def payload_end(self) -> int:
        """Offset behind the payload, where the trailer begins."""
        return self.payload_start + self.payload_bytes

    @property
    def tail_start(self) -> int:
        """Offset of the tail."""
        return self.payload_end - TAIL_BYTES

    def pack(self) -> bytes:
        """52 bytes."""
        return _HEAD.pack(
            MAGIC,
            VERSION,
            self.quant_bits,
            self.reason,
            self.flags,
            self.model_id,
            self.tokens,
            min(self.hits, _U32),
            self.ctx,
            PAYLOAD_ABI,
            bytes(3),
            self.created,
            self.last_used,
            self.payload_bytes,
            self.text_bytes,
        )


def parse_header(data: bytes, file_bytes: int) -> Header:
    """The header in the first 52 bytes of a file of `file_bytes`. Raises BadFile."""
    if file_bytes == 0:
        raise BadFile(Verdict.CORRUPT, "the file is empty")
    if len(data) < HEAD_BYTES:
        raise BadFile(Verdict.CORRUPT, f"truncated: {len(data)} bytes, the header alone has {HEAD_BYTES}")
    magic, version, quant, reason, flags, model_id, tokens, hits, ctx, abi, zero, created, last_used, payload, text = (
        _HEAD.unpack(data[:HEAD_BYTES])
    )
    if magic != MAGIC:
        raise BadFile(Verdict.CORRUPT, f"begins with {magic!r}, not {MAGIC!r}")
    if version != VERSION:
        raise BadFile(Verdict.FUTURE, f"format version {version}, this server knows {VERSION}")
    if abi != PAYLOAD_ABI:
        raise BadFile(Verdict.FUTURE, f"payload version {abi}, this server knows {PAYLOAD_ABI}")
    if not tokens:
        raise BadFile(Verdict.CORRUPT, "header: no tokens")
    if not quant:
        raise BadFile(Verdict.CORRUPT, "header: no quantisation bits")
    if any(zero):
        raise BadFile(Verdict.CORRUPT, "header: reserved bytes are not zero")
    if payload < 8 + 4 * tokens + TAIL_BYTES:
        raise BadFile(Verdict.CORRUPT, f"header: a payload of {payload} bytes cannot hold {tokens} tokens")
    known = Reason(reason) if reason <= max(Reason) else Reason.UNKNOWN
    header = Header(quant, known, flags, model_id, tokens, hits, ctx, created, last_used, payload, text)
    if header.payload_end > file_bytes:
        raise BadFile(Verdict.CORRUPT, f"truncated: {file_bytes} bytes of {header.payload_end}")
    if header.payload_end % ALIGN:
        raise BadFile(Verdict.CORRUPT, "header: the payload does not end on its alignment")
    return header


class Tail(NamedTuple):
    """The last 64 bytes of a payload: what everything else must add up to."""

    body_crc: int  # from the text length to the tail
    was_crc: int  # of the header before its last change
    header_crc: int  # of the 52 header bytes
    trailer_bytes: int
    trailer_crc: int
    fingerprint: bytes  # 16 bytes: whose state this is, see identity.py

    def pack(self) -> bytes:
        """64 bytes."""
        front = _TAIL.pack(_TAIL_MAGIC, *self, bytes(16), 0)[:-4]
        return front + struct.pack("<I", zlib.crc32(front))


def parse_tail(data: bytes, head: bytes) -> Tail:
    """The tail in `data`, which must fit the 52 header bytes `head`. Raises BadFile."""
    if len(data) < TAIL_BYTES:
        raise BadFile(Verdict.CORRUPT, "truncated: the tail is missing")
    magic, *values, _, crc = _TAIL.unpack(data)
    if magic != _TAIL_MAGIC or crc != zlib.crc32(data[:-4]):
        raise BadFile(Verdict.CORRUPT, "the tail is damaged")
    tail = Tail(*values)
    if zlib.crc32(head) not in (tail.header_crc, tail.was_crc):
        raise BadFile(Verdict.CORRUPT, "the header is damaged")
    return tail


def padding(offset: int) -> int:
    """Bytes from `offset` to the next multiple of 64."""
    return -offset % ALIGN
