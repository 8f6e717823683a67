"""The resident sessions as the router sees them: who holds each slot, and what was left in it.

A slot's checkpoint is published once, when its job ends, and never touched while the job runs. So a probe reads a value
that nobody writes, and the device is not asked.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from scheduler.job import Job
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


NOTHING = Checkpoint()


@dataclass(slots=True, eq=False)
class Slot:
    """One resident session."""

    id: int
    generation: int = 0  # grows when a job leaves: whoever remembers an older one has no say any more
    job: Job | None = None
    checkpoint: Checkpoint = NOTHING  # of the last job; out of date while a job runs
    last_used: float | None = None  # when the last job ended; None counts as the longest idleness

    def idle_seconds(self, now: float) -> int:
        """Whole seconds since the last job ended, 0..IDLE_CAP."""
        if self.last_used is None:
            return IDLE_CAP
        return min(max(0, int(now - self.last_used)), IDLE_CAP)

    def state(self, now: float, stale_after: float) -> SlotState:
        """What the slot is doing at `now`."""
        if self.job is not None:
            return SlotState.PREFILL if self.job.prefilling else SlotState.DECODE
        if not self.checkpoint.length:
            return SlotState.EMPTY
        return SlotState.STALE if self.idle_seconds(now) >= stale_after else SlotState.IDLE
