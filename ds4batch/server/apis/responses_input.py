"""The `instructions` and `input` of a Responses request as neutral messages, checked. Renders nothing, linear in their length.

The items of one answer (reasoning, text, calls) become one message of the assistant. Everything this server sends as output is taken
back as input: items it had to leave incomplete, too, and a call it sent as incomplete is no call here either, because what the
model wrote of it followed as text.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ds4batch.chat.conversation import Call, Message, Role, Tool
from ds4batch.server import fields
from ds4batch.server.apis.responses_reasoning import unseal
from ds4batch.server.apis.tools import SEARCH, read_tools
from ds4batch.server.errors import ApiError, bad_field
from ds4batch.server.fields import Object, describe
from ds4batch.server.spelt import dumps

_ROLES: dict[str, Role] = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_CALLS = ("function_call", "custom_tool_call")
_HOSTED_CALLS = {
    "local_shell_call": "local_shell",
    "web_search_call": "web_search_call",
    "tool_search_call": SEARCH,
    "image_generation_call": "image_generation_call",
}
"""Calls of tools without a declared name, and the name that stands for each in the prompt."""
_OUTPUTS = ("function_call_output", "custom_tool_call_output")
_HOSTED_OUTPUTS = (*(kind + "_output" for kind in _HOSTED_CALLS), "tool_search_output")
_IGNORED = ("compaction", "context_compaction")
_SENT = ("message", "reasoning", *_CALLS, *_HOSTED_CALLS)
"""What an answer of this server may consist of, so what may come back incomplete."""


class History(NamedTuple):
    """A conversation and what its calls' results refer to."""

    messages: list[Message]
    found: list[Tool]  # that searches of the conversation brought, in order, each name once
    continues: tuple[str, ...]  # the calls that the results at the end answer, as the answer before them made them
    results_from: int  # the first message of those results; the number of messages where none stand at the end
    undeclared: tuple[str, ...]  # calls of which there is a result and no call before it


def read_history(body: Object) -> History:
    """Read both fields. Raises ApiError 400 naming the item."""
    reader = _Reader()
    instructions = fields.text(body, "instructions")
    if instructions:
        reader.message("system", instructions)
    given = body.get("input")
    if given is None:
        raise ApiError(400, "missing input", param="input")
    if isinstance(given, str):
        reader.message("user", given)
    elif not isinstance(given, list):
        raise bad_field("input", f"expected a string or a list, got {describe(given)}")
    elif not given:
        raise bad_field("input", "must not be empty")
    else:
        for i, item in enumerate(given):
            _read_item(reader, item, f"input[{i}]")
    messages = reader.end()
    continues, results_from = _trailing(messages)
    return History(messages, list(reader.found.values()), continues, results_from, tuple(reader.undeclared))


def _trailing(messages: list[Message]) -> tuple[tuple[str, ...], int]:
    """The calls that are being answered and where their results begin.

    Where the answer that made them is not replayed, they are known from the results alone.
    """
    first = len(messages)
    while first and messages[first - 1].role == "tool":
        first -= 1
    if first == len(messages):
        return (), first
    if all(message.role == "system" for message in messages[:first]):
        return tuple(dict.fromkeys(message.call_id for message in messages[first:])), first
    return tuple(call.id for call in messages[first - 1].calls), first


@dataclass
class _Answer:
    """A message of the assistant while items may still join it."""

    text: str = ""
    reasoning: list[str] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)


class _Reader:
    """Puts items together into messages."""

    def __init__(self) -> None:
        self.found: dict[str, Tool] = {}
        self.undeclared: dict[str, None] = {}
        self._declared: set[str] = set()
        self._messages: list[Message] = []
        self._answer: _Answer | None = None
        self._reasoning: list[str] = []  # waits for the item it led to

    def message(self, role: Role, text: str) -> None:
        """A message. One of the assistant takes the reasoning that waits."""
        if role == "assistant":
            self._close()
            self._answer = _Answer(text, self._taken())
        else:
            self.end().append(Message(role, text))

    def reasoning(self, text: str) -> None:
        """Reasoning that belongs to what follows."""
        if text:
            self._reasoning.append(text)

    def call(self, call: Call) -> None:
        """A call, of the assistant's message that stands right before it if one does."""
        if self._answer is None:
            self._answer = _Answer()
        self._answer.reasoning += self._taken()
        self._answer.calls.append(call)
        self._declared.add(call.id)

    def result(self, call_id: str, text: str) -> None:
        """The result of a call."""
        if call_id not in self._declared:
            self.undeclared[call_id] = None
        self.end().append(Message("tool", text, call_id=call_id))

    def end(self) -> list[Message]:
        """All messages so far, none open. Reasoning that led to nothing is a message of its own."""
        self._close()
        if self._reasoning:
            self._answer = _Answer(reasoning=self._taken())
            self._close()
        return self._messages

    def _taken(self) -> list[str]:
        taken, self._reasoning = self._reasoning, []
        return taken

    def _close(self) -> None:
        if self._answer is not None:
            text, reasoning, calls = self._answer.text, self._answer.reasoning, self._answer.calls
            self._messages.append(Message("assistant", text, "\n".join(reasoning), tuple(calls)))
            self._answer = None


