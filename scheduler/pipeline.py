"""What is under way between two steps: the rows of a forward, and the draws that nobody has waited for.

Where every row of a forward may be chained, the next forward is launched before the tokens of this one are known: the
device takes each token from its own draw, and the host reads them while it works. A row that turns out to have ended is one
position too long, and is cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from scheduler.backend import CHAINED, Backend, BackendError, Draws, Sampled, Work
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


class Flight(NamedTuple):
    """One forward whose tokens are being drawn."""

    picked: list[Row]  # that are drawn for, in the order of the draws
    slots: list[Slot]  # of all forwards since the draws before these: what is lost when these fail
    draws: Draws
    load: Load
    launched: float  # when, in the clock's seconds


class _Refused(NamedTuple):
    """Draws that could not be begun."""

    error: Exception

    def wait(self) -> Sequence[Sampled]:
        raise self.error


def begin(backend: Backend, picked: Sequence[Row]) -> Draws:
    """Begin to draw for the rows. What is refused at once is told by `wait`, when the draws before were taken in."""
    try:
        return backend.sample([(row.slot.id, row.job.sampling) for row in picked])
    except (BackendError, ValueError) as error:
        return _Refused(error)


def may_fly(backend: Backend, flight: Flight) -> bool:
    """Whether all rows that are drawn for may be chained. One that may not holds the others up for a step: apart from them
    it would decode only every other step."""
    if isinstance(flight.draws, _Refused):
        return False
    return all(backend.can_chain(row.slot.id, row.job.sampling) for row in flight.picked if row.owned)


def row_of(slot: Slot, job: Job, tokens: int) -> Row | None:
    """What the slot's job evaluates next: `tokens` of its prompt, or the token it drew last; None when nothing follows.

    The limit is known in advance, so the draw that reaches it is never chained to.
    """
    if job.prefilling and job.done < len(job.prompt):
        end = job.done + tokens
        work = Work(slot.id, job.prompt[job.done : end], wants_logits=end == len(job.prompt))
        return Row(slot, job, slot.generation, True, job.done, work)
    position = len(job.prompt) + len(job.generated)
    if job.pending is not None:
        return Row(slot, job, slot.generation, False, position - 1, Work(slot.id, [job.pending], True))
    if job.drawing and len(job.generated) + 1 < job.limit:
        return Row(slot, job, slot.generation, False, position, Work(slot.id, CHAINED, True))
    return None


def load(rows: list[Row]) -> Load:
    """What a forward of `rows` is made of."""
    chunks = [(row.position, len(row.work.tokens)) for row in rows if row.prefill]
    return load_of(len(rows) - len(chunks), chunks)


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
