"""The engine's end of the socket pair: frames in and out, each on a thread of its own.

The engine thread never waits for the socket: it takes what has arrived and leaves what is to be sent.
"""

from __future__ import annotations

import queue
import socket
import threading
from typing import cast

import msgspec

from ds4batch.messages import HEADER, FromEngine, ToEngine, decode_to_engine, frame
from ds4batch.settings import Settings

_WAKE = object()


class FrontGone(Exception):
    """The front process closed its end."""


class Channel:
    """Messages between this process and the front."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._inbox: queue.SimpleQueue[ToEngine | object | None] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="channel-writer", daemon=True)

    def settings(self) -> Settings:
        """The first frame: the server's options. Raises FrontGone."""
        body = self._frame()
        if body is None:
            raise FrontGone
        return Settings(**msgspec.msgpack.decode(body))

    def start(self) -> None:
        """Begin to read and to write."""
        threading.Thread(target=self._read, name="channel-reader", daemon=True).start()
        self._writer.start()

    def receive(self, wait: bool) -> list[ToEngine]:
        """Everything that has arrived; with `wait`, at least one message, or none after a `wake`. Raises FrontGone."""
        found: list[ToEngine] = []
        try:
            while True:
                message = self._inbox.get(block=wait)
                wait = False
                if message is None:
                    raise FrontGone
                if message is not _WAKE:
                    found.append(cast(ToEngine, message))
        except queue.Empty:
            return found

    def wake(self) -> None:
        """Let a waiting `receive` return. May be called from any thread."""
        self._inbox.put(_WAKE)

    def send(self, message: FromEngine) -> None:
        """Queue a message."""
        self._outbox.put(frame(message))

    def close(self) -> None:
        """Send what is queued, then hang up."""
        self._outbox.put(None)
        self._writer.join(timeout=5)
        self._socket.close()

    def _read(self) -> None:
        try:
            while (body := self._frame()) is not None:
                self._inbox.put(decode_to_engine(body))
        finally:
            self._inbox.put(None)

    def _write(self) -> None:
        while (data := self._outbox.get()) is not None:
            try:
                self._socket.sendall(data)
            except OSError:
                return  # the reader sees the end of the stream and says so

    def _frame(self) -> bytes | None:
        header = self._exactly(HEADER.size)
        return None if header is None else self._exactly(HEADER.unpack(header)[0])

    def _exactly(self, count: int) -> bytes | None:
        parts = bytearray()
        while len(parts) < count:
            try:
                part = self._socket.recv(count - len(parts))
            except OSError:
                return None
            if not part:
                return None
            parts += part
        return bytes(parts)
