from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from turns import any_turns, batches, broken_ids, finished, plain_turns, turn_of

from ds4batch.chat.events import CallBroken, CallDelta, CallEnd, CallStart, Content, Reasoning, ReasoningEnd, TurnEvent
from ds4batch.server.apis.messages_wire import MessagesWire, error_body
from ds4batch.server.errors import ApiError, Unavailable, bad_field, context_length_exceeded

REASONS = st.sampled_from(["stop", "length", "tool_calls", "error"])
_DELTAS = {"thinking_delta": "thinking", "text_delta": "text", "input_json_delta": "tool_use", "signature_delta": "thinking"}


def frames(stream: bytes) -> list[dict[str, Any]]:
    """The data of each event; its name must be the type."""
    out = []
    for frame in stream.decode().split("\n\n")[:-1]:
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        out.append(event)
    return out


class Client:
    """Puts a message together as the vendor's libraries do, and refuses every event that is out of order."""

    def __init__(self) -> None:
        self.message: dict[str, Any] = {}
        self.ended = False
        self._open: dict[str, Any] | None = None
        self._json = ""

    def take(self, event: dict[str, Any]) -> None:
        assert not self.ended
        kind = event["type"]
        assert bool(self.message) == (kind != "message_start")
        getattr(self, "_" + kind)(event)

    def _message_start(self, event: dict[str, Any]) -> None:
        self.message = event["message"]
        assert self.message["content"] == []
        assert self.message["stop_reason"] is None

    def _content_block_start(self, event: dict[str, Any]) -> None:
        assert self._open is None
        assert self.message["stop_reason"] is None
        assert event["index"] == len(self.message["content"])
        self._open, self._json = event["content_block"], ""
        assert self._open.get("input", {}) == {}
        self.message["content"].append(self._open)

    def _content_block_delta(self, event: dict[str, Any]) -> None:
        assert self._open is not None
        assert event["index"] == len(self.message["content"]) - 1
        delta = dict(event["delta"])
        kind = delta.pop("type")
        assert _DELTAS[kind] == self._open["type"]
        ((field, text),) = delta.items()
        assert text
        assert not self._open.get("signature")  # the signature is the last
        if kind == "input_json_delta":
            self._json += text
        else:
            self._open[field] += text

    def _content_block_stop(self, event: dict[str, Any]) -> None:
        assert self._open is not None
        assert event["index"] == len(self.message["content"]) - 1
        if self._open["type"] == "thinking":
            assert self._open["signature"]
        if self._open["type"] == "tool_use" and self._json:
            try:
                self._open["input"] = json.loads(self._json)
            except json.JSONDecodeError:
                self._open["input"] = None
        self._open = None

    def _message_delta(self, event: dict[str, Any]) -> None:
        assert self._open is None
        assert self.message["stop_reason"] is None
        assert set(event["delta"]) == {"stop_reason", "stop_sequence"}
        self.message.update(event["delta"])
        self.message["usage"].update(event["usage"])

    def _message_stop(self, event: dict[str, Any]) -> None:
        assert self.message["stop_reason"] is not None
        self.ended = True


def streamed(wire: MessagesWire, events: list[TurnEvent], reason: str = "stop") -> bytes:
    return wire.opening() + wire.events(events, []) + wire.closing(finished(reason))


def assembled(stream: bytes) -> dict[str, Any]:
    client = Client()
    for event in frames(stream):
        client.take(event)
    assert client.ended
    return client.message


def whole(wire: MessagesWire, events: list[TurnEvent], reason: str) -> dict[str, Any]:
    return json.loads(msgspec.json.encode(wire.whole(turn_of(events), [], finished(reason))))