def _read_item(reader: _Reader, item: Any, where: str) -> None:
    if not isinstance(item, dict):
        raise bad_field(where, f"expected an object, got {describe(item)}")
    kind = fields.text(item, "type", "message", where=where + ".")
    incomplete = _incomplete(item, kind, where)
    if kind == "message":
        given = fields.text(item, "role", "user", where=where + ".")
        role = _ROLES.get(given)
        if role is None:
            raise bad_field(where + ".role", f"unknown role {given[:40]!r}")
        reader.message(role, _content(item.get("content"), where + ".content"))
    elif kind == "reasoning":
        reader.reasoning(_reasoning(item, where))
    elif kind in _CALLS or kind in _HOSTED_CALLS:
        call = _call(item, kind, where)
        if not incomplete:
            reader.call(call)
    elif kind in _OUTPUTS or kind in _HOSTED_OUTPUTS:
        _result(reader, item, kind, where)
    elif kind not in _IGNORED:
        raise bad_field(where + ".type", f"unsupported item type {kind[:40]!r}")


def _incomplete(item: Object, kind: str, where: str) -> bool:
    status = fields.text(item, "status", "completed", where=where + ".")
    if status == "incomplete" and kind in _SENT:
        return True
    if status != "completed":
        raise bad_field(where + ".status", f"only completed items can be replayed, got {status[:40]!r}")
    return False


def _reasoning(item: Object, where: str) -> str:
    """The very text where this server sealed it, else what the client shows of it."""
    sealed = unseal(fields.text(item, "encrypted_content", where=where + "."))
    parts = [_content(item.get(name), f"{where}.{name}") for name in ("summary", "content")]
    return "\n".join(part for part in parts if part) if sealed is None else sealed


def _call(item: Object, kind: str, where: str) -> Call:
    hosted = _HOSTED_CALLS.get(kind)
    call_id = fields.text(item, "call_id", where=where + ".") or fields.text(item, "id", where=where + ".")
    if hosted is not None:  # nobody answers some of these, so they need no id
        return Call(call_id, hosted, _arguments(item, ("action", "arguments", "input")))
    name = fields.text(item, "name", where=where + ".")
    if not name:
        raise bad_field(where + ".name", "is missing")
    if not call_id:
        raise bad_field(where + ".call_id", "is missing")
    return Call(call_id, fields.text(item, "namespace", where=where + ".") + name, _arguments(item, ("arguments", "input")))


def _arguments(item: Object, names: tuple[str, ...]) -> str:
    value: Any = next((item[name] for name in names if item.get(name) is not None), {})
    return value if isinstance(value, str) else dumps(value)


def _result(reader: _Reader, item: Object, kind: str, where: str) -> None:
    call_id = fields.text(item, "call_id", where=where + ".") or fields.text(item, "id", where=where + ".")
    if not call_id:
        raise bad_field(where + ".call_id", "is missing")
    if kind == "tool_search_output":
        for tool in read_tools(item.get("tools"), where + ".tools"):
            reader.found.setdefault(tool.name, tool)
    names = ("output", "result", "tools") if kind in _HOSTED_OUTPUTS else ("output",)
    name = next((name for name in names if item.get(name) is not None), None)
    if name is None and not any(name in item for name in names):
        raise bad_field(where + ".output", "is missing")
    value = "" if name is None else item[name]
    if name == "output" and isinstance(value, list) and all(_is_block(part) for part in value):
        value = _content(value, where + ".output")
    reader.result(call_id, value if isinstance(value, str) else dumps(value))


def _is_block(part: Any) -> bool:
    """Whether an element of a result is meant as content; a list of other values is data."""
    return isinstance(part, str) or (isinstance(part, dict) and "type" in part)


def _content(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_field(where, f"expected a string or a list, got {describe(content)}")
    return "".join([_part(part, f"{where}[{i}]") for i, part in enumerate(content)])


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise bad_field(where, f"expected a string or an object, got {describe(part)}")
    kind = part.get("type")
    if kind == "input_image":
        raise bad_field(where, "the loaded model has no vision, so it cannot take an image")
    if kind not in _TEXTS:
        shown = repr(kind[:40]) if isinstance(kind, str) else describe(kind)
        raise bad_field(where + ".type", f"expected one of {', '.join(_TEXTS)} or input_image, got {shown}")
    if "text" not in part:
        raise bad_field(where + ".text", "is missing")
    return fields.text(part, "text", where=where + ".")
