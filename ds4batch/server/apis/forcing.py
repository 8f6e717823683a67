"""Answers whose form the request decides: JSON of a schema, or a call that must be made. From the request to what the engine enforces.

Pure: knows no engine and no model but the name of its family's grammar.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence

from llguidance import LLMatcher

from ds4batch.chat.conversation import Tool
from ds4batch.messages import Constraint
from ds4batch.server import fields
from ds4batch.server.apis.call_grammar import call_grammar, json_grammar, lenient
from ds4batch.server.apis.tools import ToolChoice
from ds4batch.server.errors import bad_field
from ds4batch.server.fields import Object

_ANY_OBJECT: Object = {"type": "object"}
_HEAD = re.compile(r'^(?:at \d+\(\d+\): )?(?:failed to (?:compile JSON schema|parse "%json"): )?')
_PLACE = re.compile(r"\n +\d+ \| ")


def constraint(choice: ToolChoice, form: Object | None, where: str, tools: Sequence[Tool], grammar: str) -> Constraint | None:
    """What the answer is held to behind its reasoning, None for nothing.

    `form`: the request's format object, `where` the name of that field; `tools`: those the model may call; `grammar`: how it writes
    calls, a name in chat/grammars or "" for not at all. A call that must be made goes before the form: that is for the answer which
    follows the result. Where calls are left to the model it may call or answer in the form. Raises ApiError 400 naming the field.
    """
    schema = None if form is None else _schema(form, where)
    if schema is not None:
        _check(json_grammar(schema), where, "the schema cannot be enforced")
    if choice.mode in ("required", "named"):
        return _calls(_wanted(choice, tools), choice.mode == "required", None, grammar)
    if schema is None:
        return None
    return _calls(tools, True, schema, grammar) if tools and grammar else Constraint(grammar=json_grammar(schema), calls=False)


def _calls(tools: Sequence[Tool], several: bool, content: Object | None, grammar: str) -> Constraint:
    if not grammar:
        raise bad_field("tool_choice", "the loaded model cannot call tools")
    for tool in tools:
        problem = f"the parameters of {tool.name[:64]!r} cannot be enforced"
        kind = tool.parameters.get("type", "object")
        if kind != "object" and not (isinstance(kind, list) and "object" in kind):
            raise bad_field("tools", f"{problem}: they are no object")
        _check(json_grammar(tool.parameters, lenient=lenient(tool)), "tools", problem)
        _check(call_grammar(grammar, [tool], several=False), "tools", problem)
    text = call_grammar(grammar, tools, several=several, content=content)
    if len(tools) > 1 or content is not None:
        _check(text, "tools", "they cannot be enforced together")
    return Constraint(grammar=text, calls=True)


def _wanted(choice: ToolChoice, tools: Sequence[Tool]) -> Sequence[Tool]:
    """The tools that may be called. One that the model has not been shown only if it is named."""
    if choice.mode == "named":
        return [tool for tool in tools if tool.name == choice.name]
    return [tool for tool in tools if not tool.deferred] or tools


def _schema(form: Object, where: str) -> Object:
    """The schema in a format object. Chat has it inside `json_schema`, the others beside the type."""
    kind = fields.text(form, "type", where=where + ".")
    if kind not in ("json_object", "json_schema"):
        raise bad_field(where + ".type", f"expected text, json_object or json_schema, got {kind[:40]!r}")
    inner = fields.obj(form, "json_schema", where=where + ".")
    holder, at = (form, where) if inner is None else (inner, where + ".json_schema")
    schema = fields.obj(holder, "schema", where=at + ".")
    if schema is None and kind == "json_schema":
        raise bad_field((at if inner is not None or "schema" in form else where) + ".schema", "is missing")
    return _ANY_OBJECT if schema is None else schema


def _check(grammar: str, where: str, problem: str) -> None:
    """Raise ApiError 400 for a grammar that is none, or too large."""
    why = _why_not(grammar)
    if why:
        raise bad_field(where, f"{problem}: {_reason(why)}")


@functools.lru_cache(maxsize=512)  # an agent sends the same tools with every turn
def _why_not(grammar: str) -> str:
    """What is wrong with a grammar, "" for nothing. A millisecond or two for a tool."""
    return LLMatcher.validate_grammar(grammar)


def _reason(message: str) -> str:
    """What the library says is wrong, without the place in a text that the client never saw."""
    said = _PLACE.split(message, maxsplit=1)[0]
    return " ".join(_HEAD.sub("", said).split())[:400]
