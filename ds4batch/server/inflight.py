"""One request between its submission and its last event: its events for one reader, and the trail of when what happened.

Knows neither the engine's process nor HTTP.
"""

from __future__ import annotations

import asyncio
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
    finished_at: float | None = None

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
                    self.first_token_at = now if self.first_token_at is None else self.first_token_at
                    self.last_token_at = now
                    self.generated += event.tokens
            case Finished() | Failed():
                self.finished_at = now

    @property
    def phase(self) -> str:
        """Where the request is: queue, prefill or decode."""
        if self.first_token_at is not None:
            return "decode"
        return "queue" if self.routed is None else "prefill"


class Job:
    """A submitted request. The link pushes, one handler takes; neither waits for the other."""

    def __init__(self, id: int, prompt_tokens: int, max_tokens: int, arrival: float) -> None:
        self.id = id
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens  # as requested
        self.trail = Trail(arrival)
        self.cancelled: CancelCause | None = None
        self._events: list[Event] = []
        self._wake: asyncio.Future[None] | None = None

    def push(self, event: Event, now: float) -> None:
        """Note an event and hand it to the reader; after a cancellation nobody reads any more."""
        self.trail.note(event, now)
        if self.cancelled is None:
            self._events.append(event)
            self._rouse()

    def cancel(self, cause: CancelCause) -> None:
        """The reader gets no further event and `take` returns at once. The first cause stays."""
        if self.cancelled is None:
            self.cancelled = cause
            self._events.clear()
            self._rouse()

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
