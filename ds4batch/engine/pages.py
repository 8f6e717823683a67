"""The pool of KV pages: who holds which, and how many hold it.

A page is `page_tokens` consecutive positions of every layer. Pages are counted by reference: a fork shares whole pages, and a
page that two sessions hold is never written (`copy` it first). Ids are handed out lowest first, so that sessions
that start together lie side by side and attention can view them as one tensor.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ds4batch.engine.state import StatePool


class PageShape(NamedTuple):
    """What one page holds."""

    layers: int
    kv_heads: int
    page_tokens: int
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Bytes of one page, keys and values of all layers."""
        return 2 * self.layers * self.kv_heads * self.page_tokens * self.head_dim * self.dtype.itemsize


class OutOfPages(RuntimeError):
    """Fewer pages are free than were asked for; nothing was taken."""


class Hold:
    """Pages that are being read aside, whoever holds them and goes on writing behind what is read."""

    def __init__(self, pages: Sequence[int]) -> None:
        self.pages = frozenset(pages)
        self.spoilt = False  # a page was cleared: what was read after that is not what it held


class PagePool:
    """Keys and values of all sessions.

    `k` and `v` are [layers, pages, kv_heads, page_tokens, head_dim]. Both start at zero and stay finite: attention multiplies
    masked positions by an exact zero, which only a finite value survives.
    """

    def __init__(self, shape: PageShape, pages: int, device: torch.device, state: StatePool | None = None) -> None:
        """`state` is what the sessions keep besides, where the model has layers without keys and values."""
        self.shape = shape
        self.state = state
        self.pages = pages
        size = (shape.layers, pages, shape.kv_heads, shape.page_tokens, shape.head_dim)
        self.k = torch.zeros(size, dtype=shape.dtype, device=device)
        self.v = torch.zeros(size, dtype=shape.dtype, device=device)
        # Pages are copied and zeroed as plain words: not every torch operation knows 8-bit floats.
        self.words = self.k.view(torch.int32), self.v.view(torch.int32)
        self._references = [0] * pages
        self.changes = 0  # grows with every change of holders
        self._free = list(range(pages))
        self._holds: list[Hold] = []

    @property
    def free(self) -> int:
        """Pages nobody holds."""
        return len(self._free)

    def references(self, page: int) -> int:
        """How many sessions hold the page."""
        return self._references[page]

    def take(self, count: int) -> list[int]:
        """`count` pages for one holder. Raises OutOfPages with nothing taken."""
        if count > len(self._free):
            raise OutOfPages(f"{count} KV pages wanted, {len(self._free)} of {self.pages} free")
        self.changes += 1
        taken = [heapq.heappop(self._free) for _ in range(count)]
        for page in taken:
            self._references[page] = 1
        return taken

    def share(self, pages: Sequence[int]) -> None:
        """One more holder for each page."""
        self.changes += 1
        for page in pages:
            if not self._references[page]:
                raise ValueError(f"page {page} is free and cannot be shared")
            self._references[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """One holder fewer; a page without any is free."""
        self.changes += 1
        for page in pages:
            if not self._references[page]:
                raise ValueError(f"page {page} is already free")
            self._references[page] -= 1
            self._free_if_unused(page)

    def freed(self, pages: Sequence[int]) -> int:
        """How many of them would come free at once if one holder let go of each."""
        return sum(self._references[page] == 1 and not self._is_read(page) for page in pages)

    def hold(self, pages: Sequence[int]) -> Hold:
        """Keep these pages from being handed out again until `drop`. Their holders may write them, at other positions."""
        hold = Hold(pages)
        self._holds.append(hold)
        return hold

    def drop(self, hold: Hold) -> None:
        """What was held has been read."""
        self._holds.remove(hold)
        for page in hold.pages:
            self._free_if_unused(page)

    def _free_if_unused(self, page: int) -> None:
        if not self._references[page] and not self._is_read(page):
            heapq.heappush(self._free, page)

    def _is_read(self, page: int) -> bool:
        return any(page in hold.pages for hold in self._holds)

    def copy(self, source: int) -> int:
        """A page of one's own with the contents of `source`, whose holder count falls by one."""
        (target,) = self.take(1)
        self.copy_positions(source, target, self.shape.page_tokens)
        self.release([source])
        return target

    def copy_positions(self, source: int, target: int, positions: int) -> None:
        """Write the first `positions` of page `source` into page `target`."""
        for words in self.words:
            words[:, target, :, :positions] = words[:, source, :, :positions]

    def clear(self, pages: Sequence[int]) -> None:
        """Zero the pages, which makes them finite again after a forward that was not."""
        for hold in self._holds:
            hold.spoilt = hold.spoilt or not hold.pages.isdisjoint(pages)
        for page in pages:
            for words in self.words:
                words[:, page] = 0
