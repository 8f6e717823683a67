from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4batch.chat.conversation import Call, Message, Thinking
from ds4batch.server.apis.messages import MessagesRequest, continuation_lost, read_request, token_count
from ds4batch.server.apis.served import Served
from ds4batch.server.apis.tools import ToolChoice
from ds4batch.server.errors import ApiError
from ds4batch.server.jsonbody import parse_object

SERVED = Served(model="loaded", max_tokens=4096, ctx=1 << 20, vocab_size=256, levels=False)
USER = {"role": "user", "content": "hi"}
LS = {"name": "ls", "description": "List.", "input_schema": {"type": "object", "properties": {"dir": {"type": "string"}}}}


def read(body: dict[str, Any], served: Served = SERVED) -> MessagesRequest:
    """The request as it is read from the wire."""
    return read_request(parse_object(json.dumps(body).encode()), served)


def conversation(*messages: dict[str, Any], **more: Any) -> list[Message]:
    return list(read({"messages": list(messages), **more}).conversation.messages)


def use(id: str, name: str = "ls", **input: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": id, "name": name, "input": input}


def result(id: str, content: Any = "out") -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": id, "content": content}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def test_plain_messages_stay_what_they_are() -> None:
    assert conversation(USER, {"role": "assistant", "content": "yes"}, {"role": "user", "content": [text("a"), text("b")]}) == [
        Message("user", "hi"),
        Message("assistant", "yes"),
        Message("user", "ab"),
    ]


@pytest.mark.parametrize("content", [None, "", []])
def test_an_empty_message_keeps_its_turn(content: Any) -> None:
    assert conversation({"role": "user", "content": content}) == [Message("user")]


def test_an_assistants_blocks_are_one_message() -> None:
    blocks = [
        {"type": "thinking", "thinking": "look", "signature": "whatever"},
        {"type": "redacted_thinking", "data": "xyz"},
        {"type": "thinking", "thinking": " twice"},
        text("I will"),
        use("a", dir="/"),
        use("b", "spähen", n=1.0, s="é"),
    ]
    expected = Message(
        "assistant", "I will", "look twice", (Call("a", "ls", '{"dir":"/"}'), Call("b", "spähen", '{"n":1.0,"s":"é"}'))
    )
    assert conversation(USER, {"role": "assistant", "content": blocks})[1:] == [expected]


def test_a_mixed_user_message_becomes_one_message_a_result_and_one_a_piece_of_text() -> None:
    blocks = [text("x"), text("y"), result("a", "1"), result("b", [text("2"), text("3")]), text("z"), result("c", None)]
    assert conversation({"role": "user", "content": blocks}) == [
        Message("user", "xy"),
        Message("tool", "1", call_id="a"),
        Message("tool", "23", call_id="b"),
        Message("user", "z"),
        Message("tool", "", call_id="c"),
    ]


def test_blocks_are_taken_for_what_they_are_whoever_says_them() -> None:
    blocks = [text("a"), use("i"), result("i", "r")]
    assert conversation({"role": "user", "content": blocks}) == [
        Message("user", "a"),
        Message("assistant", calls=(Call("i", "ls", "{}"),)),
        Message("tool", "r", call_id="i"),
    ]


def test_members_come_in_any_order() -> None:
    body = b'{"messages":[{"content":[{"input":{},"name":"n","id":"i","type":"tool_use"}],"role":"assistant"}]}'
    (message,) = read_request(parse_object(body), SERVED).conversation.messages
    assert message == Message("assistant", calls=(Call("i", "n", "{}"),))


@pytest.mark.parametrize(
    ("input", "arguments"),
    [
        (None, "{}"),
        ({}, "{}"),
        ('{"cut', '{"cut'),
        ([1, "a"], '[1,"a"]'),
        (3, "3"),
        ({"a": {"b": [None, True]}}, '{"a":{"b":[null,true]}}'),
        ({"n": 10**40}, '{"n":1' + "0" * 40 + "}"),
    ],
)
def test_any_input_of_a_replayed_call_is_readable(input: Any, arguments: str) -> None:
    block = {"type": "tool_use", "id": "i", "name": "n", "input": input}
    (message,) = conversation({"role": "assistant", "content": [block]})
    assert message.calls == (Call("i", "n", arguments),)


def test_cache_control_changes_nothing() -> None:
    marked = {"cache_control": {"type": "ephemeral"}}
    plain = read({"system": [text("s")], "messages": [{"role": "user", "content": [text("a")]}], "tools": [LS]})
    moved = read(
        {
            "system": [text("s") | marked],
            "messages": [{"role": "user", "content": [text("a") | marked]} | marked],
            "tools": [LS | marked],
        }
    )
    assert plain.conversation == moved.conversation


@pytest.mark.parametrize(
    ("system", "shown"),
    [
        ("You are", "You are"),
        ([text("a"), text("b\n"), text("c")], "a\nb\nc"),
        ([text("x-anthropic-billing-header: cch=1"), text("a"), text("b")], "a\nb"),
        ([text("a"), text("x-anthropic-other"), text(""), text("b")], "a\nb"),
        ("x-anthropic-billing-header: 1\nx-anthropic-y\nYou are\nx-anthropic-z", "You are\nx-anthropic-z"),
        ("not x-anthropic-", "not x-anthropic-"),
    ],
)
def test_system_text_is_joined_without_the_attribution(system: Any, shown: str) -> None:
    assert conversation(USER, system=system)[0] == Message("system", shown)


@pytest.mark.parametrize("system", [None, "", [], [text("")], "x-anthropic-billing", [text("x-anthropic-billing")]])
def test_a_system_text_that_says_nothing_is_no_message(system: Any) -> None:
    assert conversation(USER, system=system) == [Message("user", "hi")]


def test_a_system_message_within_the_conversation_stays_in_its_place() -> None:
    late = {"role": "system", "content": [text("x-anthropic-a"), text("late")]}
    assert conversation(USER, late, USER, system="first") == [
        Message("system", "first"),
        Message("user", "hi"),
        Message("system", "late"),
        Message("user", "hi"),
    ]


CALLS = {"role": "assistant", "content": [use("a"), use("b")]}
RESULTS = {"role": "user", "content": [result("b"), result("a")]}
LATE = {"role": "system", "content": "note"}


@pytest.mark.parametrize(
    ("messages", "results", "start"),
    [
        ([USER], (), 1),
        ([USER, CALLS, RESULTS], ("b", "a"), 2),
        ([USER, CALLS, {"role": "user", "content": [result("a"), text("and")]}], ("a",), 2),
        ([USER, CALLS, {"role": "user", "content": [result("a")]}, {"role": "user", "content": [result("b")]}], ("a", "b"), 2),
        ([USER, CALLS, RESULTS, LATE], ("b", "a"), 2),
        ([USER, CALLS, LATE, RESULTS], ("b", "a"), 2),
        ([USER, CALLS, RESULTS, USER], (), 5),
        ([USER, CALLS, RESULTS, {"role": "assistant", "content": "done"}], (), 5),
        ([RESULTS], ("b", "a"), 0),
        ([LATE, RESULTS], ("b", "a"), 1),
        ([LATE, {"role": "user", "content": [text("x"), result("a")]}], ("a",), 1),
    ],
)
def test_the_results_at_the_end_are_found(messages: list[Any], results: tuple[str, ...], start: int) -> None:
    request = read({"messages": messages})
    assert (request.continues, request.results_from) == (results, start)


def test_results_without_a_call_before_them_are_named_once_each() -> None:
    late = {"role": "user", "content": [result("z"), result("x"), result("z"), result("a")]}
    assert read({"messages": [USER, CALLS, late]}).undeclared == ("z", "x")
    assert read({"messages": [RESULTS, CALLS]}).undeclared == ("b", "a")
    assert read({"messages": [USER, CALLS, RESULTS]}).undeclared == ()


@pytest.mark.parametrize("status", [400, 409])
def test_a_lost_continuation_names_the_call_and_the_way_out(status: int) -> None:
    error = continuation_lost("toolu_x", status)
    assert error.status == status
    assert "toolu_x; retry by replaying the full messages history" in error.message


def test_tools_are_read_and_forbidden_ones_are_not_shown() -> None:
    body = {"messages": [USER], "tools": [LS]}
    (tool,) = read(body).conversation.tools
    assert (tool.name, tool.strings) == ("ls", {"dir"})
    assert not read(body | {"tool_choice": {"type": "none"}}).conversation.tools


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, ToolChoice()),
        ({"type": "auto", "disable_parallel_tool_use": True}, ToolChoice()),
        ({"type": "none"}, ToolChoice("none")),
        ({"type": "any"}, ToolChoice("required")),
        ({"type": "tool", "name": "ls"}, ToolChoice("named", "ls")),
    ],
)
def test_a_tool_choice_is_read(choice: Any, expected: ToolChoice) -> None:
    assert read({"messages": [USER], "tools": [LS], "tool_choice": choice}).choice == expected


