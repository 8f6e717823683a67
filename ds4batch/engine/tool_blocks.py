"""The text that calls were sampled as, for the checkpoints of the sessions they were made in.

A session is known by its text alone, so its calls are those whose text occurs in it. Looking for them costs about as much as reading
the session's text once, however many calls are known: texts are filed under their beginnings of 8, 16, 32, ... characters, and a
place in a session is followed only as far as some known text goes on the same way.

Any thread may ask while others add.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

from ds4batch.kvstore.trailer import pack_tool_map

Key = TypeVar("Key")

MAX_CHARS = 512 << 20
_PER_ID = 64  # characters that an id counts for beside its own
_SHORTEST = 8  # characters: no family writes a call in less
_OWED = 64  # characters that may lack at a session's end: those of the turn's last token, which is sampled and not evaluated


class _Block:
    """The calls of one turn, or of several that read alike."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.ids: dict[str, None] = {}  # in order


class ToolBlocks:
    """Keeps up to `most` ids and MAX_CHARS of text; those not stored or saved for longest go first."""

    def __init__(self, most: int) -> None:
        """0 keeps nothing."""
        self.most = most
        self._lock = threading.Lock()
        self._by_id: OrderedDict[str, _Block] = OrderedDict()
        self._by_text: dict[str, _Block] = {}
        self._leads: Counter[str] = Counter()  # how texts begin
        self._stems: Counter[tuple[int, int]] = Counter()  # (length, hash) of beginnings -> texts that begin so
        self._filed: dict[tuple[int, int], list[_Block]] = {}  # by the longest of its beginnings
        self._chars = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def remember(self, ids: Iterable[str], text: str) -> None:
        """The calls `ids` of one turn were sampled as `text`."""
        if not self.most or len(text) < _SHORTEST:
            return
        with self._lock:
            for call_id in ids:
                block = self._by_text.get(text) or self._file(_Block(text))
                if self._by_id.get(call_id) is block:
                    self._by_id.move_to_end(call_id)
                    continue
                self._forget(call_id)
                block.ids[call_id] = None
                self._by_id[call_id] = block
                self._chars += _PER_ID + len(call_id)
            while self._by_id and (len(self._by_id) > self.most or self._chars > MAX_CHARS):
                self._forget(next(iter(self._by_id)))

    def learn(self, texts: Mapping[str, str]) -> None:
        """Texts by id, from another checkpoint's trailer. What was sampled here is not replaced."""
        for call_id, text in texts.items():
            if call_id not in self._by_id:
                self.remember((call_id,), text)

    def trailer(self, text: str) -> bytes:
        """The trailer of a session of `text`: all ids of every text that occurs in it, or that it ends in the last token of."""
        found = [(call_id, block.text) for block in self._occurring(text) for call_id in list(block.ids)]
        with self._lock:
            for call_id, _ in found:
                if call_id in self._by_id:
                    self._by_id.move_to_end(call_id)
        return pack_tool_map(found)

    def _occurring(self, text: str) -> list[_Block]:
        found: dict[str, _Block] = {}
        for lead in list(self._leads):
            at = text.find(lead)
            while at >= 0:
                found.update((block.text, block) for block in self._standing_at(text, at))
                at = text.find(lead, at + 1)
        return list(found.values())

    def _standing_at(self, text: str, at: int) -> Iterator[_Block]:
        size = _SHORTEST
        while at + size <= len(text):
            stem = (size, hash(text[at : at + size]))
            if stem not in self._stems:
                return
            for block in list(self._filed.get(stem, ())):
                if text.startswith(block.text, at):
                    yield block
            size *= 2
        rest = text[at:]
        for block in list(self._by_text.values()):
            if 0 < len(block.text) - len(rest) <= _OWED and block.text.startswith(rest):
                yield block

    def _file(self, block: _Block) -> _Block:
        stems = _stems(block.text)
        self._by_text[block.text] = block
        self._filed.setdefault(stems[-1], []).append(block)
        self._stems.update(stems)
        self._leads[block.text[:_SHORTEST]] += 1
        self._chars += len(block.text)
        return block

    def _forget(self, call_id: str) -> None:
        block = self._by_id.pop(call_id, None)
        if block is None:
            return
        del block.ids[call_id]
        self._chars -= _PER_ID + len(call_id)
        if not block.ids:
            self._unfile(block)

    def _unfile(self, block: _Block) -> None:
        stems = _stems(block.text)
        del self._by_text[block.text]
        self._filed[stems[-1]].remove(block)
        if not self._filed[stems[-1]]:
            del self._filed[stems[-1]]
        for stem in stems:
            _take(self._stems, stem)
        _take(self._leads, block.text[:_SHORTEST])
        self._chars -= len(block.text)


def _take(counts: Counter[Key], key: Key) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]


def _stems(text: str) -> list[tuple[int, int]]:
    """Lengths and hashes of the text's beginnings."""
    stems, size = [], _SHORTEST
    while size <= len(text):
        stems.append((size, hash(text[:size])))
        size *= 2
    return stems
