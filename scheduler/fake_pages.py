"""The fake backend's memory: reference-counted pages of numbers, so that what shares or loses a page wrongly shows in answers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from scheduler.backend import Held, Room

_PAGE_BYTES = 64
_AWAY = -1  # a page in host memory


class FakePages:
    """For each slot the number that each of its positions holds."""

    def __init__(self, slots: int, pages: int, page_tokens: int) -> None:
        self._size = page_tokens
        self._cells = [[0] * page_tokens for _ in range(pages)]
        self._references = [0] * pages
        self._free = list(range(pages))
        self._tables: list[list[int]] = [[] for _ in range(slots)]
        self._away: list[dict[int, list[int]] | None] = [None] * slots  # by index into the table; None: on the device

    def parked(self, slot: int) -> bool:
        """Whether the session was moved to host memory."""
        return self._away[slot] is not None

    def last(self, slot: int, length: int) -> int:
        """What position `length - 1` holds; 0 for none."""
        if not length:
            return 0
        return self._cells[self._tables[slot][(length - 1) // self._size]][(length - 1) % self._size]

    def extend(self, slot: int, start: int, values: Sequence[int]) -> None:
        """Write `values` from position `start` on. The pages must be there, see `need`."""
        table = self._tables[slot]
        for i in range(start // self._size, len(table)):
            if self._references[table[i]] > 1:
                (copy,) = self._take(1)
                self._cells[copy] = list(self._cells[table[i]])
                self._release([table[i]])
                table[i] = copy
        table += self._take(-(-(start + len(values)) // self._size) - len(table))
        for position, value in enumerate(values, start):
            self._cells[table[position // self._size]][position % self._size] = value

    def need(self, slot: int, start: int, count: int) -> int:
        """Pages that `extend` by `count` positions takes."""
        table = self._tables[slot]
        shared = sum(self._references[page] > 1 for page in table[start // self._size :])
        return max(0, -(-(start + count) // self._size) - len(table)) + shared

    def cut(self, slot: int, length: int) -> None:
        """Keep the pages of the first `length` positions."""
        table = self._tables[slot]
        kept = -(-length // self._size)
        self._release(table[kept:])
        del table[kept:]
        if not length:
            self._away[slot] = None

    def fork(self, source: int, target: int, length: int) -> bool:
        """Share whole pages of `source` with `target`, which holds nothing else then, and copy the rest of the last."""
        whole, rest = divmod(length, self._size)
        shared = self._tables[source][:whole]
        freed = sum(self._references[page] == 1 for page in self._tables[target] if page != _AWAY)
        if rest and not len(self._free) + freed:
            return False
        for page in shared:
            self._references[page] += 1
        self.cut(target, 0)
        table = self._tables[target]
        table += shared
        if rest:
            table += self._take(1)
            self._cells[table[-1]][:rest] = self._cells[self._tables[source][whole]][:rest]
        return True

    def park(self, slot: int, lengths: Mapping[int, int]) -> None:
        """Move pages to host memory, but those that the sessions of `lengths` hold whole."""
        kept = {page for other, n in lengths.items() for page in self._tables[other][: n // self._size]}
        away = self._away[slot] = self._away[slot] or {}
        table = self._tables[slot]
        for i, page in enumerate(table):
            if page != _AWAY and page not in kept:
                away[i] = list(self._cells[page])
                self._release([page])
                table[i] = _AWAY

    def resume(self, slot: int) -> bool:
        """Bring the pages back, or change nothing."""
        away = self._away[slot] or {}
        if len(away) > len(self._free):
            return False
        for i, cells in away.items():
            (page,) = self._take(1)
            self._cells[page] = cells
            self._tables[slot][i] = page
        self._away[slot] = None
        return True

    def room(self) -> Room:
        """All pages."""
        return Room(len(self._cells), len(self._free), self._size, _PAGE_BYTES)

    def held(self, slot: int) -> Held:
        """Pages of one session."""
        pages = [page for page in self._tables[slot] if page != _AWAY]
        return Held(len(pages), sum(self._references[page] == 1 for page in pages), len(self._away[slot] or ()))

    def distinct(self, parts: Mapping[int, int]) -> int:
        """Pages of these prefixes, each once."""
        return len({page for slot, n in parts.items() for page in self._tables[slot][: -(-n // self._size)]} - {_AWAY})

    def check(self) -> None:
        """Every reference is somebody's, and a page nobody holds is free once. Raises AssertionError."""
        counts = [0] * len(self._references)
        for table in self._tables:
            for page in table:
                if page != _AWAY:
                    counts[page] += 1
        assert counts == self._references, "references do not add up"
        assert sorted(self._free) == [page for page, count in enumerate(counts) if not count], "a page leaked"

    def _take(self, count: int) -> list[int]:
        if count <= 0:
            return []
        if count > len(self._free):
            raise RuntimeError(f"{count} pages wanted, {len(self._free)} free")
        taken, self._free = self._free[:count], self._free[count:]
        for page in taken:
            self._references[page] = 1
            self._cells[page] = [-1] * self._size  # nobody may rely on what another left
        return taken

    def _release(self, pages: Collection[int]) -> None:
        for page in pages:
            if page != _AWAY:
                self._references[page] -= 1
                if not self._references[page]:
                    self._free.append(page)
