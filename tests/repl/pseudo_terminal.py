"""A program on a terminal of its own, driven by keys and read by what it shows."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.repl.fake_server import PATIENCE

# The program must be the terminal's own, or ctrl-C would reach nobody.
_START = "import fcntl, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); from ds4batch.cli import main; sys.exit(main(sys.argv[1:]))"
CTRL_C, CTRL_D, ENTER = b"\x03", b"\x04", b"\r"
EDITING, NOT_EDITING = b"\x1b[?2004h", b"\x1b[?2004l"  # pasted text is marked


class Terminal:
    """`ds4batch` on a terminal of 80 columns."""

    def __init__(self, arguments: tuple[str, ...], environment: dict[str, str]) -> None:
        self._own, self._its = pty.openpty()
        termios.tcsetwinsize(self._its, (24, 80))
        self.before = self.modes()
        self.process = subprocess.Popen(
            [sys.executable, "-c", _START, *arguments],
            stdin=self._its,
            stdout=self._its,
            stderr=self._its,
            start_new_session=True,
            # This terminal does not answer the question where its cursor is.
            env={**os.environ, "TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1", **environment},
        )
        self.shown = b""
        self._seen = 0

    def modes(self) -> list[Any]:
        """Echo, line editing and so on, as `stty -g` says."""
        return termios.tcgetattr(self._its)

    def until(self, text: bytes) -> bytes:
        """Wait until `text` is shown; returns what was shown since the last wait, `text` included."""
        end = time.monotonic() + PATIENCE
        while text not in self.shown[self._seen :]:
            if not select.select([self._own], [], [], max(0.0, end - time.monotonic()))[0]:
                raise AssertionError(f"{text!r} was not shown: {self.shown[self._seen :]!r}")
            self.shown += os.read(self._own, 65536)
        start, self._seen = self._seen, self.shown.index(text, self._seen) + len(text)
        return self.shown[start : self._seen]

    def prompt(self) -> None:
        """Wait until a line can be typed."""
        self.until(EDITING)
        self.until(b">")

    def type(self, keys: bytes) -> None:
        os.write(self._own, keys)

    def wait(self) -> int:
        """Read to the end; returns the exit status."""
        code = self.process.wait(PATIENCE)
        while select.select([self._own], [], [], 0)[0]:
            self.shown += os.read(self._own, 65536)
        return code

    def hang_up(self) -> None:
        """Close the window."""
        os.close(self._own)
        self._own = -1

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for end in (self._own, self._its):
            if end >= 0:
                os.close(end)


@contextmanager
def terminal(*arguments: str, **environment: str) -> Iterator[Terminal]:
    started = Terminal(arguments, environment)
    try:
        yield started
    finally:
        started.close()
