"""What each API key's owner has in the engine and used. Keys that sent nothing since the start have no series."""

from __future__ import annotations

from collections.abc import Sequence

from ds4batch.messages import OwnerStat
from ds4batch.server.inflight import Job
from ds4batch.server.metric_series import Series

MOST_NAMES = 1000
"""Names come from the key file, but a file may change for years; later ones are counted together."""
OTHER = "(other)"


class KeyMetrics:
    """Counts by the key's name.

    Its owner's standing in the engine comes with the reports, and only while there is something to say; the engine counts from its start,
    the counter here goes on through its restarts.
    """

    def __init__(self, series: Series) -> None:
        self._requests = series.counter("ds4batch_key_requests", "Requests handed to the engine, by key.", key=())
        self._prompt = series.counter("ds4batch_key_prompt_tokens", "Prompt tokens of ended requests, by key.", key=())
        self._generated = series.counter("ds4batch_key_generation_tokens", "Generated tokens of ended requests, by key.", key=())
        self._waiting = series.gauge("ds4batch_key_requests_waiting", "Requests in the queue, by key.", key=())
        self._running = series.gauge("ds4batch_key_requests_running", "Requests that have a slot, by key.", key=())
        self._computed = series.counter(
            "ds4batch_key_computed_tokens",
            "Prompt tokens evaluated, not reused, and tokens generated, by key: what is shared fairly.",
            key=(),
        )
        self._names: set[str] = set()
        self._last: dict[str, OwnerStat] = {}  # of this engine

    def submitted(self, job: Job) -> None:
        """A request went to the engine."""
        if job.owner:
            self._requests.at(self._label(job.owner)).inc()

    def ended(self, job: Job, generated: int) -> None:
        """A request that got a slot has ended, in whatever way."""
        if job.owner and job.trail.routed is not None:
            name = self._label(job.owner)
            self._prompt.at(name).inc(job.prompt_tokens)
            self._generated.at(name).inc(generated)

    def stats(self, owners: Sequence[OwnerStat]) -> None:
        """How things stand between two steps, for those whose standing may have changed."""
        for owner, waiting, running, tokens in ((one.owner, one.waiting, one.running, one.tokens) for one in owners if one.owner):
            label, last = self._label(owner), self._last.get(owner, OwnerStat(owner, 0, 0, 0))
            self._waiting.at(label).inc(waiting - last.waiting)
            self._running.at(label).inc(running - last.running)
            most = max(tokens, last.tokens)  # fewer when drawn tokens turned out to lie behind an answer's end
            self._computed.at(label).inc(most - last.tokens)
            self._last[owner] = OwnerStat(owner, waiting, running, most)

    def engine_down(self) -> None:
        """Nobody has anything in the engine, and the next one counts from nothing."""
        self.stats([OwnerStat(owner, 0, 0, last.tokens) for owner, last in self._last.items()])
        self._last.clear()

    def _label(self, name: str) -> str:
        if name not in self._names:
            if len(self._names) >= MOST_NAMES:
                return OTHER
            self._names.add(name)
        return name
