"""A server of its own for a run, and what it wrote."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from bench.with_server import stop

START_SECONDS = 300.0


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
    command = [
        sys.executable,
        "-m",
        "ds4batch.cli",
        "serve",
        *source,
        "--batched-session",
        slots,
        "--ctx",
        ctx,
        "--port",
        "0",
        *more,
    ]
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory, "log")
        with log.open("wb") as file:
            server = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        try:
            yield Served(_url(server, log), log)
        finally:
            stop(server)


def tracebacks(log: str) -> list[str]:
    """The tracebacks in a log, each with the line before it and its last line."""
    return [
        found.group(0)[:4000] for found in re.finditer(r"[^\n]*\nTraceback \(most recent call last\):\n(?:[ \t].*\n)*[^\n]*", log)
    ]


def _url(server: subprocess.Popen[bytes], log: Path) -> str:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and server.poll() is None:
        if ready := re.search(r"ready on (http://\S+)", log.read_text(errors="replace")):
            return ready[1]
        time.sleep(0.1)
    print(log.read_text(errors="replace"), file=sys.stderr)
    raise SystemExit(2)
