"""Reads HTTP/1.1 answers out of the bytes of a connection, strictly: what is no answer is a problem of the server's."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3}) [^\r\n]*$")
_CHUNK = re.compile(rb"([0-9A-Fa-f]+)\r\n")


class Answer(NamedTuple):
    """One answer."""

    status: int
    headers: dict[str, str]  # names in lower case
    body: bytes

    @property
    def json(self) -> Any:
        """The body, parsed. Raises ValueError."""
        return json.loads(self.body)

    @property
    def events(self) -> list[bytes]:
        """The data of a stream's events."""
        return re.findall(rb"^data: ?(.*)$", self.body, re.M)


class Parsed(NamedTuple):
    """All answers that are whole, and what is wrong with the bytes."""

    answers: list[Answer]
    problem: str


def parse(raw: bytes, *, ended: bool, head: bool = False) -> Parsed:
    """`ended`: nothing follows, so that half an answer is a problem; `head`: answers to HEAD, which have no body. Interim answers
    (1xx) are passed over.
    """
    answers: list[Answer] = []
    at = 0
    while at < len(raw):
        end = raw.find(b"\r\n\r\n", at)
        if end < 0:
            return Parsed(answers, "the head of an answer is cut short" if ended else "")
        lines = raw[at:end].split(b"\r\n")
        matched = _STATUS.match(lines[0])
        if not matched:
            return Parsed(answers, f"no answer: {lines[0][:80]!r}")
        headers: dict[str, str] = {}
        for line in lines[1:]:
            name, colon, value = line.partition(b":")
            if not colon or re.search(rb"[^!#$%&'*+.^_`|~0-9A-Za-z-]", name):
                return Parsed(answers, f"no header: {line[:80]!r}")
            headers[name.decode("latin-1").lower()] = value.strip().decode("latin-1")
        status = int(matched[1])
        body, at, problem = (b"", end + 4, "") if head else _body(raw, end + 4, status, headers, ended)
        if problem or body is None:
            return Parsed(answers, problem)
        if status >= 200:
            answers.append(Answer(status, headers, body))
    return Parsed(answers, "")


def _body(raw: bytes, at: int, status: int, headers: dict[str, str], ended: bool) -> tuple[bytes | None, int, str]:
    """The body, where the next answer begins and what is wrong; None where more must come."""
    if status < 200 or status in (204, 304):
        return b"", at, ""
    if headers.get("transfer-encoding", "").lower() == "chunked":
        return _chunked(raw, at, ended)
    if "content-length" in headers:
        length = int(headers["content-length"])
        if len(raw) - at < length:
            return None, at, f"a body of {length} bytes is cut at {len(raw) - at}" if ended else ""
        return raw[at : at + length], at + length, ""
    return (raw[at:], len(raw), "") if ended else (None, at, "")


def _chunked(raw: bytes, at: int, ended: bool) -> tuple[bytes | None, int, str]:
    body = bytearray()
    while True:
        matched = _CHUNK.match(raw, at)
        if not matched:
            if len(raw) - at > 18:
                return None, at, f"no chunk: {raw[at : at + 20]!r}"
            return None, at, "a chunked body is cut short" if ended else ""
        size, start = int(matched[1], 16), matched.end()
        if len(raw) < start + size + 2:
            return None, at, "a chunked body is cut short" if ended else ""
        body += raw[start : start + size]
        at = start + size + 2
        if not size:
            return bytes(body), at, ""
