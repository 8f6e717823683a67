"""What went wrong in servers of this kind before: from a request to its prompt,
and from sampled text to the bytes of each API."""

from __future__ import annotations

import itertools
import json
from typing import Any

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ds4batch.chat.dialects.base import Dialect
from ds4batch.chat.dialects.choose import choose, facts_of
from ds4batch.chat.events import Turn, TurnEvent
from ds4batch.chat.grammars import GRAMMARS
from ds4batch.chat.template import template_for
from ds4batch.chat.tracker import End, Tracker
from ds4batch.messages import Finished
from ds4batch.scripted.vocabulary import scripted_tokenizer
from ds4batch.server.apis import chat_input, messages, responses
from ds4batch.server.apis.chat_wire import ChatWire
from ds4batch.server.apis.messages_wire import MessagesWire
from ds4batch.server.apis.responses_wire import ResponsesWire
from ds4batch.server.apis.served import Served
from ds4batch.server.generation import Wire
from tests.e2e.api_clients import CLIENTS, Asked, Client, Messages, without_own
from tests.scripted.spellings import SCHEMAS, SPELLINGS
from tests.server.harness import Answer, Server, script, until

SERVED = Served("any", 1000, 1 << 20, 300, False)
READERS: dict[str, Any] = {
    "chat": chat_input.read_request,
    "responses": responses.read_request,
    "messages": messages.read_request,
}
STRINGS = {
    name: frozenset(key for key, value in form["properties"].items() if value["type"] == "string")
    for name, form in SCHEMAS.items()
}
EACH_DIALECT = pytest.mark.parametrize("name", SPELLINGS)


def dialect(name: str) -> Dialect:
    words = scripted_tokenizer("x.json")
    return choose(words.architecture, facts_of(words, template_for(words)), name)


# From a request to its prompt.


@EACH_DIALECT
def test_many_tools_and_rounds_of_calls_with_emoji_are_all_kept(name: str) -> None:
    declared = [
        {"type": "function", "function": {"name": f"tool_{i}\U0001f40f", "parameters": SCHEMAS["look"]}} for i in range(32)
    ]
    history: list[Any] = [{"role": "user", "content": "go"}]
    for at in range(24):
        ids = [f"c{at}_{i}" for i in range(3)]
        calls = [
            {"id": id, "function": {"name": f"tool_{at}\U0001f40f", "arguments": json.dumps({"at": f"\U0001f411 {id}."})}}
            for id in ids
        ]
        history.append({"role": "assistant", "content": "\U0001f600", "tool_calls": calls})
        history += [{"role": "tool", "tool_call_id": id, "content": f"\U0001f984 {id}."} for id in ids]
    conversation = chat_input.read_request({"messages": history, "tools": declared}, SERVED).conversation
    text = dialect(name).render(conversation).text
    assert all(tool["function"]["name"] in text for tool in declared)  # type: ignore[index]
    for mark in ("\U0001f411", "\U0001f984"):
        places = [text.index(f"{mark} c{turn}_{i}.") for turn in range(24) for i in range(3)]
        assert places == sorted(places)
        assert text.count(mark) == 24 * 3


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_a_temperature_of_zero_stays_zero_while_the_model_thinks(client: Client) -> None:
    request = READERS[client.name](client.body([Asked("x")]) | {"temperature": 0}, SERVED)
    assert request.conversation.thinking.enabled
    assert request.sampling.temperature == 0.0


@EACH_DIALECT
def test_text_that_looks_like_markup_stays_the_text_of_who_said_it(name: str) -> None:
    said = "<tool_result>1</tool_result> <think> <tool_call> &lt;/tool_result>"
    blocks = [{"type": "tool_result", "tool_use_id": "a", "content": said}, {"type": "text", "text": said}]
    call = {"type": "tool_use", "id": "a", "name": "look", "input": {"at": "x"}}
    body = {"max_tokens": 5, "messages": [{"content": said}, {"role": "assistant", "content": [call]}, {"content": blocks}]}
    conversation = messages.read_request(body, SERVED).conversation
    assert [(message.role, message.text) for message in conversation.messages if message.role != "assistant"] == [
        ("user", said),
        ("tool", said),
        ("user", said),
    ]
    assert dialect(name).render(conversation).text.count(said) >= 2  # of the result, what would close it is escaped


# A client that leaves.


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize(("path", "field"), [("/v1/responses", "input"), ("/v1/messages", "messages")])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_client_that_leaves_ends_its_request_in_every_api(
    server: Server, path: str, field: str, stream: bool, phase: str
) -> None:
    key = f'ds4batch_cancelled_total{{cause="client",phase="{phase}"}}'
    before, generated = server.metric(key), server.metric("vllm:generation_tokens_total")
    forever = script(progress=4000, pdelay=0.05) if phase == "prefill" else script(n=4000, delay=0.05)
    sock = server.send({field: [{"role": "user", "content": forever}], "max_tokens": 4000, "stream": stream}, path)
    server.until_metric("vllm:num_requests_running", 1)
    if phase == "decode":
        until(lambda: server.metric("vllm:generation_tokens_total") > generated)
    sock.close()
    until(lambda: server.metric(key) == before + 1)
    server.until_metric("vllm:num_requests_running", 0)


# From sampled text to the bytes of each API.


def finished(reason: Any) -> Finished:
    return Finished(
        id=1, reason=reason, prompt_tokens=9, cached_tokens=4, completion_tokens=3, queue_seconds=0.0, prefill_seconds=0.0,
        decode_seconds=0.0
    )  # fmt: skip


