"""The body of POST /v1/responses as one checked value. Pure: submits nothing, renders nothing, knows no stream.

The server keeps no responses: a request that builds on a stored one is refused, as is one whose answer would have to be stored.
What says how a client or another server should store and cache is passed over.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ds4batch.chat.conversation import Conversation, Message, Thinking, Tool
from ds4batch.messages import Sampling
from ds4batch.server import fields, sampling
from ds4batch.server.apis import thinking, tool_choice
from ds4batch.server.apis.responses_input import History, read_history
from ds4batch.server.apis.served import Served
from ds4batch.server.apis.tools import ToolChoice, read_tools
from ds4batch.server.errors import ApiError, bad_field
from ds4batch.server.fields import Object, describe
from ds4batch.server.sampling import Limits

# Of the two names of the output limit the first is this API's own.
_LIMIT_NAMES = ("max_output_tokens", "max_tokens")
_STORED = ("previous_response_id", "conversation")
_SUMMARIES = ("auto", "concise", "detailed")
_FORMATS = ("text", "json_object", "json_schema")
_SEALED = "reasoning.encrypted_content"
_LOGPROBS = "message.output_text.logprobs"


class ResponsesRequest(NamedTuple):
    """A request, ready to be rendered and answered."""

    model: str  # as the client named it
    conversation: Conversation
    tools: tuple[Tool, ...]  # those the model may call, for their names in the answer
    choice: ToolChoice
    format: Object | None  # `text.format` as given, of the type json_object or json_schema; None for plain text
    sampling: Sampling
    limits: Limits
    summary: bool  # the reasoning is shown
    sealed: bool  # the reasoning is sent as an opaque string
    continues: tuple[str, ...]  # the calls that the results at the end answer
    results_from: int  # the first message of those results
    undeclared: tuple[str, ...]  # calls only a live session can know: where none does, `continuation_lost` is the answer
    reasoning_missing: bool  # the calls being answered came from thinking that the client does not replay


def read_request(body: Object, served: Served) -> ResponsesRequest:
    """Read a request. Time is linear in its length. Raises ApiError 400 naming the field."""
    _refuse_stored(body)
    model = fields.text(body, "model", served.model)
    included = _include(body)
    rivals = sampling.chat_logprobs({"logprobs": True, "top_logprobs": body.get("top_logprobs")})
    drawn = sampling.read_sampling(
        body,
        logprobs=rivals if _LOGPROBS in included else None,
        vocab_size=served.vocab_size,
        allow_ignore_eos=False,
    )
    limits = sampling.read_limits(body, default_max_tokens=served.max_tokens, names=_LIMIT_NAMES)
    thought, summary = _reasoning(body, served, model)
    history = read_history(body)
    tools = _with_found(read_tools(body.get("tools"), "tools"), history.found)
    choice = _tool_choice(body, tools)
    offered = () if choice.mode == "none" else tuple(tools)
    return ResponsesRequest(
        model=model,
        conversation=Conversation(history.messages, offered, thought),
        tools=offered,
        choice=choice,
        format=_format(body),
        sampling=drawn,
        limits=limits,
        summary=summary,
        sealed=_SEALED in included,
        continues=history.continues,
        results_from=history.results_from,
        undeclared=history.undeclared,
        reasoning_missing=thought.enabled and _reasoning_missing(history),
    )


def continuation_lost(call_id: str, status: int = 400) -> ApiError:
    """The answer to a result whose call neither the request nor a live session knows; 409 where the session was lost meanwhile."""
    message = f"Responses continuation state is not available for call_id {call_id}; retry by replaying the full input history"
    return ApiError(status, message, param="input")


def _refuse_stored(body: Object) -> None:
    for name in _STORED:
        if body.get(name) is not None:
            raise ApiError(400, f"{name} is not supported; replay full input instead", param=name)
    if body.get("prompt") is not None:
        raise bad_field("prompt", "stored prompts are not supported; send instructions and input instead")
    if fields.flag(body, "background"):
        raise bad_field("background", "responses are not stored, so none can be fetched later")


def _include(body: Object) -> list[str]:
    value = body.get("include")
    if value is None:
        return []
    if not isinstance(value, list):
        raise bad_field("include", f"expected a list, got {describe(value)}")
    return [item for item in value if isinstance(item, str)]


def _reasoning(body: Object, served: Served, model: str) -> tuple[Thinking, bool]:
    """How to think, and whether to show it."""
    given = fields.obj(body, "reasoning") or {}
    asked = thinking.effort(given, "effort", served.levels, where="reasoning.")
    enabled = None if asked is None else asked != "none"
    summary = fields.text(given, "summary", where="reasoning.")
    if summary and summary not in _SUMMARIES:
        raise bad_field("reasoning.summary", f"expected one of {', '.join(_SUMMARIES)}, got {summary[:40]!r}")
    return thinking.resolve(served, model, enabled, asked), bool(summary)


def _with_found(tools: list[Tool], found: list[Tool]) -> list[Tool]:
    """The tools with those that searches found: no longer deferred, and behind the others where they are new.

    A tool that is offered already stays as it was offered, so that a search does not change the prompt before it.
    """
    names = {tool.name for tool in found}
    known = {tool.name for tool in tools}
    return [
        *(replace(tool, deferred=False) if tool.deferred and tool.name in names else tool for tool in tools),
        *(replace(tool, deferred=False) for tool in found if tool.name not in known),
    ]


def _tool_choice(body: Object, tools: list[Tool]) -> ToolChoice:
    value = body.get("tool_choice")
    if value is None or value == "auto":
        return ToolChoice()
    if value == "none":
        return ToolChoice("none")
    if value == "required":
        return tool_choice.required(tools)
    if isinstance(value, str):
        raise ApiError(400, f"tool_choice={value[:40]} not supported", param="tool_choice")
    if not isinstance(value, dict):
        raise bad_field("tool_choice", f"expected a string or an object, got {describe(value)}")
    kind = fields.text(value, "type", where="tool_choice.")
    if kind not in ("function", "custom"):
        raise bad_field("tool_choice.type", f"only a function or a custom tool can be forced, got {kind[:40]!r}")
    name = fields.text(value, "namespace", where="tool_choice.") + fields.text(value, "name", where="tool_choice.")
    return tool_choice.named(tools, name, "tool_choice.name")


def _format(body: Object) -> Object | None:
    given = fields.obj(fields.obj(body, "text") or {}, "format", where="text.")
    if given is None:
        return None
    kind = fields.text(given, "type", "text", where="text.format.")
    if kind not in _FORMATS:
        raise bad_field("text.format.type", f"expected one of {', '.join(_FORMATS)}, got {kind[:40]!r}")
    if kind == "json_schema" and fields.obj(given, "schema", where="text.format.") is None:
        raise bad_field("text.format.schema", "is missing")
    return None if kind == "text" else given


def _reasoning_missing(history: History) -> bool:
    before: Message | None = history.messages[history.results_from - 1] if history.results_from else None
    return bool(history.continues) and before is not None and bool(before.calls) and not before.reasoning
