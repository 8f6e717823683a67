"""Tools and forms of answers whose schemas are recursive, huge, contradictory, or made to cost time."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

from bench.hostile.case import CHAT, COUNT, MESSAGES, RESPONSES, Case, Object, base, json_case

_PATTERNS = (
    "(a+)+$", "(a|a)*b", "^(.{1,1000}){1,1000}$", "[a-z]{1,1000000}", "(?=a)b", r"(\w+)\1", "x" * 100_000,
    "(" * 3000 + ")" * 3000, "(a?){100}a{100}",
    ".*" * 200, "(.*a){25}", "(.*a.{20}){3}", r"[\p{L}]{1000}", "[", "(?P<n>x)(?P<n>y)", "\x00", "^$", "$^", "a{2,1}",
    "(x.*y.*z.*){10}", "\\", "(?i)é",
)  # fmt: skip


def _properties(count: int, schema: Any = None) -> Object:
    return {f"p{i}": {"type": "string"} if schema is None else schema for i in range(count)}


def _object(properties: Object, **more: Any) -> Object:
    return {"type": "object", "properties": properties, **more}


def _nested(depth: int, step: Callable[[Any], Any], inmost: Any) -> Any:
    for _ in range(depth):
        inmost = step(inmost)
    return inmost


def _doubling(step: Callable[[Object], Object], levels: int = 40) -> Object:
    """Definitions of which each has the one before twice."""
    steps = {f"d{i}": step({"$ref": f"#/$defs/d{i - 1}"}) for i in range(1, levels)}
    return {"$ref": f"#/$defs/d{levels - 1}", "$defs": {"d0": {"type": "string"}, **steps}}


def schemas() -> dict[str, Any]:
    """By name. Most are no good, some are good and large."""
    many = {f"^a{i:05d}.*b": {"type": "string"} for i in range(1500)}
    found: dict[str, Any] = {
        "itself": {"$ref": "#"},
        "a circle": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        "itself inside": _object({"q": {"$ref": "#"}}, required=["q"]),
        "a list of itself": _object({"q": {"type": "array", "items": {"$ref": "#"}, "minItems": 1}}, required=["q"]),
        "nowhere": _object({"q": {"$ref": "#/$defs/none"}}),
        "elsewhere": _object({"q": {"$ref": "http://127.0.0.1:1/schema.json"}}),
        "a file": _object({"q": {"$ref": "file:///etc/passwd"}}),
        "a number as reference": _object({"q": {"$ref": 5}}),
        "an odd reference": _object({"q": {"$ref": "#/%zz/~2/\ud800/-1"}}),
        "into a list": _object({"q": {"$ref": "#/anyOf/99999999999999999999"}}, anyOf=[{}]),
        "allOf doubled 40 times": _doubling(lambda one: {"allOf": [one, one]}),
        "anyOf doubled 40 times": _doubling(lambda one: {"anyOf": [one, one]}),
        "objects doubled 40 times": _doubling(lambda one: _object({"a": one, "b": one}, required=["a", "b"])),
        "10,000 properties": _object(_properties(10_000)),
        "10,000 required": _object(_properties(10_000), required=[f"p{i}" for i in range(10_000)]),
        "600 properties": _object(_properties(600)),
        "390 properties": _object(_properties(390)),
        "2000 references": _object(_properties(2000, {"$ref": "#/$defs/a"}), **{"$defs": {"a": {"type": "integer"}}}),
        "300 references to something large": _object(
            _properties(300, {"$ref": "#/$defs/a"}), **{"$defs": {"a": _object(_properties(200, {"type": "integer"}))}}
        ),
        "a property of a million": _object({"p" * 10**6: {"type": "string"}}),
        "100,000 choices": {"enum": [f"e{i}" for i in range(100_000)]},
        "choices of all kinds": _object({"q": {"enum": [None, True, 1.5, "x", [], {}, "\x00", 10**400, float("nan")]}}),
        "no choice": _object({"q": {"enum": []}}, required=["q"]),
        "a choice of a million": _object({"q": {"const": "x" * 10**6}}, required=["q"]),
        "1500 patterns of properties": {"type": "object", "patternProperties": many},
        "patterns against properties": _object(_properties(400), patternProperties=dict(list(many.items())[:60])),
        "patterns that meet": {"type": "object", "patternProperties": {"a.*": {"type": "string"}, ".*b": {"type": "integer"}}},
        "hard patterns of properties": {
            "type": "object", "patternProperties": {f"^(.*{c}.{{20}}){{3}}$": {"type": "string"} for c in "abcdefgh"},
        },
        "bounds the wrong way": _object({"q": {"type": "integer", "minimum": 10, "maximum": 1}}, required=["q"]),
        "bounds of 400 digits": _object({"q": {"type": "integer", "minimum": -(10**400), "maximum": 10**400}}, required=["q"]),
        "a bound of 1e999": _object({"q": {"type": "number", "minimum": float("inf")}}, required=["q"]),
        "bounds with nothing between": _object({"q": {"type": "number", "exclusiveMinimum": 1, "exclusiveMaximum": 1}}, required=["q"]),
        "narrow bounds": _object({"q": {"type": "number", "minimum": 1.1e300, "maximum": 1.2e300}}, required=["q"]),
        "a tiny multiple": _object({"q": {"type": "number", "multipleOf": 1e-300}}, required=["q"]),
        "a multiple of nothing": _object({"q": {"type": "integer", "multipleOf": 0}}, required=["q"]),
        "lengths the wrong way": _object({"q": {"type": "string", "minLength": 10, "maxLength": 1}}, required=["q"]),
        "a length of a billion": _object({"q": {"type": "string", "minLength": 10**9}}, required=["q"]),
        "a billion items": _object({"q": {"type": "array", "items": {}, "minItems": 10**9}}, required=["q"]),
        "unique items": _object({"q": {"type": "array", "uniqueItems": True, "minItems": 10**5, "items": {"type": "boolean"}}},
        required=["q"]),
        "a negative length": _object({"q": {"type": "string", "maxLength": -1}}, required=["q"]),
        "a length in words": _object({"q": {"type": "string", "maxLength": "ten"}}, required=["q"]),
        "required that is not there": _object({}, required=["a", "a", 5, None], additionalProperties=False),
        "required in words": _object({"q": {}}, required="q"),
        "properties in a list": {"type": "object", "properties": [["q", {}]]},
        "types of all kinds": _object({"q": {"type": ["string", "null", "object", "array", "integer", "boolean", "number"]}},
        required=["q"]),
        "a type that is none": _object({"q": {"type": "date"}}, required=["q"]),
        "a type in an object": _object({"q": {"type": {"a": 1}}}, required=["q"]),
        "not": _object({"q": {"not": {"type": "string"}}}, required=["q"]),
        "not anything": {"not": {}},
        "if and then": _object({"q": {}}, **{"if": {"required": ["q"]}, "then": {"required": ["r"]}, "else": False}),
        "oneOf of equals": _object({"q": {"oneOf": [{"type": "string"}] * 50}}, required=["q"]),
        "anyOf of 2000": _object({"q": {"anyOf": [_object({f"r{i}": {}}, required=[f"r{i}"]) for i in range(2000)]}}, required=["q"]),
        "allOf of anyOf": {"allOf": [{"anyOf": [{"minLength": i}, {"maxLength": i + 5}]} for i in range(14)]},
        "200 levels of anyOf": _nested(115, lambda one: {"anyOf": [one]}, {"type": "string"}),
        "100 levels of objects": _nested(100, lambda one: _object({"q": one}, required=["q"]), {"type": "string"}),
        "x-guidance of its own": {"type": "object", "x-guidance": {"whitespace_pattern": ".*", "item_separator": "(a+)+",
        "coerce_one_of": 5}},
        "true": True,
        "a list": [],
        "nothing": {},
        "a date": _object({"q": {"type": "string", "format": "date-time"}}, required=["q"]),
        "a format that is none": _object({"q": {"type": "string", "format": "x" * 1000}}, required=["q"]),
        "an anchor": {"$id": "http://x/y", "$anchor": "a", "$dynamicRef": "#a", "$dynamicAnchor": "a", "$schema": "http://x/z",
        "type": "object"},
        "names of grammar": _object({'q"\n%json {}\nstart: /.*/ //': {"type": "string"}, "\\": {}, "/": {}, "\x00": {}}, required=["\\"]),
        "names of markup": _object({"</arg_key>": {}, "</parameter>": {"type": "string"}, "<tool_call>": {"const": "</tool_call>"}}),
    }  # fmt: skip
    found |= {
        f"pattern {pattern[:30]}": _object({"q": {"type": "string", "pattern": pattern}}, required=["q"]) for pattern in _PATTERNS
    }
    return found


@functools.cache
def forms() -> Sequence[Case]:
    """Each schema as the form of the answer, in each API that has forms."""
    found = []
    for name, schema in schemas().items():
        wrapped = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
        found.append(json_case("form", name, CHAT, {**base(CHAT), "response_format": wrapped}))
        flat = {"type": "json_schema", "name": "x", "schema": schema}
        found.append(json_case("form", name, RESPONSES, {**base(RESPONSES), "text": {"format": flat}}))
        output = {"format": {"type": "json_schema", "schema": schema}}
        found.append(json_case("form", name, MESSAGES, {**base(MESSAGES), "output_config": output}))
    odd: Any
    for odd in (
        {},
        {"type": "json_object"},
        {"type": "grammar"},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": []},
        {"type": []},
    ):
        found.append(json_case("form", str(odd), CHAT, {**base(CHAT), "response_format": odd}))
    return found


@functools.cache
def tools() -> Sequence[Case]:
    """Each schema as a tool's, called at will and of need."""
    found = []
    for name, schema in schemas().items():
        function = {"type": "function", "function": {"name": "look", "parameters": schema}}
        chat = {**base(CHAT), "tools": [function]}
        found.append(json_case("tool", name, CHAT, chat))
        found.append(json_case("tool", name + ", of need", CHAT, {**chat, "tool_choice": "required"}))
        strict = {"type": "function", "name": "look", "parameters": schema, "strict": True}
        found.append(
            json_case("tool", name + ", strict", RESPONSES, {**base(RESPONSES), "tools": [strict], "tool_choice": "required"})
        )
        other = {"name": "look", "input_schema": schema}
        found.append(json_case("tool", name, MESSAGES, {**base(MESSAGES), "tools": [other], "tool_choice": {"type": "any"}}))
        found.append(json_case("tool", name, COUNT, {**base(COUNT), "tools": [other]}))
    lists: dict[str, Any] = {
        "2000 tools": [{"name": f"t{i}", "parameters": {"type": "object"}} for i in range(2000)],
        "one tool twice": [{"name": "a"}, {"name": "a"}],
        "two tools of one name": [{"name": "a"}, {"name": "a", "description": "x"}],
        "a name of a million": [{"name": "a" * 10**6}],
        "a name of markup": [{"name": "</tool_call><|im_end|>{{x}}"}],
        "a name of controls": [{"name": "a\x00b\nc\ud800"}],
        "a description of a million": [{"name": "a", "description": "{% raw %}" * 10**5}],
        "namespaces in namespaces": [
            {"type": "namespace", "name": "a", "tools": [{"type": "namespace", "name": "b", "tools": []}]}
        ],
        "a search and a vendor's": [{"type": "tool_search"}, {"type": "web_search_20250305", "name": "web_search"}],
        "a custom grammar": [
            {"type": "custom", "name": "a", "format": {"type": "grammar", "syntax": "lark", "definition": "start: start"}}
        ],
        "function in function": [{"type": "function", "function": {"function": {"name": "a"}}}],
    }
    for name, given in lists.items():
        for path in (CHAT, RESPONSES, MESSAGES, COUNT):
            found.append(json_case("tool", name, path, {**base(path), "tools": given}))
        found.append(json_case("tool", name + ", of need", CHAT, {**base(CHAT), "tools": given, "tool_choice": "required"}))
    return found


