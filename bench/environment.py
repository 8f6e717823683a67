"""Where a measurement was taken: the revision of this repository, the machine that ran the client, its GPU.

Owns nothing but these facts. None is guessed: what cannot be found out is None.
"""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path


@dataclass(frozen=True)
class Host:
    """The machine that ran the client, which need not be the server's."""

    name: str
    system: str
    processor: str
    cpus: int | None
    python: str


@dataclass(frozen=True)
class Environment:
    """What a reader must know to repeat a run."""

    label: str
    date: str  # UTC, ISO 8601
    command: str
    git: str | None  # commit, with "+" behind it where the files differ from it
    host: Host
    gpu: list[str] | None  # name and driver of each card of the client's machine


def describe(label: str, command: str) -> Environment:
    """This machine, now."""
    return Environment(
        label=label,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        command=command,
        git=_git(),
        host=Host(platform.node(), platform.platform(), _processor(), os.cpu_count(), platform.python_version()),
        gpu=_gpus(),
    )


def _git() -> str | None:
    # --no-optional-locks: a benchmark must not touch the index of a checkout that somebody else works in.
    root = ["git", "--no-optional-locks", "-C", str(Path(__file__).resolve().parent)]
    commit = _output([*root, "rev-parse", "HEAD"])
    if not commit:
        return None
    return commit + ("+" if _output([*root, "status", "--porcelain", "--untracked-files=no"]) else "")


def _gpus() -> list[str] | None:
    cards = _output(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"])
    return cards.splitlines() if cards else None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def _output(command: list[str]) -> str | None:
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None
