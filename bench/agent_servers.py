"""The servers that the agents' benchmark starts: the one under test, and the oracle that its answers are held against.

Owns which options go to which of them, and how one is killed.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bench.with_server import serving
from ds4batch.settings import Settings

CTX_STEP = 256
# What may change an answer's bits. The oracle gets these and none about memory, disk or scheduling.
ARITHMETIC = ("-t", "--threads", "--device", "--dtype", "--dequantise", "--load-format", "--kv-cache-dtype")


@contextmanager
def traced_server(model: str, slots: int, ctx: int, extra: Sequence[str], trace: Path) -> Iterator[str]:
    """The address of a server that writes its trace to `trace`."""
    with serving(model, str(slots), str(ctx), ["--trace", str(trace), *extra]) as url:
        yield url


@contextmanager
def oracle_server(model: str, ctx: int, extra: Sequence[str]) -> Iterator[str]:
    """The address of a server of one slot that computes as one with the options `extra` does."""
    with serving(model, "1", str(ctx), arithmetic_only(extra)) as url:
        yield url


def arithmetic_only(extra: Sequence[str]) -> list[str]:
    """Those of the options `extra`, with their values, that may change an answer's bits."""
    kept: list[str] = []
    keep = False
    for word in extra:
        if word.startswith("-"):
            keep = word.partition("=")[0] in ARITHMETIC
        if keep:
            kept.append(word)
    return kept


def ctx_for(tokens: int) -> int:
    """A context in which a conversation of `tokens` fits."""
    return -(-tokens // CTX_STEP) * CTX_STEP


def has_disk_store() -> bool:
    """Whether the server can keep checkpoints on disk."""
    return hasattr(Settings(), "kv_disk_dir")


def disk_options(directory: Path) -> list[str]:
    """What makes a server keep checkpoints in `directory`; nothing for one that cannot."""
    return ["--kv-disk-dir", str(directory)] if has_disk_store() else []


def kill(engine: int) -> None:
    """SIGKILL to a server, both its processes. `engine` is its engine's process, as /health says; the other is its parent."""
    front = int(Path(f"/proc/{engine}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])
    for process in (front, engine):
        os.kill(process, signal.SIGKILL)
