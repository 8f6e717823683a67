"""Files that the server reads again when they change: keys, certificates. No signal is needed, a look a second is."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Protocol

POLL_SECONDS = 1.0

Stamp = tuple[tuple[int, ...] | None, ...]


class Reloadable(Protocol):
    """What was made of files."""

    def poll(self) -> None:
        """Take what the files have become; with files that cannot be used, stay as it is and say so in the log."""


def stamp(*paths: str) -> Stamp:
    """What differs once a file has changed; None stands for one that is not there. Take it before reading."""
    return tuple(map(_stamp, paths))


def _stamp(path: str) -> tuple[int, ...] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return (found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino)


async def poll(all_: Sequence[Reloadable]) -> None:
    """Look at everything once a second, until cancelled."""
    while True:
        await asyncio.sleep(POLL_SECONDS)
        for one in all_:
            one.poll()
