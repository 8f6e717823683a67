"""The drafts of an engine's sessions, from their proposal to where they are accepted or cut. Owns the books, moves no tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from ds4batch.engine.draft.drafter import Drafter, Expected, Proposal, Tokens
from ds4batch.engine.rows import Span
from ds4batch.engine.session import Session
from scheduler.backend import Work


class _Proposed(NamedTuple):
    """Drafts that wait for the launch of the token they follow."""

    position: int  # of that token
    parent: int  # it itself
    size: int
    proposal: Proposal


class _Ahead(NamedTuple):
    """Drafts that the slot's last launch evaluated."""

    base: int  # tokens of the checkpoint before the first of them
    size: int
    proposal: Proposal
    logits: torch.Tensor | None  # fp32 [1 + drafts, vocab]: what follows the checkpoint and each draft


class PendingDrafts:
    """At most one proposal, or drafts behind the checkpoint, for each slot."""

    def __init__(self, drafter: Drafter | None, sessions: Sequence[Session], vocab: int) -> None:
        self.drafter = drafter
        self._sessions = sessions
        self._vocab = vocab
        self._proposed: dict[int, _Proposed] = {}
        self._ahead: dict[int, _Ahead] = {}

    def propose(self, wants: Sequence[tuple[int, int]], tokens: Tokens, count: int) -> list[int]:
        """See scheduler.backend. Raises RuntimeError, with nothing proposed, for a drafter that failed."""
        if self.drafter is None:
            return [0] * len(wants)
        proposal = self.drafter.propose(wants, tokens, count)
        if any(token >= self._vocab for drafts in proposal.tokens.values() for token in drafts):
            raise RuntimeError("a draft is outside the vocabulary")
        for slot, token in wants:
            made = min(count, len(proposal.tokens.get(slot, ())))
            self._proposed[slot] = _Proposed(len(tokens(slot)), token, made, proposal)
        return [self._proposed[slot].size for slot, _ in wants]

    def expect(self, drawn: Mapping[int, int], slots: Sequence[int], tokens: Tokens) -> None:
        """Tell the drafter what it will be asked. `drawn`: the last row of the draws for each slot; of one slot they lie together."""
        if self.drafter is None:
            return
        expected = []
        for slot in slots:
            ahead = self._ahead.get(slot)
            drafts = () if ahead is None else ahead.proposal.tokens[slot][: ahead.size]
            expected.append(Expected(slot, len(tokens(slot)), drawn[slot] - len(drafts), drafts))
        self.drafter.expect(expected, tokens)

    def check(self, item: Work) -> None:
        """Raise ValueError where the slot cannot take part in a launch so."""
        if item.slot in self._ahead:
            raise ValueError(f"slot {item.slot} has drafts that are neither accepted nor cut")
        if item.drafts:
            made = self._proposed.get(item.slot)
            position, tokens = len(self._sessions[item.slot].tokens), list(item.tokens)
            if made is None or (made.position, [made.parent]) != (position, tokens) or not 0 < item.drafts <= made.size:
                raise ValueError(f"slot {item.slot}: {item.drafts} drafts were not proposed to follow its tokens")

    def tokens(self, item: Work) -> Sequence[int]:
        """The drafts that `item` evaluates, ids or names; it was checked."""
        return self._proposed[item.slot].proposal.tokens[item.slot][: item.drafts] if item.drafts else ()

    def launched(self, item: Work, logits: torch.Tensor | None) -> None:
        """The forward has run; the checkpoint holds the item's tokens."""
        made, session = self._proposed.pop(item.slot, None), self._sessions[item.slot]
        session.ahead = item.drafts
        if made is not None and item.drafts:
            self._ahead[item.slot] = _Ahead(len(session.tokens), item.drafts, made.proposal, logits)

    def position(self, slot: int) -> int | None:
        """That of the first draft behind the slot's checkpoint as it was launched; None without drafts."""
        ahead = self._ahead.get(slot)
        return None if ahead is None else ahead.base

    def logits(self, slot: int, row: int) -> torch.Tensor | None:
        """fp32 [vocab] of what follows the slot's draft of this number, 0 for the tokens before; None where they were not kept."""
        ahead = self._ahead.get(slot)
        return None if ahead is None or ahead.logits is None or row > ahead.size else ahead.logits[row]

    def values(self, slot: int) -> Sequence[int]:
        """The ids of the drafts that the slot's last launch evaluated, () when they were cut."""
        ahead = self._ahead.get(slot)
        return () if ahead is None else ahead.proposal.values(slot)[: ahead.size]

    def accept(self, slot: int, count: int) -> None:
        """See scheduler.backend. Raises ValueError when there are not so many, or fewer than were accepted before."""
        session, ahead = self._sessions[slot], self._ahead.get(slot)
        accepted = len(session.tokens) - ahead.base if ahead is not None else 0
        if ahead is None or not accepted <= count <= ahead.size:
            raise ValueError(f"slot {slot}: {count} drafts cannot be accepted")
        session.tokens += self.values(slot)[accepted:count]
        session.ahead = ahead.size - count
        session.logits = None if ahead.logits is None else ahead.logits[count]

    def cut(self, slot: int, length: int) -> None:
        """The session was shortened to `length` tokens."""
        self._drop(slot)
        if self.drafter is not None:
            self.drafter.cut(slot, length)

    def fork(self, source: int, target: int, length: int) -> None:
        """`target` has the first `length` tokens of `source`."""
        self._drop(target)
        if self.drafter is not None:
            self.drafter.fork(source, target, length)

    def replaced(self, slot: int) -> None:
        """The session comes from elsewhere."""
        self._drop(slot)
        if self.drafter is not None:
            self.drafter.replaced(slot, len(self._sessions[slot].tokens))

    def note(self, spans: Sequence[Span], hidden: torch.Tensor | None) -> None:
        """A forward has run."""
        if self.drafter is not None and self.drafter.wants_hidden:
            if hidden is None:
                raise RuntimeError("the forward kept no hidden states for the drafter")
            self.drafter.note(spans, hidden)

    def _drop(self, slot: int) -> None:
        self._proposed.pop(slot, None)
        self._ahead.pop(slot, None)
