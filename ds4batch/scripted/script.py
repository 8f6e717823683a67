"""The file that says what a scripted model answers.

JSON: {"dialect": "auto", "step_seconds": 0, "answers": [{"after": TEXT, "say": SAY, "end": true, "margin": 30}, ...]}

Of the answers whose `after` occurs in the prompt, the one that occurs last is given; of several that end at the same place the one with
the longest. One without `after` answers everything else. `say` is a text, or a list of pieces: texts and lists of bytes. `end` false leaves
the turn open, so that it runs to its limit. `margin` is by how much the scripted token's logit is above all others, which are equal: a
small one makes sampling stray.
"""

from __future__ import annotations

import json
import os
from typing import Any, NamedTuple

_FIELDS = {"dialect", "step_seconds", "answers"}
_ANSWER_FIELDS = {"after", "say", "end", "margin"}


class Answer(NamedTuple):
    """One thing to say."""

    after: str
    say: bytes
    end: bool = True
    margin: float = 30.0


class Script(NamedTuple):
    """A whole file."""

    answers: tuple[Answer, ...]
    dialect: str = "auto"
    step_seconds: float = 0.0  # how long a step takes

    def answer(self, prompt: str) -> Answer:
        """What is said after `prompt`: nothing where no answer fits."""
        found = [(prompt.rfind(one.after) + len(one.after), len(one.after), one) for one in self.answers if one.after in prompt]
        return max(found, key=lambda place: place[:2] if place[1] else (-1, 0))[2] if found else Answer("", b"")


def read_script(path: str | os.PathLike[str]) -> Script:
    """The script in a file. Raises OSError, and ValueError naming the file and what is wrong in it."""
    with open(path, encoding="utf-8") as file:
        try:
            table = json.load(file)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: not JSON: {error}") from None
    try:
        table = _object(table, "the script", _FIELDS)
        answers = table.get("answers")
        if not isinstance(answers, list):
            raise ValueError("answers: expected a list")
        return Script(
            tuple(_answer(one, f"answers[{i}]") for i, one in enumerate(answers)),
            _text(table.get("dialect", "auto"), "dialect"),
            _number(table.get("step_seconds", 0.0), "step_seconds"),
        )
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _answer(value: Any, where: str) -> Answer:
    table = _object(value, where, _ANSWER_FIELDS)
    if "say" not in table:
        raise ValueError(f"{where}.say: is missing")
    say = table["say"]
    pieces = say if isinstance(say, list) else [say]
    end = table.get("end", True)
    if not isinstance(end, bool):
        raise ValueError(f"{where}.end: expected true or false")
    return Answer(
        _text(table.get("after", ""), f"{where}.after"),
        b"".join(_piece(piece, f"{where}.say") for piece in pieces),
        end,
        _number(table.get("margin", 30.0), f"{where}.margin"),
    )


def _piece(value: Any, where: str) -> bytes:
    if isinstance(value, list):
        try:
            return bytes(value)
        except (TypeError, ValueError):
            raise ValueError(f"{where}: a list of bytes holds numbers of 0 to 255") from None
    return _text(value, where).encode("utf-8", "replace")


def _object(value: Any, where: str, known: set[str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: expected an object")
    unknown = sorted(set(value) - known)
    if unknown:
        raise ValueError(f"{where}: unknown field {unknown[0]!r}; it may have {', '.join(sorted(known))}")
    return value


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{where}: expected a text")
    return value


def _number(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e6:
        raise ValueError(f"{where}: expected a number of 0 or more")
    return float(value)
