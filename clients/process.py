"""`ds4batch serve` as a process: how it is started, where it says that it listens, how it is stopped."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

START_SECONDS = 300.0
STOP_SECONDS = 20.0
_POLL_SECONDS = 0.1


class NotStarted(RuntimeError):
    """The server ended, or was not ready in time. The message ends with its log."""


def command(options: Sequence[str]) -> list[str]:
    """Starts a server with `options` on a free port."""
    return [sys.executable, "-m", "ds4batch.cli", "serve", "--port", "0", *options]


def address(said: str) -> str | None:
    """The address in what a server wrote, once it is ready."""
    found = re.search(r"ready on (http://\S+)", said)
    return found[1] if found else None


@contextmanager
def logging_to(log: Path, options: Sequence[str]) -> Iterator[str]:
    """The address of a server that writes to the file `log`, stopped at the end. Raises NotStarted."""
    with log.open("wb") as out:
        server = subprocess.Popen(command(options), stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)
    try:
        yield _wait(server, log)
    finally:
        stop(server)


def stop(server: subprocess.Popen[Any]) -> None:
    """End a server, by force where it takes longer than STOP_SECONDS."""
    server.send_signal(signal.SIGTERM)
    try:
        server.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


def _wait(server: subprocess.Popen[bytes], log: Path) -> str:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        ended = server.poll() is not None
        said = log.read_text(errors="replace")
        if (found := address(said)) is not None:
            return found
        if ended:
            break
        time.sleep(_POLL_SECONDS)
    raise NotStarted(f"the server did not start:\n{log.read_text(errors='replace')}")
