"""Drafts: guesses at tokens to come, checked in the forward that evaluates the token before them.

A cycle checks the drafts that the one before it made, commits what was drawn, and makes the next. A draft is accepted exactly when
it is the token that is drawn from the row before it, so the answers are those without drafts, sampled ones too. The whole batch
drafts or nobody, as the prices of both kinds of cycle say; sessions without a draft have their one row in either.

Owns the decision and the proposals, not the drafts: those are the backend's, and are used in the next forward or never.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from scheduler.backend import Backend, BackendError, Clock
from scheduler.job import Job
from scheduler.pipeline import Flight, Row
from scheduler.pricing import Pricing, PricingStats
from scheduler.roster import Roster

_LEAST = 2  # tokens that a job has left, when drafts can still spare it a forward


@dataclass(slots=True)
class Checked:
    """What came of one forward's decode rows."""

    rows: int = 0  # that had drafts
    drafts: int = 0
    tokens: int = 0  # committed
    accepted: list[int] = field(default_factory=list)  # first drafts, second ones, ...

    def accept(self, at: int) -> None:
        """The draft at this place, from 0, was right."""
        self.accepted += [0] * (at + 1 - len(self.accepted))
        self.accepted[at] += 1


class Speculation:
    """Decides when drafts are made, and for whom. With `drafts` 0 it never does, and costs nothing."""

    def __init__(self, backend: Backend, roster: Roster, clock: Clock, drafts: int) -> None:
        self._backend = backend
        self._roster = roster
        self._drafts = drafts
        self._pricing = Pricing(clock) if drafts else None
        self._proposed: dict[int, int] = {}  # job -> drafts, for the next forward
        self._made = False  # in the last cycle

    def take(self) -> Mapping[int, int]:
        """How many drafts each job has for the forward that is composed now. What is not used in it is never used."""
        proposed, self._proposed = self._proposed, {}
        return proposed

    def take_made(self) -> bool:
        """Whether the forward that is composed now is to check drafts, though there may be none."""
        made, self._made = self._made, False
        return made

    def wanted(self, flight: Flight) -> bool:
        """Whether drafts shall be made behind these draws. To be asked once a cycle: asking counts."""
        if self._pricing is None:
            return False
        rows = [turn.row for turn in flight.turns if turn.row.owned]
        some = any(self._may(row, len(row.job.generated) + row.job.drawing) for row in rows)
        return some and self._pricing.next_drafts(len(rows), timed=not any(row.prefill for row in flight.rows))

    def expect(self, flight: Flight) -> None:
        """Let the drafter begin before the draws are known, where these are all that will be drawn."""
        turns = [turn for turn in flight.turns if turn.row.owned]
        slots = [turn.row.slot for turn in turns if self._may(turn.row, len(turn.row.job.generated) + turn.row.job.drawing)]
        if not slots or any(turn.draws <= turn.row.work.drafts for turn in turns):
            return
        try:
            self._backend.expect([slot.id for slot in slots])
        except BackendError as error:
            for slot in slots:
                self._roster.lose(slot, 500, f"drafting failed: {error}")

    def propose(self, flight: Flight) -> None:
        """Make drafts for what was just drawn. When that fails, it takes the sessions with it."""
        rows = [turn.row for turn in flight.turns if turn.row.owned and self._may(turn.row, len(turn.row.job.generated))]
        wants = [(row, row.job.pending) for row in rows if row.job.pending is not None]
        if not wants:
            return
        most = min(self._drafts, max(_room(row.job) for row, _ in wants))
        try:
            counts = self._backend.propose([(row.slot.id, token) for row, token in wants], most)
        except BackendError as error:
            for row, _ in wants:
                self._roster.lose(row.slot, 500, f"drafting failed: {error}")
            return
        self._proposed = {row.job.id: min(n, _room(row.job)) for (row, _), n in zip(wants, counts, strict=True)}
        self._made = True

    def observe(self, flight: Flight, checked: Checked, seconds: float) -> None:
        """A cycle is complete, with the drafts it made."""
        width = sum(not row.prefill for row in flight.rows)
        if self._pricing is None or not width:
            return
        mixed = width < len(flight.rows)
        self._pricing.observe(
            width,
            verified=flight.verified,
            made=self._made,
            seconds=0.0 if mixed else seconds,
            drafts=checked.drafts,
            accepted=sum(checked.accepted),
            tokens=checked.tokens,
        )

    def stats(self) -> PricingStats | None:
        """The prices, None where nothing is drafted."""
        return None if self._pricing is None else self._pricing.stats()

    def _may(self, row: Row, drawn: int) -> bool:
        return row.job.drafted and row.job.limit - drawn >= _LEAST and self._backend.can_draft(row.slot.id)


def _room(job: Job) -> int:
    """Drafts that can be of use: the draw behind the last one is the last that the job may make."""
    return job.limit - len(job.generated) - 1
