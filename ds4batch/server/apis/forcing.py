"""Answers whose form the request decides: JSON of a schema, or a call that must be made. From the request to what the engine enforces.

Pure: knows no engine and no model but the name of its family's grammar.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from llguidance import LLMatcher

from ds4batch.chat.conversation import Tool
from ds4batch.grammar_limits import LIMITS, MAX_TOOLS
from ds4batch.messages import Constraint
from ds4batch.recent import Recent
from ds4batch.server import fields
from ds4batch.server.apis.call_grammar import TooLarge, call_grammar, json_grammar, lenient
from ds4batch.server.apis.schema_limits import excess
from ds4batch.server.apis.tools import ToolChoice
from ds4batch.server.errors import bad_field
from ds4batch.server.fields import Object

_ANY_OBJECT: Object = {"type": "object"}
_HEAD = re.compile(r'^(?:at \d+\(\d+\): )?(?:failed to (?:compile JSON schema|parse "%json"): )?')
_PLACE = re.compile(r"\n +\d+ \| ")
_KEPT = 4096
_checked: Recent[bytes, str] = Recent(_KEPT)
"""What is wrong with a grammar, "" for nothing, by its digest: an agent sends the same tools with every turn."""


def constraint(choice: ToolChoice, form: Object | None, where: str, tools: Sequence[Tool], grammar: str) -> Constraint | None:
    """What the answer is held to behind its reasoning, None for nothing.

    `form`: the request's format object, `where` the name of that field; `tools`: those the model may call; `grammar`: how it writes
    calls, a name in chat/grammars or "" for not at all. A call that must be made goes before the form: that is for the answer which
    follows the result. Where calls are left to the model it may call or answer in the form. Raises ApiError 400 naming the field.
    """
    schema = None if form is None else _schema(form, where)
    if schema is not None:
        problem = "the schema cannot be enforced"
        _refuse_excess(schema, where, problem)
        _check(lambda: json_grammar(schema), where, problem)
    if choice.mode in ("required", "named"):
        return _calls(_wanted(choice, tools), choice.mode == "required", None, grammar)
    if schema is None:
        return None
    if tools and grammar:
        return _calls(tools, True, schema, grammar)
    return Constraint(grammar=json_grammar(schema), calls=False, field=where)


def _calls(tools: Sequence[Tool], several: bool, content: Object | None, grammar: str) -> Constraint:
    if not grammar:
        raise bad_field("tool_choice", "the loaded model cannot call tools")
    if len(tools) > MAX_TOOLS:
        raise bad_field("tools", f"calls of {len(tools)} tools cannot be enforced, at most of {MAX_TOOLS}")
    for tool in tools:
        problem = f"the parameters of {tool.name[:64]!r} cannot be enforced"
        kind = tool.parameters.get("type", "object")
        if kind != "object" and not (isinstance(kind, list) and "object" in kind):
            raise bad_field("tools", f"{problem}: they are no object")
        _refuse_excess(tool.parameters, "tools", problem)
        _check(partial(json_grammar, tool.parameters, lenient=lenient(tool)), "tools", problem)
        _check(partial(call_grammar, grammar, [tool], several=False), "tools", problem)
    text = _check(
        partial(call_grammar, grammar, tools, several=several, content=content), "tools", "they cannot be enforced together"
    )
    return Constraint(grammar=text, calls=True, field="tools")


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


def _refuse_excess(schema: Mapping[str, Any], where: str, problem: str) -> None:
    why = excess(schema)
    if why:
        raise bad_field(where, f"{problem}: {why}")


def _check(make: Callable[[], str], where: str, problem: str) -> str:
    """The grammar that is made. Raises ApiError 400 for one that is none, or too large. A millisecond or two for a tool."""
    try:
        grammar = make()
    except TooLarge as error:
        raise bad_field(where, f"{problem}: {error}") from None
    digest = hashlib.sha256(grammar.encode("utf-8", "surrogatepass")).digest()
    why = _checked.get(digest, lambda: _reason(LLMatcher.validate_grammar(grammar, limits=LIMITS)))
    if why:
        raise bad_field(where, f"{problem}: {why}")
    return grammar


def _reason(message: str) -> str:
    """What the library says is wrong, without the place in a text that the client never saw."""
    said = _PLACE.split(message, maxsplit=1)[0]
    return " ".join(_HEAD.sub("", said).split())[:400]
