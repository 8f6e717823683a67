"""One resident session: its tokens, its pages, and the logits of its last position.

Owns the bookkeeping of one slot; the engine moves the tensors. Every operation happens whole or changes nothing.
"""

from __future__ import annotations

import torch

from ds4batch.engine.pages import PagePool


class Session:
    """The checkpoint of one slot: `tokens[i]` is the token whose keys and values position i of the pages holds."""

    def __init__(self, slot: int, pool: PagePool, ctx: int) -> None:
        self.slot = slot
        self.ctx = ctx
        self.tokens: list[int] = []
        self.pages: list[int] = []
        self.logits: torch.Tensor | None = None  # fp32 [vocab] of the last position, when the last forward kept them
        self._pool = pool

    def pages_missing(self, length: int) -> int:
        """Pages that must be taken before the session can hold `length` tokens."""
        return -(-length // self._pool.shape.page_tokens) - len(self.pages)

    def shared_tail(self, start: int) -> list[int]:
        """Indices into `pages` of pages at or after position `start` that another session holds too."""
        first = start // self._pool.shape.page_tokens
        return [i for i in range(first, len(self.pages)) if self._pool.references(self.pages[i]) > 1]

    def can_truncate(self, length: int) -> bool:
        """Whether `truncate` can keep `length` tokens: any prefix of keys and values, but a state only as StatePool.holds says."""
        state = self._pool.state
        return 0 <= length <= len(self.tokens) and (state is None or state.holds(self.slot, len(self.tokens), length))

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens, the pages they need, and their state. Raises ValueError, with nothing changed, without one."""
        if self._pool.state is not None:
            self._pool.state.truncate(self.slot, len(self.tokens), length)
        del self.tokens[length:]
        kept = -(-length // self._pool.shape.page_tokens)
        self._pool.release(self.pages[kept:])
        del self.pages[kept:]
        self.logits = None

    def mark(self) -> None:
        """Make this point one that the session can be cut back to, in place of an earlier such point."""
        if self._pool.state is not None and self.tokens:
            self._pool.state.mark(self.slot, len(self.tokens))

    def poison(self) -> None:
        """Hold nothing, and leave no value behind that is not finite."""
        own = [page for page in self.pages if self._pool.references(page) == 1]
        self._pool.clear(own)
        self.truncate(0)