def test_limits_and_sampling_are_read() -> None:
    request = read(
        {
            "model": "any/name",
            "messages": [USER],
            "max_tokens": 7,
            "stop_sequences": ["a", "", "b"],
            "stream": True,
            "temperature": 0.5,
            "top_k": 3,
            "top_p": 0.9,
        }
    )
    assert request.model == "any/name"
    assert request.limits == (7, ["a", "b"], True, False)
    assert (request.sampling.temperature, request.sampling.top_k, request.sampling.top_p) == (0.5, 3, 0.9)
    assert request.sampling.logprobs is None


def test_what_is_left_out_takes_the_defaults() -> None:
    request = read({"messages": [USER]})
    assert request.model == "loaded"
    assert request.limits == (4096, [], False, False)
    assert request.conversation.thinking == Thinking()
    assert request.format is None


SCHEMA = {"type": "json_schema", "schema": {"type": "object"}}


@pytest.mark.parametrize("more", [{"output_config": {"format": SCHEMA, "effort": "low"}}, {"output_format": SCHEMA}])
def test_a_wish_for_structured_output_is_handed_on(more: Any) -> None:
    assert read({"messages": [USER], **more}).format == SCHEMA


def test_fields_that_mean_nothing_here_are_passed_over() -> None:
    body = {
        "messages": [USER],
        "metadata": {"user_id": 1},
        "context_management": {"edits": []},
        "n": 3,
        "logprobs": 7,
        "betas": [],
    }
    assert read(body).conversation.messages == [Message("user", "hi")]


