"""Where a request and the session most like it part ways: what its owner wants to know when a prompt was evaluated again.

Reads published checkpoints; renders a few tokens. Decides nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import NamedTuple

from scheduler.backend import Text
from scheduler.job import TOKEN_BYTES, Job
from scheduler.reuse import common_prefix
from scheduler.slots import Slot

_AROUND = 8  # tokens shown on either side


class Divergence(NamedTuple):
    """The first token in which a prompt differs from a session."""

    slot: int
    at: int  # tokens that both begin with
    live: int  # tokens of the session
    held: str  # the session's text around the place: 8 tokens before it, the one that differs, 8 after it
    asked: str  # the prompt's
    held_tokens: list[int]  # the ids of `held`


def nearest(slots: Iterable[Slot], job: Job, text: Text) -> Divergence | None:
    """Where `job` leaves the free slot's session that shares most of it; None when none shares a token."""
    best: Slot | None = None
    at = 0
    for slot in slots:
        if slot.job is None:
            common = common_prefix(slot.checkpoint.packed, job.packed)
            if common > at:
                best, at = slot, common
    if best is None:
        return None
    held = best.checkpoint
    ours, theirs = _around(held.packed, at), _around(job.packed, at)
    return Divergence(best.id, at, held.length, text.render(ours), text.render(theirs), ours)


def _around(packed: bytes, at: int) -> list[int]:
    return array("I", packed[max(0, at - _AROUND) * TOKEN_BYTES : (at + _AROUND + 1) * TOKEN_BYTES]).tolist()
