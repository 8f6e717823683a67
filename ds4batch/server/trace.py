"""The trace file: one JSON line a request, written by a thread of its own so that a slow disk delays nobody."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

log = logging.getLogger(__name__)


class Trace:
    """Appends to one file. Raises OSError when it cannot be opened."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - open as long as the server runs
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="trace")

    def add(self, record: dict[str, Any], later: Callable[[], dict[str, Any]] | None = None) -> None:
        """Write one record; returns at once. What takes its time to find out is told by `later`, which the writer calls."""
        self._writer.submit(self._write, record, later)

    def close(self) -> None:
        """Write what is left."""
        self._writer.shutdown(wait=True)
        self._file.close()

    def _write(self, record: dict[str, Any], later: Callable[[], dict[str, Any]] | None) -> None:
        try:
            if later is not None:
                record = {**record, **later()}
            self._file.write(msgspec.json.encode(record) + b"\n")
        except OSError as error:
            log.error("the trace file %s cannot be written: %s", self._path, error)
