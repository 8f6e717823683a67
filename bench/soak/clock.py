"""Jumps of the server's wall clock.

With Debian's libfaketime the clock itself jumps, for both processes, while the monotonic one goes on. Without it the times of the
checkpoints move instead, which is as much of a jump as can be made from outside.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path

LIBRARIES = ("/usr/lib/*/faketime/libfaketime.so.1", "/usr/lib/faketime/libfaketime.so.1")
SETTLE_SECONDS = 3.0  # until both processes have looked at the file again


def library() -> Path | None:
    """Where libfaketime is, None where it is not installed."""
    return next((path for pattern in LIBRARIES for path in sorted(Path("/").glob(pattern[1:]))), None)


class Clock:
    """The clock of one server."""

    def __init__(self, directory: Path, faked: bool) -> None:
        """`directory` gets the file that says what time it is; without `faked` nothing of the process is changed."""
        found = library() if faked else None
        self._file = directory / "clock"
        self._faked = found is not None
        self.environment: dict[str, str] = {}
        if found is not None:
            self._file.write_text("+0")
            self.environment = {
                "LD_PRELOAD": str(found),
                "FAKETIME_TIMESTAMP_FILE": str(self._file),
                "FAKETIME_DONT_FAKE_MONOTONIC": "1",
                "FAKETIME_CACHE_DURATION": "1",
                "NO_FAKE_STAT": "1",
            }

    @property
    def method(self) -> str:
        """How the clock is made to jump here."""
        return "libfaketime, the wall clock of both processes" if self._faked else "the times of the checkpoints' files"

    def jump(self, hours: float, files: Sequence[Path]) -> str:
        """Move the clock to so many hours from the real one; what was done."""
        if self._faked:
            # Replaced at once: a half-written file would be read as another time.
            new = self._file.with_suffix(".new")
            new.write_text(f"{hours * 3600:+.0f}")
            new.replace(self._file)
            return f"{hours:+g} h"
        moved = 0
        for path in files:
            with contextlib.suppress(OSError):
                os.utime(path, (time.time() + hours * 3600,) * 2)
                moved += 1
        return f"{hours:+g} h on {moved} files"
