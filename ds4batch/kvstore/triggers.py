"""When a session is saved. Pure decisions over token counts: no clock, no file, no device.

Lengths are absolute, so that a conversation is cut at the same places whatever was saved, restored or reused before.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ds4batch.kvstore.format import Reason
from ds4batch.kvstore.options import Options


def aligned_length(tokens: int, options: Options) -> int:
    """How much of a prompt of `tokens` a cold save takes when nothing marks a better place.

    Less its last tokens, which the next request is likeliest to change, and rounded down to the alignment; the whole prompt where
    too little would be left.
    """
    if tokens > options.min_tokens + options.boundary_trim_tokens:
        length = tokens - options.boundary_trim_tokens
        length -= length % options.boundary_align_tokens
        if length >= options.min_tokens:
            return length
    return tokens


def cold_length(prompt_tokens: int, anchor: int, options: Options) -> int:
    """Where the prefill of a prompt of which nothing was reused stops to be saved, or 0: not at all.

    `anchor` is where conversations with one system prompt part, in tokens; 0 is unknown.
    """
    if not options.min_tokens <= prompt_tokens <= options.cold_max_tokens:
        return 0
    return anchor if options.min_tokens <= anchor <= prompt_tokens else aligned_length(prompt_tokens, options)


def worth_saving(tokens: int, options: Options, *, images: bool = False) -> bool:
    """Whether a session is saved before it is replaced, and at shutdown. A payload has no room for what an image was."""
    return not images and tokens >= options.min_tokens


def continued_step(options: Options) -> int:
    """Tokens between periodic saves: the interval, rounded up to the alignment; 0 is off."""
    align = options.boundary_align_tokens
    return -(-options.continued_interval_tokens // align) * align


@dataclass(frozen=True)
class Schedule:
    """What is still to be saved of one session as it grows. Each method gives a new one.

    A cold start is `Schedule(cold_at=cold_length(...))`; after a restore of n tokens, `Schedule(last_store=n)`.
    """

    cold_at: int = 0  # position of the cold save, 0 when none is due
    last_store: int = 0  # position of the last save

    def next_stop(self, position: int, options: Options) -> int | None:
        """The next position after `position` at which a prefill chunk must end, or None."""
        stops = [self.cold_at] if self.cold_at > position else []
        step = continued_step(options)
        if step:
            after = max(position, self.last_store, options.min_tokens - 1)
            stops.append((after // step + 1) * step)
        return min(stops, default=None)

    def due(self, position: int, options: Options, *, in_tool_call: bool = False) -> Reason | None:
        """Why the session is saved now that it holds exactly `position` tokens, or None.

        Where a cold and a periodic save meet there is one file, the cold one.
        """
        if self.cold_at and position == self.cold_at:
            return Reason.COLD
        step = continued_step(options)
        if in_tool_call or not step or position % step:
            return None
        return Reason.CONTINUED if position > self.last_store and position >= options.min_tokens else None

    def after(self, reason: Reason, position: int, stored: bool) -> Schedule:
        """The schedule once a save that was due has been tried. A failed cold save leaves a periodic one at its place due."""
        cold_at = 0 if reason is Reason.COLD else self.cold_at
        return replace(self, cold_at=cold_at, last_store=max(self.last_store, position) if stored else self.last_store)
