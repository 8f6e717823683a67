"""Requests to /v1/messages and /v1/messages/count_tokens, read into neutral values. Pure: no engine, no rendering, no HTTP.

The two endpoints read the same fields the same way, so that a count is the count of the call it stands for.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ds4batch.chat.conversation import Conversation, Thinking, Tool
from ds4batch.messages import Sampling
from ds4batch.server import fields, sampling
from ds4batch.server.apis import thinking, tool_choice
from ds4batch.server.apis.messages_input import read_history
from ds4batch.server.apis.served import Served
from ds4batch.server.apis.tools import ToolChoice, read_tools
from ds4batch.server.errors import ApiError, bad_field
from ds4batch.server.fields import Object
from ds4batch.server.sampling import Limits


class MessagesRequest(NamedTuple):
    """A checked request."""

    conversation: Conversation  # without tools when the request forbids calls
    model: str  # as the answer shows it
    sampling: Sampling
    limits: Limits
    choice: ToolChoice
    format: Object | None  # as given: of the type json_schema, with a schema
    continues: tuple[str, ...]  # the calls whose results stand at the end, in that order
    results_from: int  # the first message of the conversation behind the answer that made them
    undeclared: tuple[str, ...]  # calls with a result and no call before it: answerable only by a session that made them


def read_request(body: Object, served: Served) -> MessagesRequest:
    """Read a body. Raises ApiError 400 naming the field; fields that mean nothing here are passed over."""
    model = fields.text(body, "model", served.model)
    limits = _limits(body, served)
    drawn = sampling.read_sampling(body, logprobs=None, vocab_size=served.vocab_size, allow_ignore_eos=False)
    tools = read_tools(body.get("tools"), "tools")
    choice = _tool_choice(body, tools)
    output = fields.obj(body, "output_config") or {}
    history = read_history(body)
    offered = () if choice.mode == "none" else tools
    conversation = Conversation(history.messages, offered, _thinking(body, output, served, model))
    return MessagesRequest(
        conversation,
        model,
        drawn,
        limits,
        choice,
        _format(output, "output_config.format") or _format({"format": body.get("output_format")}, "output_format"),
        history.continues,
        history.results_from,
        history.undeclared,
    )


def continuation_lost(call_id: str, status: int = 400) -> ApiError:
    """The answer to results whose calls neither the request nor a session has; 400 when it is read, 409 when the session just went."""
    message = (
        f"Anthropic continuation state is not available for tool_use_id {call_id}; retry by replaying the full messages history"
    )
    return ApiError(status, message, param="messages")


def token_count(tokens: int) -> dict[str, Any]:
    """The answer of count_tokens; `tokens` are those of the rendered prompt."""
    return {"input_tokens": tokens}


def _limits(body: Object, served: Served) -> Limits:
    given = {"max_tokens": body.get("max_tokens"), "stream": body.get("stream"), "stop": body.get("stop_sequences")}
    try:
        return sampling.read_limits(given, default_max_tokens=served.max_tokens, names=("max_tokens",))
    except ApiError as error:
        if error.param != "stop":
            raise
        raise bad_field("stop_sequences", error.message.removeprefix("stop: ")) from None


def _thinking(body: Object, output: Object, served: Served, model: str) -> Thinking:
    """An object of the type `adaptive` leaves the choice to the model, as none does."""
    asked = thinking.effort(output, "effort", served.levels, where="output_config.")
    other = thinking.effort(body, "reasoning_effort", served.levels)
    return thinking.resolve(served, model, thinking.switch(body, "thinking"), other if asked is None else asked)


def _tool_choice(body: Object, tools: list[Tool]) -> ToolChoice:
    choice = fields.obj(body, "tool_choice")
    if choice is None:
        return ToolChoice()
    match fields.text(choice, "type", where="tool_choice."):
        case "auto":
            return ToolChoice()
        case "none":
            return ToolChoice("none")
        case "any":
            return tool_choice.required(tools)
        case "tool":
            return tool_choice.named(tools, fields.text(choice, "name", where="tool_choice."), "tool_choice.name")
        case kind:
            raise bad_field("tool_choice.type", f"expected auto, any, tool or none, got {kind[:40]!r}")


def _format(output: Object, where: str) -> Object | None:
    wanted = output.get("format")
    if wanted is None:
        return None
    if not isinstance(wanted, dict):
        raise bad_field(where, f"expected an object, got {fields.describe(wanted)}")
    kind = fields.text(wanted, "type", where=where + ".")
    if kind != "json_schema":
        raise bad_field(where + ".type", f"expected json_schema, got {kind[:40]!r}")
    if fields.obj(wanted, "schema", where=where + ".") is None:
        raise bad_field(where + ".schema", "is missing")
    return wanted
