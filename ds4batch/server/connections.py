"""One client connection: how many there may be, how long the head of a request may take, and errors that are JSON like all others."""

from __future__ import annotations

import asyncio
import logging
import resource
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from aiohttp import EMPTY_PAYLOAD, StreamReader, web

from ds4batch.server.errors import SERVER, ApiError

log = logging.getLogger(__name__)

MAX_HEADER_BYTES = 64 << 10
IDLE_SECONDS = 3600.0
"""How long a connection may stay idle between two requests: agents come back after minutes."""
LINGER_SECONDS = 2.0
"""How long the rest of a refused body is read, so that its sender gets to see the refusal."""
FILES_KEPT = 128
"""Open files that connections leave to everything else."""

Dropped = Literal["full", "headers"]
DROPPED: tuple[Dropped, ...] = ("full", "headers")


class ConnectionLimits(NamedTuple):
    """What a connection is held to before it has said who it is."""

    header_seconds: float
    most: int  # open at once


def most_connections(wanted: int) -> int:
    """How many connections may be open: what was asked for, at most what this process may open. 0 asks for that."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    room = 1 << 20 if soft == resource.RLIM_INFINITY else max(1, soft - FILES_KEPT)
    return min(wanted, room) if wanted else room


class FrontProtocol(web.RequestHandler):
    """aiohttp's connection within limits."""

    __slots__ = ("_begun", "_body", "_dropped", "_late", "_limits")

    def __init__(
        self,
        server: web.Server,
        loop: asyncio.AbstractEventLoop,
        limits: ConnectionLimits,
        dropped: Callable[[Dropped], None],
    ) -> None:
        """`dropped` is told of connections that are ended without an answer from a handler, and why."""
        super().__init__(
            server,
            loop=loop,
            access_log=None,  # type: ignore[arg-type]  # None: no log
            lingering_time=LINGER_SECONDS,
            keepalive_timeout=IDLE_SECONDS,
            auto_decompress=False,  # unpack.py does it
            max_line_size=MAX_HEADER_BYTES,
            max_field_size=MAX_HEADER_BYTES,
        )
        self._limits = limits
        self._dropped = dropped
        self._late: asyncio.TimerHandle | None = None
        self._begun = False  # some of a head has arrived
        self._body: StreamReader = EMPTY_PAYLOAD  # of the last request whose head has

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has come: it is turned away where there are too many, else its first request is awaited."""
        super().connection_made(transport)
        assert self._manager is not None
        if len(self._manager.connections) > self._limits.most:
            self._drop("full", ApiError(503, "the server has as many connections as it takes", kind=SERVER, retry_after=1))
        else:
            self._expect_head()

    def data_received(self, data: bytes) -> None:
        """Bytes of a head, of a body, or of both."""
        requests, of_body = self._request_count, not self._body.is_eof()
        super().data_received(data)
        if self._request_count != requests:
            self._expect_nothing()
            self._body = self._messages[-1][1]
        elif not of_body and data.strip(b"\r\n"):  # some clients send a line end too many
            self._begun = True
            self._expect_head()

    def connection_lost(self, exc: BaseException | None) -> None:
        """The client has left."""
        self._expect_nothing()
        super().connection_lost(exc)

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """The answer to what could not be parsed as HTTP, or to a fault that reached the connection."""
        if request.writer.output_size > 0:
            raise ConnectionError("the response has begun, no error can follow") from exc
        if status >= 500:
            log.error("a request failed", exc_info=exc)
        text = "bad HTTP request" if status < 500 else "internal error"
        error = ApiError(status, text if message is None or status >= 500 else f"{text}: {message.splitlines()[0][:200]}")
        response = web.Response(status=status, body=error.body(), content_type="application/json")
        response.force_close()
        return response

    def _expect_head(self) -> None:
        if self._late is None and self._limits.header_seconds:
            self._late = self._loop.call_later(self._limits.header_seconds, self._head_is_late)

    def _expect_nothing(self) -> None:
        self._begun = False
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _head_is_late(self) -> None:
        self._late = None
        if self._waiter is None:  # a request is being answered, and some of the next one has come already
            self._expect_head()
            return
        text = f"bad HTTP request: its headers did not arrive within {self._limits.header_seconds:g} s"
        self._drop("headers", ApiError(408, text) if self._begun else None)

    def _drop(self, why: Dropped, error: ApiError | None) -> None:
        """End the connection, with a last word where there is one."""
        self._dropped(why)
        transport: Any = self.transport
        if error is not None and transport is not None:
            transport.write(_response(error))
        self.force_close()


def _response(error: ApiError) -> bytes:
    """An answer that no handler gives."""
    body = error.body()
    reason = {408: "Request Timeout", 503: "Service Unavailable"}[error.status]
    headers = {**error.headers(), "Content-Type": "application/json", "Content-Length": str(len(body)), "Connection": "close"}
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 {error.status} {reason}\r\n{head}\r\n".encode() + body
