"""What the log and the trace say of a request's reuse."""

from __future__ import annotations

from typing import Any

import msgspec

from ds4batch.chat.conversation import Conversation, Message
from ds4batch.messages import Divergence
from ds4batch.server.metric_series import TIERS
from ds4batch.server.prompts import Prompt
from ds4batch.server.request_record import DivergenceNote, ErrorNote, Record
from ds4batch.server.told import diverging_message, line
from scheduler.reuse import LADDER
from tests.server.serve_fake import ByteTokenizer


def record(**changes: Any) -> Record:
    plain = Record(
        time="2026-01-02T03:04:05.678Z",
        request="r1",
        key="",
        api="chat",
        route="/v1/chat/completions",
        model="m",
        stream=False,
        status=200,
        finish="stop",
        error=None,
        gone=None,
        tier="none",
        slot=3,
        checkpoint=None,
        fell_from=None,
        divergence=None,
        tokens_in=900,
        tokens_cached=0,
        tokens_out=12,
        queue_seconds=0.5,
        ttft_seconds=1.25,
        itl_mean_seconds=0.01,
        itl_max_seconds=0.0301,
        e2e_seconds=2.0,
        drafts=None,
        drafts_accepted=None,
        retries=0,
        jobs=[7],
        device_memory_bytes=None,
    )
    return msgspec.structs.replace(plain, **changes)


def test_the_line_says_how_it_ended_and_how_much_came_from_where() -> None:
    times = "queue 0.500 s, first token 1.250 s, gap 0.010 s, longest 0.030 s, all 2.000 s"
    none = "request r1: chat, 200 stop; 0 of 900 prompt tokens reused (slot 3), 12 generated; "
    assert line(record()) == none + times
    found = line(record(tier="memory-token", tokens_cached=812, key="anna", stream=True))
    assert found.startswith("request r1 of anna: chat stream, 200 stop; 812 of 900 prompt tokens reused (memory-token, slot 3), ")
    disk = line(record(tier="disk-text", tokens_cached=812, checkpoint="ab12.kv"))
    assert "812 of 900 prompt tokens reused (disk-text, ab12.kv, slot 3)" in disk
    assert "; fork was found and could not be carried out; " in line(record(fell_from="fork"))
    assert ", 12 generated, 3 of 5 drafts right; " in line(record(drafts=5, drafts_accepted=3))
    assert "; tried twice; " in line(record(retries=1))
    assert line(record(device_memory_bytes=0)).endswith("; device memory 0 bytes")


def test_the_line_says_where_the_nearest_session_differs_and_quotes_it_only_where_it_may() -> None:
    differs = DivergenceNote(slot=2, at=5, live=40, held="the cat", asked="the\ndog")
    assert r"; slot 2 agrees up to token 5 of its 40: it holds 'the cat', the request 'the\ndog'; " in line(record(divergence=differs))
    quiet = DivergenceNote(slot=2, at=5, live=40, held=None, asked=None)
    assert "; slot 2 agrees up to token 5 of its 40; queue" in line(record(divergence=quiet))


def test_the_line_of_a_request_without_a_slot_says_why() -> None:
    full = ErrorNote(kind="invalid_request_error", code=None, param=None, message="the queue\nis full")
    none = {"slot": None, "tier": None, "finish": None, "queue_seconds": None, "ttft_seconds": None, "itl_mean_seconds": None}
    got = line(record(status=429, error=full, **none))
    assert got == (
        r"request r1: chat, 429, invalid_request_error: the queue\nis full; 900 prompt tokens, no slot; longest 0.030 s, all 2.000 s"
    )
    field = ErrorNote(kind="invalid_request_error", code=None, param="n", message=None)
    assert line(record(status=400, error=field, jobs=[], **none)).startswith("request r1: chat, 400, invalid_request_error: field n; ")
    assert "chat, 499, given up (client); " in line(record(status=499, gone="client", **none))


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
