"""Frames over the socket to the engine process. Knows the framing only: what the messages mean is engine_link's business."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import cast

import msgspec

from ds4batch.messages import HEADER, FromEngine, ToEngine, decode_from_engine, frame

MAX_FRAME_BYTES = 1 << 30
MAX_PENDING_BYTES = 128 << 20
"""Bytes the engine may leave unread before new requests are refused; cancellations are small and always pass."""


class EngineWire(asyncio.Protocol):
    """One life's connection. `lost` is done when it has ended, with the reason or an empty string for an end of file."""

    def __init__(self, on_message: Callable[[FromEngine], None]) -> None:
        self._on_message = on_message
        self._received = bytearray()
        self._transport: asyncio.Transport | None = None
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @classmethod
    async def open(cls, sock: socket.socket, on_message: Callable[[FromEngine], None]) -> EngineWire:
        """Take over a connected AF_UNIX stream socket."""
        sock.setblocking(False)
        _, wire = await asyncio.get_running_loop().create_unix_connection(lambda: cls(on_message), sock=sock)
        return wire

    @property
    def congested(self) -> bool:
        """Whether the engine has left so much unread that no further request should be sent."""
        return self._transport is not None and self._transport.get_write_buffer_size() > MAX_PENDING_BYTES

    def send(self, message: ToEngine) -> None:
        """Queue a message; never waits. A message to a connection that has ended is dropped."""
        self.send_raw(frame(message))

    def send_raw(self, data: bytes) -> None:
        """Queue a whole frame."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def abort(self, reason: str = "") -> None:
        """End the connection now."""
        if not self.lost.done():
            self.lost.set_result(reason)
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop."""
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the event loop."""
        self._transport = None
        if not self.lost.done():
            self.lost.set_result(str(exc) if exc else "")

    def data_received(self, data: bytes) -> None:
        """Called by the event loop: cut frames, decode, deliver in order."""
        self._received += data
        start, end = 0, len(self._received)
        try:
            while end - start >= HEADER.size:
                (length,) = HEADER.unpack_from(self._received, start)
                if length > MAX_FRAME_BYTES:
                    raise ValueError(f"a frame of {length} bytes")
                stop = start + HEADER.size + length
                if stop > end:
                    break
                message = decode_from_engine(bytes(self._received[start + HEADER.size : stop]))
                start = stop
                if not self.lost.done():
                    self._on_message(message)
        except (ValueError, msgspec.DecodeError) as error:
            self.abort(f"the engine sent what is no message: {error}")
            return
        del self._received[:start]
