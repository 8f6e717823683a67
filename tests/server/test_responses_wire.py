from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import httpx
import msgspec
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from turns import any_turns, batches, finished, turn_of

from ds4batch.chat.events import CallBroken, CallDelta, CallEnd, CallStart, Content, Reasoning, ReasoningEnd, TurnEvent
from ds4batch.messages import TokenLogprob
from ds4batch.server.apis.responses import read_request
from ds4batch.server.apis.responses_items import custom_input
from ds4batch.server.apis.responses_reasoning import unseal
from ds4batch.server.apis.responses_wire import ResponsesWire
from ds4batch.server.apis.served import Served
from ds4batch.server.errors import ApiError

SERVED = Served(model="served", max_tokens=1000, ctx=4096, vocab_size=100, levels=False)
TOOLS: list[Any] = [
    {"type": "function", "name": "cat", "parameters": {"type": "object"}, "strict": False},
    {"type": "namespace", "name": "l", "description": "", "tools": [{"type": "function", "name": "s"}]},
    {"type": "custom", "name": "spähen"},
    {"type": "tool_search", "execution": "client"},
]
OPT_INS = st.fixed_dictionaries(
    {}, optional={"reasoning": st.just({"summary": "auto"}), "include": st.just(["reasoning.encrypted_content"])}
)
REASONS = st.sampled_from(["stop", "length", "tool_calls", "error", "abort"])
SHOWN: dict[str, Any] = {"reasoning": {"summary": "auto"}}

_any_event: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
_DELTAS = {
    "response.output_text.delta": "message",
    "response.reasoning_summary_text.delta": "reasoning",
    "response.function_call_arguments.delta": "function_call",
}


class Spelling:
    """A tokenizer that spells tokens."""

    def token_bytes(self, token: int) -> bytes:
        return b"t%d" % token


def wire(*, logprobs: bool = False, **body: Any) -> ResponsesWire:
    """With ids that count, so that two wires make the same."""
    numbers = itertools.count()
    request = read_request({"input": "hi", "tools": TOOLS, "model": "m", **body}, SERVED)
    tokenizer: Any = Spelling() if logprobs else None
    return ResponsesWire(request, tokenizer, new_id=lambda prefix: f"{prefix}{next(numbers)}")


def parsed(stream: bytes) -> list[dict[str, Any]]:
    """The data of each event, which must be what the vendor's library takes for an event of that type."""
    out = []
    for frame in stream.decode().split("\n\n")[:-1]:
        assert "\n" not in frame
        event = json.loads(frame.removeprefix("data: "))
        assert list(event)[:2] == ["type", "sequence_number"]
        assert _any_event.validate_python(event).type == event["type"]
        out.append(event)
    assert [event["sequence_number"] for event in out] == list(range(len(out)))
    return out


def streamed(made: ResponsesWire, *events: TurnEvent, reason: str = "stop") -> list[dict[str, Any]]:
    return parsed(made.opening() + made.events(events, []) + made.closing(finished(reason)))


def names(events: Sequence[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


def plain(value: Any) -> dict[str, Any]:
    """An answer as its client sees it; its time is no matter here."""
    got = json.loads(msgspec.json.encode(value))
    assert isinstance(got, dict)
    got.pop("created_at")
    return got


class Client:
    """Puts a response together from its events and refuses every event that is out of order."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self.final: dict[str, Any] | None = None
        self._id = ""
        self._open: dict[str, Any] | None = None
        self._text = ""
        self._parts = 0

    def take(self, event: dict[str, Any]) -> None:
        assert self.final is None
        kind = event["type"]
        assert bool(self._id) == (kind != "response.created")
        if "response" in event:
            self._response(kind, event["response"])
            return
        assert event["output_index"] == len(self.items) - (self._open is not None)
        if kind == "response.output_item.added":
            assert self._open is None
            self._open, self._text, self._parts = event["item"], "", 0
            assert self._open["status"] == "in_progress"
            self.items.append(self._open)
        elif kind == "response.output_item.done":
            self._done(event["item"])
        else:
            assert self._open is not None
            assert event["item_id"] == self._open["id"]
            self._piece(kind, event)

    def _response(self, kind: str, response: dict[str, Any]) -> None:
        self._id = self._id or response["id"]
        assert response["id"] == self._id
        if kind in ("response.created", "response.in_progress"):
            assert (response["status"], response["output"]) == ("in_progress", [])
            return
        assert self._open is None
        assert kind == f"response.{response['status']}"
        assert response["output"] == self.items
        self.final = response

    def _piece(self, kind: str, event: dict[str, Any]) -> None:
        assert self._open is not None
        if kind in _DELTAS:
            assert self._open["type"] == _DELTAS[kind]
            self._text += event["delta"]
        elif kind.endswith("part.added"):
            self._parts += 1
            assert event["part"]["text"] == ""
        elif kind.endswith("part.done"):
            self._parts -= 1
            assert event["part"]["text"] == self._text
        elif kind == "response.function_call_arguments.done":
            assert event["arguments"] == self._text
            assert event["name"] == self._open["name"]
        else:
            assert kind in ("response.output_text.done", "response.reasoning_summary_text.done")
            assert event["text"] == self._text

    def _done(self, item: dict[str, Any]) -> None:
        assert self._open is not None
        assert not self._parts
        assert item["status"] in ("completed", "incomplete")
        for name in ("id", "type", "call_id", "name", "namespace", "role", "execution"):
            assert item.get(name) == self._open.get(name)
        if item["type"] == "message":
            assert [part["text"] for part in item["content"]] == [self._text]
        if item["type"] == "function_call":
            assert item["arguments"] == self._text
        if item["type"] == "reasoning" and item["summary"]:
            assert item["summary"] == [{"type": "summary_text", "text": self._text}]
        self._open.update(item)
        self._open = None


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


def test_a_forced_tool_must_exist() -> None:
    with pytest.raises(ApiError):
        wire(tool_choice={"type": "function", "name": "nowhere"})
