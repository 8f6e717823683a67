from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import httpx
import msgspec
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.lib.streaming.chat import ChatCompletionStreamState
from turns import any_turns, batches, broken_ids, finished, plain_turns, turn_of

from ds4batch.chat.events import CallBroken, CallDelta, CallEnd, CallStart, Content, Reasoning, ReasoningEnd, TurnEvent
from ds4batch.messages import TokenLogprob
from ds4batch.server.apis.chat_wire import ChatWire

REASONS = st.sampled_from(["stop", "length", "tool_calls", "error"])


class Spelling:
    """A tokenizer whose tokens are letters."""

    vocab_size = 26
    stop_ids = frozenset[int]()

    def encode(self, text: str) -> list[int]:
        return [ord(char) - 97 for char in text]

    def with_bos(self, ids: list[int]) -> list[int]:
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(chr(97 + id) for id in ids)

    def token_bytes(self, token: int) -> bytes:
        return bytes([97 + token])


def frames(stream: bytes) -> list[Any]:
    datas = [frame.removeprefix("data: ") for frame in stream.decode().split("\n\n")[:-1]]
    assert datas[-1] == "[DONE]"
    return [json.loads(data) for data in datas[:-1]]


def assembled(stream: bytes) -> dict[str, Any]:
    """The completion that the official library makes of the bytes of a response."""
    answer = httpx.Response(200, headers={"Content-Type": "text/event-stream"}, content=stream)
    transport = httpx.MockTransport(lambda request: answer)
    with openai.OpenAI(base_url="http://server/v1", api_key="any", http_client=httpx.Client(transport=transport)) as client:
        state = ChatCompletionStreamState()
        for chunk in client.chat.completions.create(model="m", messages=[], stream=True):
            state.handle_chunk(chunk)
    return state.current_completion_snapshot.to_dict(mode="json")


def plain(completion: dict[str, Any], without: set[str]) -> dict[str, Any]:
    """What the answer says, in one form for what was streamed and what was not."""
    (choice,) = completion["choices"]
    message = choice["message"]
    return {
        "head": [completion[name] for name in ("id", "object", "created", "model")],
        "usage": completion["usage"],
        "finish_reason": choice["finish_reason"],
        "logprobs": ((choice.get("logprobs") or {}).get("content")) or [],
        "role": message["role"],
        "content": message.get("content") or "",
        "reasoning": message.get("reasoning_content", ""),
        "calls": [
            (call["id"], call["type"], call["function"]["name"], json.loads(call["function"]["arguments"]))
            for call in message.get("tool_calls") or []
            if call["id"] not in without
        ],
    }


def whole(wire: ChatWire, events: list[TurnEvent], items: list[TokenLogprob], reason: str) -> dict[str, Any]:
    return json.loads(msgspec.json.encode(wire.whole(turn_of(events), items, finished(reason))))


@given(st.data(), plain_turns() | any_turns(), REASONS, st.booleans())
def test_the_completion_the_official_library_assembles_is_the_whole_one(
    data: Any, events: list[TurnEvent], reason: str, spelt: bool
) -> None:
    wire = ChatWire("m", True, Spelling() if spelt else None)
    stream, items = wire.opening(), []
    for part, some in data.draw(batches(events)):
        stream += wire.events(part, some)
        items += some
    got = assembled(stream + wire.closing(finished(reason)))
    assert plain(got, broken_ids(events)) == plain(whole(wire, events, items, reason), set())


