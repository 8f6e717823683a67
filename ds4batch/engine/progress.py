"""A bar while the weights load; plain lines where the output is not a terminal."""

from __future__ import annotations

from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn


class LoadProgress:
    """Counts tensors. Used as a context manager."""

    def __init__(self, name: str, total: int, stream: TextIO) -> None:
        self._name = name
        self._total = total
        self._stream = stream
        self._done = 0
        self._bar: Progress | None = None

    def __enter__(self) -> LoadProgress:
        if self._stream.isatty():
            self._bar = Progress(
                TextColumn("loading {task.description}"),
                BarColumn(),
                TextColumn("{task.percentage:3.0f}%"),
                TimeElapsedColumn(),
                console=Console(file=self._stream),
            )
            self._task = self._bar.add_task(self._name, total=self._total)
            self._bar.start()
        else:
            print(f"loading {self._name}: {self._total} tensors", file=self._stream, flush=True)
        return self

    def advance(self, tensor: str) -> None:
        """One tensor more."""
        self._done += 1
        if self._bar is not None:
            self._bar.advance(self._task)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif kind is None:
            print(f"loaded {self._name}: {self._done} tensors", file=self._stream, flush=True)
