"""The events of a Responses stream, turn by turn, and the answer that is not streamed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from responses_reader import SERVED, SHOWN, Client, names, parsed, plain, streamed, wire
from turns import finished, turn_of

from ds4batch.chat.events import CallBroken, CallDelta, CallEnd, CallStart, Content, Reasoning, ReasoningEnd, TurnEvent
from ds4batch.messages import TokenLogprob
from ds4batch.server.apis.responses import read_request
from ds4batch.server.apis.responses_items import custom_input
from ds4batch.server.apis.responses_reasoning import unseal
from ds4batch.server.apis.responses_wire import ResponsesWire
from ds4batch.server.errors import ApiError


def test_the_events_of_a_whole_turn_come_in_order() -> None:
    got = streamed(
        wire(**SHOWN),
        Reasoning("let me "),
        Reasoning("think"),
        ReasoningEnd(),
        Content("I "),
        Content("look."),
        CallStart(0, "call_a", "cat"),
        CallDelta(0, '{"path":'),
        CallDelta(0, '"x"}'),
        CallEnd(0),
        reason="tool_calls",
    )
    assert names(got) == [
        "created",
        "output_item.added",
        "reasoning_summary_part.added",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    response = got[-1]["response"]
    assert response["id"].startswith("resp_")
    assert (response["object"], response["model"], response["error"]) == ("response", "m", None)
    assert [item["id"].split("_")[0] for item in response["output"]] == ["rs", "msg", "fc"]
    assert response["output"][2] == {
        "id": response["output"][2]["id"],
        "type": "function_call",
        "status": "completed",
        "name": "cat",
        "call_id": "call_a",
        "arguments": '{"path":"x"}',
    }


def test_reasoning_is_closed_when_the_model_closes_it_and_a_second_block_is_an_item() -> None:
    made = wire(**SHOWN)
    made.opening()
    assert b"output_item.done" not in made.events([Reasoning("a")], [])
    assert b"output_item.done" in made.events([ReasoningEnd()], [])
    made.events([Reasoning("b"), ReasoningEnd(), Content("c")], [])
    output = plain(made.whole(turn_of([]), [], finished()))["output"]
    assert [item["type"] for item in output] == ["reasoning", "reasoning", "message"]
    assert [item["summary"][0]["text"] for item in output[:2]] == ["a", "b"]


def test_reasoning_that_the_model_left_open_is_incomplete() -> None:
    got = streamed(wire(**SHOWN), Reasoning("a"), CallStart(0, "c", "cat"), CallDelta(0, "{}"), CallEnd(0))
    assert [item["status"] for item in got[-1]["response"]["output"]] == ["incomplete", "completed"]


def test_reasoning_is_hidden_without_a_wish_for_it() -> None:
    got = streamed(wire(), Content("a"), Reasoning("secret"), ReasoningEnd(), Content("b"))
    assert [item["content"][0]["text"] for item in got[-1]["response"]["output"]] == ["ab"]
    assert "secret" not in json.dumps(got)


def test_sealed_reasoning_shows_nothing_and_can_be_opened() -> None:
    got = streamed(wire(include=["reasoning.encrypted_content"]), Reasoning("secret"), ReasoningEnd(), Content("x"))
    assert names(got)[:3] == ["created", "output_item.added", "output_item.done"]
    item = got[-1]["response"]["output"][0]
    assert item["summary"] == []
    assert unseal(item["encrypted_content"]) == "secret"
    assert "secret" not in json.dumps(got)


def test_custom_and_search_calls_show_only_when_they_are_whole() -> None:
    got = streamed(
        wire(),
        CallStart(0, "c0", "spähen"),
        CallDelta(0, '{"input":"*** \\"x\\"'),
        CallDelta(0, '\\n"}'),
        CallEnd(0),
        CallStart(1, "c1", "tool_search"),
        CallDelta(1, '{"query": "a b",\n "limit": 340282366920938463463374607431768211456}'),
        CallEnd(1),
    )
    assert names(got) == ["created", *["output_item.added", "output_item.done"] * 2, "completed"]
    custom, search = got[-1]["response"]["output"]
    assert custom == {
        "id": custom["id"],
        "type": "custom_tool_call",
        "status": "completed",
        "name": "spähen",
        "call_id": "c0",
        "input": '*** "x"\n',
    }
    assert search == {
        "id": search["id"],
        "type": "tool_search_call",
        "status": "completed",
        "call_id": "c1",
        "execution": "client",
        "arguments": {"query": "a b", "limit": 2**128},
    }


def test_a_function_called_tool_search_is_a_function() -> None:
    made = wire(tools=[{"type": "function", "name": "tool_search"}])
    output = streamed(made, CallStart(0, "c", "tool_search"), CallDelta(0, "{}"), CallEnd(0))[-1]["response"]["output"]
    assert (output[0]["type"], output[0]["arguments"]) == ("function_call", "{}")


def test_a_tool_that_nobody_declared_keeps_its_name() -> None:
    output = streamed(wire(), CallStart(0, "c", "rm"), CallDelta(0, "{}"), CallEnd(0))[-1]["response"]["output"]
    assert (output[0]["type"], output[0]["name"]) == ("function_call", "rm")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input":"a\\nb"}', "a\nb"),
        ('{"patch": "x"}', "x"),
        ("{}", ""),
        ('{"a":"x","b":"y"}', '{"a":"x","b":"y"}'),
        ('{"a": 1}', '{"a": 1}'),
        ("*** Begin", "*** Begin"),
        ('["x"]', '["x"]'),
    ],
)
def test_a_custom_tool_gets_its_one_text(arguments: str, text: str) -> None:
    assert custom_input(arguments) == text


def test_a_broken_call_is_closed_as_incomplete_and_its_text_follows() -> None:
    got = streamed(wire(), CallStart(0, "c", "cat"), CallDelta(0, '{"a'), CallBroken(0), Content("<x>"))
    assert "function_call_arguments.done" not in names(got)
    assert [(item["type"], item["status"]) for item in got[-1]["response"]["output"]] == [
        ("function_call", "incomplete"),
        ("message", "completed"),
    ]


@pytest.mark.parametrize(
    ("reason", "status", "item", "details", "error"),
    [
        ("stop", "completed", "completed", None, None),
        ("tool_calls", "completed", "completed", None, None),
        ("length", "incomplete", "incomplete", {"reason": "max_output_tokens"}, None),
        ("error", "failed", "incomplete", None, {"code": "server_error", "message": "generation failed"}),
    ],
)
def test_the_end_of_a_turn_is_the_end_of_its_response(reason: str, status: str, item: str, details: Any, error: Any) -> None:
    got = streamed(wire(), Content("x"), reason=reason)[-1]
    assert got["type"] == f"response.{status}"
    response = got["response"]
    assert (response["status"], response["incomplete_details"], response["error"]) == (status, details, error)
    assert response["output"][0]["status"] == item
    assert response["usage"] == {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 7, "cache_write_tokens": 3},
        "output_tokens": 2,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 12,
    }


def test_an_empty_turn_has_no_items() -> None:
    got = streamed(wire(), Content(""), Reasoning(""), ReasoningEnd())
    assert names(got) == ["created", "completed"]
    assert got[-1]["response"]["output"] == []


def test_a_keepalive_is_an_event_in_the_sequence_and_may_come_first() -> None:
    made = wire()
    got = parsed(
        made.keepalive()
        + made.opening()
        + made.keepalive()
        + made.events([Content("x")], [])
        + made.keepalive()
        + made.closing(finished())
    )
    assert names(got)[:3] == ["created", "in_progress", "in_progress"]
    client = Client()
    for event in got:
        client.take(event)
    assert client.final is not None


@pytest.mark.parametrize("begin", [[], [Content("x")], [CallStart(0, "c", "cat"), CallDelta(0, "{")]])
def test_a_failure_closes_what_is_open_and_ends_the_response(begin: list[TurnEvent]) -> None:
    made = wire()
    client = Client()
    for event in parsed((made.events(begin, []) if begin else b"") + made.failed("the engine stopped")):
        client.take(event)
    assert client.final is not None
    assert client.final["status"] == "failed"
    assert client.final["error"] == {"code": "server_error", "message": "the engine stopped"}
    assert all(item["status"] == "incomplete" for item in client.items)


def test_logprobs_go_with_the_text_they_belong_to() -> None:
    made = wire(logprobs=True, **SHOWN)

    def token(i: int) -> TokenLogprob:
        return TokenLogprob(i, -0.5, [(i, -0.5), (7, -1.0)])

    sent = made.opening()
    sent += made.events([Reasoning("hm")], [token(0)])
    sent += made.events([ReasoningEnd()], [token(1)])
    sent += made.events([], [token(2)])
    sent += made.events([Content("a"), Content("b")], [token(3)])
    sent += made.events([CallStart(0, "c", "cat"), CallDelta(0, "{}"), CallEnd(0)], [token(4)])
    got = parsed(sent + made.closing(finished("tool_calls")))
    deltas = [[entry["token"] for entry in event["logprobs"]] for event in got if event["type"] == "response.output_text.delta"]
    assert deltas == [["t2", "t3"], []]
    part = got[-1]["response"]["output"][1]["content"][0]
    assert [entry["token"] for entry in part["logprobs"]] == ["t2", "t3"]
    assert part["logprobs"][0]["top_logprobs"][1] == {"token": "t7", "logprob": -1.0, "bytes": list(b"t7")}


def test_the_tool_choice_is_told_as_it_was_put() -> None:
    def told(choice: Any) -> Any:
        return parsed(wire(tool_choice=choice).opening())[0]["response"]["tool_choice"]

    assert [told(choice) for choice in (None, "auto", "none", "required")] == ["auto", "auto", "none", "required"]
    for choice in ({"type": "custom", "name": "spähen"}, {"type": "function", "name": "s", "namespace": "l"}):
        assert told(choice) == choice


def test_ids_are_fresh_in_each_answer() -> None:
    request = read_request({"input": "hi"}, SERVED)
    one, two = (parsed(ResponsesWire(request).opening())[0]["response"]["id"] for _ in range(2))
    assert one != two
    assert len(one) == len("resp_") + 24


def test_a_forced_tool_must_exist() -> None:
    with pytest.raises(ApiError):
        wire(tool_choice={"type": "function", "name": "nowhere"})
