"""What is in the directory, as far as heads tell: in memory, by name. Owns no file and asks no disk.

Several threads may ask while one changes it.
"""

from __future__ import annotations

import hashlib
import threading
from collections import defaultdict
from typing import NamedTuple

from ds4batch.kvstore.format import SUFFIX, Header
from ds4batch.kvstore.identity import Identity


class Entry(NamedTuple):
    """One checkpoint file whose head is good. Its payload was not looked at."""

    name: str  # SHA-1 of its text, 40 lower-case hex
    file_name: str
    header: Header
    fingerprint: bytes
    file_bytes: int


def entry_of(file_name: str, header: Header, fingerprint: bytes, file_bytes: int) -> Entry:
    """The entry of a file whose head was read."""
    return Entry(name_in(file_name), file_name, header, fingerprint, file_bytes)


def name_in(file_name: str) -> str:
    """The SHA-1 that a file name is made of."""
    return file_name.removesuffix(SUFFIX).lower()


class Index:
    """Entries by name, and those that one server may use by the length of their text."""

    def __init__(self, identity: Identity, min_tokens: int) -> None:
        self._identity = identity
        self._min_tokens = min_tokens
        self._lock = threading.Lock()
        self._entries: dict[str, Entry] = {}
        self._lengths: dict[int, set[str]] = defaultdict(set)  # text bytes -> names, of usable entries
        self._bytes = 0

    @property
    def total_bytes(self) -> int:
        """Bytes of all files, other models' included."""
        return self._bytes

    def __len__(self) -> int:
        return len(self._entries)

    def entries(self) -> list[Entry]:
        """All, in no order."""
        with self._lock:
            return list(self._entries.values())

    def get(self, name: str) -> Entry | None:
        """The entry of that name."""
        return self._entries.get(name)

    def usable(self, entry: Entry) -> bool:
        """Whether this server may load the entry: its own model, a context no larger than its own, long enough."""
        return (
            entry.fingerprint == self._identity.fingerprint
            and entry.header.ctx <= self._identity.ctx
            and entry.header.tokens >= self._min_tokens
        )

    def put(self, entry: Entry) -> None:
        """Add an entry, in place of one of the same name."""
        with self._lock:
            self._remove(entry.name)
            self._entries[entry.name] = entry
            self._bytes += entry.file_bytes
            if self.usable(entry):
                self._lengths[entry.header.text_bytes].add(entry.name)

    def remove(self, name: str) -> None:
        """Forget an entry. Unknown names are ignored."""
        with self._lock:
            self._remove(name)

    def _remove(self, name: str) -> None:
        entry = self._entries.pop(name, None)
        if entry is None:
            return
        self._bytes -= entry.file_bytes
        names = self._lengths.get(entry.header.text_bytes)
        if names is not None:
            names.discard(name)
            if not names:
                del self._lengths[entry.header.text_bytes]

    def find(self, text: bytes) -> Entry | None:
        """The usable entry with the longest text that `text` begins with. One pass of SHA-1 over `text` at most."""
        with self._lock:
            lengths = sorted(n for n in self._lengths if n <= len(text))
            digest, at, best = hashlib.sha1(usedforsecurity=False), 0, None
            view = memoryview(text)
            for length in lengths:
                digest.update(view[at:length])
                at = length
                name = digest.hexdigest()
                if name in self._lengths[length]:
                    best = self._entries[name]
            return best
