"""What several families do alike: which schemas are shown and how a call's arguments are written, and what a history is about."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

from ds4batch.chat.conversation import Call, Conversation, Message, Tool
from ds4batch.chat.schemas import canonical, members

SPACE = " \t\n\r\v\f"
"""What trimming takes away: white space of ASCII."""

_HIDDEN = frozenset({"strict", "defer_loading"})  # of a schema: for the server, not for the model


def shown_schemas(tools: Iterable[Tool]) -> list[str]:
    """The schemas of the tools that are not deferred, in canonical JSON, without what only a server needs to know."""
    return [schema for tool in tools if (schema := _shown_schema(tool)) is not None]


def _shown_schema(tool: Tool) -> str | None:
    if tool.deferred:
        return None
    found = members(tool.schema) if any(f'"{key}"' in tool.schema for key in _HIDDEN) else None
    if found is None:
        return tool.schema
    if ("defer_loading", None, "true") in found:
        return None
    kept = (f"{json.dumps(key)}:{value}" for key, _, value in found if key not in _HIDDEN)
    return canonical(f"{{{','.join(kept)}}}")


def declared_order(tools: Iterable[Tool]) -> dict[str, dict[str, int]]:
    """By tool: the place of each parameter in its schema."""
    return {tool.name: {key: at for at, key in enumerate(tool.properties)} for tool in tools}


def arguments(call: Call, order: Mapping[str, Mapping[str, int]]) -> list[tuple[str, str]] | None:
    """A call's parameters as texts, declared ones first and as they were declared; None when they are no JSON object.

    A string is its text, any other value its minified JSON.
    """
    found = members(call.arguments)
    if found is None:
        return None
    places = order.get(call.name)
    if places:
        found.sort(key=lambda member: places.get(member[0], len(places)))
    return [(key, spelt if text is None else text) for key, text, spelt in found]


def answer_due(messages: Sequence[Message]) -> bool:
    """Whether a new answer is to be opened; else the last one is continued."""
    return not messages or messages[-1].role != "assistant"


def reasoning_returns(conversation: Conversation) -> bool:
    """Whether the client will send the reasoning of this answer back: as it did before, else as clients with tools do."""
    answers = [message for message in conversation.messages if message.role == "assistant"]
    return any(message.reasoning for message in answers) if answers else conversation.tool_context


def leading_systems(messages: Sequence[Message]) -> int:
    """How many system messages stand at the beginning."""
    return next((at for at, message in enumerate(messages) if message.role != "system"), len(messages))


def orphans_at(messages: Sequence[Message]) -> int | None:
    """Where results begin whose calls are not shown, because their client relies on what the server holds; None for a history."""
    start = leading_systems(messages)
    return start if start < len(messages) and messages[start].role == "tool" else None


def results(messages: Sequence[Message]) -> tuple[int, list[str]] | None:
    """The first message behind the last answer, and the calls that those behind it bring results of, where all say which."""
    last = next((at for at in reversed(range(len(messages))) if messages[at].role == "assistant"), None)
    start = orphans_at(messages) if last is None else last + 1
    if start is None:
        return None
    ids = [message.call_id for message in messages[start:] if message.role == "tool"]
    return (start, sorted(set(ids))) if ids and all(ids) else None


def check_first(messages: Sequence[Message], first: int) -> None:
    """Raises ValueError unless message `first` is the first one behind an answer, shown or not."""
    behind = 0 < first <= len(messages) and messages[first - 1].role == "assistant"
    if not behind and first != orphans_at(messages):
        raise ValueError(f"message {first} of {len(messages)} does not follow an answer")
