"""Names in a checkpoint directory: which files are checkpoints, and which are what a crash left of a write."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ds4batch.kvstore.disk import Disk

_CHECKPOINT = re.compile(r"[0-9a-fA-F]{40}\.kv")
_LEFTOVER = re.compile(r"[0-9a-fA-F]{40}\.kv\.tmp\..+")


class Signature(NamedTuple):
    """Tells one state of a file from another without opening it."""

    inode: int
    size: int
    mtime_ns: int


def signature(path: Path) -> Signature | None:
    """The file's signature, or None when it cannot be asked for."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return Signature(status.st_ino, status.st_size, status.st_mtime_ns)


def checkpoints(directory: Path) -> Iterator[tuple[str, Signature]]:
    """File names of the checkpoints in a directory, in no order. Files that go meanwhile are left out. Raises OSError."""
    with os.scandir(directory) as found:
        for file in found:
            if _CHECKPOINT.fullmatch(file.name):
                with contextlib.suppress(OSError):
                    status = file.stat()
                    yield file.name, Signature(status.st_ino, status.st_size, status.st_mtime_ns)


def remove_leftovers(disk: Disk, directory: Path) -> int:
    """Remove temporary files that nobody is writing any more, and say how many. Raises OSError.

    A writer holds the lock of its file until the file has its name, and the system takes the lock from a process that dies.
    """
    with os.scandir(directory) as found:
        names = [file.name for file in found if _LEFTOVER.fullmatch(file.name)]
    removed = 0
    for name in names:
        with contextlib.suppress(OSError):
            fd = os.open(directory / name, os.O_RDWR | os.O_CLOEXEC)
            try:
                if disk.try_lock(fd, exclusive=True):
                    disk.unlink(directory / name)
                    removed += 1
            finally:
                os.close(fd)
    return removed
