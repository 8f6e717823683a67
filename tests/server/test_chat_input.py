from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4batch.chat.conversation import Call, Message
from ds4batch.server.apis.chat_input import ChatRequest, read_request
from ds4batch.server.apis.served import Served
from ds4batch.server.apis.tools import ToolChoice
from ds4batch.server.errors import ApiError
from ds4batch.server.jsonbody import parse_object

SERVED = Served(model="loaded", max_tokens=4096, ctx=1 << 20, vocab_size=256, levels=False)
USER = {"role": "user", "content": "hi"}
LS = {"type": "function", "function": {"name": "ls", "parameters": {"type": "object", "properties": {}}}}


def read(body: dict[str, Any]) -> ChatRequest:
    """The request as it is read from the wire."""
    return read_request(parse_object(json.dumps(body).encode()), SERVED)


def conversation(*messages: dict[str, Any]) -> list[Message]:
    return list(read({"messages": list(messages)}).conversation.messages)


def call(**function: Any) -> dict[str, Any]:
    return {"id": "i", "type": "function", "function": function}


@pytest.mark.parametrize(
    ("given", "role"),
    [("system", "system"), ("developer", "system"), ("user", "user"), ("assistant", "assistant"), (None, "user")],
)
def test_roles_are_mapped(given: Any, role: Any) -> None:
    assert conversation({"role": given, "content": "x"}) == [Message(role, "x")]


@pytest.mark.parametrize("role", ["tool", "function"])
def test_results_keep_the_id_of_their_call_known_or_not(role: str) -> None:
    assert conversation({"role": role, "tool_call_id": "call_1", "content": "x"}) == [Message("tool", "x", call_id="call_1")]
    assert conversation({"role": role, "name": "ls", "content": "x"}) == [Message("tool", "x")]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, ""),
        ("x", "x"),
        ([], ""),
        (["a", {"type": "text", "text": "b"}, {"text": "c"}, {"type": "output_text", "text": "d"}], "abcd"),
        ([{"type": "refusal", "refusal": "no"}, {}, {"text": None}], ""),
    ],
)
def test_content_is_a_string_or_a_list_of_parts(content: Any, text: str) -> None:
    assert conversation({"role": "user", "content": content}) == [Message("user", text)]


def test_an_answer_is_replayed_with_its_reasoning_and_calls() -> None:
    replayed = {
        "role": "assistant",
        "content": None,
        "reasoning_content": ["so", {"text": "!"}],
        "tool_calls": [call(name="ls", arguments='{"a": 1.0}'), call(name="pwd", arguments="")],
    }
    assert conversation(USER, replayed)[1] == Message(
        "assistant", "", "so!", (Call("i", "ls", '{"a": 1.0}'), Call("i", "pwd", ""))
    )


def test_what_belongs_to_an_answer_is_not_looked_for_elsewhere() -> None:
    odd = {
        "role": "user",
        "content": "x",
        "reasoning_content": "r",
        "tool_calls": [call(name="ls", arguments="{}")],
        "tool_call_id": "i",
    }
    assert conversation(odd) == [Message("user", "x")]


@pytest.mark.parametrize(
    ("arguments", "read_as"),
    [({"é": [1, "x"]}, '{"é":[1,"x"]}'), (None, "null"), (3, "3"), ('{"cut', '{"cut'), ([], "[]")],
)
def test_arguments_are_text_whatever_is_sent(arguments: Any, read_as: str) -> None:
    (message,) = conversation({"role": "assistant", "tool_calls": [call(name="f", arguments=arguments)]})
    assert message.calls == (Call("i", "f", read_as),)


