"""The numbers that steer the store. Their defaults as a user sees them are the server's settings; these here say what they mean."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Options:
    """Raises ValueError, naming the field, for a number that cannot work."""

    budget_bytes: int  # of all checkpoints in the directory; 0 is no limit
    max_file_bytes: int = 0  # of one checkpoint; 0 leaves it to the budget
    min_free_bytes: int = 0  # that a save leaves free on the file system
    min_tokens: int = 512  # shorter sessions are neither saved nor restored
    cold_max_tokens: int = 30000  # longest prompt that gets a cold save; 0 is none
    continued_interval_tokens: int = 10000  # between periodic saves; 0 is none
    boundary_trim_tokens: int = 32  # of a prompt's end that a cold save leaves out
    boundary_align_tokens: int = 2048  # lengths are multiples of this

    def __post_init__(self) -> None:
        for name in ("min_tokens", "boundary_align_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} is below 1")
        for name in (
            "budget_bytes",
            "max_file_bytes",
            "min_free_bytes",
            "cold_max_tokens",
            "continued_interval_tokens",
            "boundary_trim_tokens",
        ):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: {getattr(self, name)} is below 0")
        if 0 < self.cold_max_tokens < self.min_tokens:
            raise ValueError(f"cold_max_tokens: {self.cold_max_tokens} is neither 0 nor at least min_tokens, {self.min_tokens}")
