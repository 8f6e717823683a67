"""What holds of every Responses stream, and what the vendor's library makes of it."""

from __future__ import annotations

import json
from typing import Any

import httpx
import msgspec
import openai
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response
from responses_reader import OPT_INS, REASONS, SERVED, TOOLS, Client, parsed, plain, streamed, wire
from turns import any_turns, batches, finished, turn_of

from ds4batch.chat.events import TurnEvent
from ds4batch.server.apis.responses import read_request
from ds4batch.server.apis.responses_items import custom_input
from ds4batch.server.apis.responses_reasoning import unseal


@given(st.data(), any_turns(), OPT_INS, REASONS, st.booleans())
def test_a_stream_adds_up_to_the_answer_that_is_not_streamed(
    data: st.DataObject, events: list[TurnEvent], body: dict[str, Any], reason: str, logprobs: bool
) -> None:
    parts = data.draw(batches(events))
    stream, whole = wire(logprobs=logprobs, **body), wire(logprobs=logprobs, **body)
    sent = stream.opening() + b"".join([stream.events(*part) for part in parts]) + stream.closing(finished(reason))
    client = Client()
    for event in parsed(sent):
        client.take(event)
    for part in parts:
        whole.events(*part)
    items = [item for part in parts for item in part[1]]
    assert client.final is not None
    answer = whole.whole(turn_of(events), items, finished(reason))
    assert plain(client.final) == plain(answer)
    Response.model_validate(json.loads(msgspec.json.encode(answer)))


@given(any_turns(), OPT_INS)
def test_a_stream_says_no_less_than_the_turn(events: list[TurnEvent], body: dict[str, Any]) -> None:
    output = streamed(wire(**body), *events)[-1]["response"]["output"]
    turn = turn_of(events)
    messages = [item["content"][0]["text"] for item in output if item["type"] == "message"]
    assert "".join(messages) == turn.content
    assert "" not in messages
    calls = [item for item in output if "call_id" in item]
    assert [(item["call_id"], item["status"] == "completed") for item in calls] == [
        (call.id, call.complete) for call in turn.calls
    ]
    for item, call in zip(calls, turn.calls, strict=True):
        if item["type"] == "function_call":
            assert (item["name"], item["namespace"], item["arguments"]) == ("s", "l", call.arguments)
        else:
            assert (item["name"], item["input"]) == ("spähen", custom_input(call.arguments))
    thoughts = [item for item in output if item["type"] == "reasoning"]
    assert bool(thoughts) == (bool(body) and any(turn.reasoning))
    if "reasoning" in body:
        assert "".join(item["summary"][0]["text"] for item in thoughts) == "".join(turn.reasoning)
    if "include" in body:
        assert "".join(unseal(item["encrypted_content"]) or "" for item in thoughts) == "".join(turn.reasoning)


@given(st.data(), any_turns(), OPT_INS)
def test_an_answer_does_not_depend_on_how_it_is_cut(data: st.DataObject, events: list[TurnEvent], body: dict[str, Any]) -> None:
    cut = wire(**body)
    sent = cut.opening() + b"".join([cut.events(*part) for part in data.draw(batches(events))]) + cut.closing(finished())
    at_once, in_parts = streamed(wire(**body), *events), parsed(sent)
    for event in at_once + in_parts:
        if "response" in event:
            event["response"] = plain(event["response"])
    assert at_once == in_parts


@given(any_turns(), OPT_INS, REASONS)
def test_an_answer_is_accepted_back(events: list[TurnEvent], body: dict[str, Any], reason: str) -> None:
    output = streamed(wire(**body), *events, reason=reason)[-1]["response"]["output"]
    again = read_request({"input": [{"role": "user", "content": "hi"}, *output], "tools": TOOLS}, SERVED)
    turn = turn_of(events)
    messages = again.conversation.messages[1:]
    assert "".join(message.text for message in messages) == turn.content
    assert [call.id for message in messages for call in message.calls] == [call.id for call in turn.complete_calls]
    if body:
        assert "".join(message.reasoning for message in messages).replace("\n", "") == "".join(turn.reasoning).replace("\n", "")


def served_by(stream: bytes, kind: str = "text/event-stream") -> openai.OpenAI:
    transport = httpx.MockTransport(lambda _: httpx.Response(200, content=stream, headers={"Content-Type": kind}))
    return openai.OpenAI(api_key="x", base_url="http://test/v1", http_client=httpx.Client(transport=transport))


@given(any_turns(), OPT_INS)
def test_the_vendors_library_puts_the_same_response_together(events: list[TurnEvent], body: dict[str, Any]) -> None:
    made = wire(**body)
    sent = made.opening() + made.events(events, []) + made.keepalive() + made.closing(finished())
    with served_by(sent) as client, client.responses.stream(model="m", input="hi") as stream:
        final = stream.get_final_response()
    whole = wire(**body)
    whole.events(events, [])
    expected = msgspec.json.encode(whole.whole(turn_of(events), [], finished()))
    with served_by(expected, "application/json") as client:
        direct = client.responses.create(model="m", input="hi")
    assert final.output_text == direct.output_text == turn_of(events).content
    assert final.usage == direct.usage
    assert [item.to_dict() for item in direct.output] == json.loads(expected)["output"]
    assert [(item.id, item.type) for item in final.output] == [(item.id, item.type) for item in direct.output]


def test_the_vendors_library_sees_a_failure() -> None:
    made = wire()
    with served_by(made.opening() + made.failed("gone")) as client:
        last = list(client.responses.create(model="m", input="hi", stream=True))[-1]
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert last.response.error.message == "gone"
