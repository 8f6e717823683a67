"""How hard the model is asked to think: the words of the user, and the fields of a request."""

from __future__ import annotations

import re
from typing import Any

UNSET = ""  # the server decides
OFF = "none"
WORDS = "0..100, off, low, medium, high or max"
_NAMED = {"off": OFF, "0": OFF, "low": "low", "medium": "medium", "high": "high", "max": "max"}
_LEVEL = re.compile(r"[1-9][0-9]?|100")


def parse(text: str) -> str:
    """The effort that a word or a number stands for. Raises ValueError."""
    if text in _NAMED:
        return _NAMED[text]
    if _LEVEL.fullmatch(text):
        return text
    raise ValueError(f"expected {WORDS}, got {text[:40]!r}")


def level(text: str) -> str:
    """The effort of a number of 0..100. Raises ValueError."""
    if text != "0" and not _LEVEL.fullmatch(text):
        raise ValueError(f"expected a number of 0..100, got {text[:40]!r}")
    return parse(text)


def name(effort: str) -> str:
    """An effort in the user's words."""
    return {UNSET: "as the server decides", OFF: "off"}.get(effort, effort)


def fields(effort: str) -> dict[str, Any]:
    """What a request says of it. The switch goes along, because a model's name may have turned thinking off."""
    if effort == UNSET:
        return {}
    return {"think": effort != OFF, "reasoning_effort": effort}