def test_a_call_without_a_name_or_arguments_is_left_out() -> None:
    calls = [call(name="f"), call(arguments="{}"), call(name="", arguments="{}"), {"id": "i"}, {"function": None}]
    assert conversation({"role": "assistant", "content": "x", "tool_calls": calls}) == [Message("assistant", "x")]
    assert conversation({"role": "assistant", "content": "x", "tool_calls": None}) == [Message("assistant", "x")]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, ToolChoice()),
        ("auto", ToolChoice()),
        ("none", ToolChoice("none")),
        ("required", ToolChoice("required")),
        ({"type": "function", "function": {"name": "ls"}}, ToolChoice("named", "ls")),
        ({"type": "custom", "custom": {"name": "ls"}}, ToolChoice("named", "ls")),
    ],
)
def test_a_tool_choice_is_read(choice: Any, expected: ToolChoice) -> None:
    request = read({"messages": [USER], "tools": [LS], "tool_choice": choice})
    assert request.choice == expected
    assert [tool.name for tool in request.conversation.tools] == ([] if expected.mode == "none" else ["ls"])


@pytest.mark.parametrize(
    ("given", "expected"),
    [(None, None), ({"type": "text"}, None), ({}, None), ({"type": "json_object"}, {"type": "json_object"})],
)
def test_a_response_format_is_handed_on_as_given(given: Any, expected: Any) -> None:
    assert read({"messages": [USER], "response_format": given}).format == expected


def test_limits_and_sampling_are_read() -> None:
    body = {
        "model": "any/name",
        "messages": [USER],
        "max_tokens": 3,
        "max_completion_tokens": 7,
        "stop": "x",
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": True,
        "top_logprobs": 2,
    }
    request = read(body)
    assert request.model == "any/name"
    assert request.limits == (7, ["x"], True, True)
    assert (request.sampling.ignore_eos, request.sampling.logprobs) == (True, 2)
    plain = read({"messages": [USER]})
    assert (plain.model, plain.limits.max_tokens, plain.sampling.logprobs) == ("loaded", 4096, None)


def part(value: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": [value]}]}


def calls(value: Any) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", "tool_calls": value}]}


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}

BAD = [
    ({}, "missing messages"),
    ({"messages": None}, "missing messages"),
    ({"messages": {}}, "messages: expected a list, got an object"),
    ({"messages": []}, "messages: must not be empty"),
    ({"messages": [1]}, "messages[0]: expected an object, got a number"),
    ({"messages": [USER, {"role": "wizard"}]}, "messages[1].role: unknown role 'wizard'"),
    ({"messages": [{"role": 1}]}, "messages[0].role: expected a string, got a number"),
    ({"messages": [{"content": 2}]}, "messages[0].content: expected a string or a list, got a number"),
    (part(2), "messages[0].content[0]: expected a string or an object, got a number"),
    (part({"text": 2}), "messages[0].content[0].text: expected a string, got a number"),
    (part(IMAGE), "messages[0].content[0]: the loaded model has no vision"),
    (part({"type": "input_image", "image_url": "x"}), "messages[0].content[0]: the loaded model has no vision"),
    (part(IMAGE, "assistant"), "messages[0].content[0]: images belong in user messages"),
    (part(IMAGE, "tool"), "messages[0].content[0]: images belong in user messages"),
    (part(IMAGE, "system"), "messages[0].content[0]: images belong in user messages"),
    (part({"type": "input_audio"}), "messages[0].content[0]: the loaded model takes text only, no audio"),
    ({"messages": [{"role": "assistant", "reasoning_content": 3}]}, "messages[0].reasoning_content: expected a string or a list"),
    ({"messages": [{"role": "tool", "tool_call_id": 3}]}, "messages[0].tool_call_id: expected a string, got a number"),
    (calls({}), "messages[0].tool_calls: expected a list, got an object"),
    (calls([3]), "messages[0].tool_calls[0]: expected an object, got a number"),
    (calls([{"function": 3}]), "messages[0].tool_calls[0].function: expected an object, got a number"),
    (calls([call(name=3)]), "messages[0].tool_calls[0].function.name: expected a string, got a number"),
    (calls([call(name="f", arguments="") | {"id": 3}]), "messages[0].tool_calls[0].id: expected a string, got a number"),
    ({"messages": [USER], "tools": {}}, "tools: expected a list"),
    ({"messages": [USER], "tool_choice": "must"}, "tool_choice: expected auto, none, required or an object"),
    ({"messages": [USER], "tool_choice": []}, "tool_choice: expected auto, none, required or an object"),
    ({"messages": [USER], "tool_choice": "required"}, "tool_choice: a call is required, but there are no tools"),
    (
        {"messages": [USER], "tools": [LS], "tool_choice": {"type": "allowed_tools"}},
        "tool_choice.type: expected function or custom",
    ),
    (
        {"messages": [USER], "tools": [LS], "tool_choice": {"function": {"name": "x"}}},
        "tool_choice.function.name: no tool is named 'x'",
    ),
    ({"messages": [USER], "response_format": 3}, "response_format: expected an object, got a number"),
    ({"messages": [USER], "response_format": {"type": 3}}, "response_format.type: expected a string, got a number"),
    ({"messages": [USER], "chat_template_kwargs": 3}, "chat_template_kwargs: expected an object, got a number"),
    (
        {"messages": [USER], "chat_template_kwargs": {"enable_thinking": 1}},
        "chat_template_kwargs.enable_thinking: expected true or false, got a number",
    ),
    (
        {"messages": [USER], "chat_template_kwargs": {"reasoning_effort": "x"}},
        "chat_template_kwargs.reasoning_effort: expected one of max",
    ),
    ({"messages": [USER], "think": "yes"}, "think: expected true or false, got a string"),
    ({"messages": [USER], "thinking": 3}, "thinking: expected true or false or an object, got a number"),
    ({"messages": [USER], "model": 3}, "model: expected a string, got a number"),
    ({"messages": [USER], "n": 2}, "n: only 1 is supported, got 2"),
]


