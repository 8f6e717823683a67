"""The small words that the OpenAPI description is written in."""

from __future__ import annotations

from typing import Any

Object = dict[str, Any]

ANY_OBJECT: Object = {"type": "object", "additionalProperties": True}


def text(about: str = "", *choices: str) -> Object:
    """A string, or one of a few."""
    return _told({"type": "string", **({"enum": list(choices)} if choices else {})}, about)


def number(about: str = "", low: float | None = None, high: float | None = None, default: float | None = None) -> Object:
    """A number within bounds that are enforced."""
    limits = {"minimum": low, "maximum": high, "default": default}
    return _told({"type": "number", **{name: value for name, value in limits.items() if value is not None}}, about)


def whole(about: str = "", low: int | None = None, default: int | None = None) -> Object:
    """An integer; fractions are cut, and what is too large counts as 2^31-1."""
    return {**number(about, low, None, default), "type": "integer"}


def flag(about: str = "") -> Object:
    """A boolean."""
    return _told({"type": "boolean"}, about)


def array(items: Object, about: str = "") -> Object:
    """A list."""
    return _told({"type": "array", "items": items}, about)


def either(*schemas: Object, about: str = "") -> Object:
    """One of several forms."""
    return _told({"anyOf": list(schemas)}, about)


def obj(properties: Object, required: tuple[str, ...] = (), about: str = "") -> Object:
    """An object. Members beyond these are passed over."""
    needed = {"required": list(required)} if required else {}
    return _told({"type": "object", "properties": properties, **needed}, about)


def ref(name: str) -> Object:
    """A schema of the components."""
    return {"$ref": f"#/components/schemas/{name}"}


def nullable(properties: Object, required: tuple[str, ...] = ()) -> Object:
    """The members of a request: null is the same as absent, but where a member is required."""
    return {name: schema if name in required else either(schema, {"type": "null"}) for name, schema in properties.items()}


def _told(schema: Object, about: str) -> Object:
    return {**schema, "description": about} if about else schema
