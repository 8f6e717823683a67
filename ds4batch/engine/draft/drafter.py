"""What the engine asks of a drafter, and what it tells it.

A drafter guesses. Nothing it says can change an answer, because a draft counts only when it is the token that is drawn anyway; so it
need not be exact, and what it does not know makes its guesses worse and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch

from ds4batch.engine.rows import Span

Tokens = Callable[[int], Sequence[int]]
"""A slot's checkpoint."""


class Proposal:
    """Drafts by slot: ids, or names of what the device is still making (-1 - i for the i-th of its drawn tokens, see
    triton_kernels.embedding). A drafter that gives names says the ids in `values`."""

    def __init__(self, tokens: Mapping[int, Sequence[int]]) -> None:
        self.tokens = tokens

    def values(self, slot: int) -> Sequence[int]:
        """The ids of the slot's drafts. Asked once the draws behind the forward that took them were waited for."""
        return self.tokens[slot]


class Expected(NamedTuple):
    """A session for which drafts will be asked, behind draws that the host does not know yet."""

    slot: int
    length: int  # of its checkpoint, behind which its drafts lie
    drawn: int  # the draws' row behind the checkpoint; those behind each draft follow
    drafts: Sequence[int]  # as they were proposed: ids or names


class Drafter(Protocol):
    """Guesses at the tokens of an engine's sessions. One thread calls it."""

    @property
    def wants_hidden(self) -> bool:
        """Whether `note` is to be called."""

    def propose(self, wants: Sequence[tuple[int, int]], tokens: Tokens, count: int) -> Proposal:
        """Up to `count` drafts for each (slot, token that follows its checkpoint); a slot may be left out.

        Raises RuntimeError when the device failed; the sessions are lost then.
        """

    def expect(self, sessions: Sequence[Expected], tokens: Tokens) -> None:
        """What `propose` will be asked once these draws were waited for: the drafter may begin, from the draws on the device.

        Another question, or none, may follow. Raises RuntimeError as `propose` does.
        """

    def note(self, spans: Sequence[Span], hidden: torch.Tensor) -> None:
        """A forward has evaluated `spans`. hidden: fp32 [rows, hidden], the residual stream behind the last layer, valid until the next.

        Spans with drafts have positions among them that are cut again. Raises RuntimeError as `propose` does.
        """

    def cut(self, slot: int, length: int) -> None:
        """The slot's session was shortened to `length` tokens."""

    def fork(self, source: int, target: int, length: int) -> None:
        """The first `length` tokens of `source` are those of `target` now."""

    def replaced(self, slot: int, length: int) -> None:
        """The slot holds `length` tokens of which nothing was noted."""
