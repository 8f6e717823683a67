"""What the scheduler tells its owner: everything that happened in a step, and how things stand between two steps.

Plain values. The engine process turns them into its own messages; nothing here is encoded or counted.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from scheduler.divergence import Divergence
    from scheduler.pricing import PricingStats

Victim = Literal["none", "empty", "stale", "protected"]
Reason = Literal["stop", "length", "tool_calls", "abort", "error"]
Phase = Literal["queue", "restore", "prefill", "decode"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Routed:
    """A job has its slot."""

    job: int
    slot: int
    tier: str  # of the reuse ladder, "none" when nothing was reused
    cached_tokens: int
    prompt_tokens: int
    victim: Victim  # what the slot held that the job could not use
    evicted_tokens: int  # checkpoint tokens another conversation lost by it
    queue_seconds: float
    fell_from: str | None = None  # the tier that was promised and could not be carried out
    divergence: Divergence | None = None  # when a session was cut or none was continued: where the nearest one differs
    source: str = ""  # the checkpoint that was restored
    restore_seconds: float = 0.0  # that the job waited in its slot for it


@dataclass(frozen=True, slots=True)
class Progress:
    """Prompt tokens of a job that are evaluated or cached, out of all."""

    job: int
    done: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The last event of a job. Times are seconds and None for a stage that was not completed."""

    job: int
    reason: Reason
    phase: Phase  # where the job stood when it ended
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int  # drawn, without the stop token
    queue_seconds: float | None
    prefill_seconds: float | None  # from the slot to the first token
    decode_seconds: float | None  # from the first token to the last
    total_seconds: float  # from the arrival to this event
    ttft_seconds: float | None  # from the arrival to the first token
    drafts: int = 0  # tokens that were guessed ahead for it and checked
    drafts_accepted: int = 0
    cause: str | None = None  # of an abort: who asked for it
    status: int | None = None  # of an error: an HTTP status
    message: str | None = None  # of an error


@dataclass(frozen=True, slots=True)
class StepDone:
    """One forward."""

    decode_rows: int  # sessions that decoded
    prefill_tokens: int
    seconds: float  # from the launch until its tokens were drawn
    checked_rows: int = 0  # of the sessions that decoded, those that had drafts
    drafts: int = 0  # checked, over all sessions
    accepted: tuple[int, ...] = ()  # of the first drafts, of the second ones, ...


Event = Routed | Progress | Ended | StepDone


class PoolStats(NamedTuple):
    """The pages of all sessions between two steps, and counts since the start."""

    pages: int = 0
    page_bytes: int = 0
    used: int = 0  # not free; a shared page counts once
    unshared: int = 0  # what they would hold if nothing were shared
    parked: int = 0  # in host memory
    parks: int = 0
    resumes: int = 0
    evicted_stale: int = 0  # tokens of idle sessions whose pages others needed
    evicted_protected: int = 0


class SlotStats(NamedTuple):
    """One slot between two steps."""

    state: str  # empty, idle, stale, prefill, restore, decode, parked
    live_tokens: int
    prefill_done: int  # 0 when the slot is not in prefill
    prefill_total: int
    pages: int = 0  # of the KV pool, that the session holds
    own_pages: int = 0  # of those, that nobody else holds


class OwnerStats(NamedTuple):
    """One owner between two steps, and a count since the start."""

    owner: str
    waiting: int
    running: int
    tokens: int  # served: evaluated, not reused, and drawn


@dataclass(frozen=True, slots=True)
class Stats:
    """Gauges of one instant between two steps, and counters since the start."""

    running: int
    waiting: int
    kv_usage: float  # live tokens over the positions of all slots, 0..1
    slots: tuple[SlotStats, ...]
    accepted: int
    ended: int
    pricing: PricingStats | None = None  # None where nothing is drafted
    pool: PoolStats = field(default_factory=PoolStats)
    owners: tuple[OwnerStats, ...] = ()  # while nobody has a name
