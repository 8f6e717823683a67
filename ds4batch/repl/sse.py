"""Splits the bytes of a text/event-stream into events. Does no input or output."""

from __future__ import annotations

from typing import NamedTuple


class Event(NamedTuple):
    """One event."""

    name: str  # "message" where the stream names none
    data: str


class Events:
    """The events of one stream, from blocks cut anywhere. Comments, which keep a silent stream alive, vanish here.

    Format: WHATWG HTML, section 9.2.6, without the lone carriage return as a line end, which no such server sends.
    """

    def __init__(self, errors: str = "replace") -> None:
        """`errors`: what becomes of bytes that are no UTF-8. "replace" makes them U+FFFD, as the format says."""
        self._errors = errors
        self._line = bytearray()
        self._name = ""
        self._data: list[str] = []

    def feed(self, block: bytes) -> list[Event]:
        """The events that `block` completes. Raises UnicodeDecodeError where `errors` is "strict"."""
        *lines, rest = block.split(b"\n")
        found = []
        for line in lines:
            self._line += line
            event = self._take(self._line.decode(errors=self._errors).removesuffix("\r"))
            self._line.clear()
            if event is not None:
                found.append(event)
        self._line += rest
        return found

    def _take(self, line: str) -> Event | None:
        if not line:
            event = Event(self._name or "message", "\n".join(self._data)) if self._data else None
            self._name, self._data = "", []
            return event
        name, _, value = line.partition(":")
        if name == "data":
            self._data.append(value.removeprefix(" "))
        elif name == "event":
            self._name = value.removeprefix(" ")
        return None  # an empty name is a comment; id and retry mean nothing here
