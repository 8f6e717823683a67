"""What /proc says of a group of processes: who is there, what they hold, who died and was not buried. Linux only."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")


@dataclass(frozen=True)
class Process:
    """One process of a session."""

    pid: int
    parent: int
    state: str  # Z is a zombie


@dataclass(frozen=True)
class Holdings:
    """What a process holds."""

    resident: int  # bytes
    descriptors: int
    threads: int


def session(leader: int) -> list[Process]:
    """All processes whose session `leader` leads, itself included."""
    return [process for process, sid in _all() if sid == leader]


def _all() -> Iterator[tuple[Process, int]]:
    for entry in PROC.iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):  # it may end while it is looked at
            fields = (entry / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            yield Process(int(entry.name), int(fields[1]), fields[0]), int(fields[3])


def holdings(pid: int) -> Holdings | None:
    """None for a process that is gone."""
    try:
        status = (PROC / str(pid) / "status").read_text(encoding="utf-8", errors="replace")
        fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
        resident = int(fields["VmRSS"].split()[0]) << 10
        return Holdings(resident, len(os.listdir(PROC / str(pid) / "fd")), int(fields["Threads"]))
    except (OSError, KeyError):
        return None
