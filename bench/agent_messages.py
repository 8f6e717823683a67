"""How agents' clients write a conversation back to the server: the same history, hardly ever the same bytes.

Owns the tools of the scenario, what a turn said and did, and the habits by which a client encodes both again. Pure: no
clock, no socket, no tokens. Who says what, and when, is agent_scenario's.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

Json = dict[str, Any]

TOOLS: tuple[Json, ...] = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {field: {"type": kind} for field, kind in fields.items()},
                "required": [next(iter(fields))],
            },
        },
    }
    for name, description, fields in (
        ("read_file", "Read a part of a text file.", {"path": "string", "offset": "integer", "limit": "integer"}),
        ("search", "Find a pattern in the files below a folder.", {"pattern": "string", "folder": "string", "limit": "integer"}),
        ("run", "Run a command and return what it printed.", {"command": "string", "seconds": "integer", "folder": "string"}),
        ("agent", "Give a task to a sub-agent and wait for its report.", {"task": "string", "name": "string"}),
    )
)
"""Tool definitions, in the order and the key order in which every agent sends them."""

FIELD_ORDER = {tool["function"]["name"]: tuple(tool["function"]["parameters"]["properties"]) for tool in TOOLS}


class Habit(Enum):
    """How a client encodes its history.

    A turn goes back as it was received first. From the next request on it is history, and the client encodes it anew.
    """

    EXACT = "exact"  # byte for byte, for ever
    SCHEMA_ORDER = "schema order"  # arguments in the order of the tool's schema, characters unescaped
    COMPACT = "compact"  # arguments and JSON results without spaces, characters escaped
    FORGETFUL = "forgetful"  # as COMPACT with sorted keys; text trimmed; reasoning left out once the user speaks again


@dataclass(frozen=True)
class ToolCall:
    """One call of a tool. `arguments` are the bytes as they were written first."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Turn:
    """What a model said, the calls it made, and what came back for each: one step of a tool loop."""

    content: str
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    results: tuple[str, ...] = ()  # one for each call
    user: str = ""  # what the user said after it, where the loop had ended


def history(turns: Iterable[Turn], habit: Habit) -> list[Json]:
    """The messages of `turns` as a client of that habit sends them."""
    ordered = list(turns)
    messages: list[Json] = []
    for i, turn in enumerate(ordered):
        old = i + 1 < len(ordered)
        spoken_since = any(later.user for later in ordered[i:])
        messages += _turn(turn, habit, old, spoken_since)
    return messages


def _turn(turn: Turn, habit: Habit, old: bool, spoken_since: bool) -> list[Json]:
    reasoning, content = turn.reasoning, turn.content
    if habit is Habit.FORGETFUL and old and spoken_since:
        reasoning, content = "", content if reasoning else without_opening(content)
    if habit is Habit.FORGETFUL and old:
        content = content.strip()
    calls = [encoded(call, habit) if old else call.arguments for call in turn.calls]
    message: Json = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
            for call, arguments in zip(turn.calls, calls, strict=True)
        ]
    messages = [message]
    for call, result in zip(turn.calls, turn.results, strict=True):
        messages.append({"role": "tool", "tool_call_id": call.id, "content": encoded_result(result, habit) if old else result})
    if turn.user:
        messages.append({"role": "user", "content": turn.user})
    return messages


def encoded(call: ToolCall, habit: Habit) -> str:
    """The arguments of `call` as a client of that habit writes them from its own copy. Text that is no object stays."""
    value = _parsed(call.arguments)
    if habit is Habit.EXACT or not isinstance(value, Mapping):
        return call.arguments
    if habit is Habit.SCHEMA_ORDER:
        order = FIELD_ORDER.get(call.name, ())
        fields = {key: value[key] for key in (*(k for k in order if k in value), *(k for k in value if k not in order))}
        return json.dumps(fields, ensure_ascii=False)
    return json.dumps(value, separators=(",", ":"), sort_keys=habit is Habit.FORGETFUL)


def encoded_result(result: str, habit: Habit) -> str:
    """A tool's result as a client of that habit sends it once it is history."""
    if habit not in (Habit.COMPACT, Habit.FORGETFUL):
        return result
    value = _parsed(result)
    if not isinstance(value, Mapping):
        return result.strip() if habit is Habit.FORGETFUL else result
    return json.dumps(value, separators=(",", ":"), sort_keys=habit is Habit.FORGETFUL)


def without_opening(content: str) -> str:
    """`content` without what stands for reasoning in a model that has none: its first line or, in one line, sentence."""
    for mark in ("\n", ". "):
        _, found, rest = content.partition(mark)
        if found and rest.strip():
            return rest
    return content


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
