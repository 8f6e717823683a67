"""Sends one case over a socket of its own and takes what comes back. Judges nothing."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from bench.hostile.case import Case
from bench.hostile.http_answers import Answer, parse

End = Literal["answered", "closed", "left", "hung", "unconnected"]
_TICK = 0.2  # seconds between two looks at the probe
_READ = 1 << 16


@dataclass(frozen=True)
class Outcome:
    """What came back for one case."""

    end: End
    answers: list[Answer]
    problem: str  # what is wrong with the bytes as HTTP, "" for nothing
    raw: bytes  # all bytes received
    seconds: float


def send(case: Case, address: tuple[str, int], rounds: Callable[[], int], limit: int) -> Outcome:
    """Send and receive. The case hangs when the probe went `limit` rounds while no byte came."""
    begun = time.monotonic()

    def outcome(end: End, raw: bytes = b"") -> Outcome:
        answers, problem = parse(raw, ended=end == "closed", head=case.method == "HEAD")
        return Outcome(end, answers, problem, raw, time.monotonic() - begun)

    try:
        sock = socket.create_connection(address, timeout=30)
    except OSError:
        return outcome("unconnected")
    with contextlib.closing(sock):
        sock.setblocking(False)
        received = bytearray()
        if not _send(case, sock, received, rounds, limit):
            return outcome("hung", bytes(received))
        if case.ending == "abort":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return outcome("left")
        if case.ending == "half-close":
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_WR)
        return outcome(_receive(case, sock, received, rounds, limit), bytes(received))


def _send(case: Case, sock: socket.socket, received: bytearray, rounds: Callable[[], int], limit: int) -> bool:
    """False where the server takes nothing and says nothing. What it says meanwhile is kept; a closed connection ends the sending."""
    for part in case.parts:
        if not isinstance(part, bytes):
            time.sleep(part)
            continue
        view, since = memoryview(part), rounds()
        while view:
            readable, writable, _ = select.select([sock], [sock], [], _TICK)
            try:
                if readable:
                    data = sock.recv(_READ)
                    if not data:
                        return True
                    received += data
                if writable:
                    view, since = view[sock.send(view[: 1 << 18]) :], rounds()
            except BlockingIOError:
                continue
            except OSError:
                return True
            if rounds() - since > limit:
                return False
    return True


def _receive(case: Case, sock: socket.socket, received: bytearray, rounds: Callable[[], int], limit: int) -> End:
    since = rounds()
    checked, got = -1, 0
    while True:
        if len(received) != checked:
            checked = len(received)
            if case.ending == "first-bytes" and b"\r\n\r\n" in received:
                return "left"
            got = len(parse(bytes(received), ended=False, head=case.method == "HEAD").answers)
            if got >= case.answers:
                return "answered"
        if rounds() - since > limit:
            return "hung"
        readable, _, _ = select.select([sock], [], [], _TICK)
        if not readable:
            if case.closes and got and case.ending == "read":  # so many at most, and no more came
                return "answered"
            continue
        try:
            data = sock.recv(_READ)
        except BlockingIOError:
            continue
        except OSError:
            return "closed"
        if not data:
            return "closed"
        received += data
        since = rounds()
