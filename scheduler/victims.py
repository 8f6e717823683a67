"""What it is worth to put a job on a slot: one integer, the higher the better.

Four ranks that cannot overlap: reuse (by its length), an empty slot, a stale conversation (the most idle first,
whatever its length), a protected one (the one that loses fewest tokens first). Idleness is capped so that the ranks
stay apart. Protected conversations of owners that hold no more than their share (see scheduler.fairness) are spared: they come
after all other protected ones.
"""

from __future__ import annotations

from scheduler.events import Victim
from scheduler.options import IDLE_CAP
from scheduler.reuse import Reuse
from scheduler.slots import Slot, SlotState

REQUIRED = 1 << 62  # the slot a job is bound to
EMPTY = 0
_STALE = -1 - IDLE_CAP
_PROTECTED = -2 - IDLE_CAP
_SPARED = 1 << 40  # more than any conversation's length


def score(slot: Slot, reuse: Reuse, now: float, stale_after: float, spared: bool = False) -> int:
    """The rank of a free `slot` for a job that would find `reuse` in it.

    A foreign reuse of a protected conversation ranks among the protected by what it costs, `lost - tokens`: below any
    empty or stale slot, above evicting the whole of a conversation that is dearer.
    """
    state = slot.state(now, stale_after)
    if reuse.tokens and not (reuse.foreign and state is SlotState.IDLE):
        return reuse.tokens
    if state is SlotState.EMPTY:
        return EMPTY
    if state is SlotState.STALE:
        return _STALE + slot.idle_seconds(now)
    protected = _PROTECTED - spared * _SPARED
    if reuse.tokens:
        return min(protected + int(stale_after), protected + gain(reuse))
    return protected - slot.checkpoint.length


def fork_score(slot: Slot, tokens: int, kept: int, now: float, stale_after: float, spared: bool = False) -> int:
    """The rank of a free `slot` for a job that would find `tokens` of another slot's session copied into it.

    Nobody is harmed in an empty slot, so it ranks with reuse. A protected conversation is lost whole, but the `kept` tokens that
    it begins with like the copy can be found there again: it costs what cutting it would, and ranks alike.
    """
    state = slot.state(now, stale_after)
    if state is SlotState.EMPTY:
        return tokens
    if state is SlotState.STALE:
        return _STALE + slot.idle_seconds(now)
    lost = slot.checkpoint.length - min(kept, tokens)
    protected = _PROTECTED - spared * _SPARED
    return min(protected + int(stale_after), protected + tokens - lost)


def gain(reuse: Reuse) -> int:
    """Tokens that need no evaluation now, less those the slot's owner would have to evaluate again."""
    return reuse.tokens - reuse.lost


def victim(slot: Slot, reuse: Reuse, now: float, stale_after: float) -> tuple[Victim, int]:
    """What a job put on `slot` drives out, and how many tokens of it. One's own conversation is not driven out."""
    if reuse.tokens and not reuse.foreign:
        return "none", 0
    state = slot.state(now, stale_after)
    if state is SlotState.EMPTY:
        return "empty", 0
    lost = reuse.lost if reuse.tokens else slot.checkpoint.length
    return ("stale" if state is SlotState.STALE else "protected"), lost
