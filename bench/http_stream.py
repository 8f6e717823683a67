"""One chat completion over HTTP, timed: the client side of the load benchmark.

Owns the connection, the request body and the clock readings of a single request. Which requests are sent, and when, is
decided elsewhere (load.py); whether an answer counts is decided by chat_stream.py.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import TracebackType
from typing import Any, Self

import aiohttp

from bench.chat_stream import ChatStream, Events, Rejection, StreamRejected

Message = dict[str, str]
now = time.perf_counter  # seconds; every time in this benchmark is a reading of this one clock
DRAIN_SECONDS = 1.0  # after [DONE], how long to wait for the end of the body that lets the connection be used again


class Outcome(StrEnum):
    """How a request ended."""

    COMPLETED = "completed"
    FAILED = "failed"
    DISCONNECTED = "disconnected"  # hung up by this program, on purpose


@dataclass(frozen=True)
class Hangup:
    """When to hang up on purpose: after so many token chunks, or after so many seconds if no token came before."""

    after_chunks: int
    after_seconds: float | None = None


@dataclass(frozen=True)
class Call:
    """One request to make."""

    index: int
    messages: Sequence[Message]
    max_tokens: int
    turn: int = 0
    scheduled: float | None = None  # open loop: when it was due, on the clock `now`
    hangup: Hangup | None = None


@dataclass(frozen=True)
class Result:
    """One request as it went. Times are readings of `now`, in seconds."""

    index: int
    turn: int
    outcome: Outcome
    start: float  # open loop: when it was due; otherwise when it was sent
    sent: float  # just before the request was handed to the socket
    end: float  # arrival of [DONE]; for a failed request, when it was given up
    token_times: tuple[float, ...] = ()
    output_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    finish_reason: str = ""
    text: str = ""
    reason: str = ""  # of a failure
    detail: str = ""

    @property
    def ttft(self) -> float:
        """Start to the first chunk with text or a tool call, seconds."""
        return self.token_times[0] - self.start

    @property
    def e2el(self) -> float:
        """Start to [DONE], seconds."""
        return self.end - self.start

    @property
    def tpot(self) -> float | None:
        """Mean seconds a token after the first; None where there was only one."""
        return (self.e2el - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def gaps(self) -> list[tuple[float, float]]:
        """The intervals between successive token chunks; their lengths are the inter-token latencies."""
        return list(zip(self.token_times, self.token_times[1:], strict=False))

    @property
    def dispatch_lag(self) -> float:
        """How long after it was due the request was sent, seconds; 0 in a closed loop."""
        return self.sent - self.start


class ServerUnusable(Exception):
    """The server cannot be measured at all; the message says what it answered."""


class Connections:
    """An open pool of connections. Use as an async context manager."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        """`headers` go with every request."""
        self._headers = headers
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        # No limit on connections: a request that waited in this program would be charged to the server.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), headers=self._headers, timeout=aiohttp.ClientTimeout(total=None)
        )
        return self

    async def __aexit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        await self.session.close()

    @property
    def session(self) -> aiohttp.ClientSession:
        """The open pool. Raises RuntimeError outside `async with`."""
        if self._session is None:
            raise RuntimeError(f"{type(self).__name__} is used outside `async with`")
        return self._session


class ChatClient(Connections):
    """A connection pool to one OpenAI-compatible server. Use as an async context manager."""

    def __init__(
        self,
        base_url: str,
        *,
        model: str,
        temperature: float,
        ignore_eos: bool,
        no_think: bool,
        timeout: float,
        api_key: str = "",
    ) -> None:
        """`timeout` is the longest a request may take from its sending to [DONE], in seconds."""
        root = base_url.rstrip("/")
        self.root = root.removesuffix("/v1")
        self.model = model
        self.temperature = temperature
        self.ignore_eos = ignore_eos
        self.no_think = no_think
        self.timeout = timeout
        super().__init__({"Authorization": f"Bearer {api_key}"} if api_key else {})

    async def first_model(self) -> str:
        """The id of the first model the server lists. Raises ServerUnusable."""
        answer = await self._json("GET", "/v1/models", None)
        try:
            return str(answer["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise ServerUnusable(f"{self.root}/v1/models lists no model; name one with --model") from None

    async def count_prompt_tokens(self, messages: Sequence[Message]) -> int:
        """The prompt's length as the server counts it, at the price of one generated token. Raises ServerUnusable."""
        answer = await self._json("POST", "/v1/chat/completions", self._body(messages, max_tokens=1, stream=False))
        usage = answer.get("usage")
        count = usage.get("prompt_tokens") if isinstance(usage, dict) else None
        if not isinstance(count, int) or count <= 0:
            raise ServerUnusable(f"{self.root}: the answer to the calibration request has no usage.prompt_tokens")
        return count

    async def _json(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        try:
            async with (
                asyncio.timeout(self.timeout),
                self.session.request(method, self.root + path, json=body) as response,
            ):
                if response.status != 200:
                    text = (await response.text())[:300]
                    raise ServerUnusable(f"{self.root}{path} answered {response.status}: {text}")
                answer = await response.json(content_type=None)
        except TimeoutError:
            raise ServerUnusable(f"{self.root}{path} did not answer within {self.timeout:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise ServerUnusable(f"{self.root}{path}: {error}") from None
        if not isinstance(answer, dict):
            raise ServerUnusable(f"{self.root}{path} answered no JSON object")
        return answer

    def _body(self, messages: Sequence[Message], *, max_tokens: int, stream: bool) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": list(messages),
            "max_tokens": max_tokens,
            "temperature": self.temperature,
        }
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.no_think:
            body["chat_template_kwargs"] = {"enable_thinking": False}
        return body

    async def stream(self, call: Call) -> Result:
        """Make one request and read its stream to the end. A failure of any kind is a Result, never an exception."""
        stream = ChatStream()
        body = json.dumps(self._body(call.messages, max_tokens=call.max_tokens, stream=True)).encode()
        sent = now()  # the body is ready: encoding a long prompt is this program's time, not the server's
        start = sent if call.scheduled is None else call.scheduled
        outcome, reason, detail = Outcome.COMPLETED, "", ""
        try:
            async with asyncio.timeout(self.timeout):
                if await self._read(call.hangup, body, stream):
                    stream.check(call.max_tokens, self.ignore_eos)
                else:
                    outcome = Outcome.DISCONNECTED
        except StreamRejected as rejected:
            outcome, reason, detail = Outcome.FAILED, rejected.reason, rejected.detail
        except TimeoutError:
            outcome, reason, detail = Outcome.FAILED, Rejection.TIMEOUT, f"no [DONE] within {self.timeout:g} s"
        except (aiohttp.ClientError, OSError) as error:
            outcome, reason, detail = Outcome.FAILED, Rejection.NETWORK_ERROR, f"{type(error).__name__}: {error}"
        end = stream.done_at if outcome is Outcome.COMPLETED and stream.done_at is not None else now()
        return Result(
            index=call.index,
            turn=call.turn,
            outcome=outcome,
            start=start,
            sent=sent,
            end=end,
            token_times=tuple(stream.token_times),
            output_tokens=max(stream.output_tokens, 0),
            prompt_tokens=stream.prompt_tokens,
            cached_tokens=stream.cached_tokens,
            finish_reason=stream.finish_reason or "",
            text="".join(stream.content),
            reason=str(reason),
            detail=detail,
        )

    async def _read(self, hangup: Hangup | None, body: bytes, stream: ChatStream) -> bool:
        """Fill `stream`; False if this side hung up, which closing a half-read response on the way out does."""
        limit = None if hangup is None else hangup.after_seconds
        headers = {"Content-Type": "application/json"}
        try:
            async with asyncio.timeout(limit) as patience:
                async with self.session.post(f"{self.root}/v1/chat/completions", data=body, headers=headers) as response:
                    if response.status != 200:
                        raise StreamRejected(f"http_{response.status}", (await response.text())[:300])
                    complete = await self._events(response, stream, hangup)
                    if not complete:
                        response.close()
                    return complete
        except TimeoutError:
            if patience.expired():
                return False
            raise

    async def _events(self, response: aiohttp.ClientResponse, stream: ChatStream, hangup: Hangup | None) -> bool:
        events = Events()
        async for block in response.content.iter_any():
            arrived = now()  # read before parsing: events of one read arrived together
            for event in events.feed(block):
                stream.accept(event, arrived)
                if hangup is not None and len(stream.token_times) >= hangup.after_chunks:
                    return False
                if stream.done_at is not None:
                    await _drain(response)
                    return True
        return True


async def _drain(response: aiohttp.ClientResponse) -> None:
    """Read what follows [DONE], so that the connection goes back to the pool, unless the server keeps it open."""
    try:
        async with asyncio.timeout(DRAIN_SECONDS):
            await response.content.read()
    except (TimeoutError, aiohttp.ClientError, OSError):
        response.close()
