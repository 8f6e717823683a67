"""A file that grows by lines, written by a thread of its own: a slow or full disk delays and fails nobody.

What cannot be written is lost and counted; the process log says so once, and once more when the file takes lines again.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

log = logging.getLogger(__name__)

MAX_PENDING_BYTES = 256 << 20
"""What may wait for a slow disk before lines are lost."""


class LineFile:
    """Appends to one file, made with `mode` where there is none. Raises OSError when it cannot be opened."""

    def __init__(self, path: str, mode: int, name: str) -> None:
        self._path = os.path.abspath(path)
        self._mode = mode
        self._name = name
        self._fd = self._open()
        self._torn = False  # the last line was cut short
        self._failing = False
        self._lost = 0
        self._pending = 0
        self._lock = threading.Lock()
        self._closed = False
        self._writer = ThreadPoolExecutor(1, thread_name_prefix=name)

    def add(self, make: Callable[[], bytes], size: int) -> None:
        """Write the line that `make` gives, without its end; returns at once. `make` runs in the writer; `size` is about how
        many bytes it and the line hold.
        """
        with self._lock:
            full = self._pending + size > MAX_PENDING_BYTES
            self._pending += 0 if full else size
        if full or self._closed:
            self._writer_failed("it is closed" if self._closed else "lines come faster than it can be written")
            return
        self._writer.submit(self._write, make, size)

    def reopen(self) -> None:
        """Open the path anew, behind what is to be written: it may have been renamed. Keeps the old file when it cannot be."""
        if not self._closed:
            self._writer.submit(self._reopen)

    def close(self) -> None:
        """Write what is left."""
        self._closed = True
        self._writer.shutdown(wait=True)
        os.close(self._fd)

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, self._mode)

    def _reopen(self) -> None:
        try:
            fd = self._open()
        except OSError as error:
            log.error("%s cannot be opened anew, the old file is written: %s", self._name, error)
            return
        os.close(self._fd)
        self._fd, self._torn = fd, False
        log.info("%s: %s was opened anew", self._name, self._path)

    def _write(self, make: Callable[[], bytes], size: int) -> None:
        try:
            line = make() + b"\n"
            self._put(b"\n" + line if self._torn else line)
        except OSError as error:
            self._writer_failed(str(error))
        except Exception:  # one line that cannot be made must not be silent, nor end the others
            log.exception("%s: a line was lost", self._name)
        else:
            self._writer_works()
        finally:
            with self._lock:
                self._pending -= size

    def _put(self, data: bytes) -> None:
        """A full disk may take the beginning of a line: it is ended before the next one."""
        view = memoryview(data)
        try:
            while view:
                written = os.write(self._fd, view)
                view = view[written:]
        except OSError:
            self._torn = self._torn or len(view) < len(data)
            raise
        self._torn = False

    def _writer_failed(self, why: str) -> None:
        with self._lock:
            self._lost += 1
            begins, self._failing = not self._failing, True
        if begins:
            log.error("%s: %s is not written, lines are lost: %s", self._name, self._path, why)

    def _writer_works(self) -> None:
        with self._lock:
            ends, lost = self._failing, self._lost
            self._failing, self._lost = False, 0
        if ends:
            log.warning("%s: %s is written again, %d lines were lost", self._name, self._path, lost)
