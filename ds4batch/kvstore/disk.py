"""Every system call of the store, in one class, so that a test can cut the sequence anywhere.

Knows nothing of checkpoints. Errors are OSError, as the system gives them.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_LOCK_TRIES = 40
_LOCK_PAUSE = 0.025  # seconds; together one second


class Disk:
    """The file system."""

    def make_directory(self, path: Path) -> None:
        """Create a directory, private to its owner, unless it is there. What is stored in it are conversations."""
        path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def create(self, path: Path) -> int:
        """A new file, private to its owner and locked by us; FileExistsError when the name is taken."""
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            self.try_lock(fd, exclusive=True)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def write(self, fd: int, data: bytes | memoryview) -> int:
        """One write, which may be short."""
        return os.write(fd, data)

    def write_all(self, fd: int, data: bytes | memoryview) -> None:
        """All of `data`. A write that takes nothing is a full disk."""
        view = memoryview(data)
        while view:
            count = self.write(fd, view)
            if count <= 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            view = view[count:]

    def write_at(self, fd: int, data: bytes, offset: int) -> None:
        """All of `data` in one call. Meant for a few bytes inside one sector."""
        if os.pwrite(fd, data, offset) != len(data):
            raise OSError(errno.EIO, "short write")

    def truncate(self, fd: int, size: int) -> None:
        """Cut the file."""
        os.ftruncate(fd, size)

    def sync(self, fd: int) -> None:
        """The file's contents are on the disk afterwards."""
        os.fsync(fd)

    def sync_directory(self, path: Path) -> None:
        """The directory's names are on the disk afterwards."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, source: Path, target: Path) -> None:
        """Give a file its name; a file of that name is replaced."""
        os.rename(source, target)

    def unlink(self, path: Path) -> None:
        """Remove a name. Whoever has the file open keeps reading it."""
        os.unlink(path)

    def free_bytes(self, path: Path) -> int:
        """Bytes we may still write on the file system of `path`."""
        status = os.statvfs(path)
        return status.f_bavail * status.f_frsize

    def try_lock(self, fd: int, *, exclusive: bool) -> bool:
        """Take the file's advisory lock, or say False when another open file holds it. A file system without locks says True."""
        try:
            fcntl.flock(fd, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
        return True

    @contextmanager
    def locked(self, fd: int, *, exclusive: bool) -> Iterator[bool]:
        """The file's lock, waited for at most a second: whoever changes a file in place holds it for a few writes only.

        Yields whether we have it.
        """
        held = False
        for _ in range(_LOCK_TRIES):
            held = self.try_lock(fd, exclusive=exclusive)
            if held:
                break
            time.sleep(_LOCK_PAUSE)
        try:
            yield held
        finally:
            if held:
                with suppress(OSError):  # a file system without locks has none to give back
                    fcntl.flock(fd, fcntl.LOCK_UN)
