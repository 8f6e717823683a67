"""One generation from submission to the end of its HTTP response, for every API: the API's own shapes come from a `Wire`.

A client that leaves, or stops reading, ends its request: in the queue, in prefill, in decode, streaming or not.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import msgspec
from aiohttp import web

from ds4batch.chat.events import Content, Turn, TurnEvent
from ds4batch.messages import API, Constraint, Delta, Event, Failed, Finished, Progress, Reading, Sampling, Submit, TokenLogprob
from ds4batch.server.engine_link import SHUTTING_DOWN
from ds4batch.server.errors import GATEWAY_TIMEOUT, ApiError, failure
from ds4batch.server.inflight import Job
from ds4batch.server.keys import KeyInfo
from ds4batch.server.prompts import Prompt, retry_prompt
from ds4batch.server.request_record import CLIENT_GONE
from ds4batch.server.sampling import Limits
from ds4batch.server.service import Exchange, Service
from ds4batch.server.sse import SseStream
from ds4batch.server.watch import Gone

_OPENED_EARLY = ("responses", "anthropic")  # their clients count events from the first on, and a comment is none
_WHOLE_WAIT = 3600.0  # a handler that sends nothing until the end has no reason to wake earlier


class Wire(Protocol):
    """How one API writes an answer. Stream parts are complete events, ready to be sent."""

    def opening(self, cached_tokens: int = 0) -> bytes:
        """What comes before the first event."""

    def events(self, events: Sequence[TurnEvent], logprobs: Sequence[TokenLogprob]) -> bytes:
        """The next part of the turn."""

    def closing(self, finished: Finished) -> bytes:
        """What ends a stream that was answered."""

    def whole(self, turn: Turn, logprobs: Sequence[TokenLogprob], finished: Finished) -> dict[str, Any]:
        """The answer that is not streamed."""

    def keepalive(self) -> bytes:
        """What its clients take as a sign of life."""

    def failed(self, message: str) -> bytes:
        """What ends a stream that cannot be answered."""


@dataclass(frozen=True)
class Plan:
    """A checked request."""

    prompt: Prompt
    sampling: Sampling
    limits: Limits
    api: API
    reading: Reading | None = None
    needs_live_state: bool = False
    constraint: Constraint | None = None  # what the answer is held to

    def submission(self, arrival: float, keeps_calls: bool, key: KeyInfo) -> Submit:
        """The request as the engine gets it, but for its id. `keeps_calls`: the engine saves what calls were sampled as."""
        prompt = self.prompt
        return Submit(
            id=0,
            tokens=prompt.tokens,
            text=prompt.text,
            max_tokens=self.limits.max_tokens,
            sampling=self.sampling,
            stop=self.limits.stop,
            api=self.api,
            arrival=arrival,
            anchor=prompt.anchor,
            generation_from=prompt.generation_from,
            visible=prompt.visible,
            continues=prompt.continues,
            needs_live_state=self.needs_live_state,
            reading=self.reading,
            replayed={call.id: m.raw for m in prompt.messages if m.raw for call in m.calls} if keeps_calls else {},
            constraint=self.constraint,
            owner=key.name,
            owner_limit=key.concurrency,
            owner_weight=key.weight,
        )


@dataclass
class Output:
    """What one request has produced so far."""

    plain: bool = False  # the answer is text and nothing else
    text: list[str] = field(default_factory=list)  # as it was sampled
    turn: Turn = field(default_factory=Turn)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    end: Finished | Failed | None = None
    fresh: list[TurnEvent] = field(default_factory=list)  # of the turn, not sent yet

    def collect(self, item: Event) -> None:
        """Take one event."""
        match item:
            case Delta():
                if item.text:
                    self.text.append(item.text)
                self._add(item.events or ([Content(item.text)] if item.text and self.plain else []))
                self.logprobs.extend(item.logprobs)
            case Finished() | Failed():
                self.end = item

    def close(self) -> None:
        """No second try follows: what was held back to the end is part of the turn."""
        if isinstance(self.end, Finished):
            self._add(self.end.rest)

    def take(self) -> tuple[list[TurnEvent], list[TokenLogprob]]:
        """What is to be sent."""
        events, self.fresh = self.fresh, []
        logprobs, self.logprobs = self.logprobs, []
        return events, logprobs

    def _add(self, events: Sequence[TurnEvent]) -> None:
        self.turn.add(events)
        self.fresh += events


async def generate(service: Service, exchange: Exchange, plan: Plan, wire: Wire) -> web.StreamResponse:
    """Answer a request. Raises ApiError while nothing of the response has been sent."""
    answering = _Answering(service, exchange, plan)
    try:
        return await (answering.stream(wire) if plan.limits.stream else answering.whole(wire))
    except ConnectionError:
        return web.Response(status=CLIENT_GONE)
    finally:
        answering.end()


class _Answering:
    """One request, tried once more where its calls cannot be read."""

    def __init__(self, service: Service, exchange: Exchange, plan: Plan) -> None:
        self._service = service
        self._exchange = exchange
        self._plan = plan
        self._output = Output(plain=plan.reading is None)
        self._keeps_calls = bool(service.settings.kv_disk_dir)
        exchange.account.plan, exchange.account.turn = plan, self._output.turn
        self._job = self._submit(plan)
        self._tried = False  # once more
        self._first: Finished | None = None  # of the first try, when the second is the answer
        self._watched = service.watch.add(exchange.request, self._on_gone)
        self._overdue = False
        self._deadline = self._set_deadline(service.settings.request_timeout)

    def _submit(self, plan: Plan) -> Job:
        exchange = self._exchange
        job = self._service.link.submit(plan.submission(exchange.arrival, self._keeps_calls, exchange.key), exchange.request_id)
        exchange.account.begin(plan.prompt, job, self._output.text)
        return job

    def _set_deadline(self, seconds: float) -> asyncio.TimerHandle | None:
        """0 sets none. What the prompt took before it was submitted counts."""
        left = self._exchange.arrival + seconds - time.monotonic()
        return asyncio.get_running_loop().call_later(left, self._on_deadline, seconds) if seconds else None

    def _on_deadline(self, seconds: float) -> None:
        self._overdue = True
        message = f"the request took longer than {seconds:g} s, which is this server's limit"
        self._service.link.give_up(self._job, "deadline", GATEWAY_TIMEOUT, message)

    def _on_gone(self, why: Gone) -> None:
        self._service.link.cancel(self._job, why)

    def end(self) -> None:
        """Let go of the request, whatever became of it."""
        # Does nothing once the request has ended; it covers the connection that broke and a handler that was cancelled.
        self._service.link.cancel(self._job, self._watched.gone or "client")
        self._service.watch.release(self._watched)
        if self._deadline is not None:
            self._deadline.cancel()
        account = self._exchange.account
        account.gone = self._job.cancelled or self._watched.gone
        account.tries[-1].end = self._job.trail.last if self._tried else self._output.end

    async def whole(self, wire: Wire) -> web.StreamResponse:
        """The answer in one object."""
        output = self._output
        while output.end is None:
            for item in await self._job.take(_WHOLE_WAIT):
                self._collect(item)
            if self._job.cancelled is not None and output.end is None:
                return web.Response(status=CLIENT_GONE)
            await self._try_again()
        end = self._answered(output.end)
        output.close()
        self._remember(end)
        events, logprobs = output.take()
        wire.events(events, logprobs)
        return self._exchange.json(wire.whole(output.turn, logprobs, end))

    async def stream(self, wire: Wire) -> web.StreamResponse:
        """The answer as it comes."""
        output, stream = self._output, SseStream(self._exchange.request, self._exchange.headers)
        opened = False
        while output.end is None:
            happened = await self._job.take(stream.until_keepalive)
            for item in happened:
                self._collect(item)
            if self._job.cancelled is not None and output.end is None:
                return stream.response if stream.started else web.Response(status=CLIENT_GONE)
            await self._try_again()
            parts = bytearray()
            early = self._plan.api in _OPENED_EARLY
            begun = early and (not happened or any(isinstance(item, Progress) for item in happened))
            if not opened and (begun or any(isinstance(item, Delta | Finished) for item in happened)):
                opened = True
                routed = self._job.trail.routed
                parts += wire.opening(routed.cached_tokens if routed is not None else 0)
            elif not happened or (not stream.started and any(isinstance(item, Progress) for item in happened)):
                parts += wire.keepalive()
            if output.end is None:
                parts += self._fresh(wire)
            else:
                parts += self._ending(output.end, wire, stream.started or opened)
            if parts:
                await stream.write(bytes(parts))
        await stream.end()
        return stream.response

    def _collect(self, item: Event) -> None:
        """Take an event. Where a second try fails the first one is the answer."""
        self._output.collect(item)
        if isinstance(item, Failed) and self._first is not None:
            self._output.end, self._first = self._first, None

    def _fresh(self, wire: Wire) -> bytes:
        events, logprobs = self._output.take()
        return wire.events(events, logprobs) if events or logprobs else b""

    def _ending(self, end: Finished | Failed, wire: Wire, sent: bool) -> bytes:
        """The last events of a stream; raises ApiError when a status can still be given instead."""
        try:
            finished = self._answered(end)
        except ApiError as error:
            if not sent:
                raise
            self._exchange.account.error = error
            return self._fresh(wire) + wire.failed(error.message)
        self._output.close()
        self._remember(finished)
        return self._fresh(wire) + wire.closing(finished)

    def _answered(self, end: Finished | Failed) -> Finished:
        """The end of an answered request; anything else is raised. A client still here has not aborted: the server has."""
        if isinstance(end, Failed):
            raise failure(end.status, end.message, end.retry_after)
        if end.reason == "abort":
            raise failure(503, SHUTTING_DOWN)
        self._exchange.account.finish = end.reason
        first = self._first
        if first is None:
            return end
        return msgspec.structs.replace(
            end,
            prompt_tokens=first.prompt_tokens,
            cached_tokens=first.cached_tokens,
            completion_tokens=first.completion_tokens + end.completion_tokens,
        )

    async def _try_again(self) -> None:
        """Go on with a second try where the first one's calls cannot be read, nothing of them was reported and tokens are left.

        The client sees the second only. What was reasoned stays.
        """
        end, plan = self._output.end, self._plan
        if not isinstance(end, Finished) or not end.malformed or end.reason != "stop" or self._tried or self._overdue:
            return
        left = plan.limits.max_tokens - end.completion_tokens
        if left <= 0 or plan.prompt.conversation is None:
            return
        output = self._output
        first = output.text
        sampled, thinking_open = "".join(first), output.turn.reasoning_open
        try:
            prompt = await retry_prompt(self._service, plan.prompt, sampled, thinking_open, end.malformed)
            again = replace(plan, prompt=prompt, limits=plan.limits._replace(max_tokens=left), needs_live_state=False)
            output.text = []
            self._job = self._submit(again)
        except ApiError:
            output.text = first
            return  # no room, or no engine: the first try is the answer
        self._exchange.account.tries[0].end = end
        self._first, self._tried = end, True
        output.end = None

    def _remember(self, end: Finished) -> None:
        """Keep the text of the calls for the request that brings their results."""
        calls = self._output.turn.complete_calls
        if end.raw is not None and end.reason == "tool_calls" and calls:
            self._service.memory.remember(calls, end.raw)
