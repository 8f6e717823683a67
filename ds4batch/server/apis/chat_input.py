"""Requests to /v1/chat/completions, read into neutral values. Pure: no engine, no rendering, no HTTP; linear in the history.

Agents replay what they were sent in forms of their own, so a history is read with patience: what says nothing is passed over. What
cannot be understood, or would be lost, is refused by name.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ds4batch.chat.conversation import Call, Conversation, Message, Role, Thinking, Tool
from ds4batch.messages import Sampling
from ds4batch.server import fields, sampling
from ds4batch.server.apis import thinking, tool_choice
from ds4batch.server.apis.served import Served
from ds4batch.server.apis.tools import ToolChoice, read_tools
from ds4batch.server.errors import ApiError, bad_field
from ds4batch.server.fields import Object, describe
from ds4batch.server.sampling import Limits
from ds4batch.server.spelt import dumps

# Of the two names of the output limit the newer is the more deliberate.
_LIMIT_NAMES = ("max_completion_tokens", "max_tokens")

_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
_IMAGES = ("image_url", "input_image", "image")
_MEDIA = {"input_audio": "audio", "video_url": "video", "file": "files"}


class ChatRequest(NamedTuple):
    """A checked request."""

    conversation: Conversation  # without tools when the request forbids calls
    model: str  # as the answer shows it
    sampling: Sampling
    limits: Limits
    choice: ToolChoice
    format: Object | None  # as given, but None where it asks for plain text


def read_request(body: Object, served: Served) -> ChatRequest:
    """Read a body. Raises ApiError 400 naming the field; fields that mean nothing here are passed over."""
    model = fields.text(body, "model", served.model)
    limits = sampling.read_limits(body, default_max_tokens=served.max_tokens, names=_LIMIT_NAMES)
    wanted = sampling.chat_logprobs(body)
    drawn = sampling.read_sampling(body, logprobs=wanted, vocab_size=served.vocab_size, allow_ignore_eos=True)
    tools = read_tools(body.get("tools"), "tools")
    choice = _tool_choice(body, tools)
    offered = () if choice.mode == "none" else tools
    conversation = Conversation(_messages(body), offered, _thinking(body, served, model))
    return ChatRequest(conversation, model, drawn, limits, choice, _response_format(body))


def _thinking(body: Object, served: Served, model: str) -> Thinking:
    """The variables of a chat template are what a client sets who knows the model, so they come first."""
    kwargs = fields.obj(body, "chat_template_kwargs") or {}
    where = "chat_template_kwargs."
    switches = (
        _flag(kwargs, "enable_thinking", where),
        thinking.switch(body, "thinking"),
        _flag(body, "think", ""),
    )
    asked = thinking.effort(body, "reasoning_effort", served.levels)
    other = thinking.effort(kwargs, "reasoning_effort", served.levels, where=where)
    enabled = next((value for value in switches if value is not None), None)
    return thinking.resolve(served, model, enabled, other if asked is None else asked)


def _flag(body: Object, name: str, where: str) -> bool | None:
    value = body.get(name)
    if value is None or isinstance(value, bool):
        return value
    raise bad_field(where + name, f"expected true or false, got {describe(value)}")


def _tool_choice(body: Object, tools: list[Tool]) -> ToolChoice:
    choice = body.get("tool_choice")
    if isinstance(choice, dict):
        kind = fields.text(choice, "type", "function", where="tool_choice.")
        if kind not in ("function", "custom"):
            raise bad_field("tool_choice.type", f"expected function or custom, got {kind[:40]!r}")
        function = fields.obj(choice, kind, where="tool_choice.") or {}
        name = fields.text(function, "name", where=f"tool_choice.{kind}.")
        return tool_choice.named(tools, name, f"tool_choice.{kind}.name")
    if choice is None or choice == "auto":
        return ToolChoice()
    if choice == "none":
        return ToolChoice("none")
    if choice == "required":
        return tool_choice.required(tools)
    raise bad_field("tool_choice", "expected auto, none, required or an object")


def _response_format(body: Object) -> Object | None:
    wanted = fields.obj(body, "response_format")
    if wanted is None or fields.text(wanted, "type", "text", where="response_format.") == "text":
        return None
    return wanted


def _messages(body: Object) -> list[Message]:
    given = body.get("messages")
    if given is None:
        raise ApiError(400, "missing messages", param="messages")
    if not isinstance(given, list):
        raise bad_field("messages", f"expected a list, got {describe(given)}")
    if not given:
        raise bad_field("messages", "must not be empty")
    return [_message(item, f"messages[{i}]") for i, item in enumerate(given)]


def _message(item: Any, where: str) -> Message:
    if not isinstance(item, dict):
        raise bad_field(where, f"expected an object, got {describe(item)}")
    given = fields.text(item, "role", "user", where=where + ".")
    role = _ROLES.get(given)
    if role is None:
        raise bad_field(where + ".role", f"unknown role {given[:40]!r}")
    text = _content(item.get("content"), role, where + ".content")
    reasoning = _content(item.get("reasoning_content"), "assistant", where + ".reasoning_content")
    call_id = fields.text(item, "tool_call_id", where=where + ".")
    calls = _calls(item.get("tool_calls"), where + ".tool_calls")
    if role == "assistant":
        return Message(role, text, reasoning, calls)
    return Message(role, text, call_id=call_id if role == "tool" else "")


def _content(content: Any, role: Role, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise bad_field(where, f"expected a string or a list, got {describe(content)}")
    return "".join([_part(part, role, f"{where}[{i}]") for i, part in enumerate(content)])


def _part(part: Any, role: Role, where: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise bad_field(where, f"expected a string or an object, got {describe(part)}")
    kind = part.get("type")
    if kind in _IMAGES:
        problem = (
            "the loaded model has no vision, so it cannot take an image" if role == "user" else "images belong in user messages"
        )
        raise bad_field(where, problem)
    if isinstance(kind, str) and kind in _MEDIA:
        raise bad_field(where, f"the loaded model takes text only, no {_MEDIA[kind]}")
    return fields.text(part, "text", where=where + ".")


def _calls(calls: Any, where: str) -> tuple[Call, ...]:
    """The calls of a replayed answer; one without a name or arguments says nothing and is left out."""
    if calls is None:
        return ()
    if not isinstance(calls, list):
        raise bad_field(where, f"expected a list, got {describe(calls)}")
    out = []
    for i, call in enumerate(calls):
        at = f"{where}[{i}]"
        if not isinstance(call, dict):
            raise bad_field(at, f"expected an object, got {describe(call)}")
        function = fields.obj(call, "function", where=at + ".") or {}
        name = fields.text(function, "name", where=at + ".function.")
        if name and "arguments" in function:
            out.append(Call(fields.text(call, "id", where=at + "."), name, _arguments(function["arguments"])))
    return tuple(out)


def _arguments(value: Any) -> str:
    """JSON in a string, as it was sent; some send the object itself. A call cut short stays the text it was."""
    return value if isinstance(value, str) else dumps(value)
