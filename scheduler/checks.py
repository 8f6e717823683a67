"""The scheduler's promises about its own state, checked between two steps. Reads everything, changes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from scheduler.backend import Backend
from scheduler.job import RUNNING, Job, JobState, pack
from scheduler.queue import JobQueue
from scheduler.slots import Slot


class InvariantError(RuntimeError):
    """The scheduler's state contradicts itself. The message names the job or the slot."""


def verify(slots: Sequence[Slot], queue: JobQueue, jobs: Mapping[int, Job], backend: Backend, accepted: int, ended: int) -> None:
    """Raise InvariantError for the first promise that is broken."""
    running = [slot.job for slot in slots if slot.job is not None]
    counts = f"{accepted} accepted, {ended} ended, {len(running)} running, {len(queue)} waiting"
    _require(len(running) + len(queue) == accepted - ended, counts)
    _require(len({id(job) for job in running}) == len(running), "a job has two slots")
    _require(len(running) + len(queue) == len(jobs), "a job is neither queued nor running")
    for job in queue:
        _require(jobs.get(job.id) is job, f"job {job.id} is queued and unknown")
        _require(job.state is JobState.QUEUED and job.slot is None, f"job {job.id} is queued as {job.state.name}")
    for slot in slots:
        if slot.job is None:
            live = backend.tokens(slot.id)
            _require(slot.checkpoint.length == len(live), f"slot {slot.id}: the published length is wrong")
            _require(slot.checkpoint.packed == pack(live), f"slot {slot.id}: the published tokens are wrong")
        else:
            _require(jobs.get(slot.job.id) is slot.job, f"slot {slot.id} runs an unknown job")
            _verify_running(slot, slot.job, backend)


def _verify_running(slot: Slot, job: Job, backend: Backend) -> None:
    name = f"job {job.id} in slot {slot.id}"
    _require(job.state in RUNNING, f"{name} is {job.state.name}")
    _require(job.slot == slot.id and job.generation == slot.generation, f"{name}: job and slot disagree")
    live = backend.tokens(slot.id)
    _require(len(live) <= backend.ctx, f"{name}: {len(live)} tokens in a context of {backend.ctx}")
    if job.state is JobState.RESTORE:
        _require(not job.prompt and not job.drawing, f"{name}: it waits and runs")
        _require(len(live) in (0, slot.checkpoint.length), f"{name}: {len(live)} tokens of {slot.checkpoint.length} are left")
        return
    if job.state is JobState.PREFILL:
        _require(len(live) == job.done, f"{name}: {len(live)} tokens evaluated, {job.done} counted")
        _require((job.done == len(job.prompt)) == bool(job.drawing), f"{name}: the prompt's end and its draw disagree")
        return
    _require(len(job.generated) <= job.limit, f"{name}: {len(job.generated)} tokens drawn of {job.limit}")
    going = (job.pending is not None) + job.drawing
    _require(going == (job.ending is None) and not job.chained, f"{name}: neither going on nor ending")
    unevaluated = 1 if job.pending is not None or job.ending == "length" else 0
    counted = len(job.prompt) + len(job.generated) - unevaluated
    _require(len(live) == counted, f"{name}: {len(live)} tokens evaluated, {counted} counted")


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise InvariantError(message)
