"""Typed readers for the members of a JSON request. Every refusal names the field; nothing here knows what a field means."""

from __future__ import annotations

import math
from typing import Any

from ds4batch.server.errors import bad_field

INT_MAX = 2**31 - 1

Object = dict[str, Any]


def describe(value: Any) -> str:
    """The JSON type of a parsed value, for messages."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, str):
        return "a string"
    return "a list" if isinstance(value, list) else "an object"


def clamp_int(value: float) -> int:
    """The integer rule of the API: NaN and negatives become 0, anything above 2^31-1 becomes that, fractions are cut."""
    if value != value or value < 0:
        return 0
    return INT_MAX if value > INT_MAX else int(value)


def number(body: Object, name: str) -> float | None:
    """A number, or None where the field is absent or null. NaN is given through."""
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise bad_field(name, f"expected a number, got {describe(value)}")
    return value


def bounded(body: Object, name: str, default: float, low: float, high: float) -> float:
    """A number in [low, high]; NaN counts as absent."""
    value = number(body, name)
    if value is None or value != value:
        return default
    if not low <= value <= high:
        wanted = f"at least {low:g}" if math.isinf(high) else f"between {low:g} and {high:g}"
        raise bad_field(name, f"expected a number {wanted}, got {shown(value)}")
    return float(value)


def integer(body: Object, name: str) -> int | None:
    """A number under `clamp_int`, or None where absent."""
    value = number(body, name)
    return None if value is None else clamp_int(value)


def flag(body: Object, name: str, default: bool = False, *, where: str = "") -> bool:
    """A boolean; absent or null is the default. `where` prefixes the field's name in messages."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise bad_field(where + name, f"expected true or false, got {describe(value)}")
    return value


def text(body: Object, name: str, default: str = "", *, where: str = "") -> str:
    """A string; absent or null is the default. `where` prefixes the field's name in messages."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, str):
        raise bad_field(where + name, f"expected a string, got {describe(value)}")
    return value


def obj(body: Object, name: str, *, where: str = "") -> Object | None:
    """An object, or None where absent or null."""
    value = body.get(name)
    if value is not None and not isinstance(value, dict):
        raise bad_field(where + name, f"expected an object, got {describe(value)}")
    return value


def shown(value: float) -> str:
    """A number as a message shows it: short, whatever its length."""
    digits = str(value) if isinstance(value, float) or abs(value) < 10**20 else f"{'-' if value < 0 else ''}1e20 or more"
    return digits[:32]
