"""A server of its own for a run, and what it wrote."""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from clients.process import NotStarted, logging_to


class Served(NamedTuple):
    """A server that runs."""

    url: str
    log: Path | None = None  # what it wrote so far, where that is known

    def tracebacks(self) -> list[str]:
        """Those it wrote so far."""
        return [] if self.log is None else tracebacks(self.log.read_text(errors="replace"))


@contextmanager
def served(source: Sequence[str], slots: str, ctx: str, more: Sequence[str] = ()) -> Iterator[Served]:
    """`ds4batch serve`, stopped at the end. Raises SystemExit(2) where it does not start."""
    options = [*source, "--batched-session", slots, "--ctx", ctx, *more]
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        log = Path(directory, "log")
        try:
            url = stack.enter_context(logging_to(log, options))
        except NotStarted as error:
            print(error, file=sys.stderr)
            raise SystemExit(2) from None
        yield Served(url, log)


def tracebacks(log: str) -> list[str]:
    """The tracebacks in a log, each with the line before it and its last line."""
    return [
        found.group(0)[:4000] for found in re.finditer(r"[^\n]*\nTraceback \(most recent call last\):\n(?:[ \t].*\n)*[^\n]*", log)
    ]