def test_a_count_has_the_shape_of_the_api() -> None:
    assert token_count(12) == {"input_tokens": 12}


def block(value: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [value]}]}


def inside(value: Any) -> dict[str, Any]:
    return block(result("i", [value]))


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}

BAD = [
    ({}, "missing messages"),
    ({"messages": "x"}, "messages: expected a list, got a string"),
    ({"messages": []}, "messages: must not be empty"),
    ({"messages": [{"role": "system", "content": ""}]}, "messages: say nothing"),
    ({"messages": [3]}, "messages[0]: expected an object, got a number"),
    ({"messages": [{"role": "wizard"}]}, "messages[0].role: unknown role 'wizard'"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role: unknown role 'tool'"),
    ({"messages": [{"role": 3}]}, "messages[0].role: expected a string, got a number"),
    ({"messages": [USER, {"role": "user", "content": {}}]}, "messages[1].content: expected a string or a list, got an object"),
    (block("x"), "messages[0].content[0]: expected an object, got a string"),
    (block({}), "messages[0].content[0].type: is missing"),
    (block({"type": []}), "messages[0].content[0].type: expected a string, got a list"),
    (block({"type": "document"}), "messages[0].content[0].type: expected text, thinking, tool_use"),
    (block({"type": "text", "text": 1}), "messages[0].content[0].text: expected a string, got a number"),
    (block({"type": "thinking", "thinking": []}), "messages[0].content[0].thinking: expected a string, got a list"),
    (block({"type": "tool_use", "id": "i"}), "messages[0].content[0].name: is missing"),
    (block({"type": "tool_use", "name": "n"}), "messages[0].content[0].id: is missing"),
    (block({"type": "tool_result"}), "messages[0].content[0].tool_use_id: is missing"),
    (block(result("i", 3)), "messages[0].content[0].content: expected a string or a list, got a number"),
    (block(IMAGE), "messages[0].content[0]: the loaded model has no vision"),
    (inside(IMAGE), "messages[0].content[0].content[0]: the loaded model has no vision"),
    (inside({"type": "tool_use"}), "messages[0].content[0].content[0].type: a tool_result holds text and images, got 'tool_use'"),
    (inside(None), "messages[0].content[0].content[0]: expected an object, got null"),
    ({"messages": [{"role": "assistant", "content": [IMAGE]}]}, "messages[0].content[0]: images belong in user messages"),
    ({"messages": [{"role": "system", "content": [IMAGE]}]}, "messages[0].content[0].type: a system text holds text only"),
    ({"messages": [USER], "system": 3}, "system: expected a string or a list, got a number"),
    (
        {"messages": [USER], "system": [text("a"), {"type": "text", "text": {}}]},
        "system[1].text: expected a string, got an object",
    ),
    ({"messages": [USER], "tools": {}}, "tools: expected a list"),
    ({"messages": [USER], "tool_choice": "auto"}, "tool_choice: expected an object, got a string"),
    ({"messages": [USER], "tool_choice": {"type": "must"}}, "tool_choice.type: expected auto, any, tool or none, got 'must'"),
    ({"messages": [USER], "tool_choice": {"type": "any"}}, "tool_choice: a call is required, but there are no tools"),
    ({"messages": [USER], "tools": [LS], "tool_choice": {"type": "tool"}}, "tool_choice.name: no tool is named ''"),
    ({"messages": [USER], "model": 3}, "model: expected a string"),
    ({"messages": [USER], "max_tokens": 0}, "max_tokens: must be at least 1, got 0"),
    ({"messages": [USER], "max_tokens": "x"}, "max_tokens: expected a number, got a string"),
    ({"messages": [USER], "stream": 1}, "stream: expected true or false, got a number"),
    ({"messages": [USER], "stop_sequences": 3}, "stop_sequences: expected a string or a list of strings, got a number"),
    ({"messages": [USER], "stop_sequences": [str(i) for i in range(65)]}, "stop_sequences: at most 64 stop strings, got 65"),
    ({"messages": [USER], "temperature": -1}, "temperature: expected a number between 0 and 100, got -1"),
    ({"messages": [USER], "thinking": 3}, "thinking: expected true or false or an object, got a number"),
    ({"messages": [USER], "thinking": {"type": 3}}, "thinking.type: expected a string, got a number"),
    ({"messages": [USER], "output_config": 3}, "output_config: expected an object, got a number"),
    ({"messages": [USER], "output_config": {"effort": "huge"}}, "output_config.effort: expected one of max, high"),
    ({"messages": [USER], "output_config": {"format": 3}}, "output_config.format: expected an object, got a number"),
    (
        {"messages": [USER], "output_config": {"format": {"type": "x"}}},
        "output_config.format.type: expected json_schema, got 'x'",
    ),
    ({"messages": [USER], "output_format": {"type": "json_schema"}}, "output_format.schema: is missing"),
    ({"messages": [USER], "reasoning_effort": 50}, "reasoning_effort: expected a string, got a number"),
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
_names = ["type", "role", "content", "text", "thinking", "id", "name", "input", "tool_use_id", "source"]
_words = ["text", "thinking", "tool_use", "tool_result", "image", "user", "assistant", "system"]
near_blocks = st.dictionaries(st.sampled_from(_names), st.sampled_from(_words) | json_values, max_size=5)
near_messages = st.dictionaries(
    st.sampled_from(["role", "content"]), st.sampled_from(_words) | st.lists(near_blocks, max_size=3) | json_values
)
near_bodies = st.fixed_dictionaries(
    {"messages": st.lists(near_messages, max_size=3) | json_values},
    optional={
        name: json_values
        | st.dictionaries(st.sampled_from(["type", "effort", "format", "name"]), st.sampled_from(_words), max_size=3)
        for name in (
            "system",
            "tools",
            "tool_choice",
            "thinking",
            "output_config",
            "max_tokens",
            "stop_sequences",
            "stream",
            "model",
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
        assert request.conversation.messages
    else:
        assert refusal.status == 400
        assert refusal.param in body


MIXED = {"role": "user", "content": [text("x"), result("q"), text("y")]}


@given(st.lists(st.sampled_from([USER, CALLS, RESULTS, LATE, MIXED]), min_size=1))
def test_a_history_that_grew_begins_with_what_it_grew_from(messages: list[dict[str, Any]]) -> None:
    grown = conversation(*messages)
    for end in range(1, len(messages)):
        before = conversation(*messages[:end])
        assert grown[: len(before)] == before


def test_the_time_to_read_a_history_is_linear_in_its_length() -> None:
    def seconds(pairs: int) -> float:
        body = {"messages": []}
        for i in range(pairs):
            body["messages"] += [
                {"role": "assistant", "content": [text("go"), use(f"t{i}", dir="/")]},
                {"role": "user", "content": [result(f"t{i}"), text("next")]},
            ]
        took = []
        for _ in range(3):
            began = time.process_time()
            request = read_request(body, SERVED)
            took.append(time.process_time() - began)
            assert len(request.conversation.messages) == 3 * pairs
            assert not request.undeclared
        return min(took)

    assert seconds(4096) < 10 * seconds(1024)
