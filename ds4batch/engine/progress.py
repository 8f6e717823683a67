"""A bar for each file while the weights load; plain lines where the output is not a terminal."""

from __future__ import annotations

import os
from collections.abc import Iterable
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TransferSpeedColumn

from ds4batch.engine.weights.layout import Extent


class LoadProgress:
    """Counts bytes, file by file. Used as a context manager."""

    def __init__(self, name: str, extents: Iterable[Extent], stream: TextIO) -> None:
        """`extents`: of all tensors that will be loaded."""
        self._name = name
        self._stream = stream
        self._totals: dict[str, int] = {}
        for extent in extents:
            self._totals[extent.file] = self._totals.get(extent.file, 0) + extent.nbytes
        self._done = dict.fromkeys(self._totals, 0)
        self._tasks: dict[str, TaskID] = {}
        self._bar: Progress | None = None

    def __enter__(self) -> LoadProgress:
        if self._stream.isatty():
            self._bar = Progress(
                TextColumn("loading {task.description}"),
                BarColumn(),
                DownloadColumn(binary_units=True),
                TransferSpeedColumn(),
                TimeElapsedColumn(),
                console=Console(file=self._stream),
            )
            self._bar.start()
        return self

    def advance(self, extent: Extent) -> None:
        """One tensor more."""
        file = extent.file
        if not self._done[file]:
            self._begin(file)
        self._done[file] += extent.nbytes
        if self._bar is not None:
            self._bar.advance(self._tasks[file], extent.nbytes)

    def _begin(self, file: str) -> None:
        shown = os.path.basename(file)
        if self._bar is not None:
            self._tasks[file] = self._bar.add_task(shown, total=self._totals[file])
        else:
            print(f"loading {shown}: {_mib(self._totals[file])}", file=self._stream, flush=True)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif kind is None:
            print(f"loaded {self._name}: {_mib(sum(self._done.values()))}", file=self._stream, flush=True)


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"
