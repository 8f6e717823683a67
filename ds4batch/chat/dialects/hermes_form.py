"""Tools, calls and results as plain text, in the form that models of many families have seen: JSON between tags.

For templates that show none of them. Pure functions of neutral values; the grammar that reads such calls is grammars/hermes.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from ds4batch.chat.conversation import Call, Tool
from ds4batch.chat.escapes import escape
from ds4batch.chat.schemas import canonical, members

_INTRODUCTION = """# Tools

You may call the functions listed between <tools> and </tools>, one JSON object each. A call is a JSON object between <tool_call> \
and </tool_call>, with the function's name and its arguments:
<tool_call>
{"name": "FUNCTION", "arguments": {"PARAMETER": "VALUE"}}
</tool_call>
End your answer behind the last call. What the functions give comes next, between <tool_response> and </tool_response>.

"""
_END = "</tool_response>"


def show_tools(tools: Sequence[Tool]) -> str:
    """What goes in front of the system text."""
    schemas = "".join(f'{{"type": "function", "function": {tool.schema}}}\n' for tool in tools)
    return f"{_INTRODUCTION}<tools>\n{schemas}</tools>"


def show_calls(calls: Sequence[Call]) -> str:
    """The calls of an answer."""
    return "\n".join(f"<tool_call>\n{_object(call, 'arguments')}\n</tool_call>" for call in calls)


def show_bare_calls(calls: Sequence[Call]) -> str:
    """The same as Llama 3 writes them."""
    return "; ".join(_object(call, "parameters") for call in calls)


def show_results(results: Iterable[str]) -> str:
    """A run of results."""
    return "\n".join(f"<tool_response>\n{escape(text, _END)}\n{_END}" for text in results)


def _object(call: Call, member: str) -> str:
    readable = members(call.arguments) is not None
    arguments = call.arguments if readable else json.dumps({"arguments": call.arguments}, ensure_ascii=False)
    return f'{{"name": {json.dumps(call.name, ensure_ascii=False)}, "{member}": {canonical(arguments)}}}'
