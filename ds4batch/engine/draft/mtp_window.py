"""What an MTP module keeps of each session, and which of its rows are to be evaluated: bookkeeping, no arithmetic.

The module is one layer, so its key and value at a position follow from two things: the model's hidden state there and the next token. A
session keeps both for its last positions, in a ring of PAGES pages of PAGE positions; position p lies in page p // PAGE % PAGES. Rows of
the module are evaluated when drafts are asked for, all that are missing at once, so that a step without drafts pays for nothing but
the copy of its hidden states.

A query sees the pages of the ring but one, because the rows of drafts may already lie in the next page, which is the oldest one.
Nothing here touches an answer: what is missing, after a restore or a long cut, makes drafts worse until it is there again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

PAGE = 128
PAGES = 6
RING = PAGE * PAGES
"""Positions whose hidden states and keys a session keeps."""

SEEN = PAGES - 1
"""Pages that a query sees at most."""

MOST_ROWS = 1024
"""Rows that a card evaluates at once, at most."""

Array = np.ndarray[Any, Any]


@dataclass(slots=True)
class Window:
    """The positions of one session that are kept: hidden states of first .. end - 1, rows of the module of first .. done - 1."""

    first: int = 0
    end: int = 0
    done: int = 0
    follow: int = -1  # the token that the row at done - 1 was made with

    def extend(self, start: int, count: int) -> range:
        """Positions start .. start + count - 1 were evaluated; those whose hidden states are to be kept.

        Positions in between that nobody noted (they were restored) leave a window that begins behind them.
        """
        if start < self.end:
            self.cut(start)
        elif start > self.end:
            self.first = self.done = start
        self.end = start + count
        self.first = max(self.first, self.end - RING)
        self.done = max(self.done, self.first)
        return range(max(start, self.first), self.end)

    def cut(self, length: int) -> None:
        """The session was shortened."""
        if length < self.end:
            self.end = length
            self.first = min(self.first, length)
            self.done = min(self.done, max(length - 1, self.first))

    def missing(self, tokens: Sequence[int], token: int) -> range:
        """Rows to be evaluated before a draft may follow `token`, which follows the session's `tokens`; empty when nothing is kept.

        The row of the last position is always among them: what it was made with may not be what follows now.
        """
        assert self.end == len(tokens)
        start = self.done
        if self.first < start < self.end and tokens[start] != self.follow:
            start -= 1
        return range(max(min(start, self.end - 1), self.first), self.end)

    def made(self, token: int) -> None:
        """All rows are there, the last one made with `token`."""
        self.done, self.follow = self.end, token


class Rows(NamedTuple):
    """Rows of the module, several sessions one after another. Vectors over rows; `last` and `slots` over sessions."""

    tokens: Array  # int64: the token behind each
    positions: Array  # int64
    places: Array  # int64: slot * RING + position % RING
    pages: Array  # int32: where the key goes
    offsets: Array  # int32
    last: Array  # int64: each session's last row
    slots: Array  # int64


class Queries(NamedTuple):
    """One query a session. Vectors over sessions."""

    positions: Array  # int64
    pages: Array  # int32: where its own key goes
    offsets: Array  # int32
    table: Array  # int32 [sessions, SEEN]: the pages it sees, oldest first
    lengths: Array  # int32: keys in them that it sees


def rows_of(parts: Sequence[tuple[int, range, Sequence[int]]]) -> Rows:
    """The rows of (slot, positions, tokens behind them) parts; none is empty."""
    counts = np.array([len(part[1]) for part in parts])
    positions = np.concatenate([np.arange(p.start, p.stop) for _, p, _ in parts])
    slots = np.array([part[0] for part in parts])
    slot = np.repeat(slots, counts)
    tokens = np.concatenate([np.asarray(part[2], np.int64) for part in parts])
    pages, offsets = where(slot, positions)
    return Rows(tokens, positions, slot * RING + positions % RING, pages, offsets, np.cumsum(counts) - 1, slots)


def queries_of(slots: Array, positions: Array, first: Array) -> Queries:
    """The queries at `positions` of sessions that keep `first` .. ; int64 vectors."""
    own = positions // PAGE
    pages, offsets = where(slots, positions)
    oldest = np.maximum(own - SEEN + 1, np.minimum(-(-first // PAGE), own))
    table = slots[:, None] * PAGES + (oldest[:, None] + np.arange(SEEN)) % PAGES
    return Queries(positions, pages, offsets, table.astype(np.int32), (positions + 1 - oldest * PAGE).astype(np.int32))


def where(slots: Array, positions: Array) -> tuple[Array, Array]:
    """The page and the offset in it of these positions of these slots, int32."""
    return (slots * PAGES + positions // PAGE % PAGES).astype(np.int32), (positions % PAGE).astype(np.int32)