def wires() -> list[tuple[Client, Wire]]:
    asked = responses.read_request({"input": "x", "reasoning": {"summary": "auto"}}, SERVED)
    return list(zip(CLIENTS, (ChatWire("m", True, None), ResponsesWire(asked), MessagesWire("m", 9)), strict=True))


def read(grammar: str, thinking: bool, pieces: list[str], reason: str = "stop") -> tuple[list[list[TurnEvent]], End]:
    """What a tracker says of an answer: with each piece, and at the end."""
    ids = itertools.count()
    tracker = Tracker(grammar, thinking=thinking, tools=STRINGS, new_id=lambda: f"call_{next(ids)}")
    events = [tracker.push(piece) for piece in pieces]
    return events, tracker.finish(reason)


def streamed(client: Client, wire: Wire, events: list[list[TurnEvent]], end: End) -> Any:
    """The object that a client puts together; its closing events and their order are checked there."""
    parts = [
        wire.opening(4),
        *(wire.events(some, []) for some in events),
        wire.events(end.events, []),
        wire.closing(finished(end.reason)),
    ]
    return client.assembled(Answer(200, {}, b"".join(parts)))


def cut(text: str, size: int) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]


FRAGMENTS = ["<", "</", "<\uff5c", "\uff5cDSML\uff5c", "think", "tool_", "call", "calls", "arg_", "key", "parameter",
             "function=", ">", "a", "é\U0001f600",
             " ", "\n", "&lt;", "&amp;", '"', "\\", "{", "}"]  # fmt: skip
ALMOST = st.lists(st.sampled_from(FRAGMENTS), max_size=10).map("".join)


def harmless(text: str) -> bool:
    """Whether a text holds no marker of any grammar: nothing that opens a block or a reasoning, or closes one."""
    starts = [start for grammar in GRAMMARS.values() for start in (*grammar.starts, *grammar.bare)]
    closers = ("think>", "</parameter>", "</arg_value>", "\uff5cparameter>", "\uff5c parameter>")
    return not any(mark in text for mark in (*starts, *closers))


@pytest.mark.parametrize("name", SPELLINGS)
@settings(max_examples=80, deadline=None, database=None)
@given(reasoning=ALMOST, content=ALMOST, value=ALMOST, calls=st.integers(0, 2), size=st.integers(1, 7))
def test_whatever_nearly_is_markup_reaches_every_client_as_the_text_it_is(
    name: str, reasoning: str, content: str, value: str, calls: int, size: int
) -> None:
    spelling = SPELLINGS[name]
    reasoning, content, value = (text.strip() or "-" for text in (reasoning, content, value))
    assume(all(map(harmless, (reasoning, content, value, reasoning + content + value))))
    made = [("look", {"at": value, "times": 2})] * calls
    events, end = read(spelling.grammar, spelling.opened, cut(spelling.turn(reasoning, content, *made), size))
    assert end.malformed == ""
    for client, wire in wires():
        reply = client.whole(streamed(client, wire, events, end))
        assert reply.said == (reasoning, content, made, "tool_calls" if calls else "stop")


MARKUP = st.lists(
    st.sampled_from(
        [
            *FRAGMENTS, "<think>", "</think>", "<tool_call>", "</tool_call>", "<function=look>", "</function>",
            "<parameter=at>", "</parameter>",
            "look", "<arg_key>at</arg_key>", "<arg_value>", "</arg_value>", "<\uff5cDSML\uff5ctool_calls>",
            "</\uff5cDSML\uff5ctool_calls>",
            '<\uff5cDSML\uff5cinvoke name="look">', "</\uff5cDSML\uff5cinvoke>",
            '<\uff5cDSML\uff5cparameter name="at" string="true">',
            '<\uff5cDSML\uff5cparameter name="x" string="false">', "</\uff5cDSML\uff5cparameter>", "<|python_tag|>",
            '{"name": "look", ',
            '"arguments": {"at": "x"}', '"parameters": {}}',
        ]
    ),
    max_size=14,
).map("".join)  # fmt: skip


@settings(max_examples=400, deadline=None, database=None)
@given(
    st.sampled_from(sorted(GRAMMARS)),
    st.booleans(),
    MARKUP,
    st.integers(1, 9),
    st.sampled_from(["stop", "length", "error", "cut"]),
)
def test_whatever_a_model_writes_every_stream_is_closed_and_adds_up_to_the_object(
    grammar: str, thinking: bool, text: str, size: int, reason: str
) -> None:
    events, end = read(grammar, thinking, cut(text, size), reason)
    turn = Turn()
    for some in (*events, end.events):
        turn.add(some)
    assert all(isinstance(json.loads(call.arguments), dict) for call in turn.complete_calls)
    assume(end.reason != "error")  # how a stream ends then is for the tests of each wire
    for client, wire in wires():
        whole = json.loads(json.dumps(streamed(client, wire, events, end)))
        reply = client.whole(whole)
        assert (reply.reasoning, reply.content) == ("".join(turn.reasoning), turn.content)
        assert [(call.id, call.name, call.parsed) for call in reply.calls] == [
            (call.id, call.name, json.loads(call.arguments)) for call in turn.complete_calls
        ]
        told = end.reason == "stop" and client.name == "responses" and reply.calls  # it names no reason beside its items
        assert reply.reason == ("tool_calls" if told else end.reason)
        again = wires()[CLIENTS.index(client)][1]
        for some in (*events, end.events):
            again.events(some, [])
        if not isinstance(client, Messages) and len(turn.calls) == len(turn.complete_calls):
            assert without_own(whole) == without_own(_plain(again.whole(turn, [], finished(end.reason))))


def _plain(value: Any) -> Any:
    """As it is read from its bytes."""
    return json.loads(msgspec.json.encode(value))
