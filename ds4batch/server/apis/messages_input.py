"""The `system` and `messages` of an Anthropic request as neutral messages, checked. Renders nothing, linear in their length.

A message is a list of blocks, and each block is taken for what its type says: a result of a call is a message of its own, thinking
and calls are the assistant's. `cache_control`, signatures and redacted thinking say nothing to a prompt and are passed over, so that
a history that only grew reads as one that only grew.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from ds4batch.chat.conversation import Call, Message, Role
from ds4batch.server import fields
from ds4batch.server.errors import ApiError, bad_field
from ds4batch.server.fields import Object, describe
from ds4batch.server.spelt import dumps, times

_ROLES: dict[str, Role] = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_ATTRIBUTION = "x-anthropic-"
"""How the text begins with which an agent tells who pays: it differs from session to session, so one system prompt would
be another for everybody. Of a list the block goes, of a plain string the lines at its beginning."""
_ATTRIBUTION_LINES = re.compile(rf"(?:{_ATTRIBUTION}[^\n]*\n?)++")  # possessive: a match of many lines takes no memory


class History(NamedTuple):
    """A conversation and what its calls' results refer to."""

    messages: list[Message]
    continues: tuple[str, ...]  # the calls whose results stand at the end, in that order
    results_from: int  # the first message behind the answer that made those calls
    undeclared: tuple[str, ...]  # calls of which there is a result and no call before it


class _Turn(NamedTuple):
    """One message of the request."""

    role: Role
    first: int  # of the neutral messages it became
    results: tuple[str, ...]


def read_history(body: Object) -> History:
    """Read both fields. Raises ApiError 400 naming the block."""
    given = body.get("messages")
    if given is None:
        raise ApiError(400, "missing messages", param="messages")
    if not isinstance(given, list):
        raise bad_field("messages", f"expected a list, got {describe(given)}")
    if not given:
        raise bad_field("messages", "must not be empty")
    messages = _system(body.get("system"), "system")
    turns: list[_Turn] = []
    for i, item in enumerate(given):
        first = len(messages)
        role, pieces = _message(item, f"messages[{i}]")
        messages += pieces
        turns.append(_Turn(role, first, tuple(piece.call_id for piece in pieces if piece.role == "tool")))
    if not messages:
        raise bad_field("messages", "say nothing: there is only empty system text")
    continues, results_from = _trailing(messages, turns)
    return History(messages, continues, results_from, _undeclared(messages))


def _trailing(messages: list[Message], turns: list[_Turn]) -> tuple[tuple[str, ...], int]:
    """The results at the end and where what follows the calls begins. System messages among them do not count, but belong to it."""
    first, groups = len(messages), []
    for turn in reversed(turns):
        if turn.role == "user" and turn.results:
            groups.append(turn.results)
            first = turn.first
        elif turn.role != "system":
            break
    if not groups:
        return (), len(messages)
    behind = first
    while behind > 0 and messages[behind - 1].role == "system":
        behind -= 1
    if behind:  # else no answer stands before: system messages at the beginning belong to the calls' own prompt
        first = behind
    return tuple(call for group in reversed(groups) for call in group), first


def _undeclared(messages: list[Message]) -> tuple[str, ...]:
    declared: set[str] = set()
    missing: dict[str, None] = {}
    for message in messages:
        declared.update(call.id for call in message.calls)
        if message.role == "tool" and message.call_id not in declared:
            missing[message.call_id] = None
    return tuple(missing)


def _message(item: Any, where: str) -> tuple[Role, list[Message]]:
    if not isinstance(item, dict):
        raise bad_field(where, f"expected an object, got {describe(item)}")
    given = fields.text(item, "role", "user", where=where + ".")
    role = _ROLES.get(given)
    if role is None:
        raise bad_field(where + ".role", f"unknown role {given[:40]!r}")
    content, where = item.get("content"), where + ".content"
    if times(item, "content") > 1:
        raise bad_field(where, "is there twice")
    if role == "system":
        return role, _system(content, where)
    if content is None or isinstance(content, str):
        return role, [Message(role, content or "")]
    pieces = _Pieces()
    for block, at in _blocks(content, where):
        _add(pieces, role, block, at)
    return role, pieces.end() or [Message(role)]


