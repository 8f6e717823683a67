"""Notices clients that left or stopped reading, for all requests in flight at once.

HTTP keeps quiet about both: a closed connection only shows as an end of file, which may hide behind bytes the client sent
ahead, and a reader that stalls only shows as a send buffer that nothing leaves. One task looks at every watched connection
each tick; a handler is told by a callback and decides itself what to end.
"""

from __future__ import annotations

import asyncio
import os
import select
import time
from collections.abc import Callable
from typing import Literal

from aiohttp import web

TICK_SECONDS = 0.05
STALL_SECONDS = 2.0
_HUNG_UP = select.POLLERR | select.POLLHUP | select.POLLNVAL | getattr(select, "POLLRDHUP", 0)

Gone = Literal["client", "slow_reader"]


class Watched:
    """One request's connection. `gone` says why it is of no use any more, None while it is."""

    def __init__(self, request: web.BaseRequest, on_gone: Callable[[Gone], None]) -> None:
        self.transport: asyncio.Transport | None = request.transport
        self.gone: Gone | None = None
        self._request = request
        self._on_gone = on_gone
        self._sent = 0  # bytes that had left the send buffer at the last tick
        self._moved_at = time.monotonic()
        sock = self.transport.get_extra_info("socket") if self.transport is not None else None
        self.fd: int = sock.fileno() if sock is not None else -1

    def fail(self, why: Gone) -> None:
        """Tell the handler, once. A slow reader's unsent bytes are thrown away with the connection."""
        if self.gone is not None:
            return
        self.gone = why
        if why == "slow_reader" and self.transport is not None:
            self.transport.abort()
        self._on_gone(why)

    @property
    def closed(self) -> bool:
        """Whether our side already knows that the connection has ended."""
        return self.transport is None or self.transport.is_closing()

    def stalled(self, now: float) -> bool:
        """Whether the send buffer holds bytes and none has left it for STALL_SECONDS."""
        assert self.transport is not None
        pending = self.transport.get_write_buffer_size()
        sent = self._request.writer.output_size - pending
        if pending == 0 or sent != self._sent:
            self._moved_at = now
        self._sent = sent
        return pending > 0 and now - self._moved_at >= STALL_SECONDS

    def drained_to_end(self) -> bool:
        """Throw away bytes sent ahead that nobody reads any more; True when the end of file was behind them.

        Only while the HTTP parser has stopped reading, because otherwise the bytes are its own. What is thrown away may be half
        a request, so the connection ends with the answer under way.
        """
        assert self.transport is not None
        if self.transport.is_reading():
            return False
        self._request.protocol.close()
        try:
            while os.read(self.fd, 1 << 16):
                pass
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True


class ConnectionWatch:
    """Watches connections until they are released. `run` is its task."""

    def __init__(self) -> None:
        self._watched: set[Watched] = set()

    def add(self, request: web.BaseRequest, on_gone: Callable[[Gone], None]) -> Watched:
        """Watch the connection of a request whose body has been read. Release it when the response is complete."""
        entry = Watched(request, on_gone)
        self._watched.add(entry)
        return entry

    def release(self, entry: Watched) -> None:
        """Look no longer."""
        self._watched.discard(entry)

    async def run(self) -> None:
        """Look at every connection each tick, until cancelled."""
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self.tick(time.monotonic())

    def tick(self, now: float) -> None:
        """One look. The handlers of connections that ended or stall are told."""
        hung_up = self._poll()
        for entry in list(self._watched):
            if entry.closed or entry.fd in hung_up or entry.drained_to_end():
                entry.fail("client")
            elif entry.stalled(now):
                entry.fail("slow_reader")
            if entry.gone is not None:
                self._watched.discard(entry)

    def _poll(self) -> set[int]:
        """The descriptors whose peer has hung up. Unread bytes before the end of file do not hide it."""
        poll = select.poll()
        for entry in self._watched:
            if not entry.closed:
                poll.register(entry.fd, _HUNG_UP)
        return {fd for fd, events in poll.poll(0) if events & _HUNG_UP}
