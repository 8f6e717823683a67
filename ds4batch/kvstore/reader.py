"""Reads a checkpoint file, and believes nothing in it before its checksum is right.

Checksums are taken with plain reads, so that a sector that cannot be read is an error here and not a fault in whoever uses the state;
the arrays are then views of a memory map of the same, by now cached, pages. Removes nothing and changes nothing.
"""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ds4batch.kvstore.disk import Disk
from ds4batch.kvstore.format import (
    HEAD_BYTES,
    TAIL_BYTES,
    BadFile,
    Header,
    Tail,
    Verdict,
    parse_header,
    parse_tail,
)
from ds4batch.kvstore.index import name_in
from ds4batch.kvstore.payload import CARRIERS, ArraySpec, read_layout

_PIECE = 4 << 20


class Head(NamedTuple):
    """What a listing knows of a file: read without its payload."""

    header: Header
    tail: Tail
    file_bytes: int


class Contents(NamedTuple):
    """A checkpoint whose every byte was verified, but for a trailer that is damaged.

    The arrays are read-only views of the file's pages in their carrier types (payload.CARRIERS); they stay good when the file is
    removed, and the map goes when the last of them does.
    """

    head: Head
    text: bytes
    tokens: np.ndarray  # u32 [tokens]
    arrays: dict[tuple[str, int], np.ndarray]  # by name and position
    specs: tuple[ArraySpec, ...]
    trailer: bytes | None  # b"" where there is none, None where it is damaged: the state is good without it


Check = Callable[[Head], None]
"""Raises BadFile for a head that must not be used, before anything else is read."""


def read_head(fd: int) -> Head:
    """Header and tail of an open file. The caller holds its lock. Raises BadFile and OSError."""
    size = os.fstat(fd).st_size
    head = os.pread(fd, HEAD_BYTES, 0)
    header = parse_header(head, size)
    tail = parse_tail(os.pread(fd, TAIL_BYTES, header.tail_start), head)
    return Head(header, tail, size)


def read_trailer(fd: int, head: Head) -> bytes | None:
    """The trailer of an open file, b"" when there is none, None when it is damaged or cannot be read. The caller holds its lock."""
    start, size = head.header.payload_end, head.tail.trailer_bytes
    if start + size > head.file_bytes:
        return None
    try:
        trailer = _read_exactly(fd, size, start)
    except (BadFile, OSError):
        return None
    return trailer if zlib.crc32(trailer) == head.tail.trailer_crc else None


def peek(disk: Disk, path: Path, *, trailer: bool = False, check: Check | None = None) -> tuple[Head, bytes | None]:
    """Head of a file, and its trailer if asked for, as in `Contents`. Raises BadFile alone."""
    fd = _open(path)
    try:
        return _front(disk, fd, trailer, check)
    except OSError as error:
        raise _unreadable(error) from None
    finally:
        os.close(fd)


def read_text(path: Path, header: Header) -> bytes:
    """The text of a file whose head was read, unverified but for its name. Raises BadFile alone."""
    fd = _open(path)
    try:
        text = _read_exactly(fd, header.text_bytes, HEAD_BYTES)
    except OSError as error:
        raise _unreadable(error) from None
    finally:
        os.close(fd)
    _check_name(path, text)
    return text


def read_checkpoint(disk: Disk, path: Path, check: Check | None = None) -> Contents:
    """Verify a file to its last byte and map it. A damaged trailer is left out. Raises BadFile alone."""
    fd = _open(path)
    try:
        head, trailer = _front(disk, fd, True, check)
        header = head.header
        text = _read_exactly(fd, header.text_bytes, HEAD_BYTES)
        _check_name(path, text)
        if _body_crc(fd, header.tail_start) != head.tail.body_crc:
            raise BadFile(Verdict.CORRUPT, "the checksum is wrong")
        mapped = memoryview(mmap.mmap(fd, header.payload_end, access=mmap.ACCESS_READ))
    except OSError as error:
        raise _unreadable(error) from None
    finally:
        os.close(fd)
    tokens, layout = read_layout(mapped[header.payload_start :], header.payload_start)
    if len(tokens) != header.tokens:
        raise BadFile(Verdict.CORRUPT, f"the header says {header.tokens} tokens, the payload {len(tokens)}")
    arrays = {}
    for spec, start in ((placed.spec, placed.start) for placed in layout.arrays):
        flat = np.frombuffer(mapped[start : start + spec.size], CARRIERS[spec.dtype])
        arrays[spec.name, spec.position] = flat.reshape(spec.shape)
    return Contents(head, text, tokens, arrays, tuple(p.spec for p in layout.arrays), trailer)


def name_of(text: bytes) -> str:
    """The name, without its suffix, under which a text is stored."""
    return hashlib.sha1(text, usedforsecurity=False).hexdigest()


def _front(disk: Disk, fd: int, trailer: bool, check: Check | None) -> tuple[Head, bytes | None]:
    with disk.locked(fd, exclusive=False) as held:
        if not held:
            raise BadFile(Verdict.BUSY, "another process holds it")
        head = read_head(fd)
        if check is not None:
            check(head)
        return head, read_trailer(fd, head) if trailer else b""


def _body_crc(fd: int, end: int) -> int:
    """CRC-32 from the length of the text to `end`."""
    buffer = memoryview(bytearray(min(_PIECE, end)))
    crc, at = 0, HEAD_BYTES - 4
    while at < end:
        count = os.preadv(fd, [buffer[: end - at]], at)
        if not count:
            raise BadFile(Verdict.CORRUPT, "truncated while it was read")
        crc = zlib.crc32(buffer[:count], crc)
        at += count
    return crc


def _read_exactly(fd: int, count: int, offset: int) -> bytes:
    """`count` bytes, which the file was seen to have."""
    data = os.pread(fd, count, offset)
    while len(data) < count:
        more = os.pread(fd, count - len(data), offset + len(data))
        if not more:
            raise BadFile(Verdict.CORRUPT, "truncated while it was read")
        data += more
    return data


def _check_name(path: Path, text: bytes) -> None:
    if name_of(text) != name_in(path.name):
        raise BadFile(Verdict.CORRUPT, "the text is not the one its name stands for")


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise _unreadable(error) from None


def _unreadable(error: OSError) -> BadFile:
    gone = error.errno in (errno.ENOENT, errno.ENOTDIR)
    return BadFile(Verdict.VANISHED if gone else Verdict.UNREADABLE, error.strerror or str(error))
