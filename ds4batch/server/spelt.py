"""What a parsed body must still know of its text, because a prompt shows it: how a number was spelt, and members that came twice.

Readers see a float and a dict, whose last member counts. Only numbers that Python would spell otherwise are kept so; `dumps` writes
them back.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Self

_DIGITS = 4000  # int() of more raises; such a number is far beyond every range, so a float stands for it


class Spelt(float):
    """A number, and its text."""

    __slots__ = ("text",)
    text: str

    def __new__(cls, text: str) -> Self:
        """Of a JSON number."""
        number = super().__new__(cls, text)
        number.text = text
        return number


class Doubled(dict[str, Any]):
    """An object of which a member came twice or more; `pairs` has all of them, in order."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        self.pairs = pairs


def integer(text: str) -> int | float:
    """A JSON number without fraction and exponent."""
    return int(text) if text != "-0" and len(text) <= _DIGITS else Spelt(text)


def real(text: str) -> float:
    """Any other JSON number."""
    number = float(text)
    return number if repr(number) == text else Spelt(text)


def members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object."""
    found = dict(pairs)
    return found if len(found) == len(pairs) else Doubled(pairs)


def values(value: dict[str, Any]) -> Iterable[Any]:
    """Of all members of an object."""
    return [item for _, item in value.pairs] if isinstance(value, Doubled) else value.values()


def times(value: dict[str, Any], name: str) -> int:
    """How often an object has a member."""
    if isinstance(value, Doubled):
        return sum(1 for key, _ in value.pairs if key == name)
    return int(name in value)


def without(value: dict[str, Any], name: str) -> dict[str, Any]:
    """The object without a member."""
    if isinstance(value, Doubled):
        return members([(key, item) for key, item in value.pairs if key != name])
    return {key: item for key, item in value.items() if key != name}


def dumps(value: Any, *, spaced: bool = False) -> str:
    """JSON of a parsed value, with its own numbers and all of its members; `spaced`: as prompts show it."""
    comma, colon = (", ", ": ") if spaced else (",", ":")
    if not _odd(value):
        return json.dumps(value, ensure_ascii=False, separators=(comma, colon))
    return _written(value, comma, colon)


def _odd(value: Any) -> bool:
    """Whether the standard encoder would lose something."""
    pending = [value]
    while pending:
        one = pending.pop()
        kind = type(one)
        if kind is dict:
            pending += one.values()
        elif kind is list:
            pending += one
        elif kind is Spelt or kind is Doubled:
            return True
    return False


def _written(value: Any, comma: str, colon: str) -> str:
    """Recurses; a body is no deeper than its limit."""
    if isinstance(value, dict):
        pairs = value.pairs if isinstance(value, Doubled) else value.items()
        inner = (f"{json.dumps(key, ensure_ascii=False)}{colon}{_written(item, comma, colon)}" for key, item in pairs)
        return f"{{{comma.join(inner)}}}"
    if isinstance(value, list):
        return f"[{comma.join([_written(item, comma, colon) for item in value])}]"
    return value.text if isinstance(value, Spelt) else json.dumps(value, ensure_ascii=False)