def by_kind(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose blocks of a kind are joined, whatever stands between them."""
    blocks = message["content"]
    return message | {
        "content": (
            "".join(block["thinking"] for block in blocks if block["type"] == "thinking"),
            "".join(block["text"] for block in blocks if block["type"] == "text"),
            [block for block in blocks if block["type"] == "tool_use"],
        )
    }


@given(st.data(), plain_turns(), REASONS)
def test_the_message_a_client_assembles_is_the_whole_one(data: Any, events: list[TurnEvent], reason: str) -> None:
    wire = MessagesWire("m", 10)
    stream = wire.opening(3)
    for part, items in data.draw(batches(events)):
        stream += wire.events(part, items)
    assert assembled(stream + wire.closing(finished(reason))) == whole(wire, events, reason)


@given(any_turns(), REASONS)
def test_whatever_the_order_a_stream_is_well_formed_and_says_what_the_whole_says(events: list[TurnEvent], reason: str) -> None:
    wire = MessagesWire("m", 10)
    got = assembled(streamed(wire, events, reason))
    got["content"] = [block for block in got["content"] if block.get("id") not in broken_ids(events)]
    assert by_kind(got) == by_kind(whole(wire, events, reason))


@given(any_turns(), st.integers(0, 30))
def test_a_turn_cut_off_anywhere_still_closes_its_blocks(events: list[TurnEvent], end: int) -> None:
    assembled(streamed(MessagesWire("m", 10), events[:end], "length"))


def test_the_events_come_in_the_order_of_the_protocol() -> None:
    wire = MessagesWire("name", 10)
    events: list[TurnEvent] = [
        Reasoning("a"),
        ReasoningEnd(),
        Reasoning("b"),
        ReasoningEnd(),
        Content("c"),
        Content("d"),
        CallStart(0, "toolu_1", "ls"),
        CallDelta(0, '{"x":'),
        CallDelta(0, "1}"),
        CallEnd(0),
        CallStart(1, "toolu_2", "pwd"),
        CallDelta(1, "{}"),
        CallEnd(1),
    ]
    start, *rest = frames(streamed(wire, events, "tool_calls"))
    signature = start["message"]["id"]
    assert signature.startswith("msg_")
    assert start == {
        "type": "message_start",
        "message": {
            "id": signature,
            "type": "message",
            "role": "assistant",
            "model": "name",
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {
                "input_tokens": 0,
                "cache_creation_input_tokens": 10,
                "cache_read_input_tokens": 0,
                "output_tokens": 0,
            },
        },
    }

    def block(index: int, start: dict[str, Any], *deltas: dict[str, Any]) -> list[dict[str, Any]]:
        return [
            {"type": "content_block_start", "index": index, "content_block": start},
            *({"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas),
            {"type": "content_block_stop", "index": index},
        ]

    thinking = {"type": "thinking", "thinking": "", "signature": ""}
    signed = {"type": "signature_delta", "signature": signature}
    assert rest == [
        *block(0, thinking, {"type": "thinking_delta", "thinking": "a"}, signed),
        *block(1, thinking, {"type": "thinking_delta", "thinking": "b"}, signed),
        *block(2, {"type": "text", "text": ""}, {"type": "text_delta", "text": "c"}, {"type": "text_delta", "text": "d"}),
        *block(
            3,
            {"type": "tool_use", "id": "toolu_1", "name": "ls", "input": {}},
            {"type": "input_json_delta", "partial_json": '{"x":'},
            {"type": "input_json_delta", "partial_json": "1}"},
        ),
        *block(
            4,
            {"type": "tool_use", "id": "toolu_2", "name": "pwd", "input": {}},
            {"type": "input_json_delta", "partial_json": "{}"},
        ),
        {
            "type": "message_delta",
            "delta": {"stop_reason": "tool_use", "stop_sequence": None},
            "usage": {
                "input_tokens": 0,
                "cache_creation_input_tokens": 3,
                "cache_read_input_tokens": 7,
                "output_tokens": 2,
            },
        },
        {"type": "message_stop"},
    ]


@pytest.mark.parametrize("events", [[], [Reasoning("a")], [Reasoning("a"), ReasoningEnd()], [Content("")]])
def test_an_answer_without_text_and_calls_has_an_empty_text_block(events: list[TurnEvent]) -> None:
    wire = MessagesWire("m", 10)
    assert assembled(streamed(wire, events))["content"][-1] == {"type": "text", "text": ""}
    assert whole(wire, events, "stop")["content"][-1] == {"type": "text", "text": ""}


def test_an_answer_of_calls_only_has_no_text_block() -> None:
    wire = MessagesWire("m", 10)
    events: list[TurnEvent] = [CallStart(0, "i", "n"), CallDelta(0, "{}"), CallEnd(0)]
    expected = [{"type": "tool_use", "id": "i", "name": "n", "input": {}}]
    assert assembled(streamed(wire, events, "tool_calls"))["content"] == expected
    assert whole(wire, events, "tool_calls")["content"] == expected


def test_a_call_that_broke_is_closed_and_its_text_follows_while_the_whole_message_has_no_such_call() -> None:
    wire = MessagesWire("m", 10)
    events: list[TurnEvent] = [CallStart(0, "i", "n"), CallDelta(0, '{"a'), CallBroken(0), Content("raw")]
    assert [block["type"] for block in assembled(streamed(wire, events, "length"))["content"]] == ["tool_use", "text"]
    assert whole(wire, events, "length")["content"] == [{"type": "text", "text": "raw"}]


@pytest.mark.parametrize(
    ("reason", "shown"), [("stop", "end_turn"), ("length", "max_tokens"), ("tool_calls", "tool_use"), ("error", "end_turn")]
)
def test_the_stop_reason_is_the_same_streamed_and_whole(reason: str, shown: str) -> None:
    wire = MessagesWire("m", 10)
    for message in (assembled(streamed(wire, [Content("x")], reason)), whole(wire, [Content("x")], reason)):
        assert message["stop_reason"] == shown
        assert message["stop_sequence"] is None


def test_a_calls_input_keeps_the_spelling_of_its_numbers() -> None:
    call: list[TurnEvent] = [CallStart(0, "i", "n"), CallDelta(0, '{"a": 1.50, "b": 123456789012345678901234567890}'), CallEnd(0)]
    encoded = msgspec.json.encode(MessagesWire("m", 1).whole(turn_of(call), [], finished("tool_calls")))
    assert b'"input":{"a":1.50,"b":123456789012345678901234567890}' in encoded


@pytest.mark.parametrize("arguments", ["", "[]", '{"a":', "NaN"])
def test_arguments_that_are_no_object_give_an_empty_input(arguments: str) -> None:
    call: list[TurnEvent] = [CallStart(0, "i", "n"), CallDelta(0, arguments), CallEnd(0)]
    assert whole(MessagesWire("m", 1), call, "tool_calls")["content"][0]["input"] == {}


@pytest.mark.parametrize(("cached", "read"), [(7, 7), (0, 0), (99, 10), (-1, 0)])
def test_cached_tokens_and_written_tokens_make_up_the_prompt(cached: int, read: int) -> None:
    usage = MessagesWire("m", 10).whole(turn_of([]), [], finished(cached=cached))["usage"]
    assert usage == {
        "input_tokens": 0,
        "cache_creation_input_tokens": 10 - read,
        "cache_read_input_tokens": read,
        "output_tokens": 2,
    }


def test_the_usage_at_the_start_knows_the_reused_tokens() -> None:
    (start,) = frames(MessagesWire("m", 10).opening(4))
    assert start["message"]["usage"]["cache_read_input_tokens"] == 4
    assert start["message"]["usage"]["cache_creation_input_tokens"] == 6


def test_keepalive_and_failure_are_named_events() -> None:
    wire = MessagesWire("m", 1)
    assert wire.keepalive() == b'event: ping\ndata: {"type":"ping"}\n\n'
    assert frames(wire.failed("engine died")) == [{"type": "error", "error": {"type": "api_error", "message": "engine died"}}]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (bad_field("messages[0]", "is odd"), "invalid_request_error"),
        (ApiError(404, "unknown endpoint"), "not_found_error"),
        (ApiError(409, "gone"), "invalid_request_error"),
        (ApiError(429, "busy"), "rate_limit_error"),
        (ApiError(500, "broken"), "api_error"),
        (Unavailable("loading"), "overloaded_error"),
    ],
)
def test_an_error_has_the_apis_own_shape(error: ApiError, kind: str) -> None:
    body = error_body(error)
    assert body.endswith(b"\n")
    assert json.loads(body) == {"type": "error", "error": {"type": kind, "message": error.message}}


def test_an_overflow_says_what_agents_look_for() -> None:
    error = json.loads(error_body(context_length_exceeded(16, 16, "messages")))["error"]
    assert error == {
        "type": "invalid_request_error",
        "message": "prompt is too long: 16 tokens > 15 maximum",
        "n_prompt_tokens": 16,
        "n_ctx": 16,
    }
