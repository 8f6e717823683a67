"""Who is where: the slots, the waiting line, the live jobs, and the one way in, to a slot, and out.

Everything that changes a job's or a slot's standing goes through here, so that the counts and the back-pointers agree
at every moment. Decides nothing, and of the device it only reads what a leaving job left.
"""

from __future__ import annotations

import logging

from scheduler.backend import Backend, Clock, Text
from scheduler.bindings import Bindings, Keys
from scheduler.checks import verify
from scheduler.events import Ended, Event, Phase, Reason, SlotStats, Stats
from scheduler.fairness import Fairness
from scheduler.job import Job, JobState
from scheduler.options import Options
from scheduler.publish import publish
from scheduler.queue import JobQueue
from scheduler.slots import NOTHING, Slot

log = logging.getLogger(__name__)

_PHASES: dict[JobState, Phase] = {
    JobState.QUEUED: "queue",
    JobState.RESTORE: "restore",
    JobState.PREFILL: "prefill",
    JobState.DECODE: "decode",
}


class Roster:
    """The jobs and slots of one scheduler."""

    def __init__(self, backend: Backend, text: Text, clock: Clock, slots: int, options: Options) -> None:
        self.slots = tuple(Slot(i) for i in range(slots))
        self.queue = JobQueue(options.max_queue, slots)
        self.fairness = Fairness(self.slots, self.queue)
        self.jobs: dict[int, Job] = {}  # queued and running, by id
        self.events: list[Event] = []  # since they were last taken
        self.changed = False  # a job came or a slot was freed since the last routing
        self._accepted = 0
        self._ended = 0
        self._backend = backend
        self._text = text
        self._clock = clock
        self._options = options

    @property
    def free(self) -> int:
        """Slots without a job."""
        return sum(slot.job is None for slot in self.slots)

    def admit(self, job: Job) -> None:
        """Put a new job in the line. Raises QueueFull."""
        self.queue.push(job, self.free)
        job.move(JobState.QUEUED)
        job.times.queued = self._clock()
        self.jobs[job.id] = job
        self.fairness.enter(job)
        self._accepted += 1
        self.changed = True

    def seat(self, job: Job, slot: Slot, now: float, state: JobState = JobState.PREFILL) -> None:
        """Give a waiting job its slot, to run there or, as RESTORE, to wait until it can."""
        self.queue.remove(job)
        job.move(state)
        job.times.scheduled = now
        job.slot, job.generation = slot.id, slot.generation
        slot.job = job

    def fail(self, job: Job, status: int, message: str, cause: str | None = None) -> None:
        """End `job` with an error."""
        self.end(job, "error", status=status, message=message, cause=cause)

    def lose(self, slot: Slot, status: int, message: str) -> None:
        """The device has lost what the slot held: its job fails, or nobody will find it there."""
        if slot.job is not None:
            self.fail(slot.job, status, message)
        elif slot.checkpoint.length:
            self.forget(slot)

    def forget(self, slot: Slot) -> None:
        """Nothing is left of what an idle slot held."""
        slot.checkpoint = NOTHING
        slot.generation += 1
        self.changed = True

    def end(
        self,
        job: Job,
        reason: Reason,
        *,
        cause: str | None = None,
        status: int | None = None,
        message: str | None = None,
    ) -> None:
        """Report the end of `job`, wherever it stands, then free its slot."""
        now = self._clock()
        phase = _PHASES[job.state]
        job.move(JobState.FINISHED)
        job.times.finished = now
        job.pending, job.drawing, job.chained = None, 0, False
        self.events.append(
            Ended(
                job=job.id,
                reason=reason,
                phase=phase,
                prompt_tokens=len(job.prompt or job.tokens),
                cached_tokens=job.cached,
                completion_tokens=len(job.generated) - len(job.unread),
                queue_seconds=job.times.queue_seconds,
                prefill_seconds=job.times.prefill_seconds,
                decode_seconds=job.times.decode_seconds,
                total_seconds=now - job.times.arrival,
                ttft_seconds=job.times.ttft_seconds,
                drafts=job.drafts,
                drafts_accepted=job.drafts_accepted,
                cause=cause,
                status=status,
                message=message,
            )
        )
        del self.jobs[job.id]
        self.fairness.leave(job)
        self._ended += 1
        if job in self.queue:
            self.queue.remove(job)
            self.changed = True  # it may have held up others
        if job.slot is not None and phase == "restore":
            self._give_back(self.slots[job.slot])
        elif job.slot is not None:
            self._release(self.slots[job.slot], job, now, _keys(job) if reason in ("stop", "tool_calls") else None)

    def _give_back(self, slot: Slot) -> None:
        """Free the slot of a job that never ran in it: unless it was emptied already, it is as it was."""
        if slot.checkpoint.length and not self._backend.tokens(slot.id):
            slot.checkpoint = NOTHING
            slot.generation += 1
        slot.job = None
        self.changed = True

    def _release(self, slot: Slot, job: Job, now: float, keys: Keys | None) -> None:
        """Publish what the job left, stamp the slot, and only then let the router see it."""
        tokens = self._backend.tokens(slot.id)
        try:
            slot.checkpoint = publish(self._text, job, tokens, slot.checkpoint)
        except Exception:  # a slot is worth more than the text of its checkpoint
            log.exception("slot %d: the checkpoint has no text", slot.id)
            slot.checkpoint = publish(None, job, tokens, slot.checkpoint)
        slot.last_used = now
        slot.owner = job.owner
        slot.generation += 1
        slot.bindings = None if keys is None else self._bindings(slot, job, keys)
        slot.job = None
        self.changed = True
        self.queue.record_service(now - (job.times.scheduled or now))

    def _bindings(self, slot: Slot, job: Job, keys: Keys) -> Bindings | None:
        """`keys` for what the slot holds. An answer that ended with a call was not evaluated to its last token, which the keys cover;
        a session that could not be shortened holds more than they say."""
        length, kept = slot.checkpoint.length, len(job.generated) - len(job.unread)
        evaluated = length - len(job.prompt)
        if not 0 <= evaluated <= kept:
            return None
        owed = tuple(job.generated[evaluated:kept])
        if keys.visible is not None and owed:
            shown = self._text.render(owed)
            visible = keys.visible.removesuffix(shown) if keys.visible.endswith(shown) else None
            keys = keys._replace(visible=visible)
        return Bindings(job.api, keys, length, slot.generation, owed)

    def take_events(self) -> list[Event]:
        """What happened since the last call."""
        events, self.events = self.events, []
        return events

    def stats(self) -> Stats:
        """How things stand now. Costs a few operations a slot."""
        now = self._clock()
        slots = tuple(self._slot_stats(slot, now) for slot in self.slots)
        return Stats(
            running=len(self.slots) - self.free,
            waiting=len(self.queue),
            kv_usage=sum(one.live_tokens for one in slots) / (len(slots) * self._backend.ctx),
            slots=slots,
            accepted=self._accepted,
            ended=self._ended,
            owners=self.fairness.stats(),
        )

    def _slot_stats(self, slot: Slot, now: float) -> SlotStats:
        job = slot.job
        state = "parked" if job is not None and job.parked else slot.state(now, self._options.stale_after).value
        live, held = len(self._backend.tokens(slot.id)), self._backend.held(slot.id)
        if job is None or not job.prefilling:
            return SlotStats(state, live, 0, 0, held.pages, held.own)
        return SlotStats(state, live, job.done, len(job.prompt), held.pages, held.own)

    def check(self) -> None:
        """Raise InvariantError when the state contradicts itself."""
        verify(self.slots, self.queue, self.jobs, self._backend, self._accepted, self._ended)


def _keys(job: Job) -> Keys | None:
    """What the next request may be recognised by. It is worth a tier, not the answer."""
    try:
        return job.keys() if job.keys is not None else None
    except Exception:
        log.exception("job %d: its keys", job.id)
        return None
