"""Small checkpoints whose state follows from their tokens, a clock that stands still, and a disk that dies when told to."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ds4batch.kvstore.disk import Disk
from ds4batch.kvstore.format import Reason
from ds4batch.kvstore.identity import Identity, fingerprint
from ds4batch.kvstore.options import Options
from ds4batch.kvstore.payload import APPEND, FIXED, StateArray, state_array
from ds4batch.kvstore.store import KVStore, Restored, Saved

IDENTITY = Identity(fingerprint({"weights": "a", "dtype": "bf16"}), quant_bits=16, ctx=4096)
OTHER = Identity(fingerprint({"weights": "b", "dtype": "bf16"}), quant_bits=16, ctx=4096)
LAYERS, HEADS, DIM, VOCAB = 2, 2, 4, 8


class Time:
    """Unix seconds, moved by hand."""

    def __init__(self, now: float = 1_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class Killed(BaseException):
    """The process is gone: nothing after it runs any more."""


class MortalDisk(Disk):
    """Lets `left` operations through, does half of the next one if it is a write, and is dead from then on. Never waits for a disk."""

    def __init__(self, left: int | None = None) -> None:
        self.left = left
        self.log: list[str] = []

    def _spend(self, what: str) -> bool:
        if self.left is not None:
            if self.left <= 0:
                raise Killed
            self.left -= 1
        self.log.append(what)
        return self.left == 0

    def create(self, path: Path) -> int:
        self._spend("create")
        return super().create(path)

    def write(self, fd: int, data: bytes | memoryview) -> int:
        if self._spend("write"):
            os.write(fd, memoryview(data)[: len(data) // 2])
            raise Killed
        return super().write(fd, data)

    def write_at(self, fd: int, data: bytes, offset: int) -> None:
        self._spend("write_at")
        super().write_at(fd, data, offset)

    def truncate(self, fd: int, size: int) -> None:
        self._spend("truncate")
        super().truncate(fd, size)

    def sync(self, fd: int) -> None:
        self._spend("sync")

    def sync_directory(self, path: Path) -> None:
        self._spend("sync_directory")

    def rename(self, source: Path, target: Path) -> None:
        self._spend("rename")
        super().rename(source, target)

    def unlink(self, path: Path) -> None:
        self._spend("unlink")
        super().unlink(path)


class FullDisk(MortalDisk):
    """Takes `room` bytes of contents, then is full."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room

    def write(self, fd: int, data: bytes | memoryview) -> int:
        if self.room <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = super().write(fd, memoryview(data)[: self.room])
        self.room -= count
        return count


def state_of(tokens: Sequence[int]) -> list[StateArray]:
    """All kinds of state, as a pure function of the tokens: what a cold run would hold."""
    n = len(tokens)
    rows = np.cumsum(np.asarray(tokens, np.uint64)) + 1
    keys = (
        rows[None, None, :, None] * np.arange(1, LAYERS * HEADS * DIM + 1, dtype=np.uint64).reshape(LAYERS, HEADS, 1, DIM)
    ) % 65521
    recurrent = np.sin(np.arange(6, dtype=np.float32) * np.float32(rows[-1])).reshape(2, 3)
    arrays = [
        state_array("k", keys.astype("<u2"), "bf16", kind=APPEND, position=n),
        state_array("v", (keys + 1).astype("<u2"), "bf16", kind=APPEND, position=n),
        state_array("recurrent", recurrent, "f32", kind=FIXED, position=n),
        state_array("logits", np.cos(np.arange(VOCAB, dtype=np.float32) + np.float32(rows[-1])), "f32", kind=FIXED, position=n),
    ]
    if n > 1:
        arrays.append(state_array("recurrent", recurrent * 2, "f32", kind=FIXED, position=n // 2))
    return arrays


def contents(arrays: Sequence[StateArray]) -> dict[tuple[str, int], bytes]:
    return {(a.spec.name, a.spec.position): b"".join(bytes(c) for c in a.chunks()) for a in arrays}


def tokens_of(text: bytes) -> list[int]:
    return [b + 1 for b in text]


def open_store(
    directory: Path, *, identity: Identity = IDENTITY, now: Time | None = None, disk: Disk | None = None, **options
) -> KVStore:
    options = {"budget_bytes": 1 << 20, "min_tokens": 2, "boundary_align_tokens": 4, **options}
    return KVStore(directory, identity, Options(**options), now or Time(), disk or MortalDisk())


def save(store: KVStore, text: bytes, reason: Reason = Reason.EVICT, **rest) -> Saved:
    tokens = tokens_of(text)
    return store.save(text, tokens, state_of(tokens), reason, **rest)


def restore(store: KVStore, text: bytes) -> Restored | None:
    """The best checkpoint that can be used, as a server goes about it."""
    while (claim := store.claim(text)) is not None:
        found = store.load(claim)
        if found is not None:
            return found
    return None


def check(found: Restored, text: bytes) -> None:
    """What was restored is what a cold run of its tokens would hold, and belongs to `text`."""
    stored = text[: found.text_bytes]
    assert found.tokens.tolist() == tokens_of(stored)
    assert {key: a.tobytes() for key, a in found.arrays.items()} == contents(state_of(tokens_of(stored)))


def files(directory: Path) -> list[str]:
    return sorted(p.name for p in directory.iterdir())
