"""One HTTP request over a bare socket, with the manners of good and of bad clients.

Owns the socket: when it is read, how slowly, and when it is hung up. It knows nothing of what is said over it. A client library would
hide what matters here: whether the server ended its answer properly or cut the connection.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from dataclasses import dataclass, field
from enum import StrEnum

SMALL_BUFFER = 2048  # bytes of the receive buffer of a client that reads slowly
BLOCK = 1 << 16


class Manner(StrEnum):
    """How a client behaves."""

    READ = "reads"
    SLOW = "reads slowly"
    STALL = "stops reading"
    LEAVE_UPLOAD = "leaves while sending"
    LEAVE_EARLY = "leaves before the answer"
    LEAVE_WITHIN = "leaves within the answer"


@dataclass(frozen=True)
class Behaviour:
    """A manner and its numbers. Which of them mean something depends on the manner."""

    manner: Manner = Manner.READ
    after_bytes: int = 0  # of the request (LEAVE_UPLOAD) or of the answer's body (LEAVE_WITHIN, STALL)
    after_seconds: float = 0.0  # LEAVE_EARLY: how long it stays; STALL: how long it does not read
    abruptly: bool = False  # hangs up with a reset

    @property
    def leaves(self) -> bool:
        """Whether it may go before the end."""
        return self.manner in (Manner.LEAVE_UPLOAD, Manner.LEAVE_EARLY, Manner.LEAVE_WITHIN)


PLAIN = Behaviour()


class Framing(StrEnum):
    """How the answer ended on the wire."""

    WHOLE = "whole"  # as its framing says
    CUT = "cut"  # the connection ended before that
    LEFT = "left"  # this side hung up
    NONE = "none"  # the connection ended without one byte of an answer
    REFUSED = "refused"  # there was no connection
    HUNG = "hung"  # nothing ended it in time
    GARBLED = "garbled"  # not HTTP


@dataclass
class Reply:
    """What came back."""

    framing: Framing
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)  # names in lower case
    body: bytes = b""  # without chunk headers; of a cut answer what came
    detail: str = ""


class _Left(Exception):
    """This side has hung up."""


class ResponseParser:
    """Takes the bytes of one response. `complete` when its framing is satisfied. Raises ValueError on what is not HTTP."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = bytearray()
        self.complete = False
        self._rest = bytearray()
        self._left = 0  # bytes of the body or of the chunk that are still to come
        self._chunked = False
        self._until_close = False

    def feed(self, data: bytes) -> None:
        """More bytes."""
        self._rest += data
        if not self.status and not self._head():
            return
        if self._until_close:
            self._take(len(self._rest))
        elif self._chunked:
            while not self.complete and self._chunk():
                pass
        else:
            self._left -= self._take(min(self._left, len(self._rest)))
            self.complete = self._left == 0

    def end(self) -> None:
        """The connection has ended."""
        self.complete = self.complete or (self._until_close and bool(self.status))

    def _take(self, count: int) -> int:
        self.body += self._rest[:count]
        del self._rest[:count]
        return count

    def _head(self) -> bool:
        head, found, rest = bytes(self._rest).partition(b"\r\n\r\n")
        if not found:
            return False
        first, *lines = head.decode("latin-1").split("\r\n")
        version, _, status = first.partition(" ")
        if not version.startswith("HTTP/1.") or not status[:3].isdigit():
            raise ValueError(f"not a status line: {first[:80]!r}")
        self.headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        self.status = int(status[:3])
        self._rest = bytearray(rest)
        self._chunked = self.headers.get("transfer-encoding", "").lower() == "chunked"
        length = self.headers.get("content-length")
        self._until_close = length is None and not self._chunked and self.status not in (204, 304)
        self._left = int(length or 0)
        return True

    def _chunk(self) -> bool:
        """One chunk or a part of one; False when more bytes are needed."""
        if self._left > 2:
            self._left -= self._take(min(self._left - 2, len(self._rest)))
            return self._left == 2
        if self._left:  # the line end behind a chunk
            if len(self._rest) < 2:
                return False
            if self._rest[:2] != b"\r\n":
                raise ValueError("a chunk is longer than it says")
            del self._rest[:2]
            self._left = 0
        line, found, _ = bytes(self._rest).partition(b"\r\n")
        if not found:
            return False
        size = int(line.split(b";")[0], 16)
        if size == 0:
            if not bytes(self._rest).startswith(line + b"\r\n\r\n"):
                return False
            self.complete = True
            return False
        del self._rest[: len(line) + 2]
        self._left = size + 2
        return True


def request_bytes(method: str, path: str, body: bytes, host: str = "soak") -> bytes:
    """A request on a connection of its own."""
    head = f"{method} {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def exchange(address: tuple[str, int], data: bytes, behaviour: Behaviour = PLAIN, patience: float = 120.0) -> Reply:
    """Send `data` to `address` and read the answer as `behaviour` says. Never raises for the server's sake.

    `patience` is in seconds, and bounds the whole exchange.
    """
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    sock.setblocking(False)
    if behaviour.manner in (Manner.SLOW, Manner.STALL):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
    parser = ResponseParser()

    def reply(framing: Framing, detail: str = "") -> Reply:
        return Reply(framing, parser.status, parser.headers, bytes(parser.body), detail)

    try:
        async with asyncio.timeout(patience):
            try:
                await asyncio.get_running_loop().sock_connect(sock, address)
            except OSError as error:
                return reply(Framing.REFUSED, str(error))
            await _talk(sock, data, behaviour, parser)
    except _Left:
        if behaviour.abruptly:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return reply(Framing.LEFT)
    except TimeoutError:
        return reply(Framing.HUNG, f"no end within {patience:g} s")
    except ValueError as error:
        return reply(Framing.GARBLED, str(error))
    except OSError as error:
        return reply(Framing.CUT if parser.status else Framing.NONE, str(error))
    finally:
        sock.close()
    if parser.complete:
        return reply(Framing.WHOLE)
    return reply(Framing.CUT, "the end came too early") if parser.status else reply(Framing.NONE)


async def _talk(sock: socket.socket, data: bytes, behaviour: Behaviour, parser: ResponseParser) -> None:
    loop = asyncio.get_running_loop()
    manner = behaviour.manner
    if manner is Manner.LEAVE_UPLOAD:
        await loop.sock_sendall(sock, data[: behaviour.after_bytes])
        raise _Left
    await loop.sock_sendall(sock, data)
    leave_at = time.monotonic() + behaviour.after_seconds if manner is Manner.LEAVE_EARLY else None
    stalled = False
    while not parser.complete:
        if leave_at is not None:
            try:
                async with asyncio.timeout(max(0.0, leave_at - time.monotonic())):
                    block = await loop.sock_recv(sock, BLOCK)
            except TimeoutError:
                raise _Left from None
        else:
            block = await loop.sock_recv(sock, 256 if manner is Manner.SLOW else BLOCK)
        if not block:
            parser.end()
            return
        parser.feed(block)
        if manner is Manner.LEAVE_WITHIN and len(parser.body) >= behaviour.after_bytes:
            raise _Left
        if manner is Manner.STALL and not stalled and len(parser.body) >= behaviour.after_bytes:
            stalled = True
            await asyncio.sleep(behaviour.after_seconds)
        if manner is Manner.SLOW:
            await asyncio.sleep(0.01)
