"""What the log and the trace say of a request's reuse."""

from __future__ import annotations

import json
import pathlib

import msgspec

from ds4batch.chat.conversation import Conversation, Message
from ds4batch.messages import Divergence, Routed
from ds4batch.server.metric_series import TIERS
from ds4batch.server.prompts import Prompt
from ds4batch.server.told import diverging_message, line
from scheduler.reuse import LADDER
from tests.server.harness import running
from tests.server.serve_fake import ByteTokenizer


def routed(**changes) -> Routed:
    plain = Routed(id=1, slot=3, tier="none", cached_tokens=0, victim="empty", evicted_tokens=0, queue_seconds=0.0)
    return msgspec.structs.replace(plain, **changes)


def test_the_line_says_how_much_came_from_where() -> None:
    assert line(routed(), 900) == "0 of 900 prompt tokens reused"
    found = line(routed(tier="memory-token", cached_tokens=812), 900)
    assert found == "812 of 900 prompt tokens reused (memory-token, slot 3)"
    disk = line(routed(tier="disk-text", cached_tokens=812, source="ab12.kv"), 900)
    assert disk == "812 of 900 prompt tokens reused (disk-text, ab12.kv, slot 3)"
    assert "; fork was found and could not be carried out" in line(routed(fell_from="fork"), 900)


def test_the_line_says_where_the_nearest_session_differs() -> None:
    differs = Divergence(slot=2, at=5, live=40, held="the cat", asked="the dog")
    assert line(routed(divergence=differs), 9).endswith(
        "; slot 2 agrees up to token 5 of its 40: it holds 'the cat', the request 'the dog'"
    )


def test_every_rung_of_the_ladder_has_its_series() -> None:
    assert {tier.name for tier in LADDER} | {"none"} <= set(TIERS)


TALK = Conversation(
    [Message("system", " be brief \n"), Message("user"), Message("user", "why?"), Message("user", "why?")],
)
TEXT = "system: be brief\nuser: \nuser: why?\nuser: why?\nassistant:"


def message_at(at: int) -> int | None:
    prompt = Prompt(TEXT, list(TEXT.encode()), conversation=TALK)
    return diverging_message(prompt, Divergence(slot=0, at=at, live=99, held="", asked=""), ByteTokenizer())


def test_a_divergence_lies_in_the_message_that_began_last() -> None:
    assert [message_at(at) for at in (0, 7)] == [None, None]
    assert [message_at(TEXT.index("be") + i) for i in (0, 4)] == [0, 0]
    assert message_at(TEXT.index("why?")) == 2
    assert [message_at(TEXT.rindex("why?") + i) for i in (-1, 0, 9)] == [2, 3, 3]


def test_the_log_has_a_line_for_each_request_and_the_trace_its_message(tmp_path: pathlib.Path) -> None:
    trace = tmp_path / "trace.jsonl"
    messages = [{"role": "user", "content": "first"}, {"role": "user", "content": '<<{"diverges": 20}>>'}]
    with running({"trace": str(trace)}) as server:
        server.request("POST", "/v1/chat/completions", {"messages": messages}, {"X-Request-Id": "r1"})
        server.line("request r1: 0 of ")
        server.line("slot 1 agrees up to token 20 of its 99: it holds 'left', the request 'right'")
        server.chat()
    first, second = map(json.loads, trace.read_text().splitlines())
    assert first["routed"]["divergence"] == {"slot": 1, "at": 20, "live": 99, "held": "left", "asked": "right"}
    assert first["divergence_message"] == 1
    assert (second["routed"]["divergence"], second["divergence_message"]) == (None, None)
