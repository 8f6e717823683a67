"""Shows how far a load has come: a bar on a terminal, a line every tenth of the way anywhere else.

Owns the display of progress on the error stream, so that the standard output holds results only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from bench.http_stream import Outcome, Result

PLAIN_LINES = 10


class Progress:
    """Counts finished requests in front of the user."""

    def __init__(self, console: Console, title: str) -> None:
        self._console = console
        self._title = title
        self._bar: RichProgress | None = None
        self._task: TaskID | None = None
        self._total = self._done = self._failed = self._tokens = 0

    @contextmanager
    def running(self, total: int) -> Iterator[None]:
        """Show `total` requests while the block runs."""
        self._total, self._done, self._failed, self._tokens = total, 0, 0, 0
        if not self._console.is_terminal:
            self._console.print(f"{self._title}: {total} requests", highlight=False)
            yield
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        with RichProgress(*columns, console=self._console) as self._bar:
            self._task = self._bar.add_task(self._title, total=total, note="")
            yield
        self._bar = None

    def advance(self, result: Result) -> None:
        """One request has ended."""
        self._done += 1
        self._failed += result.outcome is Outcome.FAILED
        self._tokens += result.output_tokens
        note = f"{self._tokens} tokens" + (f", {self._failed} failed" if self._failed else "")
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, advance=1, note=note)
        elif self._done * PLAIN_LINES // self._total > (self._done - 1) * PLAIN_LINES // self._total:
            self._console.print(f"{self._title}: {self._done}/{self._total}, {note}", highlight=False)
