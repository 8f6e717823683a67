"""One resident session: its tokens, its pages, and the logits of its last position.

Owns the bookkeeping of one slot; the engine moves the tensors. Every operation happens whole or changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from ds4batch.engine.pages import PagePool
from ds4batch.engine.parking import HostPage, to_device, to_host

AWAY = -1
"""In `Session.pages`, for a page in host memory."""


class Session:
    """The checkpoint of one slot: `tokens[i]` is the token whose keys and values position i of the pages holds."""

    def __init__(self, slot: int, pool: PagePool, ctx: int) -> None:
        self.slot = slot
        self.ctx = ctx
        self.tokens: list[int] = []
        self.pages: list[int] = []
        self.logits: torch.Tensor | None = None  # fp32 [vocab] of the last token, when the last forward kept them
        self.ahead = 0  # positions evaluated behind the tokens: drafts that are not accepted
        self.parked: dict[int, HostPage] | None = None  # by index into `pages`; None while the session is on the device
        self._pool = pool

    def pages_missing(self, length: int) -> int:
        """Pages that must be taken before the session can hold `length` tokens."""
        return -(-length // self._pool.shape.page_tokens) - len(self.pages)

    def shared_tail(self, start: int) -> list[int]:
        """Indices into `pages` of pages at or after position `start` that another session holds too."""
        first = start // self._pool.shape.page_tokens
        return [i for i in range(first, len(self.pages)) if self._pool.references(self.pages[i]) > 1]

    @property
    def evaluated(self) -> int:
        """Positions that keys, values and state are of."""
        return len(self.tokens) + self.ahead

    @property
    def resident(self) -> list[int]:
        """The pages on the device."""
        return self.pages if self.parked is None else [page for page in self.pages if page != AWAY]

    def can_truncate(self, length: int) -> bool:
        """Whether `truncate` can keep `length` tokens: any prefix of keys and values, but a state only as StatePool.holds says.

        A parked session can only be emptied.
        """
        if self.parked is not None:
            return length in (0, len(self.tokens))
        return 0 <= length <= len(self.tokens) and self._state_holds(length)

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens, the pages they need, and their state. Raises ValueError, with nothing changed, without one."""
        if self._pool.state is not None:
            self._pool.state.truncate(self.slot, self.evaluated, length)
        self.logits = self.logits if length == len(self.tokens) else None
        self.ahead = 0
        del self.tokens[length:]
        kept = -(-length // self._pool.shape.page_tokens)
        self._pool.release([page for page in self.pages[kept:] if page != AWAY])
        del self.pages[kept:]
        if not length:
            self.parked = None

    def fork_point(self, most: int) -> int:
        """The longest prefix of at most `most` tokens that `fork` can give away; 0 when there is none."""
        if self.parked is not None:
            return 0
        live, state = len(self.tokens), self._pool.state
        if state is None:
            return max(0, min(live, most))
        return max((n for n in state.lengths(self.slot, self.evaluated) if n <= min(live, most)), default=0)

    def can_fork(self, length: int) -> bool:
        """Whether a session can begin with the first `length` tokens of this one."""
        return self.parked is None and 0 < length <= len(self.tokens) and self._state_holds(length)

    def fork(self, target: Session, length: int) -> bool:
        """Make the first `length` tokens those of `target`: whole pages are shared, what is left of the last is copied.

        False, with nothing changed, where `can_fork` says no, no page is left to copy into, or both are one session.
        """
        if target is self or not self.can_fork(length):
            return False
        pool = self._pool
        whole, rest = divmod(length, pool.shape.page_tokens)
        shared = self.pages[:whole]
        if rest and not pool.free + pool.freed(target.resident):
            return False
        pool.share(shared)
        if pool.state is not None:
            pool.state.fork(self.slot, self.evaluated, target.slot, length)
        pool.release(target.resident)
        target.parked = None
        target.pages = shared
        if rest:
            target.pages += pool.take(1)
            pool.copy_positions(self.pages[whole], target.pages[-1], rest)
        target.tokens = self.tokens[:length]
        target.logits = None
        target.ahead = 0
        return True

    def park(self, kept: Collection[int]) -> None:
        """Move the pages to host memory, those in `kept` apart. A parked session's other pages follow."""
        self.parked = {} if self.parked is None else self.parked
        for i, page in enumerate(self.pages):
            if page != AWAY and page not in kept:
                self.parked[i] = to_host(self._pool, page)
                self._pool.release([page])
                self.pages[i] = AWAY

    def resume(self) -> bool:
        """Bring the pages back, or return False with nothing changed when too few are free."""
        if self.parked is None:
            return True
        if len(self.parked) > self._pool.free:
            return False
        for i, copy in self.parked.items():
            (self.pages[i],) = self._pool.take(1)
            to_device(self._pool, copy, self.pages[i])
        self.parked = None
        return True

    def mark(self) -> None:
        """Make this point one that the session can be cut back to, in place of an earlier such point. Raises ValueError before drafts."""
        if self.ahead:
            raise ValueError(f"slot {self.slot} has drafts behind the point to be marked")
        if self._pool.state is not None and self.tokens:
            self._pool.state.mark(self.slot, len(self.tokens))

    def poison(self) -> None:
        """Hold nothing, and leave no value behind that is not finite."""
        own = [page for page in self.resident if self._pool.references(page) == 1]
        self._pool.clear(own)
        self.truncate(0)

    def _state_holds(self, length: int) -> bool:
        state = self._pool.state
        return state is None or state.holds(self.slot, self.evaluated, length)
