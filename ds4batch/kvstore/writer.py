"""Puts a checkpoint file into its directory, whole or not at all, and changes one in place.

Owns the order of the system calls. It decides nothing: not whether to store, nor what makes room.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ds4batch.kvstore.disk import Disk
from ds4batch.kvstore.format import HEAD_BYTES, SUFFIX, TRAILER_FLAGS, BadFile, Header, Reason, Tail, Verdict
from ds4batch.kvstore.payload import Layout, StateArray
from ds4batch.kvstore.reader import read_head

TEMPORARY = SUFFIX + ".tmp."
_PIECE = 4 << 20  # bytes written at once: one system call's cost vanishes, and other threads get their turn


class Content(NamedTuple):
    """All that goes into a file."""

    header: Header
    fingerprint: bytes
    text: bytes
    layout: Layout
    arrays: Sequence[StateArray]
    trailer: bytes


def write_checkpoint(disk: Disk, directory: Path, name: str, content: Content) -> None:
    """Write `<name>.kv`: a temporary file, synced, renamed, and the directory synced.

    Raises OSError, and whatever an array's `chunks` raises; the temporary file is gone then. The name holds the old file or the
    whole new one at any moment.
    """
    temporary = directory / f"{name}{TEMPORARY}{os.getpid()}.{secrets.token_hex(4)}"
    fd = disk.create(temporary)
    try:
        _write_content(disk, fd, content)
        disk.sync(fd)
        disk.rename(temporary, directory / f"{name}{SUFFIX}")
    except BaseException:
        with contextlib.suppress(OSError):
            disk.unlink(temporary)
        raise
    finally:
        os.close(fd)  # not before the rename: our lock tells others that the file is no leftover
    disk.sync_directory(directory)


def _write_content(disk: Disk, fd: int, content: Content) -> None:
    header, layout = content.header, content.layout
    head = header.pack()
    body = _Body(disk, fd, head)
    body.put(content.text)
    body.put(layout.front)
    for array, placed in zip(content.arrays, layout.arrays, strict=True):
        body.put(bytes(placed.start - body.at))
        for chunk in array.chunks():
            body.put(chunk)
        if body.at != placed.start + placed.spec.size:
            raise ValueError(f"array {placed.spec.name}: {body.at - placed.start} bytes came, its shape has {placed.spec.size}")
    body.put(bytes(header.tail_start - body.at))
    head_crc = zlib.crc32(head)
    tail = Tail(body.crc, head_crc, head_crc, len(content.trailer), zlib.crc32(content.trailer), content.fingerprint)
    disk.write_all(fd, tail.pack() + content.trailer)


class _Body:
    """Writes what the body checksum covers, from the length of the text on."""

    def __init__(self, disk: Disk, fd: int, head: bytes) -> None:
        self._disk = disk
        self._fd = fd
        self.at = HEAD_BYTES
        self.crc = zlib.crc32(head[-4:])
        disk.write_all(fd, head)

    def put(self, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), _PIECE):
            piece = view[start : start + _PIECE]
            self.crc = zlib.crc32(piece, self.crc)
            self._disk.write_all(self._fd, piece)
        self.at += len(view)


def count_use(disk: Disk, path: Path, now: int) -> Header:
    """One hit more, and `now` as the last use. Raises OSError and BadFile."""
    with _Opened(disk, path) as file:
        file.change(file.header._replace(hits=file.header.hits + 1, last_used=now))
        return file.header


def renew(disk: Disk, path: Path, trailer: bytes, flags: int, used: int, reason: Reason | None = None) -> Header:
    """Another trailer behind the same state, `used` as the last use, and another reason if one is given. Raises OSError and BadFile.

    A crash leaves the old trailer, the new one, or none; the state is good in all three cases.
    """
    with _Opened(disk, path) as file:
        new = file.header._replace(last_used=used, reason=file.header.reason if reason is None else reason)
        if trailer == file.trailer() and flags == new.flags:
            file.change(new)
            return file.header
        file.change(new._replace(flags=new.flags & ~TRAILER_FLAGS), b"")
        disk.truncate(file.fd, new.payload_end)
        os.lseek(file.fd, new.payload_end, os.SEEK_SET)
        disk.write_all(file.fd, trailer)
        disk.sync(file.fd)
        file.change(file.header._replace(flags=flags), trailer)
        return file.header


class _Opened:
    """A checkpoint open for change, under its exclusive lock."""

    def __init__(self, disk: Disk, path: Path) -> None:
        self._disk = disk
        self._path = path

    def __enter__(self) -> _Opened:
        self._stack = contextlib.ExitStack()
        self.fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        self._stack.callback(os.close, self.fd)
        try:
            if not self._stack.enter_context(self._disk.locked(self.fd, exclusive=True)):
                raise BadFile(Verdict.BUSY, "another process holds it")
            head = read_head(self.fd)
        except BaseException:
            self._stack.close()
            raise
        self.header, self.tail, self._size = head.header, head.tail, head.file_bytes
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def trailer(self) -> bytes:
        """The trailer as it is, damaged or not."""
        there = self._size - self.header.payload_end
        return os.pread(self.fd, min(self.tail.trailer_bytes, there), self.header.payload_end)

    def change(self, header: Header, trailer: bytes | None = None) -> None:
        """Give the file another header, and a checksum for `trailer` when that changes too. The tail goes first; see format.py."""
        was, now = self.header.pack(), header.pack()
        tail = self.tail._replace(was_crc=zlib.crc32(was), header_crc=zlib.crc32(now))
        if trailer is not None:
            tail = tail._replace(trailer_bytes=len(trailer), trailer_crc=zlib.crc32(trailer))
        self._disk.write_at(self.fd, tail.pack(), header.tail_start)
        self._disk.sync(self.fd)  # else a power failure may keep the header alone
        self._disk.write_at(self.fd, now, 0)
        self.header, self.tail = header, tail
