"""The resident sessions as the router sees them: who holds each slot, and what was left in it.

A slot's checkpoint is published once, when its job ends, and never touched while the job runs, and the bindings with it. So a
probe reads values that nobody writes, and the device is not asked.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from scheduler.bindings import Bindings, Image, Point, bound
from scheduler.job import Job, JobState
from scheduler.options import IDLE_CAP


class SlotState(Enum):
    """What a slot is doing. The counts over all states always sum to the number of slots."""

    EMPTY = "empty"
    IDLE = "idle"
    STALE = "stale"
    PREFILL = "prefill"
    RESTORE = "restore"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a free slot holds."""

    length: int = 0  # tokens
    packed: bytes = b""  # the tokens, as `pack` writes them
    text: str | None = None  # the text of exactly these tokens; None when nobody can vouch for one
    turn_start: int = 0  # tokens of the turns before the last one, 0 when unknown
    prompt_length: int = 0  # of the last job, 0 when its prompt was not evaluated to the end
    asked: str = ""  # the last job's text, which may show less than the tokens hold
    points: tuple[Point, ...] = ()  # where its client may come back to, in order
    images: tuple[Image, ...] = ()  # in these tokens; their offsets are in `asked`


NOTHING = Checkpoint()

_RUNNING = {JobState.RESTORE: SlotState.RESTORE, JobState.PREFILL: SlotState.PREFILL, JobState.DECODE: SlotState.DECODE}


@dataclass(slots=True, eq=False)
class Slot:
    """One resident session."""

    id: int
    generation: int = 0  # grows when a job leaves: whoever remembers an older one has no say any more
    job: Job | None = None
    checkpoint: Checkpoint = NOTHING  # of the last job; out of date while a job runs
    last_used: float | None = None  # when the last job ended; None counts as the longest idleness
    bindings: Bindings | None = None  # as last published; see `bound`
    owner: str = ""  # of the last job

    @property
    def bound(self) -> Bindings | None:
        """The bindings that hold for what the slot holds now."""
        return bound(self.bindings, self.checkpoint.length, self.generation)

    @property
    def holder(self) -> str | None:
        """Whose job or session it holds; None when it is empty."""
        if self.job is not None:
            return self.job.owner
        return self.owner if self.checkpoint.length else None

    def idle_seconds(self, now: float) -> int:
        """Whole seconds since the last job ended, 0..IDLE_CAP."""
        if self.last_used is None:
            return IDLE_CAP
        return min(max(0, int(now - self.last_used)), IDLE_CAP)

    def state(self, now: float, stale_after: float) -> SlotState:
        """What the slot is doing at `now`."""
        if self.job is not None:
            return _RUNNING[self.job.state]
        if not self.checkpoint.length:
            return SlotState.EMPTY
        return SlotState.STALE if self.idle_seconds(now) >= stale_after else SlotState.IDLE
