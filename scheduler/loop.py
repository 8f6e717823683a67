"""The step loop: one forward after another, for everything that can go on.

One thread calls everything here. A step places waiting jobs, launches one forward, reads the previous step's text while
the device works, and draws the next tokens. Where the rows may be chained (see scheduler.pipeline) it does not wait for
them: they are taken in by the next step, behind its launch. Where drafts are worth it (see scheduler.speculation) it waits, and
makes them for the next forward. Time comes from the injected clock alone.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from scheduler.admission import Admission
from scheduler.backend import Answered, Backend, BackendError, Clock, Draws, Sampled, Text, Unanswerable
from scheduler.checkpoints import Checkpoints, Keeper, NoCheckpoints
from scheduler.cost import CostModel
from scheduler.events import Ended, Event, Progress, Stats, StepDone
from scheduler.interleave import Interleaver, Rest
from scheduler.job import Job, JobState
from scheduler.options import Options
from scheduler.pipeline import Flight, Row, Turn, begin, commit, first_turn, load, may_fly, row_of
from scheduler.pool import Pool, Reclaimed
from scheduler.reuse import LADDER, Tier
from scheduler.roster import Roster
from scheduler.slots import Slot
from scheduler.speculation import Checked, Speculation

log = logging.getLogger(__name__)


class Stopping(Exception):
    """The scheduler takes no more jobs."""


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
        checkpoints: Checkpoints | None = None,
    ) -> None:
        if slots < 1:
            raise ValueError(f"slots: {slots} is below 1")
        self._backend = backend
        self._clock = clock
        self._options = options
        self._roster = Roster(backend, text, clock, slots, options)
        self._keeper = Keeper(checkpoints or NoCheckpoints(), backend, text)
        self._pool = Pool(self._roster, backend, clock, options, self._keeper)
        self._admission = Admission(self._roster, backend, text, clock, options, ladder, self._keeper, self._pool)
        self._cost = CostModel(backend.survey)
        self._interleaver = Interleaver(options, self._cost)
        self._speculation = Speculation(backend, self._roster, clock, options.drafts)
        self._verified = False  # the forward of this step is to check drafts
        self._flight: Flight | None = None  # the draws nobody has waited for
        self._touched: list[Slot] = []  # by forwards since the last draws
        self._known = clock()  # when the last draws were
        self._cycle = clock()  # when the last cycle ended
        self._stopping = False
        self._stepping = False
        self._idle = False  # the last step launched nothing and left nothing under way
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
        return bool(self._roster.jobs or self._roster.events or self._flight)

    @property
    def blocked(self) -> bool:
        """Whether a step can do nothing before the store of checkpoints has ended something, of which it wakes its owner."""
        return self._idle and self._keeper.waits and not self._roster.events

    def stats(self) -> Stats:
        """How things stand now. Cheap."""
        stats, pool = self._roster.stats(), self._pool.stats()
        usage = pool.used / pool.pages if self._pool.elastic else stats.kv_usage
        return replace(stats, pool=pool, kv_usage=usage, pricing=self._speculation.stats())

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
            known = self._known
            self._pool.resume()
            self._admission.dispatch()
            self._follow_forks()
            rows = self._with_pages(self._compose())
            started = self._clock()
            launched = self._launch(rows) if rows else []
            self._read_texts()  # the previous step's, while the device runs this one
            earlier, self._flight = self._flight, None
            steered = any(row.job.steered for row in launched)
            later = None if steered else self._draw(launched, started)
            if earlier is not None:
                self._land(earlier)
                self._read_texts()
            if steered:
                later = self._draw(launched, started)
            if later is not None:
                drafts = self._speculation.wanted(later)
                if drafts or not (self._options.overlap and may_fly(self._backend, later)):
                    self._land(later, drafts)
                    later = None
            self._flight = later
            for row in launched:
                if row.work.drafts and not row.owned:
                    self._settle(row)
            if not self._options.overlap:
                self._read_texts()
            if later is None and self._known == known:
                self._cycle = self._clock()  # nothing was drawn in this step
            self._idle = not rows and later is None
            if self._idle:
                self._cost.pause()
        finally:
            self._stepping = False
        self._apply_requests()
        if self._options.self_check:
            self.check()
        events = self._roster.take_events()
        for event in events:
            if isinstance(event, Ended):
                self._keeper.ended(event)
        return events

    def save_all(self) -> None:
        """Begin to save every session. To be called when nothing is `busy` any more."""
        self._keeper.save_all(self._roster.slots)

    def _compose(self) -> list[Row]:
        """Every row that can decode, with its drafts, then one prefill quantum."""
        drafts, self._verified = self._speculation.take(), self._speculation.take_made()
        rows: list[Row] = []
        rests: list[Rest] = []
        for slot in self._roster.slots:
            job = slot.job
            if job is None or job.parked:
                continue
            if job.done < len(job.prompt):
                end = min(job.mark_at if job.done < job.mark_at else len(job.prompt), self._keeper.stop(slot, job))
                rests.append(Rest(slot.id, job.done, end - job.done, job.owner))
            elif (row := row_of(slot, job, 0, drafts.get(job.id, 0))) is not None:
                rows.append(row)
        for share in self._interleaver.shares(rests, load(rows).decode_rows) if rests else ():
            slot = self._roster.slots[share.slot]
            assert slot.job is not None
            row = row_of(slot, slot.job, share.tokens)
            assert row is not None
            rows.append(row)
        return rows

    def _follow_forks(self) -> None:
        """What a forward under way spoils is lost in the forks of its sessions too."""
        flying = [] if self._flight is None else [self._flight.slots]
        for donor, slot in self._admission.take_forks():
            for members in (self._touched, *flying):
                if donor in members:
                    members.append(slot)

    def _with_pages(self, rows: list[Row]) -> list[Row]:
        """The rows that find their pages, once all was done for the others: what is idle goes, then what came last is parked.

        Drafts are left out before anybody loses a page for them. Nothing is parked while tokens are under way: they are taken in
        first, which may end jobs.
        """
        while self._pool.elastic and rows:
            lacking = self._backend.shortage([row.work for row in rows])
            if not lacking:
                break
            if any(row.work.drafts for row in rows):
                rows = [row._replace(work=row.work._replace(drafts=0)) for row in rows]
                continue
            reclaimed = self._pool.reclaim(self._backend.room().free + lacking)
            if reclaimed is Reclaimed.FREE:
                continue
            if reclaimed is Reclaimed.TOO_FEW and self._flight is not None:
                flight, self._flight = self._flight, None
                self._land(flight)
                self._read_texts()
                rows = self._compose()
            elif reclaimed is Reclaimed.TOO_FEW and self._pool.park_youngest():
                rows = [row for row in rows if not row.job.parked]
            else:
                return self._that_fit(rows)
        return rows

    def _that_fit(self, rows: list[Row]) -> list[Row]:
        """As many of `rows` as find their pages together. The pages of the others are still being copied by the store."""
        chosen: list[Row] = []
        for row in rows:
            if not self._backend.shortage([one.work for one in [*chosen, row]]):
                chosen.append(row)
        return chosen

    def _launch(self, rows: list[Row]) -> list[Row]:
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
                if row.job.done == row.job.mark_at:
                    self._backend.mark(row.slot.id)
                self._roster.events.append(Progress(row.job.id, row.job.done, len(row.job.prompt)))
            else:
                row.job.pending, row.job.chained = None, row.chained
        self._touched += [row.slot for row in rows]
        for row in rows:
            if row.prefill:
                self._keeper.reached(row.slot, row.job)
        return rows

    def _read_texts(self) -> None:
        """Give the outputs the tokens of the last step, and end the jobs that are complete with them."""
        for slot in self._roster.slots:
            if slot.job is not None and (slot.job.unread or slot.job.ending is not None):
                self._read_text(slot, slot.job)

    def _read_text(self, slot: Slot, job: Job) -> None:
        reason: Answered | None = job.ending
        keep: int | None = None
        try:
            while job.unread and keep is None:
                verdict = job.output.push(job.unread.pop(0))
                if verdict is not None:
                    reason, keep = verdict
                    if not 0 <= keep <= len(job.generated):
                        raise ValueError(f"a verdict keeps {keep} of {len(job.generated)} tokens")
            if reason is None:
                return
            if job.unread:  # drawn together with the token that ended the turn
                del job.generated[-len(job.unread) :]
                job.unread.clear()
            reason = job.output.finish(reason)
        except Unanswerable as error:
            self._roster.fail(job, 400, str(error))
            return
        except Exception as error:  # whatever it is, it is this job's alone
            log.exception("job %d: output", job.id)
            self._roster.fail(job, 500, f"the output could not be read: {error}")
            return
        if keep is not None and len(self._backend.tokens(slot.id)) > len(job.prompt) + keep:
            # a state that cannot be shortened stays: what is published is read from the session, not assumed
            self._backend.truncate(slot.id, len(job.prompt) + keep)
        self._roster.end(job, reason)

    def _draw(self, launched: list[Row], started: float) -> Flight | None:
        """Begin to draw for the rows of a forward that want it."""
        picked = [row for row in launched if row.work.wants_logits and row.owned]
        if not picked:
            if launched:
                self._record(launched, Checked(), self._clock() - started, complete=not self._options.overlap)
            return None
        for row in picked:
            row.job.drawing += 1
        touched, self._touched = self._touched, []
        turns = [first_turn(self._backend, row) if row.work.drafts else Turn(row, 0, 1) for row in picked]
        return Flight(turns, launched, touched, begin(self._backend, turns), started, self._verified)

    def _land(self, flight: Flight, drafts: bool = False) -> None:
        """Wait for the draws and take them in; with `drafts` make some for the next forward. That is a cycle."""
        if drafts:
            self._speculation.expect(flight)
        checked = self._collect(flight)
        if checked is None:
            return
        seconds, self._cycle = self._known - self._cycle, self._known
        if drafts:
            self._speculation.propose(flight)
        self._speculation.observe(flight, checked, seconds)

    def _collect(self, flight: Flight) -> Checked | None:
        """Take in the draws, and those that follow from them. None where nothing came of them."""
        checked, taken, now = Checked(), 0, self._known
        known = self._wait(flight.turns, flight.draws, flight.slots)
        while known:
            taken += len(known)
            now = self._clock()
            further = []
            for turn, drawn in known:
                row = turn.row
                if not row.owned:
                    continue
                if row.work.drafts:
                    further += self._take(turn, drawn, checked, now)
                    continue
                commit(self._backend, row, drawn[0], now)
                checked.tokens += not row.prefill
                self._keeper.reached(row.slot, row.job)
            known = self._wait(further, begin(self._backend, further), flight.slots) if further else []
        if not taken:
            return None
        self._record(flight.rows, checked, now - max(flight.launched, self._known), complete=True)
        self._known = now
        return checked

    def _wait(self, turns: Sequence[Turn], draws: Draws, slots: Sequence[Slot]) -> list[tuple[Turn, Sequence[Sampled]]]:
        """What was drawn for each turn. Lost are those of a forward that failed; one whose sampling is refused fails alone."""
        try:
            drawn = draws.wait()
        except BackendError as error:
            for slot in slots:
                self._roster.lose(slot, 500, f"the forward failed: {error}")
            return []
        except ValueError as error:
            owned = [turn for turn in turns if turn.row.owned]
            if len(turns) > 1:
                return [one for turn in owned for one in self._wait([turn], begin(self._backend, [turn]), slots)]
            if owned:
                self._roster.fail(owned[0].row.job, 400, f"sampling was refused: {error}")
            return []
        if len(drawn) == len(turns):
            return list(zip(turns, zip(drawn, strict=True), strict=True))
        ends = accumulate(turn.draws for turn in turns)
        return [(turn, drawn[end - turn.draws : end]) for turn, end in zip(turns, ends, strict=True)]

    def _take(self, turn: Turn, drawn: Sequence[Sampled], checked: Checked, now: float) -> list[Turn]:
        """Commit what was drawn for a row as far as its drafts were right. What is to be drawn next, where that had to wait."""
        row, job, slot = turn.row, turn.row.job, turn.row.slot
        drafts = self._backend.drafts(slot.id)
        if not turn.first:
            checked.rows += 1
            checked.drafts += len(drafts)
            job.drafts += len(drafts)
        for at, one in enumerate(drawn, turn.first):
            commit(self._backend, row, one, now)
            checked.tokens += 1
            if at >= len(drafts) or job.pending != drafts[at]:
                break
            if job.steered:
                self._read_text(slot, job)
                if not row.owned:
                    break
            job.pending, job.drawing = None, 1  # it is evaluated, and what follows it is drawn or will be
            self._backend.accept(slot.id, at + 1)
            checked.accept(at)
            job.drafts_accepted += 1
        else:
            return [Turn(row, turn.first + len(drawn), 1)]
        self._settle(row)
        if row.owned:
            self._keeper.reached(slot, job)
        return []

    def _settle(self, row: Row) -> None:
        """Cut what was evaluated beyond the drafts that were right."""
        if row.work.drafts:
            self._backend.truncate(row.slot.id, len(self._backend.tokens(row.slot.id)))

    def _record(self, rows: Sequence[Row], checked: Checked, seconds: float, complete: bool) -> None:
        """Report one forward and learn its price."""
        made_of = load(rows)
        self._cost.observe(made_of, seconds, complete)
        decoders = sum(not row.prefill for row in rows)
        self._roster.events.append(
            StepDone(decoders, made_of.tokens, seconds, checked.rows, checked.drafts, tuple(checked.accepted))
        )

    def _apply_requests(self) -> None:
        """Carry out cancels and a stop. What an output asks for during a step waits until the step has committed."""
        if self._stepping:
            return
        cancels, self._cancels = self._cancels, {}
        for job_id, cause in cancels.items():
            job = self._roster.jobs.get(job_id)
            if job is not None:
                self._pool.leave(job)
                self._roster.end(job, "abort", cause=cause)
        if self._halt:
            self._halt = False
            for job in list(self._roster.jobs.values()):
                self._pool.leave(job)
                self._roster.fail(job, 503, "shutdown requested", cause="shutdown")
