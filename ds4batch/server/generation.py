"""One generation from submission to the end of its HTTP response, for every API: the API's own shapes come from a `Wire`.

A client that leaves, or stops reading, ends its request: in the queue, in prefill, in decode, streaming or not.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
from aiohttp import web

from ds4batch.messages import API, Delta, Event, Failed, Finished, Progress, Sampling, TokenLogprob
from ds4batch.server import told
from ds4batch.server.engine_link import SHUTTING_DOWN
from ds4batch.server.errors import ApiError, failure
from ds4batch.server.inflight import Job
from ds4batch.server.prompts import Prompt
from ds4batch.server.sampling import Limits
from ds4batch.server.service import Exchange, Service
from ds4batch.server.sse import KEEPALIVE, SseStream, event
from ds4batch.server.watch import Gone

log = logging.getLogger(__name__)

CLIENT_GONE = 499
_WHOLE_WAIT = 3600.0  # a handler that sends nothing until the end has no reason to wake earlier


class Wire(Protocol):
    """How one API writes an answer. Stream parts are complete events, ready to be sent."""

    def opening(self) -> bytes:
        """What comes before the first text."""

    def delta(self, text: str, logprobs: list[TokenLogprob]) -> bytes:
        """New text."""

    def closing(self, finished: Finished) -> bytes:
        """What ends a stream that was answered."""

    def whole(self, text: str, logprobs: list[TokenLogprob], finished: Finished) -> dict[str, Any]:
        """The answer that is not streamed."""


@dataclass(frozen=True)
class Plan:
    """A checked request."""

    prompt: Prompt
    sampling: Sampling
    limits: Limits
    api: API


@dataclass
class Output:
    """What one request has produced so far."""

    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    end: Finished | Failed | None = None


async def generate(service: Service, exchange: Exchange, plan: Plan, wire: Wire) -> web.StreamResponse:
    """Answer a request. Raises ApiError while nothing of the response has been sent."""
    prompt = plan.prompt
    job = service.link.submit(
        tokens=prompt.tokens,
        text=prompt.text,
        requested_tokens=plan.limits.max_tokens,
        sampling=plan.sampling,
        stop=plan.limits.stop,
        api=plan.api,
        arrival=exchange.arrival,
        places=prompt.places,
        anchor=prompt.anchor,
    )
    output = Output()

    def on_gone(why: Gone) -> None:
        service.link.cancel(job, why)

    watched = service.watch.add(exchange.request, on_gone)
    try:
        run = _stream if plan.limits.stream else _whole
        return await run(exchange, job, wire, output)
    except ConnectionError:
        return web.Response(status=CLIENT_GONE)
    finally:
        # Does nothing once the request has ended; it covers the connection that broke and a handler that was cancelled.
        service.link.cancel(job, watched.gone or "client")
        service.watch.release(watched)
        _record(service, exchange, plan, job, output)


async def _whole(exchange: Exchange, job: Job, wire: Wire, output: Output) -> web.StreamResponse:
    while output.end is None:
        for item in await job.take(_WHOLE_WAIT):
            _collect(output, item)
        if job.cancelled is not None:
            return web.Response(status=CLIENT_GONE)
    return exchange.json(wire.whole("".join(output.text), output.logprobs, _answered(output.end)))


async def _stream(exchange: Exchange, job: Job, wire: Wire, output: Output) -> web.StreamResponse:
    stream = SseStream(exchange.request, exchange.headers)
    opened = False
    while output.end is None:
        events = await job.take(stream.until_keepalive)
        if job.cancelled is not None:
            return stream.response if stream.started else web.Response(status=CLIENT_GONE)
        if not events:
            await stream.keepalive()
            continue
        fresh = Output()
        for item in events:
            _collect(fresh, item)
        output.text += fresh.text
        output.end = fresh.end
        parts = bytearray()
        if not stream.started and any(isinstance(item, Progress) for item in events):
            parts += KEEPALIVE
        if not opened and any(isinstance(item, Delta | Finished) for item in events):
            opened = True
            parts += wire.opening()
        if fresh.text or fresh.logprobs:
            parts += wire.delta("".join(fresh.text), fresh.logprobs)
        if output.end is not None:
            parts += _ending(output.end, wire, stream.started or opened)
        if parts:
            await stream.write(bytes(parts))
    await stream.end()
    return stream.response


def _ending(end: Finished | Failed, wire: Wire, sent: bool) -> bytes:
    """The last events of a stream; raises ApiError when a status can still be given instead."""
    try:
        return wire.closing(_answered(end))
    except ApiError as error:
        if not sent:
            raise
        return event("error", msgspec.json.encode({"error": {"message": error.message, "type": "server_error"}}))


def _answered(end: Finished | Failed) -> Finished:
    """The end of an answered request; anything else is raised. A client still here has not aborted: the server has."""
    if isinstance(end, Failed):
        raise failure(end.status, end.message, end.retry_after)
    if end.reason == "abort":
        raise failure(503, SHUTTING_DOWN)
    return end


def _collect(output: Output, item: Event) -> None:
    match item:
        case Delta():
            if item.text:
                output.text.append(item.text)
            output.logprobs.extend(item.logprobs)
        case Finished() | Failed():
            output.end = item


def _record(service: Service, exchange: Exchange, plan: Plan, job: Job, output: Output) -> None:
    if service.settings.gpu_stats:
        log.info(
            "request %s: %d prompt tokens, %d generated, device memory %d bytes",
            exchange.request_id,
            job.prompt_tokens,
            job.trail.generated,
            service.metrics.device_memory,
        )
    routed = job.trail.routed
    if routed is not None:
        log.info("request %s: %s", exchange.request_id, told.line(routed, job.prompt_tokens))
    if service.trace is None:
        return
    trail, now = job.trail, time.monotonic()

    def since(moment: float | None) -> float | None:
        return None if moment is None else round(moment - trail.arrival, 6)

    def message() -> dict[str, Any]:
        differs = None if routed is None else routed.divergence
        where = None if differs is None else told.diverging_message(plan.prompt, differs, service.model.tokenizer)
        return {"divergence_message": where}

    service.trace.add(
        {
            "time": time.time() - (now - trail.arrival),
            "request": exchange.request_id,
            "api": plan.api,
            "prompt": plan.prompt.text,
            "prompt_tokens": job.prompt_tokens,
            "max_tokens": job.max_tokens,
            "stop": plan.limits.stop,
            "stream": plan.limits.stream,
            "sampling": plan.sampling,
            "routed": trail.routed,
            "cancelled": job.cancelled,
            "output": "".join(output.text),
            "end": output.end,
            "seconds": {
                "routed": since(trail.routed_at),
                "first_token": since(trail.first_token_at),
                "last_token": since(trail.last_token_at),
                "end": since(now),
            },
        },
        message,
    )
