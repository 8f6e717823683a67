"""The grammar of an answer that must be calls: the markup of one family, names and arguments as the tools' schemas want them.

Written as llguidance reads it: Lark, with JSON schemas inside. What it describes is what the renderer of the family writes, white
space included, so that a model is held to what it was trained on; the readers (chat/grammars) accept more. Where a family writes
an argument as plain text the text is free up to its end, unless the schema lists the texts that it may be.

No terminal may be the beginning of another one that goes on with what may follow the first: the lexer takes the longest and never
goes back. So a tag is one terminal, with the name in it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ds4batch.chat.conversation import Tool
from ds4batch.chat.dialects.deepseek_v4 import DeepSeekV4, Tags
from ds4batch.chat.dialects.deepseek_v41 import DeepSeekV41
from ds4batch.chat.escapes import attribute, escape
from ds4batch.grammar_limits import MAX_CHARS
from ds4batch.server.apis.schema_facts import Schema, admits_text, choices, is_text, part, rebased, resolved

_WHITE_SPACE = r"\n[ \t]{0,40}| "
"""What may stand, once, between two parts of JSON. Bounded, because a model that is held to JSON may write nothing but space."""
_LEAD = "LEAD: /\\n{0,2}/"  # newlines that some families write behind their reasoning
_ANY_KEY = "/[A-Za-z0-9_.-]{1,64}/"  # of an argument that no schema names


class TooLarge(ValueError):
    """The grammar goes beyond what may be spent on one; the message says by what."""


def json_grammar(schema: Mapping[str, Any], *, lenient: bool = False) -> str:
    """The grammar of an answer that is JSON of the schema and nothing else. `lenient`: but for what cannot be enforced.

    Raises TooLarge.
    """
    return _bounded(f"%llguidance {{}}\nstart: LEAD content\n{_LEAD}\ncontent: {_json(schema, lenient=lenient)}\n")


def call_grammar(family: str, tools: Sequence[Tool], *, several: bool, content: Mapping[str, Any] | None = None) -> str:
    """The grammar of an answer that is a call of one of the tools, or `several`, as `family` (a name in chat/grammars) writes them.

    `content`: JSON of this schema is an answer too. Raises KeyError for a family that does not exist, and TooLarge.
    """
    frame = _FRAMES[family]
    lark = _Lark()
    call = lark.rule(" | ".join(frame.call(lark, tool) for tool in tools))
    more = f"({_text(frame.between)} {call})*" if several else ""
    answer = f"LEAD {_text(frame.before)} {call} {more} {_text(frame.after)}"
    if content is not None:
        answer += f" | LEAD {lark.rule(_json(content))}"
    return _bounded("\n".join(["%llguidance {}", f"start: {answer}", _LEAD, *lark.lines, ""]))


def _bounded(grammar: str) -> str:
    if len(grammar) > MAX_CHARS:
        raise _too_large()
    return grammar


def _too_large() -> TooLarge:
    return TooLarge(f"too large, at most {MAX_CHARS} characters of a grammar are compiled")


class _Lark:
    """Rules and terminals, numbered as they come."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._left = MAX_CHARS
        self._bodies: dict[str, str] = {}  # end -> rule

    def rule(self, expression: str, options: str = "") -> str:
        """A rule of this expression."""
        name = f"r{len(self.lines)}"
        self.lines.append(f"{name}{options}: {expression}")
        return name

    def terminal(self, expression: str) -> str:
        """A terminal of this expression."""
        name = f"T{len(self.lines)}"
        self.lines.append(f"{name}: {expression}")
        return name

    def spend(self, expression: str) -> str:
        """The expression, which counts. Raises TooLarge when all that was counted is too much: before the rest is written."""
        self._left -= len(expression)
        if self._left < 0:
            raise _too_large()
        return expression

    def body(self, end: str) -> str:
        """A rule of any text up to and with the first `end`."""
        if end not in self._bodies:
            self._bodies[end] = self.rule("/(?s:.*)/", f"[suffix={_text(end)}]")
        return self._bodies[end]


class _Frame(NamedTuple):
    """How a family writes the calls of an answer."""

    call: Callable[[_Lark, Tool], str]  # the expression of one call of a tool
    between: str = ""  # two calls
    before: str = ""  # all of them
    after: str = ""


class _Elements(NamedTuple):
    """How a family writes arguments that have an element each."""

    before: str  # the key
    spell: Callable[[str], str]  # the key
    after: str  # the key: up to the value, with a place for the kind where elements have one
    end: str  # of a value
    pad: str = ""  # white space between a value and its end
    behind: str = ""  # the end
    typed: bool = False  # the tag says of which kind the value is: text ("true") or JSON ("false")


def _arguments(lark: _Lark, elements: _Elements, tool: Tool) -> str:
    """The expression of a call's arguments: declared ones in their order, then any others where the schema admits them."""
    root = resolved(tool.parameters, tool.parameters)
    declared = root.get("properties")
    properties: Mapping[str, Schema] = declared if isinstance(declared, Mapping) else {}
    required = root.get("required")
    wanted = [key for key in required if isinstance(key, str)] if isinstance(required, list) else []
    undeclared: dict[str, Schema] = {key: True for key in wanted if key not in properties}
    named = {**properties, **undeclared}
    parts = [
        f"({_element(lark, elements, tool, key, schema)}){'' if key in wanted else '?'}"
        for key, schema in named.items()
        if schema is not False
    ]
    other: Schema = root.get("additionalProperties", not isinstance(declared, Mapping))
    if other is not False:
        parts.append(f"({_element(lark, elements, tool, None, other, named)})*")
    return " ".join(parts)


