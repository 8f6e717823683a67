"""The tool lists of all APIs, brought to one type. Decides how a tool is called in the prompt; shows and runs none.

An item is one of: OpenAI's wrapped function; a namespace with functions inside; the tool search; or the schema itself, flat, as
Anthropic (`input_schema`) and Responses (`parameters`, freeform `custom`) write it. A tool that the vendor's own servers would run,
such as web search, cannot be run here: it is accepted and left out, so that the model does not call what nobody answers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from ds4batch.chat.conversation import Tool
from ds4batch.server import fields
from ds4batch.server.errors import bad_field
from ds4batch.server.fields import Object, describe
from ds4batch.server.spelt import dumps, without

SEARCH = "tool_search"
_SEARCH_DESCRIPTION = "Find further tools by keywords. The tools that are found can be called afterwards."
_SEARCH_PARAMETERS: Object = {
    "type": "object",
    "properties": {"query": {"type": "string", "description": "Words that describe the tool."}},
    "required": ["query"],
}
_FREEFORM: Object = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
"""What a custom tool takes: one text. Not part of its schema, which the model sees as the client wrote it."""
_RUN_BY_VENDOR = ("web_search_", "web_fetch_", "code_execution_", "tool_search_tool_")
"""Types of Anthropic's server-side tools, which have names as client tools do; a date follows."""
_TRANSPORT = "cache_control"  # moves between items from turn to turn, so it would change a prompt that says the same


class ToolChoice(NamedTuple):
    """How far the request leaves calls to the model."""

    mode: Literal["auto", "none", "required", "named"] = "auto"
    name: str = ""  # of the tool that must be called, as the prompt shows it


def read_tools(value: Any, where: str) -> list[Tool]:
    """The tools of a list field, null or absent for none. `where` is the field's name. Linear. Raises ApiError 400 naming the item.

    A tool that is listed twice counts once; two different tools of one name are refused, for the model could not tell them apart.
    """
    if value is None:
        return []
    if not isinstance(value, list):
        raise bad_field(where, f"expected a list, got {describe(value)}")
    found: dict[str, Tool] = {}
    for i, item in enumerate(value):
        here = f"{where}[{i}]"
        for tool in _item(item, here):
            if found.setdefault(tool.name, tool) != tool:
                raise bad_field(here, f"another tool is called {tool.name[:64]!r} in the prompt")
    return list(found.values())


def _item(item: Any, where: str) -> Iterator[Tool]:
    if not isinstance(item, dict):
        raise bad_field(where, f"expected an object, got {describe(item)}")
    function = fields.obj(item, "function", where=where + ".")
    kind = fields.text(item, "type", where=where + ".")
    if function is not None:
        yield _tool(function, where + ".function")
    elif kind == "namespace":
        yield from _namespace(item, where)
    elif kind == SEARCH:
        yield _search(item, where)
    elif not _hosted(item, kind):
        yield _tool(item, where)


def _hosted(item: Object, kind: str) -> bool:
    if kind.startswith(_RUN_BY_VENDOR):
        return True
    return kind not in ("", "function", "custom") and item.get("name") is None


def _namespace(item: Object, where: str) -> Iterator[Tool]:
    space = _name(item, where)
    inner = item.get("tools")
    if not isinstance(inner, list):
        raise bad_field(where + ".tools", f"expected a list, got {describe(inner)}")
    for i, entry in enumerate(inner):
        here = f"{where}.tools[{i}]"
        if not isinstance(entry, dict):
            raise bad_field(here, f"expected an object, got {describe(entry)}")
        function = fields.obj(entry, "function", where=here + ".") or entry
        schema: Object = {"name": space + _name(function, here)}
        if function.get("description") is not None:
            schema["description"] = fields.text(function, "description", where=here + ".")
        parameters = _parameters(function, here)
        if parameters is not None:
            schema["parameters"] = parameters
        yield _built(schema, function, parameters, space)


def _search(item: Object, where: str) -> Tool:
    parameters = _parameters(item, where)
    if parameters is None:
        parameters = _SEARCH_PARAMETERS
    schema = {
        "name": SEARCH,
        "description": fields.text(item, "description", where=where + ".") or _SEARCH_DESCRIPTION,
        "parameters": parameters,
    }
    return Tool(name=SEARCH, schema=_canonical(schema), parameters=parameters, kind="tool_search", wire_name=SEARCH)


def _tool(schema: Object, where: str) -> Tool:
    _name(schema, where)
    parameters = _parameters(schema, where)
    return _built(without(schema, _TRANSPORT), schema, parameters, "")


def _built(shown: Object, given: Object, parameters: Object | None, namespace: str) -> Tool:
    """`shown` is what the model reads, `given` what the client wrote."""
    custom = given.get("type") == "custom"
    return Tool(
        name=shown["name"],
        schema=_canonical(shown),
        parameters=_FREEFORM if custom else parameters or {},
        kind="custom" if custom else "function",
        wire_name=given["name"],
        namespace=namespace,
        deferred=given.get("defer_loading") is True,
    )


def _name(item: Object, where: str) -> str:
    name = fields.text(item, "name", where=where + ".")
    if not name:
        raise bad_field(where + ".name", "is missing")
    return name


def _parameters(item: Object, where: str) -> Object | None:
    found = fields.obj(item, "parameters", where=where + ".")
    return fields.obj(item, "input_schema", where=where + ".") if found is None else found


def _canonical(schema: Object) -> str:
    """The form of chat/schemas.py, from an object that is parsed already."""
    return dumps(schema, spaced=True)
