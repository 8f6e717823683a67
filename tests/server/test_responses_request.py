from __future__ import annotations

from typing import Any

import pytest

from ds4batch.chat.conversation import Message
from ds4batch.server.apis.responses import ResponsesRequest, continuation_lost, read_request
from ds4batch.server.apis.served import Served
from ds4batch.server.apis.tools import ToolChoice
from ds4batch.server.errors import ApiError

SERVED = Served(model="served", max_tokens=1000, ctx=4096, vocab_size=100, levels=False)
LS = {"type": "function", "name": "ls", "strict": False, "parameters": {"type": "object", "properties": {}}}
PATCH = {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'}}
SPACE = {"type": "namespace", "name": "mcp__x__", "description": "X", "tools": [{"type": "function", "name": "find"}]}
SEARCH = {"type": "tool_search", "execution": "client", "description": "d", "parameters": {"type": "object", "properties": {}}}
CALL = {"type": "function_call", "call_id": "call_1", "name": "ls", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "call_1", "output": "ok"}


def read(served: Served = SERVED, **body: Any) -> ResponsesRequest:
    return read_request({"input": "hi", **body}, served)


def refused(**body: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read(**body)
    assert caught.value.status == 400
    return caught.value


def test_the_least_request_has_defaults_for_everything() -> None:
    request = read()
    assert request.conversation.messages == [Message("user", "hi")]
    assert (request.model, request.limits.max_tokens, request.limits.stream) == ("served", 1000, False)
    assert request.sampling.temperature == 1.0
    assert request.sampling.logprobs is None
    assert (request.tools, request.choice, request.format) == ((), ToolChoice(), None)
    assert not request.summary
    assert not request.sealed
    assert request.conversation.thinking.enabled


def test_a_coding_agents_request_is_read_whole() -> None:
    text = [{"type": "input_text", "text": "x"}]
    request = read(
        model="any/name",
        instructions="",
        input=[
            {"type": "message", "role": "developer", "content": text},
            {"type": "message", "role": "user", "content": text},
            {"type": "message", "role": "developer", "content": text},
            {"type": "message", "role": "user", "content": text},
        ],
        tools=[LS, SPACE, {"type": "web_search", "external_web_access": False}, PATCH, SEARCH],
        tool_choice="auto",
        parallel_tool_calls=True,
        reasoning={"effort": "high", "summary": "auto"},
        store=False,
        stream=True,
        include=["reasoning.encrypted_content"],
        prompt_cache_key="0199",
        text={"verbosity": "low"},
        client_metadata={"a": "b"},
        service_tier=None,
    )
    assert request.model == "any/name"
    assert [message.role for message in request.conversation.messages] == ["system", "user", "system", "user"]
    assert [tool.name for tool in request.tools] == ["ls", "mcp__x__find", "apply_patch", "tool_search"]
    assert [tool.kind for tool in request.tools] == ["function", "function", "custom", "tool_search"]
    assert request.conversation.tools == request.tools
    assert request.limits.stream
    assert request.summary
    assert request.sealed
    assert request.format is None


@pytest.mark.parametrize(
    ("body", "limit"),
    [
        ({"max_output_tokens": 5}, 5),
        ({"max_tokens": 6}, 6),
        ({"max_output_tokens": 5, "max_tokens": 6}, 5),
        ({"max_output_tokens": None}, 1000),
    ],
)
def test_the_output_limit_has_two_names(body: dict[str, Any], limit: int) -> None:
    assert read(**body).limits.max_tokens == limit


@pytest.mark.parametrize(
    ("reasoning", "enabled", "effort", "explicit"),
    [
        (None, True, "high", False),
        ({}, True, "high", False),
        ({"effort": None}, True, "high", False),
        ({"effort": "minimal"}, True, "low", True),
        ({"effort": "medium"}, True, "medium", True),
        ({"effort": "none"}, False, "high", True),
    ],
)
def test_an_effort_is_an_explicit_wish(reasoning: Any, enabled: bool, effort: str, explicit: bool) -> None:
    thinking = read(reasoning=reasoning).conversation.thinking
    assert (thinking.enabled, thinking.effort, thinking.explicit) == (enabled, effort, explicit)


def test_an_effort_may_be_a_number_where_the_model_has_levels() -> None:
    assert read(SERVED._replace(levels=True), reasoning={"effort": "50"}).conversation.thinking.level == 50
    assert not read(SERVED._replace(levels=True), reasoning={"effort": "0"}).conversation.thinking.enabled
    assert refused(reasoning={"effort": "50"}).message.startswith("reasoning.effort: expected one of")


@pytest.mark.parametrize(
    ("summary", "shown"), [("auto", True), ("concise", True), ("detailed", True), (None, False), ("", False)]
)
def test_reasoning_is_shown_only_on_request(summary: Any, shown: bool) -> None:
    assert read(reasoning={"summary": summary}).summary is shown


def test_logprobs_are_wanted_by_inclusion() -> None:
    included = {"include": ["message.output_text.logprobs"]}
    assert read(**included).sampling.logprobs == 0
    assert read(**included, top_logprobs=3).sampling.logprobs == 3
    assert read(top_logprobs=3).sampling.logprobs is None


def test_without_calls_no_tool_is_shown() -> None:
    request = read(tools=[LS], tool_choice="none", input=[CALL, RESULT])
    assert request.tools == request.conversation.tools == ()
    assert request.conversation.tool_context


def test_forced_calls_are_kept_by_their_name_in_the_prompt() -> None:
    def choice(value: Any) -> ToolChoice:
        return read(tools=[LS, SPACE, PATCH], tool_choice=value).choice

    assert choice("required") == ToolChoice("required")
    assert choice({"type": "function", "name": "ls"}) == ToolChoice("named", "ls")
    assert choice({"type": "custom", "name": "apply_patch"}) == ToolChoice("named", "apply_patch")
    assert choice({"type": "function", "name": "find"}) == ToolChoice("named", "mcp__x__find")
    assert choice({"type": "function", "name": "find", "namespace": "mcp__x__"}) == ToolChoice("named", "mcp__x__find")


def test_found_tools_join_those_of_the_request() -> None:
    deferred = LS | {"defer_loading": True}
    find = {"type": "function", "name": "find"}
    items = [
        {"type": "tool_search_call", "call_id": "s", "arguments": {}},
        {"type": "tool_search_output", "call_id": "s", "tools": [deferred, find | {"defer_loading": True}]},
    ]
    tools = read(input=items, tools=[deferred, PATCH]).tools
    assert [(tool.name, tool.deferred) for tool in tools] == [("ls", False), ("apply_patch", False), ("find", False)]
    assert [tool.deferred for tool in read(tools=[deferred, PATCH]).tools] == [True, False]


@pytest.mark.parametrize(
    "given",
    [{"type": "json_object"}, {"type": "json_schema", "name": "n", "strict": True, "schema": {"type": "object"}}],
)
def test_a_wish_for_structure_is_kept_as_given(given: Any) -> None:
    assert read(text={"format": given, "verbosity": "low"}).format == given
    assert read(text={"format": {"type": "text"}}).format is None
    assert read(text={"format": None}).format is None


def test_what_a_session_must_know_is_told() -> None:
    alone = read(input=[RESULT])
    assert (alone.continues, alone.undeclared, alone.results_from) == (("call_1",), ("call_1",), 0)
    replayed = read(input=[CALL, RESULT])
    assert (replayed.continues, replayed.undeclared, replayed.results_from) == (("call_1",), (), 1)


def test_thinking_that_is_not_replayed_is_told() -> None:
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}
    assert read(input=[CALL, RESULT]).reasoning_missing
    assert not read(input=[thought, CALL, RESULT]).reasoning_missing
    assert not read(input=[CALL, RESULT], reasoning={"effort": "none"}).reasoning_missing
    assert not read(input=[RESULT]).reasoning_missing
    assert not read(input=[CALL, RESULT, {"role": "user", "content": "x"}]).reasoning_missing


def test_a_lost_continuation_names_the_call_and_the_way_out() -> None:
    error = continuation_lost("call_9", 409)
    assert error.status == 409
    assert error.message == (
        "Responses continuation state is not available for call_id call_9; retry by replaying the full input history"
    )
    assert continuation_lost("x").status == 400


def test_ways_to_store_and_cache_are_passed_over() -> None:
    read(store=True, metadata={"a": "b"}, truncation="auto", user="u", previous_response_id=None, conversation=None, prompt=None)
    read(
        include=["file_search_call.results", 1],
        background=False,
        safety_identifier="x",
        stream_options={"include_obfuscation": False},
    )


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id is not supported; replay full input instead"),
        ({"conversation": {"id": "x"}}, "conversation is not supported; replay full input instead"),
        ({"prompt": {"id": "p"}}, "prompt: stored prompts are not supported"),
        ({"background": True}, "background: responses are not stored"),
        ({"model": 1}, "model: expected a string"),
        ({"include": "reasoning.encrypted_content"}, "include: expected a list"),
        ({"reasoning": "high"}, "reasoning: expected an object"),
        ({"reasoning": {"effort": 1}}, "reasoning.effort: expected a string"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort: expected one of"),
        ({"reasoning": {"summary": True}}, "reasoning.summary: expected a string"),
        ({"reasoning": {"summary": "long"}}, "reasoning.summary: expected one of"),
        ({"tools": {}}, "tools: expected a list"),
        ({"tool_choice": "any"}, "tool_choice=any not supported"),
        ({"tool_choice": 1}, "tool_choice: expected a string or an object"),
        ({"tool_choice": "required"}, "tool_choice: a call is required"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice.type: only a function or a custom tool"),
        ({"tools": [LS], "tool_choice": {"type": "function", "name": "cat"}}, "tool_choice.name: no tool is named 'cat'"),
        ({"tools": [LS], "tool_choice": {"type": "function"}}, "tool_choice.name: no tool is named"),
        ({"text": 1}, "text: expected an object"),
        ({"text": {"format": "json"}}, "text.format: expected an object"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type: expected one of"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema: is missing"),
        ({"max_output_tokens": 0}, "max_output_tokens: must be at least 1"),
        ({"temperature": "hot"}, "temperature: expected a number"),
        ({"top_logprobs": 21}, "top_logprobs: expected a number between 0 and 20"),
        ({"stream": 1}, "stream: expected true or false"),
        ({"input": None}, "missing input"),
    ],
)
def test_bad_fields_are_refused_by_name(body: dict[str, Any], named: str) -> None:
    error = refused(**body)
    assert error.message.startswith(named)
    assert error.param is not None
    assert error.param in named
