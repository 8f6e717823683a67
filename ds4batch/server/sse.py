"""A server-sent event stream over one HTTP response: headers at the first byte, keepalive comments, back-pressure.

The transport's buffer stays small: a writer waits until the client has read, and the connection watch ends a wait that gets
nowhere.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from aiohttp import web

KEEPALIVE_SECONDS = 5.0
KEEPALIVE = b": prefill\n\n"
HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class SseStream:
    """The stream of one request. Every method raises ConnectionError when the client has left."""

    def __init__(self, request: web.BaseRequest, headers: Mapping[str, str]) -> None:
        self._request = request
        self._headers = {**HEADERS, **headers}
        self._response: web.StreamResponse | None = None
        self._last = time.monotonic()

    @property
    def started(self) -> bool:
        """Whether the status and the headers are on their way, so that no other status can be given."""
        return self._response is not None

    @property
    def response(self) -> web.StreamResponse:
        """What the handler returns after a started stream."""
        assert self._response is not None
        return self._response

    @property
    def until_keepalive(self) -> float:
        """Seconds until the client should see a byte again."""
        return max(0.0, self._last + KEEPALIVE_SECONDS - time.monotonic())

    async def write(self, data: bytes) -> None:
        """Send whole events. Returns when the transport's buffer has room again."""
        if self._response is None:
            self._response = web.StreamResponse(status=200, headers=self._headers)
            await self._response.prepare(self._request)
        self._last = time.monotonic()
        await self._response.write(data)
        # aiohttp waits for room only every 64 KiB of writes; here each event does, or a stalled client would hide that long.
        await self._request.writer.drain()

    async def end(self) -> None:
        """Complete the response."""
        await self.response.write_eof()


def data(payload: bytes) -> bytes:
    """An event of unnamed type."""
    return b"data: " + payload + b"\n\n"


def event(name: str, payload: bytes) -> bytes:
    """A named event."""
    return b"event: " + name.encode() + b"\ndata: " + payload + b"\n\n"


DONE = data(b"[DONE]")
