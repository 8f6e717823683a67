"""Drives a server with a load: which request is made when, in a closed loop, an open loop or as growing conversations.

Owns the order and the timing of requests. How one is made and judged is http_stream.py's business; what the results add
up to is report.py's. Every request that was planned leaves exactly one Result, whatever happens to it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine, Iterable
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import dataclass
from statistics import median
from typing import Any

from bench import seeded
from bench.arrivals import arrival_offsets
from bench.chat_stream import Rejection
from bench.http_stream import Call, ChatClient, Hangup, Message, Outcome, Result, now
from bench.progress import Progress
from bench.prompts import PromptBook
from bench.serve_options import Options

INTRUDER_INDEX = -1
WARMUP_INDEX = -2  # and below
GUESSED_TTFT = 0.05  # seconds; used to place a hang-up where no warm-up measured the real one


class WarmupFailed(Exception):
    """Not one warm-up request was answered properly; the message says why the last was not."""


@dataclass(frozen=True)
class Measured:
    """A load as it went."""

    results: tuple[Result, ...]  # one for each planned request, in the order of their index
    intruder: Result | None
    interrupted: bool


class Load:
    """One load against one server. Build it, call `warm_up`, then `run`, each once."""

    def __init__(
        self,
        client: ChatClient,
        book: PromptBook,
        options: Options,
        progress: Progress,
        *,
        concurrency: int,
        requests: int,
    ) -> None:
        """`concurrency` and `requests` stand apart from the options because a sweep varies them."""
        self.client = client
        self.book = book
        self.options = options
        self.progress = progress
        self.concurrency = concurrency
        self.requests = requests
        self._results: dict[int, Result] = {}
        self._intruder_due = asyncio.Event()
        self._intruder_sent = False
        self._intruder: Result | None = None
        self._hangups: dict[int, Hangup] = {}
        self._expected_ttft = GUESSED_TTFT

    async def run(self) -> Measured:
        """Make every request that is measured; an interrupt keeps what was measured until then."""
        self._hangups = choose_hangups(self.options, self.requests, self._expected_ttft)
        interrupted = False
        with self.progress.running(self.requests):
            load = asyncio.ensure_future(self._with_intruder())
            try:
                await load
            except asyncio.CancelledError:
                load.cancel()
                with suppress(asyncio.CancelledError):
                    await load
                interrupted = True
        for index in range(self.requests):
            if index not in self._results:
                self._results[index] = _not_made(index, 0, Rejection.INTERRUPTED, "the load was interrupted")
        return Measured(tuple(self._results[index] for index in range(self.requests)), self._intruder, interrupted)

    async def warm_up(self) -> None:
        """Make the requests that are not measured. Raises WarmupFailed."""
        if not self.options.warmup:
            return
        indices = iter(range(WARMUP_INDEX, WARMUP_INDEX - self.options.warmup, -1))
        results: list[Result] = []

        async def worker() -> None:
            for index in indices:
                results.append(await self.client.stream(self._call(index)))

        await _together(worker() for _ in range(min(self.options.warmup, self.concurrency)))
        good = [result.ttft for result in results if result.outcome is Outcome.COMPLETED]
        if good:
            self._expected_ttft = median(good)
        elif not self.options.allow_failures:
            last = results[-1]
            raise WarmupFailed(f"no warm-up request was answered properly: {last.reason}: {last.detail}")

    async def _with_intruder(self) -> None:
        workload = {"closed": self._closed, "poisson": self._open, "sessions": self._sessions}[self.options.mode]
        if not self.options.intruder_tokens:
            await workload()
            return
        intruder = asyncio.ensure_future(self._intrude())
        try:
            self._count_done()  # a share of 0 is due at once
            await workload()
            if self._intruder_sent:
                await intruder
        finally:
            intruder.cancel()
            with suppress(asyncio.CancelledError):
                await intruder

    async def _closed(self) -> None:
        """`concurrency` workers, each making the next request as soon as its last one ended."""
        indices = iter(range(self.requests))

        async def worker() -> None:
            for index in indices:
                self._record(await self.client.stream(self._call(index)))

        await _together(worker() for _ in range(min(self.concurrency, self.requests)))

    async def _open(self) -> None:
        """Requests at their due times, whether or not earlier ones have ended."""
        options = self.options
        offsets = arrival_offsets(self.requests, options.request_rate, options.burstiness, options.seed)
        permit = self._permit()
        origin = now()

        async def arrival(index: int, due: float) -> None:
            while (early := due - now()) > 0:  # a timer of the event loop may fire up to a millisecond too soon
                await asyncio.sleep(early)
            async with permit:
                self._record(await self.client.stream(self._call(index, scheduled=due)))

        await _together(arrival(index, origin + offset) for index, offset in enumerate(offsets))

    async def _sessions(self) -> None:
        """Conversations side by side; each sends its whole history again with every turn, as chat clients do."""
        permit = self._permit()
        await _together(self._session(session, permit) for session in range(self.options.sessions))

    async def _session(self, session: int, permit: AbstractAsyncContextManager[Any]) -> None:
        turns = self.options.turns
        first = session * turns
        history: list[Message] = self.book.single(first)
        for turn in range(turns):
            if turn:
                await asyncio.sleep(self.options.think_time)
                history.append(self.book.follow_up(session, turn, self.options.turn_tokens))
            async with permit:
                call = Call(index=first + turn, turn=turn, messages=tuple(history), max_tokens=self.options.max_tokens)
                result = await self.client.stream(call)
            self._record(result)
            if result.outcome is not Outcome.COMPLETED:
                for later in range(turn + 1, turns):
                    self._record(_not_made(first + later, later, Rejection.SKIPPED, f"turn {turn + 1} failed"))
                return
            history.append({"role": "assistant", "content": result.text})

    async def _intrude(self) -> None:
        """One long prompt, once it is due."""
        when = self.options.intruder_at
        if when.seconds is not None:
            await asyncio.sleep(when.seconds)
        else:
            await self._intruder_due.wait()
        self._intruder_sent = True
        messages = self.book.single(INTRUDER_INDEX, self.options.intruder_tokens)
        call = Call(index=INTRUDER_INDEX, messages=messages, max_tokens=self.options.max_tokens)
        self._intruder = await self.client.stream(call)

    def _call(self, index: int, scheduled: float | None = None) -> Call:
        return Call(
            index=index,
            messages=self.book.single(index),
            max_tokens=self.options.max_tokens,
            scheduled=scheduled,
            hangup=self._hangups.get(index),
        )

    def _permit(self) -> AbstractAsyncContextManager[Any]:
        limit = self.options.max_concurrency
        return asyncio.Semaphore(limit) if limit else nullcontext()

    def _record(self, result: Result) -> None:
        self._results[result.index] = result
        self.progress.advance(result)
        self._count_done()

    def _count_done(self) -> None:
        share = self.options.intruder_at.share
        if share is not None and len(self._results) >= math.floor(share * self.requests):
            self._intruder_due.set()


def choose_hangups(options: Options, requests: int, ttft: float) -> dict[int, Hangup]:
    """Which requests hang up, and when. `ttft` is the expected time to the first token in seconds.

    The number is exactly the fraction asked for, rounded; which ones it hits depends on the seed alone.
    """
    seed = options.seed
    ranked = sorted(range(requests), key=lambda index: seeded.digest(seed, "disconnect", index))
    chosen = sorted(ranked[: round(options.disconnect_fraction * requests)])
    return {index: _hangup(options, index, ttft) for index in chosen}


def _hangup(options: Options, index: int, ttft: float) -> Hangup:
    after, seed = options.disconnect_after, options.seed
    if after.kind == "tokens":
        return Hangup(after.tokens)
    if after.kind == "random" and seeded.fraction(seed, "disconnect in decode", index) < 0.5:
        return Hangup(1 + seeded.below(options.max_tokens, seed, "disconnect token", index))
    # Within the time a first token takes on an idle server; on a busy one the request is still queued or prefilling.
    return Hangup(1, after_seconds=ttft * seeded.fraction(seed, "disconnect at", index))


def _not_made(index: int, turn: int, reason: Rejection, detail: str) -> Result:
    at = now()
    return Result(index=index, turn=turn, outcome=Outcome.FAILED, start=at, sent=at, end=at, reason=str(reason), detail=detail)


async def _together(workers: Iterable[Coroutine[Any, Any, None]]) -> None:
    async with asyncio.TaskGroup() as group:
        for worker in workers:
            group.create_task(worker)