def test_the_chunks_come_in_the_order_of_the_protocol() -> None:
    wire = ChatWire("name", True, None)
    events: list[TurnEvent] = [
        Reasoning("look"),
        ReasoningEnd(),
        Content("Hi."),
        CallStart(0, "call_1", "ls"),
        CallDelta(0, '{"cmd":'),
        CallDelta(0, '"x"}'),
        CallEnd(0),
    ]
    *chunks, usage = frames(wire.opening() + wire.events(events, []) + wire.closing(finished("tool_calls")))
    head = {name: usage[name] for name in ("id", "object", "created", "model")}
    assert head["id"].startswith("chatcmpl-")
    assert (head["object"], head["model"]) == ("chat.completion.chunk", "name")
    deltas = [
        {"role": "assistant"},
        {"reasoning_content": "look"},
        {"content": "Hi."},
        {"tool_calls": [{"index": 0, "id": "call_1", "type": "function", "function": {"name": "ls", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"cmd":'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '"x"}'}}]},
    ]
    assert chunks == [
        *({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas),
        {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]},
    ]
    assert usage == {
        **head,
        "choices": [],
        "usage": {
            "prompt_tokens": 10,
            "completion_tokens": 2,
            "total_tokens": 12,
            "prompt_tokens_details": {"cached_tokens": 7, "cache_write_tokens": 3},
        },
    }


def test_usage_is_streamed_only_where_it_is_asked_for() -> None:
    wire = ChatWire("m", False, None)
    assert all(chunk["choices"] for chunk in frames(wire.opening() + wire.closing(finished())))


def test_a_whole_answer_of_calls_has_empty_content_and_compact_arguments() -> None:
    call: list[TurnEvent] = [CallStart(0, "i", "n"), CallDelta(0, '{"a": "x y",  "n": 1.0}'), CallEnd(0)]
    (choice,) = whole(ChatWire("m", False, None), call, [], "tool_calls")["choices"]
    assert choice == {
        "index": 0,
        "message": {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "i", "type": "function", "function": {"name": "n", "arguments": '{"a":"x y","n":1.0}'}}],
        },
        "finish_reason": "tool_calls",
    }


def test_a_whole_answer_has_reasoning_only_where_there_is_some() -> None:
    wire = ChatWire("m", False, None)
    assert whole(wire, [Content("x")], [], "stop")["choices"][0]["message"] == {"role": "assistant", "content": "x"}
    cut: list[TurnEvent] = [Reasoning("a"), ReasoningEnd(), Reasoning("b")]
    message = whole(wire, cut, [], "length")["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "", "reasoning_content": "ab"}


@pytest.mark.parametrize("arguments", ["", "[]", '{"a":'])
def test_arguments_that_are_no_object_are_shown_as_an_empty_one(arguments: str) -> None:
    call: list[TurnEvent] = [CallStart(0, "i", "n"), CallDelta(0, arguments), CallEnd(0)]
    (choice,) = whole(ChatWire("m", False, None), call, [], "tool_calls")["choices"]
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == "{}"


def test_a_call_that_broke_is_no_call_of_the_whole_answer() -> None:
    events: list[TurnEvent] = [CallStart(0, "i", "n"), CallDelta(0, '{"a'), CallBroken(0), Content("raw")]
    (choice,) = whole(ChatWire("m", False, None), events, [], "length")["choices"]
    assert choice["message"] == {"role": "assistant", "content": "raw"}


def test_logprobs_go_with_the_first_chunk_of_a_batch_or_with_an_empty_one() -> None:
    wire = ChatWire("m", False, Spelling())
    item = TokenLogprob(1, -0.5, [(1, -0.5), (2, -1.0)])
    held, first, second, _ = frames(
        wire.events([], [item]) + wire.events([Content("a"), Content("b")], [item]) + wire.closing(finished())
    )
    entry = {"token": "b", "logprob": -0.5, "bytes": [98]}
    rival = {"token": "c", "logprob": -1.0, "bytes": [99]}
    shape = {"content": [{**entry, "top_logprobs": [entry, rival]}]}
    assert held["choices"][0] == {"index": 0, "delta": {"content": ""}, "logprobs": shape, "finish_reason": None}
    assert first["choices"][0]["logprobs"] == shape
    assert "logprobs" not in second["choices"][0]


def test_a_batch_that_says_nothing_sends_nothing() -> None:
    assert ChatWire("m", False, None).events([ReasoningEnd(), Content("")], []) == b""


def test_keepalive_is_a_comment_and_failure_a_named_event() -> None:
    wire = ChatWire("m", False, None)
    assert wire.keepalive() == b": prefill\n\n"
    assert wire.failed("died") == b'event: error\ndata: {"error":{"message":"died","type":"server_error"}}\n\n'


def test_the_official_library_raises_what_a_failed_stream_says() -> None:
    wire = ChatWire("m", False, None)
    with pytest.raises(openai.APIError, match="engine died"):
        assembled(wire.opening() + wire.failed("engine died"))
