"""What is under way between two steps: the rows of a forward, and the draws that nobody has waited for.

Where every row of a forward may be chained, the next forward is launched before the tokens of this one are known: the
device takes each token from its own draw, and the host reads them while it works. A row that turns out to have ended is one
position too long, and is cut. A forward that checks drafts is not flown on: how far its sessions go is known with its draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from scheduler.backend import CHAINED, Backend, BackendError, Draws, Pick, Sampled, Work
from scheduler.cost import Load, load_of
from scheduler.job import Job, JobState
from scheduler.slots import Slot


class Row(NamedTuple):
    """One slot's part of a forward, and the right to commit its result."""

    slot: Slot
    job: Job
    generation: int  # of the slot, when the row was made
    prefill: bool
    position: int  # of its first token
    work: Work

    @property
    def owned(self) -> bool:
        """Whether the job still has the slot. A result that comes later is nobody's."""
        return self.slot.job is self.job and self.slot.generation == self.generation

    @property
    def chained(self) -> bool:
        """Whether its token is not known yet."""
        return self.work.tokens is CHAINED


class Turn(NamedTuple):
    """Draws for one slot that are begun together: from its row `first` on, where row n follows the n-th draft."""

    row: Row
    first: int
    draws: int


class Flight(NamedTuple):
    """One forward whose tokens are being drawn."""

    turns: list[Turn]  # in the order of the draws
    rows: list[Row]  # of the forward
    slots: list[Slot]  # of all forwards since the draws before these: what is lost when these fail
    draws: Draws
    launched: float  # when, in the clock's seconds
    verified: bool  # it was to check drafts


class _Refused(NamedTuple):
    """Draws that could not be begun."""

    error: Exception

    def wait(self) -> Sequence[Sampled]:
        raise self.error


def first_turn(backend: Backend, row: Row) -> Turn:
    """What is drawn first for a row: all behind its drafts too, unless a draw depends on what is drawn and read before it."""
    alone = row.job.steered or not backend.independent(row.job.sampling)
    return Turn(row, 0, 1 if alone else 1 + row.work.drafts)


def begin(backend: Backend, turns: Sequence[Turn]) -> Draws:
    """Begin to draw. What is refused at once is told by `wait`, when the draws before were taken in."""
    picks = [Pick(row.slot.id, row.job.sampling, first + i) for row, first, draws in turns for i in range(draws)]
    try:
        return backend.sample(picks)
    except (BackendError, ValueError) as error:
        return _Refused(error)


def may_fly(backend: Backend, flight: Flight) -> bool:
    """Whether all rows that are drawn for may be chained. One that may not holds the others up for a step: apart from them
    it would decode only every other step."""
    if isinstance(flight.draws, _Refused):
        return False
    if any(row.work.drafts for row in flight.rows):
        return False
    return all(backend.can_chain(row.slot.id, row.job.sampling) for row, _, _ in flight.turns if row.owned)


def row_of(slot: Slot, job: Job, tokens: int, drafts: int = 0) -> Row | None:
    """What the slot's job evaluates next: `tokens` of its prompt, or the token it drew last with `drafts`; None when nothing follows.

    The limit is known in advance, so the draw that reaches it is never chained to.
    """
    if job.prefilling and job.done < len(job.prompt):
        end = job.done + tokens
        work = Work(slot.id, job.prompt[job.done : end], wants_logits=end == len(job.prompt))
        return Row(slot, job, slot.generation, True, job.done, work)
    position = len(job.prompt) + len(job.generated)
    if job.pending is not None:
        return Row(slot, job, slot.generation, False, position - 1, Work(slot.id, [job.pending], True, drafts))
    if job.drawing and len(job.generated) + 1 < job.limit:
        return Row(slot, job, slot.generation, False, position, Work(slot.id, CHAINED, True))
    return None


def load(rows: Sequence[Row]) -> Load:
    """What a forward of `rows` is made of. A draft is a decode row like any other."""
    chunks = [(row.position, len(row.work.tokens)) for row in rows if row.prefill]
    return load_of(len(rows) - len(chunks) + sum(row.work.drafts for row in rows), chunks)


def commit(backend: Backend, row: Row, sampled: Sampled, now: float) -> None:
    """Take a drawn token. What can be known from its id is decided here, before another forward is paid for."""
    job = row.job
    evaluated, job.chained = job.chained, False
    job.drawing -= 1
    if job.times.first_token is None:
        job.times.first_token = now
        job.move(JobState.DECODE)
    job.times.last_token = now
    if sampled.token in job.stop_tokens:  # never read, not part of the answer
        job.ending, job.drawing = "stop", 0
        if evaluated:
            backend.truncate(row.slot.id, len(job.prompt) + len(job.generated))
        return
    job.generated.append(sampled.token)
    job.unread.append(sampled)
    if len(job.generated) >= job.limit:
        job.ending = "length"
    elif not evaluated:
        job.pending = sampled.token
