"""The pool of KV pages: who holds which, and how many hold it.

A page is `page_tokens` consecutive positions of every layer. Pages are counted by reference: a fork shares whole pages, and a
page that two sessions hold is never written (`writable` copies it first). Ids are handed out lowest first, so that sessions
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
        self._words = self.k.view(torch.int32), self.v.view(torch.int32)
        self._references = [0] * pages
        self._free = list(range(pages))

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
        taken = [heapq.heappop(self._free) for _ in range(count)]
        for page in taken:
            self._references[page] = 1
        return taken

    def share(self, pages: Sequence[int]) -> None:
        """One more holder for each page."""
        for page in pages:
            if not self._references[page]:
                raise ValueError(f"page {page} is free and cannot be shared")
            self._references[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """One holder fewer; a page without any is free."""
        for page in pages:
            if not self._references[page]:
                raise ValueError(f"page {page} is already free")
            self._references[page] -= 1
            if not self._references[page]:
                heapq.heappush(self._free, page)

    def copy(self, source: int) -> int:
        """A page of one's own with the contents of `source`, whose holder count falls by one."""
        (target,) = self.take(1)
        for words in self._words:
            words[:, target] = words[:, source]
        self.release([source])
        return target

    def clear(self, pages: Sequence[int]) -> None:
        """Zero the pages, which makes them finite again after a forward that was not."""
        for page in pages:
            for words in self._words:
                words[:, page] = 0
