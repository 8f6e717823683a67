"""Drafts without weights: what followed the last tokens when they stood in the session before.

Worth it where answers repeat their prompts: edited files, quoted results, lists. The longest suffix of SIZES tokens, with the one that
follows the checkpoint, is looked up; of its earlier places the latest counts. Each session's index is brought up to date when drafts are
asked for, and costs a few dictionary operations a token that came or went.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ds4batch.engine.draft.drafter import Expected, Proposal, Tokens
from ds4batch.engine.rows import Span

SIZES = (4, 3, 2)
"""Tokens of the suffixes that are looked up, the longest first."""


class NGrams:
    """Where the n-grams of one session end: the latest place of each, and for each place the one before it. Any cut is undone exactly."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._latest: dict[int, dict[int, int]] = {n: {} for n in SIZES}  # hash of an n-gram -> index of its last token
        self._before: dict[int, list[int]] = {n: [] for n in SIZES}  # for each token the place before; -1 is none

    def extend(self, tokens: Sequence[int]) -> None:
        """More tokens."""
        for token in tokens:
            self.tokens.append(token)
            at = len(self.tokens) - 1
            for n in SIZES:
                gram, latest = self._gram(at, n), self._latest[n]
                self._before[n].append(-1 if gram is None else latest.get(gram, -1))
                if gram is not None:
                    latest[gram] = at

    def cut(self, length: int) -> None:
        """Keep the first `length` tokens."""
        for at in range(len(self.tokens) - 1, length - 1, -1):
            for n in SIZES:
                gram, before = self._gram(at, n), self._before[n].pop()
                if gram is not None and before < 0:
                    del self._latest[n][gram]
                elif gram is not None:
                    self._latest[n][gram] = before
            self.tokens.pop()

    def copy(self, length: int) -> NGrams:
        """The index of the first `length` tokens: cut from a copy or built anew, whichever is less."""
        made = NGrams()
        if len(self.tokens) - length > length:
            made.extend(self.tokens[:length])
            return made
        made.tokens = self.tokens.copy()
        made._latest = {n: latest.copy() for n, latest in self._latest.items()}
        made._before = {n: before.copy() for n, before in self._before.items()}
        made.cut(length)
        return made

    def continuation(self, follow: int, count: int) -> list[int]:
        """The `count` tokens that stood behind the longest known suffix of the tokens and `follow`; none without one.

        Where it stood near the end, what it says so far goes on: a loop is drafted as a loop.
        """
        tokens = self.tokens
        for n in SIZES:
            if len(tokens) < n:  # the suffix would have no earlier place
                continue
            suffix = [*tokens[len(tokens) - n + 1 :], follow]
            at = self._latest[n].get(hash(tuple(suffix)))
            if at is not None and tokens[at - n + 1 : at + 1] == suffix:  # two n-grams may have one hash
                found = [*tokens[at + 1 : at + 1 + count], follow]  # `follow` stands behind all tokens
                while len(found) < count:
                    found.append(found[len(found) - (len(tokens) - at)])
                return found[:count]
        return []

    def _gram(self, at: int, n: int) -> int | None:
        return hash(tuple(self.tokens[at - n + 1 : at + 1])) if at + 1 >= n else None


class LookupDrafter:
    """Drafts from each session's own tokens."""

    wants_hidden = False

    def __init__(self, slots: int) -> None:
        self._grams = [NGrams() for _ in range(slots)]

    def propose(self, wants: Sequence[tuple[int, int]], tokens: Tokens, count: int) -> Proposal:
        """Up to `count` drafts for each slot in which something is found."""
        found = {}
        for slot, follow in wants:
            grams, known = self._grams[slot], tokens(slot)
            grams.extend(known[len(grams.tokens) :])
            if drafts := grams.continuation(follow, count):
                found[slot] = drafts
        return Proposal(found)

    def expect(self, sessions: Sequence[Expected], tokens: Tokens) -> None:
        """A lookup takes no time worth it."""

    def note(self, spans: Sequence[Span], hidden: torch.Tensor) -> None:
        """Never called: tokens are all it needs."""

    def cut(self, slot: int, length: int) -> None:
        """Forget what was cut."""
        if length < len(self._grams[slot].tokens):
            self._grams[slot].cut(length)

    def fork(self, source: int, target: int, length: int) -> None:
        """Begin with the source's index, as far as it goes."""
        grams = self._grams[source]
        self._grams[target] = grams.copy(min(length, len(grams.tokens)))

    def replaced(self, slot: int, length: int) -> None:
        """Begin anew."""
        self._grams[slot] = NGrams()
