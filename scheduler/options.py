"""The numbers that steer the scheduler. Those a user may set have no default here: the server's settings hold it."""

from __future__ import annotations

from dataclasses import dataclass

IDLE_CAP = 1 << 20  # seconds, 12 days: more idleness does not count, so that the ranks of victims stay apart
MOST_DRAFTS = 8


@dataclass(frozen=True, kw_only=True)
class Options:
    """Raises ValueError for a number that cannot work."""

    mixed_prefill_quantum: int  # most prompt tokens in a step that also decodes
    idle_prefill_quantum: int  # most prompt tokens in a step that does not
    itl_budget: float  # seconds a step with decoders in it may take
    max_queue: int  # jobs that may wait when no slot is free

    idle_budget: float = 0.25  # seconds a step without decoders may take: a cancel or an arrival waits no longer
    stale_after: float = 3600.0  # seconds without use after which a conversation is taken for abandoned
    age_after: float = 30.0  # seconds a job waits for a busy slot of its own before any will do
    rewind_min_tokens: int = 256  # a shorter common prefix is not worth cutting a checkpoint for
    rewind_min_share: float = 0.5  # nor is one that is a smaller part of the prompt
    lookahead: int = 256  # tokens of an answer that a pool smaller than all contexts keeps pages for when it admits a job
    drafts: int = 0  # tokens ahead that a session's next ones are guessed and checked; 0 never does
    overlap: bool = True  # texts are read while the device runs the next forward; where it cannot, before that
    self_check: bool = False  # verify every invariant after each step

    def __post_init__(self) -> None:
        for name in ("mixed_prefill_quantum", "idle_prefill_quantum"):
            if getattr(self, name) < 16:
                raise ValueError(f"{name}: {getattr(self, name)} is below 16")
        for name in ("itl_budget", "idle_budget"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: {getattr(self, name)} is not above 0 seconds")
        if not 0 <= self.stale_after <= IDLE_CAP:
            raise ValueError(f"stale_after: {self.stale_after} is not in 0..{IDLE_CAP} seconds")
        if not 0 <= self.drafts <= MOST_DRAFTS:
            raise ValueError(f"drafts: {self.drafts} is not in 0..{MOST_DRAFTS}")
        if self.max_queue < 0:
            raise ValueError(f"max_queue: {self.max_queue} is below 0")