class _Pieces:
    """Turns blocks into messages: neighbours of one role join, a result stands alone."""

    def __init__(self) -> None:
        self._done: list[Message] = []
        self._role: Role | None = None
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[Call] = []

    def add(self, role: Role, *, text: str = "", reasoning: str = "", call: Call | None = None) -> None:
        """A part of a message of `role`."""
        if role != self._role:
            self.end()
            self._role = role
        self._text.append(text)
        self._reasoning.append(reasoning)
        if call is not None:
            self._calls.append(call)

    def result(self, call_id: str, text: str) -> None:
        """The result of a call."""
        self.end().append(Message("tool", text, call_id=call_id))

    def end(self) -> list[Message]:
        """All messages so far, the open one closed."""
        if self._role is not None:
            self._done.append(Message(self._role, "".join(self._text), "".join(self._reasoning), tuple(self._calls)))
            self._role = None
            self._text, self._reasoning, self._calls = [], [], []
        return self._done


def _add(pieces: _Pieces, role: Role, block: Object, where: str) -> None:
    match block["type"]:
        case "text":
            pieces.add(role, text=fields.text(block, "text", where=where + "."))
        case "thinking":
            pieces.add("assistant", reasoning=fields.text(block, "thinking", where=where + "."))
        case "redacted_thinking":
            pass
        case "tool_use":
            name, call_id = _needed(block, "name", where), _needed(block, "id", where)
            pieces.add("assistant", call=Call(call_id, name, _arguments(block.get("input"))))
        case "tool_result":
            call_id = _needed(block, "tool_use_id", where)
            pieces.result(call_id, _result(block.get("content"), where + ".content"))
        case "image" if role == "user":
            raise _no_vision(where)
        case "image":
            raise bad_field(where, "images belong in user messages")
        case kind:
            raise bad_field(where + ".type", f"expected text, thinking, tool_use, tool_result or image, got {kind[:40]!r}")


def _result(content: Any, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = []
    for block, at in _blocks(content, where):
        if block["type"] == "image":
            raise _no_vision(at)
        if block["type"] != "text":
            raise bad_field(at + ".type", f"a tool_result holds text and images, got {block['type'][:40]!r}")
        parts.append(fields.text(block, "text", where=at + "."))
    return "".join(parts)


def _arguments(value: Any) -> str:
    """The input of a call as JSON. Text stays the text it is: a call cut short is replayed so by some."""
    if isinstance(value, str):
        return value
    return dumps({} if value is None else value)


def _system(content: Any, where: str) -> list[Message]:
    """One system message, or none where nothing is said."""
    if content is None:
        return []
    if isinstance(content, str):
        lines = _ATTRIBUTION_LINES.match(content)
        text = content[lines.end() :] if lines else content
    else:
        parts: list[str] = []
        for block, at in _blocks(content, where):
            if block["type"] != "text":
                raise bad_field(at + ".type", f"a system text holds text only, got {block['type'][:40]!r}")
            part = fields.text(block, "text", where=at + ".")
            if not part or part.startswith(_ATTRIBUTION):
                continue
            if parts and not parts[-1].endswith("\n"):
                parts.append("\n")
            parts.append(part)
        text = "".join(parts)
    return [Message("system", text)] if text else []


def _blocks(content: Any, where: str) -> Iterator[tuple[Object, str]]:
    """The blocks of a list with their places; each is an object and has a type."""
    if not isinstance(content, list):
        raise bad_field(where, f"expected a string or a list, got {describe(content)}")
    for i, block in enumerate(content):
        at = f"{where}[{i}]"
        if not isinstance(block, dict):
            raise bad_field(at, f"expected an object, got {describe(block)}")
        _needed(block, "type", at)
        yield block, at


def _needed(block: Object, name: str, where: str) -> str:
    value = fields.text(block, name, where=where + ".")
    if not value:
        raise bad_field(f"{where}.{name}", "is missing")
    return value


def _no_vision(where: str) -> ApiError:
    return bad_field(where, "the loaded model has no vision, so it cannot take an image")