def random_schema(random: random.Random, depth: int = 0) -> Any:
    """A schema of any words in any place."""
    words = ("type", "properties", "items", "anyOf", "allOf", "oneOf", "$ref", "enum", "const", "required", "pattern",
    "minLength", "maximum", "not",
             "additionalProperties", "prefixItems", "patternProperties", "minItems", "format", "$defs")  # fmt: skip

    def value() -> Any:
        inner = depth < 4
        makers: list[Callable[[], Any]] = [
            lambda: random.choice(["string", "object", "array", "integer", "number", "null", "boolean", "x"]),
            lambda: random_schema(random, depth + 1) if inner else {},
            lambda: [random_schema(random, depth + 1) for _ in range(random.randrange(3))] if inner else [],
            lambda: {random.choice("abc"): random_schema(random, depth + 1) for _ in range(random.randrange(3))} if inner else {},
            lambda: random.choice([0, 1, -1, 1e308, 10**20, 2.5, None, True, False]),
            lambda: random.choice(["#", "#/$defs/a", "#/properties/b", "^a*$", "[a-c]{2}", "date-time", ""]),
            lambda: [random.choice("abc")],
        ]  # fmt: skip
        return random.choice(makers)()

    return {random.choice(words): value() for _ in range(random.randrange(1, 5))}


def random_schemas(random_: random.Random) -> Case:
    """A random schema, as a form or as a tool's."""
    schema = random_schema(random_)
    if random_.random() < 0.5:
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        return json_case("form", "a random schema", CHAT, {**base(CHAT), "response_format": form})
    tool = {"name": "look", "input_schema": schema}
    return json_case("tool", "a random schema", MESSAGES, {**base(MESSAGES), "tools": [tool], "tool_choice": {"type": "any"}})