@pytest.mark.parametrize(("body", "message"), BAD, ids=[message[:50] for _, message in BAD])
def test_a_bad_field_is_named(body: dict[str, Any], message: str) -> None:
    with pytest.raises(ApiError) as caught:
        read(body)
    assert caught.value.status == 400
    assert caught.value.message.startswith(message)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)
_names = ["type", "text", "id", "function", "name", "arguments", "image_url"]
_words = ["text", "image_url", "function", "user", "assistant", "tool", "system", "none", "required"]
near_parts = st.dictionaries(st.sampled_from(_names), st.sampled_from(_words) | json_values, max_size=4)
near_messages = st.dictionaries(
    st.sampled_from(["role", "content", "reasoning_content", "tool_calls", "tool_call_id"]),
    st.sampled_from(_words) | st.lists(near_parts | st.fixed_dictionaries({"function": near_parts}), max_size=3) | json_values,
)
near_bodies = st.fixed_dictionaries(
    {"messages": st.lists(near_messages, max_size=3) | json_values},
    optional={
        name: json_values | st.sampled_from(_words) | near_parts
        for name in (
            "tools",
            "tool_choice",
            "thinking",
            "think",
            "chat_template_kwargs",
            "reasoning_effort",
            "response_format",
            "stop",
        )
    },
)


@given(near_bodies)
def test_no_body_is_a_fault_of_the_server(body: dict[str, Any]) -> None:
    refusal = None
    try:
        request = read_request(body, SERVED)
    except ApiError as error:
        refusal = error
    if refusal is None:
        assert len(request.conversation.messages) == len(body["messages"])
    else:
        assert refusal.status == 400
        assert refusal.param in body


def test_the_time_to_read_a_history_is_linear_in_its_length() -> None:
    def seconds(pairs: int) -> float:
        messages: list[Any] = []
        for i in range(pairs):
            messages += [
                {"role": "assistant", "content": "go", "tool_calls": [call(name="ls", arguments="{}") | {"id": f"c{i}"}]},
                {"role": "tool", "tool_call_id": f"c{i}", "content": [{"type": "text", "text": "out"}]},
            ]
        took = []
        for _ in range(3):
            began = time.process_time()
            request = read_request({"messages": messages}, SERVED)
            took.append(time.process_time() - began)
            assert len(request.conversation.messages) == 2 * pairs
        return min(took)

    assert seconds(4096) < 10 * seconds(1024)