def _element(
    lark: _Lark, elements: _Elements, tool: Tool, key: str | None, schema: Schema, taken: Mapping[str, Schema] | None = None
) -> str:
    """One argument. Without a `key` it may have any that is not `taken`."""

    def tag(kind: str) -> str:
        after = elements.after.format(kind)
        if key is not None:
            return _text(elements.before + elements.spell(key) + after)
        but = f" & ~({' | '.join(map(_text, taken))})" if taken else ""
        return lark.terminal(f"{_text(elements.before)} {lark.terminal(_ANY_KEY + but)} {_text(after)}")

    ways = _values(lark, elements, tool, schema)
    written = (f"{tag(kind)} ({' | '.join(values)})" for kind, values in ways.items())
    return f"({' | '.join(written)}) {_text(elements.behind)}"


def _values(lark: _Lark, elements: _Elements, tool: Tool, schema: Schema) -> dict[str, list[str]]:
    """The expressions of what an argument may be, its end included, by kind."""
    root, end = tool.parameters, elements.end
    listed = choices(schema, root)
    ways: dict[str, list[str]] = {}
    if listed is not None:
        for value in listed:
            kind, spelt = ("true", escape(value, end)) if isinstance(value, str) else ("false", _compact(value))
            ways.setdefault(kind if elements.typed else "", []).append(_text(spelt + elements.pad + end))
        return ways
    text = admits_text(schema, root)
    if text:
        ways["true"] = [lark.body(end)]
    if not text or (elements.typed and not is_text(schema, root)):
        value = lark.spend(_json(part(schema, root), lenient=lenient(tool)))
        ways["false"] = [f"{value} {_text(elements.pad + end)}"]
    return ways


def _dsml(tags: Tags) -> _Frame:
    elements = _Elements(
        before=f'<{tags.parameter} name="',
        spell=attribute,
        after='" string="{}">',
        end=f"</{tags.parameter}>",
        behind="\n",
        typed=True,
    )

    closing = _text(f"</{tags.invoke}>\n")

    def call(lark: _Lark, tool: Tool) -> str:
        opening = _text(f'<{tags.invoke} name="{attribute(tool.name)}">\n')
        return f"{opening} {_arguments(lark, elements, tool)} {closing}"

    return _Frame(call, before=f"<{tags.calls}>\n", after=f"</{tags.calls}>")


_GLM = _Elements("<arg_key>", lambda key: escape(key, "</arg_key>"), "</arg_key><arg_value>", "</arg_value>")
_QWEN = _Elements("<parameter=", str, ">\n", "</parameter>", pad="\n", behind="\n")


def _glm_call(lark: _Lark, tool: Tool) -> str:
    opening, closing = f"<tool_call>{tool.name}", "</tool_call>"
    return f"{_text(opening)} {_arguments(lark, _GLM, tool)} {_text(closing)}"


def _qwen_call(lark: _Lark, tool: Tool) -> str:
    opening, closing = f"<tool_call>\n<function={tool.name}>\n", "</function>\n</tool_call>"
    return f"{_text(opening)} {_arguments(lark, _QWEN, tool)} {_text(closing)}"


def _json_call(tool: Tool, arguments: str) -> str:
    """A call that is one JSON object."""
    schema = {
        "type": "object",
        "properties": {
            "name": {"const": tool.name},
            arguments: {"type": "object", **rebased(tool.parameters, f"#/properties/{arguments}")},
        },
        "required": ["name", arguments],
        "additionalProperties": False,
    }
    return _json(schema, lenient=lenient(tool))


def _hermes_call(lark: _Lark, tool: Tool) -> str:
    opening, closing = "<tool_call>\n", "\n</tool_call>"
    return f"{_text(opening)} {_json_call(tool, 'arguments')} {_text(closing)}"


def _llama3_call(lark: _Lark, tool: Tool) -> str:
    return _json_call(tool, "parameters")


def lenient(tool: Tool) -> bool:
    """Whether what cannot be enforced of a tool's schema is left to the model: unless the client wants every word to hold."""
    return json.loads(tool.schema).get("strict") is not True


def _json(schema: Mapping[str, Any], *, lenient: bool = False) -> str:
    """JSON of a schema, as an expression."""
    options: dict[str, Any] = {"whitespace_pattern": _WHITE_SPACE}
    if lenient:
        options["lenient"] = True
    return f"%json {_compact({**schema, 'x-guidance': options})}"


def _text(text: str) -> str:
    """A literal, "" for none."""
    return json.dumps(text) if text else ""


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


_FRAMES: Mapping[str, _Frame] = {
    "dsml": _dsml(DeepSeekV4.tags),
    "dsml-v41": _dsml(DeepSeekV41.tags),
    "glm": _Frame(_glm_call),
    "qwen": _Frame(_qwen_call, between="\n"),
    "hermes": _Frame(_hermes_call, between="\n"),
    "llama3": _Frame(_llama3_call, between="; "),
}
