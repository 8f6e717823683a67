"""Files of turns that a conversation starts with.

UTF-8, with or without a byte order mark. A turn begins on a line that starts with `USER:` or `ASSISTANT:` and runs to the next such
line; one space or tab behind the colon and the last line end belong to the format, everything else to the turn. Users and assistants
take turns, the user first, the assistant last.
"""

from __future__ import annotations

import codecs
import os
from collections.abc import Sequence

from ds4batch.repl.transcript import Role, Said

_MARKERS: tuple[tuple[str, Role], ...] = (("USER:", "user"), ("ASSISTANT:", "assistant"))
_NAMES = {role: marker for marker, role in _MARKERS}


def read(path: str | os.PathLike[str]) -> list[Said]:
    """The turns in a file. Raises OSError, and ValueError naming the file, the line and what is wrong in it."""
    with open(path, "rb") as file:
        data = file.read()
    try:
        return parse(data)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def parse(data: bytes) -> list[Said]:
    """The turns in a file's bytes. Raises ValueError naming the line."""
    lines = _text(data).split("\n")
    starts = [(number, role) for number, line in enumerate(lines) if (role := _role(line)) is not None]
    _check_order(starts, len(lines))
    ends = [number for number, _ in starts[1:]] + [len(lines)]
    return [_turn(lines, start, end, role) for (start, role), end in zip(starts, ends, strict=True)]


def _text(data: bytes) -> str:
    data = data.removeprefix(codecs.BOM_UTF8)
    zero = data.find(b"\0")
    if zero >= 0:
        raise ValueError(f"line {_line_of(data, zero)}: NUL byte")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"line {_line_of(data, error.start)}: not UTF-8") from None


def _line_of(data: bytes, position: int) -> int:
    return data.count(b"\n", 0, position) + 1


def _role(line: str) -> Role | None:
    return next((role for marker, role in _MARKERS if line.startswith(marker)), None)


def _check_order(starts: Sequence[tuple[int, Role]], end: int) -> None:
    """`starts`: line index and role of every turn; `end`: the index behind the last line."""
    if not starts or starts[0][0] != 0:
        raise ValueError("line 1: expected USER:")
    expected: Role = "user"
    for number, role in starts:
        if role != expected:
            raise ValueError(f"line {number + 1}: expected {_NAMES[expected]}")
        expected = "assistant" if role == "user" else "user"
    if expected == "assistant":
        raise ValueError(f"line {end}: expected ASSISTANT: before the end of the file")


def _turn(lines: Sequence[str], start: int, end: int, role: Role) -> Said:
    """The turn in lines[start:end]. A file that ends in a line end has an empty line more."""
    first = lines[start].removeprefix(_NAMES[role])
    body = [first[1:] if first[:1] in (" ", "\t") else first, *lines[start + 1 : end]]
    if end < len(lines) or (len(body) > 1 and not body[-1]):
        if end == len(lines):
            body.pop()
        body[-1] = body[-1].removesuffix("\r")
    text = "\n".join(body)
    if not text.strip():
        raise ValueError(f"line {start + 1}: empty turn")
    return Said(role, text)
