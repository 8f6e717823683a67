"""The step loop: one forward after another, for everything that can go on.

One thread calls everything here. A step places waiting jobs, launches one forward, reads the previous step's text while
the device works, and draws the next tokens. Time comes from the injected clock alone.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

from scheduler.admission import Admission
from scheduler.backend import Backend, BackendError, Clock, Sampled, Text, Work
from scheduler.events import Event, Progress, Stats, StepDone
from scheduler.interleave import CostModel, Interleaver
from scheduler.job import Job, JobState
from scheduler.options import Options
from scheduler.reuse import LADDER, Tier
from scheduler.roster import Roster
from scheduler.slots import Slot

log = logging.getLogger(__name__)


class Stopping(Exception):
    """The scheduler takes no more jobs."""


class _Row(NamedTuple):
    """One slot's part of a forward, and the right to commit its result."""

    slot: Slot
    job: Job
    generation: int  # of the slot, when the row was made
    prefill: bool
    work: Work

    @property
    def owned(self) -> bool:
        """Whether the job still has the slot. A result that comes later is nobody's."""
        return self.slot.job is self.job and self.slot.generation == self.generation


class Scheduler:
    """Runs jobs on resident sessions: `submit` and `cancel` at any time, `step` while `busy`.

    `backend` must be able to empty any session: `truncate(slot, 0)` always succeeds. `text.tokenise` must add nothing
    of its own (no begin-of-text token), because it is given the middle of a text. `ladder` replaces the tiers of the
    reuse ladder.
    """

    def __init__(
        self,
        backend: Backend,
        text: Text,
        clock: Clock,
        *,
        slots: int,
        options: Options,
        ladder: Sequence[Tier] = LADDER,
    ) -> None:
        if slots < 1:
            raise ValueError(f"slots: {slots} is below 1")
        self._backend = backend
        self._clock = clock
        self._options = options
        self._roster = Roster(backend, text, clock, slots, options)
        self._admission = Admission(self._roster, backend, text, clock, options, ladder)
        self._cost = CostModel()
        self._interleaver = Interleaver(options, self._cost)
        self._stopping = False
        self._stepping = False
        self._cancels: dict[int, str] = {}  # job -> cause; kept while a step is under way
        self._halt = False  # end all jobs as soon as no step is under way

    def submit(self, job: Job) -> None:
        """Queue a new job. Raises QueueFull, Stopping, and ValueError for a job that can never run."""
        if self._stopping:
            raise Stopping("the server is shutting down")
        if job.state is not JobState.NEW or job.id in self._roster.jobs:
            raise ValueError(f"id: job {job.id} was submitted already")
        ctx = self._backend.ctx
        if len(job.tokens) >= ctx:
            raise ValueError(f"tokens: a prompt of {len(job.tokens)} leaves no room in a context of {ctx}")
        slots = len(self._roster.slots)
        if job.required_slot is not None and not 0 <= job.required_slot < slots:
            raise ValueError(f"required_slot: there is no slot {job.required_slot} among {slots}")
        if job.needs_live_state and job.required_slot is None:
            raise ValueError("needs_live_state: the job names no slot whose state it needs")
        self._roster.admit(job)

    def cancel(self, job_id: int, cause: str) -> None:
        """End a job wherever it stands. Its slot keeps what was evaluated. Unknown and ended ids are ignored."""
        if job_id in self._roster.jobs:
            self._cancels.setdefault(job_id, cause)
            self._apply_requests()

    def stop(self, drain: bool) -> None:
        """Take no more jobs. With `drain` the accepted ones are answered, else they end with an error.

        Step until not `busy`.
        """
        self._stopping = True
        self._halt = self._halt or not drain
        self._apply_requests()

    @property
    def busy(self) -> bool:
        """Whether `step` has anything to do or to report."""
        return bool(self._roster.jobs or self._roster.events)

    def stats(self) -> Stats:
        """How things stand now. Cheap."""
        return self._roster.stats()

    def check(self) -> None:
        """Raise InvariantError when the state contradicts itself. Reads every token: not for service."""
        self._roster.check()

    def step(self) -> list[Event]:
        """Run one iteration and return what happened since the last one.

        A backend error that is neither BackendError nor ValueError passes through: the device is lost, and the
        scheduler with it.
        """
        self._stepping = True
        try:
            self._admission.dispatch()
            rows = self._compose()
            started = self._clock()
            launched = self._launch(rows) if rows else []
            self._read_texts()  # the previous step's, while the device runs this one
            drawn = self._draw([row for row in launched if row.work.wants_logits and row.owned])
            now = self._clock()
            for row, one in drawn:
                _commit(row.job, one, now)
            if not self._options.overlap:
                self._read_texts()
            if not rows:
                self._cost.pause()
            if launched:
                self._record(launched, now - started, sampled=bool(drawn))
        finally:
            self._stepping = False
        self._apply_requests()
        if self._options.self_check:
            self.check()
        return self._roster.take_events()

    def _compose(self) -> list[_Row]:
        """Every row that can decode, then one prefill quantum."""
        rows: list[_Row] = []
        remaining: list[tuple[int, int]] = []
        for slot in self._roster.slots:
            job = slot.job
            if job is None:
                continue
            if job.prefilling:
                remaining.append((slot.id, len(job.prompt) - job.done))
            elif job.pending is not None:
                rows.append(_Row(slot, job, slot.generation, False, Work(slot.id, [job.pending], True)))
        for share in self._interleaver.shares(remaining, len(rows)) if remaining else ():
            slot = self._roster.slots[share.slot]
            job = slot.job
            assert job is not None
            end = job.done + share.tokens
            work = Work(slot.id, job.prompt[job.done : end], wants_logits=end == len(job.prompt))
            rows.append(_Row(slot, job, slot.generation, True, work))
        return rows

    def _launch(self, rows: list[_Row]) -> list[_Row]:
        """Evaluate `rows` in one forward and return those that were. The jobs of the others have failed."""
        try:
            self._backend.launch([row.work for row in rows])
        except BackendError as error:
            for row in rows:
                self._roster.fail(row.job, 500, f"the forward failed: {error}")
            return []
        except ValueError as error:
            if len(rows) > 1:  # nothing was evaluated: alone, each row shows whether it is the one refused
                return [done for row in rows for done in self._launch([row])]
            self._roster.fail(rows[0].job, 400 if rows[0].prefill else 500, f"the forward was refused: {error}")
            return []
        for row in rows:
            if row.prefill:
                row.job.done += len(row.work.tokens)
                self._roster.events.append(Progress(row.job.id, row.job.done, len(row.job.prompt)))
            else:
                row.job.pending = None
        return rows

    def _read_texts(self) -> None:
        """Give the outputs the tokens of the last step, and end the jobs that are complete with them."""
        for slot in self._roster.slots:
            if slot.job is not None and (slot.job.unread or slot.job.ending is not None):
                self._read_text(slot, slot.job)

    def _read_text(self, slot: Slot, job: Job) -> None:
        reason = job.ending
        keep: int | None = None
        try:
            while job.unread and keep is None:
                verdict = job.output.push(job.unread.pop(0))
                if verdict is not None:
                    reason, keep = "stop", verdict.keep
                    if not 0 <= keep <= len(job.generated):
                        raise ValueError(f"a verdict keeps {keep} of {len(job.generated)} tokens")
            if reason is None:
                return
            job.output.finish()
        except Exception as error:  # whatever it is, it is this job's alone
            log.exception("job %d: output", job.id)
            self._roster.fail(job, 500, f"the output could not be read: {error}")
            return
        if keep is not None and len(self._backend.tokens(slot.id)) > len(job.prompt) + keep:
            # a state that cannot be shortened stays: what is published is read from the session, not assumed
            self._backend.truncate(slot.id, len(job.prompt) + keep)
        self._roster.end(job, reason)

    def _draw(self, rows: list[_Row]) -> list[tuple[_Row, Sampled]]:
        """Draw one token for each row. A row whose sampling is refused fails alone."""
        if not rows:
            return []
        try:
            drawn = self._backend.sample([(row.slot.id, row.job.sampling) for row in rows])
        except BackendError as error:
            for row in rows:
                self._roster.fail(row.job, 500, f"sampling failed: {error}")
            return []
        except ValueError as error:
            if len(rows) > 1:
                return [one for row in rows for one in self._draw([row])]
            self._roster.fail(rows[0].job, 400, f"sampling was refused: {error}")
            return []
        return list(zip(rows, drawn, strict=True))

    def _record(self, rows: list[_Row], seconds: float, sampled: bool) -> None:
        """Report one forward and learn its price."""
        prefill_tokens = sum(len(row.work.tokens) for row in rows if row.prefill)
        decode_rows = sum(not row.prefill for row in rows)
        self._cost.observe(decode_rows, prefill_tokens, seconds, sampled)
        self._roster.events.append(StepDone(decode_rows, prefill_tokens, seconds))

    def _apply_requests(self) -> None:
        """Carry out cancels and a stop. What an output asks for during a step waits until the step has committed."""
        if self._stepping:
            return
        cancels, self._cancels = self._cancels, {}
        for job_id, cause in cancels.items():
            job = self._roster.jobs.get(job_id)
            if job is not None:
                self._roster.end(job, "abort", cause=cause)
        if self._halt:
            self._halt = False
            for job in list(self._roster.jobs.values()):
                self._roster.fail(job, 503, "shutdown requested", cause="shutdown")


def _commit(job: Job, sampled: Sampled, now: float) -> None:
    """Take a drawn token. What can be known from its id is decided here, before another forward is paid for."""
    if job.times.first_token is None:
        job.times.first_token = now
        job.move(JobState.DECODE)
    job.times.last_token = now
    if sampled.token in job.stop_tokens:
        job.ending = "stop"  # never evaluated, never read, not part of the answer
        return
    job.generated.append(sampled.token)
    job.unread.append(sampled)
    if len(job.generated) >= job.limit:
        job.ending = "length"
    else:
        job.pending = sampled.token
