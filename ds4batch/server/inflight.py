"""One request between its submission and its last event: its events for one reader, and the trail of when what happened.

Knows neither the engine's process nor HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from ds4batch.messages import CancelCause, Delta, Event, Failed, Finished, Progress, Routed


@dataclass(slots=True)
class Trail:
    """What is known of a request so far. Times are `time.monotonic()` of the front, None while not reached."""

    arrival: float
    routed: Routed | None = None
    routed_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    evaluated: int = 0  # prompt tokens known to be in the session, cached ones included
    generated: int = 0
    gaps: int = 0  # between two tokens
    longest_gap: float = 0.0  # seconds between two deliveries of tokens
    finished_at: float | None = None
    last: Finished | Failed | None = None  # the engine's last word

    def note(self, event: Event, now: float) -> None:
        """Take one event into the trail."""
        match event:
            case Routed():
                if self.routed is None:
                    self.routed, self.routed_at = event, now
                    self.evaluated = max(self.evaluated, event.cached_tokens)
            case Progress():
                self.evaluated = max(self.evaluated, event.done)
            case Delta():
                if event.tokens > 0:
                    if self.last_token_at is None:
                        self.first_token_at = now
                        self.gaps += event.tokens - 1
                    else:
                        self.gaps += event.tokens
                        self.longest_gap = max(self.longest_gap, now - self.last_token_at)
                    self.last_token_at = now
                    self.generated += event.tokens
            case Finished() | Failed():
                self.finished_at, self.last = now, event

    @property
    def decoding(self) -> float:
        """Seconds from the first token to the last."""
        first, last = self.first_token_at, self.last_token_at
        return 0.0 if first is None or last is None else last - first

    @property
    def produced(self) -> int:
        """Tokens generated, those included that brought no delta, such as one that ended a turn."""
        return max(self.generated, self.last.completion_tokens) if isinstance(self.last, Finished) else self.generated

    def cached(self, prompt_tokens: int) -> int:
        """Tokens of the prompt that were reused."""
        return 0 if self.routed is None else max(0, min(self.routed.cached_tokens, prompt_tokens))

    @property
    def phase(self) -> str:
        """Where the request is: queue, prefill or decode."""
        if self.first_token_at is not None:
            return "decode"
        return "queue" if self.routed is None else "prefill"


class Job:
    """A submitted request. The link pushes, one handler takes; neither waits for the other."""

    def __init__(self, id: int, prompt_tokens: int, max_tokens: int, arrival: float, owner: str = "") -> None:
        self.id = id
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens  # as requested
        self.owner = owner  # the name of the key, "" without keys
        self.trail = Trail(arrival)
        self.cancelled: CancelCause | None = None
        self.request_id = ""  # of the HTTP request, for log lines
        self._when_ended: Callable[[], None] | None = None
        self._events: list[Event] = []
        self._wake: asyncio.Future[None] | None = None

    def push(self, event: Event, now: float) -> None:
        """Note an event and hand it to the reader; after a cancellation nobody reads any more."""
        self.trail.note(event, now)
        if self.cancelled is None:
            self._events.append(event)
            self._rouse()
        if self.trail.last is not None and self._when_ended is not None:
            told, self._when_ended = self._when_ended, None
            told()

    def cancel(self, cause: CancelCause, told: Failed | None = None) -> None:
        """The reader gets no further event but `told`, and `take` returns at once. The first cause stays."""
        if self.cancelled is None:
            self.cancelled = cause
            self._events = [] if told is None else [told]
            self._rouse()

    def when_ended(self, call: Callable[[], None]) -> None:
        """Call back once the engine has said its last word, at once where it has. One callback a job."""
        if self.trail.last is not None:
            call()
        else:
            self._when_ended = call

    async def take(self, timeout: float) -> list[Event]:
        """All events since the last call, waiting up to `timeout` seconds for the first; empty on timeout or after `cancel`."""
        if not self._events and self.cancelled is None:
            self._wake = asyncio.get_running_loop().create_future()
            try:
                async with asyncio.timeout(timeout):
                    await self._wake
            except TimeoutError:
                pass
            finally:
                self._wake = None
        events, self._events = self._events, []
        return events

    def _rouse(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)
