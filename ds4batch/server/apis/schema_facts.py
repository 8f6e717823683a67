"""What a JSON schema says of the values that it admits, as far as markup has to know it. Pure; enforces nothing itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

Schema = Mapping[str, Any] | bool

_MAX_STEPS = 32  # of references that lead to references
_ROOT = "root"


def resolved(schema: Schema, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema with what it refers to in its place, members beside a reference kept. What leads nowhere is left as it is."""
    for _ in range(_MAX_STEPS):
        if not isinstance(schema, Mapping):
            return {"enum": []} if schema is False else {}
        sole = schema.get("allOf")
        target: Any
        if isinstance(ref := schema.get("$ref"), str):
            key, target = "$ref", _at(root, ref)
        elif isinstance(sole, list) and len(sole) == 1:
            key, target = "allOf", sole[0]
        else:
            break
        if not isinstance(target, Mapping | bool):
            break
        beside = {name: value for name, value in schema.items() if name != key}
        schema = {**target, **beside} if isinstance(target, Mapping) else target
    return schema if isinstance(schema, Mapping) else {}


def choices(schema: Schema, root: Mapping[str, Any]) -> list[Any] | None:
    """The values it lists, where it lists them."""
    found = resolved(schema, root)
    if "const" in found:
        return [found["const"]]
    listed = found.get("enum")
    return listed if isinstance(listed, list) else None


def is_text(schema: Schema, root: Mapping[str, Any]) -> bool:
    """Whether it admits strings and nothing else."""
    return resolved(schema, root).get("type") in ("string", ["string"])


def admits_text(schema: Schema, root: Mapping[str, Any], depth: int = 0) -> bool:
    """Whether a string may fit; of what says nothing about it, any may."""
    found = resolved(schema, root)
    kind = found.get("type")
    if isinstance(kind, str):
        return kind == "string"
    if isinstance(kind, list):
        return "string" in kind
    listed = choices(found, root)
    if listed is not None:
        return any(isinstance(value, str) for value in listed)
    for key in ("anyOf", "oneOf"):
        ways = found.get(key)
        if isinstance(ways, list) and depth < _MAX_STEPS:
            return any(admits_text(way, root, depth + 1) for way in ways if isinstance(way, Mapping | bool))
    return True


def part(schema: Schema, root: Mapping[str, Any]) -> dict[str, Any]:
    """A part of `root` as a schema of its own."""
    if isinstance(schema, bool):
        return {} if schema else {"enum": []}
    if not _refers(schema):
        return dict(schema)
    home = f"#/$defs/{_ROOT}"
    return {**rebased(schema, home), "$defs": {_ROOT: rebased(root, home)}}


def rebased(schema: Mapping[str, Any], home: str) -> dict[str, Any]:
    """The schema for a place `home` (a reference such as "#/properties/a") inside another one: its references lead there."""
    moved = _moved(schema, home)
    assert isinstance(moved, dict)
    return moved


def _moved(value: Any, home: str) -> Any:
    if isinstance(value, list):
        return [_moved(item, home) for item in value]
    if not isinstance(value, Mapping):
        return value
    return {
        key: home + item[1:] if key == "$ref" and isinstance(item, str) and item.startswith("#") else _moved(item, home)
        for key, item in value.items()
    }


def _refers(value: Any) -> bool:
    if isinstance(value, Mapping):
        return "$ref" in value or any(map(_refers, value.values()))
    return isinstance(value, list) and any(map(_refers, value))


def _at(root: Any, ref: str) -> Any:
    """What a reference inside `root` leads to, None for nothing."""
    if ref == "#":
        return root
    if not ref.startswith("#/"):
        return None
    for step in ref[2:].split("/"):
        name = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(root, Mapping):
            root = root.get(name)
        elif isinstance(root, list) and name.isdecimal() and int(name) < len(root):
            root = root[int(name)]
        else:
            return None
    return root
