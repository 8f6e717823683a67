"""What a value is that stands between tags without a type: the schema says, or the value itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from json.encoder import encode_basestring

from ds4batch.chat.grammars.base import SPACE, Block, Reading
from ds4batch.chat.schemas import compact


def read_untyped(block: Block, end: str, is_string: bool, *, trims_newline: bool = False) -> Reading[None]:
    """Read a value up to `end` and write it as JSON. `trims_newline`: one newline at each end belongs to the tags.

    A string is written as it comes. Any other value only when it is complete, because its end may tell that it is text.
    """
    parts: list[str] = []
    write = block.write_text if is_string else parts.append
    if is_string:
        block.write('"')
    yield from block.body((end,), _NewlineTrim(write) if trims_newline else write)
    block.write('"' if is_string else json_or_text("".join(parts)))


def json_or_text(text: str) -> str:
    """JSON of a value whose type is unknown: itself where it is one complete JSON value other than a string, else a string."""
    stripped = text.strip(SPACE)
    try:
        json.loads(stripped, parse_int=str, parse_float=str, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return encode_basestring(text)
    return encode_basestring(text) if stripped.startswith('"') else compact(stripped)


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


class _NewlineTrim:
    """Passes pieces on without the newline that the whole text begins with and the one it ends with."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._first = True
        self._held = ""

    def __call__(self, piece: str) -> None:
        if self._first:
            self._first = False
            piece = piece.removeprefix("\n")
        piece = self._held + piece
        self._held = "\n" if piece.endswith("\n") else ""
        self._write(piece.removesuffix("\n"))
