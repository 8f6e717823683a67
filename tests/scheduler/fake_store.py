"""A store of sessions in a dictionary. It works when it is told to, and complains when the scheduler breaks its rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from scheduler.backend import Work
from scheduler.checkpoints import Key, Restored, Why
from scheduler.fake import FakeBackend


class File(NamedTuple):
    tokens: list[int]
    why: Why
    shows_less: bool


class Fetch:
    """One session on its way back. `stage` counts: 0 asked for, 1 read, 2 in its place."""

    def __init__(self, slot: int, text: str) -> None:
        self.slot = slot
        self.text = text
        self.stage = 0
        self.file: tuple[str, File] | None = None


class FakeStore:
    """Implements Checkpoints over a FakeBackend. `files` outlive it. Every `work` ends the oldest thing under way."""

    def __init__(
        self, backend: FakeBackend, files: dict[str, File], *, step: int = 0, cold: Callable[[int, int], int] | None = None
    ) -> None:
        self.backend = backend
        self.files = files
        self.step = step  # periodic saves
        self.cold = cold or (lambda prompt, anchor: anchor)
        self.copies: list[tuple[int, list[int], Key, Why]] = []
        self.fetches: dict[int, Fetch] = {}
        self.cold_at: dict[int, int] = {}
        self.from_: dict[int, str] = {}
        self.log: list[tuple[Why, int]] = []  # saves: why, tokens
        self.discarded: list[str] = []
        self.broken: set[str] = set()  # files that turn out bad when they are read
        self._finished = False

    @property
    def woke(self) -> bool:
        """Whether something has ended that nobody has asked for: the owner was woken."""
        return self._finished

    def work(self) -> bool:
        """End one thing; False when nothing is under way."""
        self._finished = True
        if self.copies:
            slot, tokens, key, why = self.copies.pop(0)
            now = list(self.backend.tokens(slot))
            assert now == tokens[: len(now)] or now[: len(tokens)] == tokens, f"slot {slot} was overwritten while it was copied"
            if key.text:
                self.files.setdefault(key.text, File(tokens, why, key.shows_less))
            return True
        for fetch in self.fetches.values():
            if fetch.stage == 0:
                found = self._best(fetch.text)
                while found is not None and found[0] in self.broken:
                    del self.files[found[0]]
                    found = self._best(fetch.text)
                fetch.file, fetch.stage = found, 1
                return True
        return False

    def _best(self, text: str) -> tuple[str, File] | None:
        names = [name for name in self.files if text.startswith(name)]
        name = max(names, key=len, default=None)
        return None if name is None else (name, self.files[name])

    def find(self, text: str) -> int:
        found = self._best(text)
        return 0 if found is None else len(found[1].tokens)

    def save(self, slot: int, key: Key, why: Why) -> None:
        tokens = list(self.backend.tokens(slot))
        assert tokens
        self.log.append((why, len(tokens)))
        self.copies.append((slot, tokens, key, why))

    def replace(self, slot: int, leaving: Key | None, coming: str | None) -> None:
        assert slot not in self.fetches
        if leaving is not None:
            self.save(slot, leaving, "evict")
        if coming is not None:
            self.fetches[slot] = Fetch(slot, coming)

    def busy(self, slot: int) -> bool:
        return any(copy[0] == slot for copy in self.copies)

    def finished(self) -> bool:
        finished, self._finished = self._finished, False
        return finished

    def lacking(self, slot: int) -> int:
        fetch = self.fetches[slot]
        if fetch.stage != 1 or fetch.file is None or self.busy(slot):
            return 0
        self.backend.truncate(slot, 0)
        return self.backend.shortage([Work(slot, fetch.file[1].tokens, False)])

    def restored(self, slot: int) -> Restored | None:
        fetch = self.fetches[slot]
        if fetch.stage == 0 or self.busy(slot):
            return None
        if fetch.file is None:
            del self.fetches[slot]
            return Restored(seconds=1.0)
        name, file = fetch.file
        if self.lacking(slot):
            return None
        assert not self.backend.tokens(slot), "a session that waits for its state holds nothing"
        failures = self.backend._failures
        self.backend.fail_next(0)  # it is not evaluated, only put there
        self.backend.launch([Work(slot, file.tokens, False)])
        self.backend.fail_next(failures)
        del self.fetches[slot]
        self.from_[slot] = name
        return Restored(name, len(file.tokens), len(name), file.why in ("evict", "shutdown"), file.shows_less, 1.0)

    def abandon(self, slot: int) -> None:
        del self.fetches[slot]

    def discard(self, slot: int) -> None:
        name = self.from_.pop(slot)
        self.files.pop(name, None)
        self.discarded.append(name)

    def start(self, slot: int, prompt: int, kept: int, anchor: int) -> None:
        self.cold_at[slot] = 0 if kept else self.cold(prompt, anchor)

    def next_stop(self, slot: int, position: int) -> int | None:
        stops = [self.cold_at[slot]] if self.cold_at.get(slot, 0) > position else []
        if self.step:
            stops.append((position // self.step + 1) * self.step)
        return min(stops, default=None)

    def due(self, slot: int, position: int) -> Why | None:
        if position and position == self.cold_at.get(slot):
            return "cold"
        return "continued" if self.step and position and position % self.step == 0 else None
