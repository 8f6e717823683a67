"""What a JSON schema says of the values that it admits, as far as markup has to know it. Pure; enforces nothing itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

Schema = Mapping[str, Any] | bool

_MAX_STEPS = 32  # of references that lead to references
_HOMES = ("$defs", "definitions")  # what stands there is only of use where something refers to it


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
    """A part of `root` as a schema of its own, with what it refers to and no more."""
    if isinstance(schema, bool):
        return {} if schema else {"enum": []}
    names: dict[str, str] = {}  # reference -> definition
    wanted = [ref for ref in references(schema) if _at(root, ref) is not None]
    while wanted:
        ref = wanted.pop()
        if ref not in names:
            names[ref] = f"r{len(names)}"
            wanted += [inner for inner in references(_without_homes(_at(root, ref))) if _at(root, inner) is not None]
    if not names:
        return dict(schema)
    defined = {name: _renamed(_without_homes(_at(root, ref)), names) for ref, name in names.items()}
    return {**_renamed(schema, names), "$defs": defined}


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


def references(value: Any) -> list[str]:
    """Every reference in a schema, in its order, the same one as often as it stands there."""
    if isinstance(value, list):
        return [ref for item in value for ref in references(item)]
    if not isinstance(value, Mapping):
        return []
    own = [ref for key, ref in value.items() if key == "$ref" and isinstance(ref, str)]
    return own + [ref for item in value.values() for ref in references(item)]


def _renamed(value: Any, names: Mapping[str, str]) -> Any:
    if isinstance(value, list):
        return [_renamed(item, names) for item in value]
    if not isinstance(value, Mapping):
        return value
    return {
        key: f"#/$defs/{names[item]}" if key == "$ref" and isinstance(item, str) and item in names else _renamed(item, names)
        for key, item in value.items()
    }


def _without_homes(value: Any) -> Any:
    return {key: item for key, item in value.items() if key not in _HOMES} if isinstance(value, Mapping) else value


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
