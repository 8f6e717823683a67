"""The soak's client: it tells a whole answer from a cut one, and reads every API's answers and their beginnings."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.soak import hostile
from bench.soak.asks import Wish, ask_of
from bench.soak.ledger import ANSWERED, ANY, ENDED, Ending, Fate, judged
from bench.soak.replies import BadAnswer, Said, read_stream, read_whole
from bench.soak.wire import PLAIN, Behaviour, Framing, Manner, Reply, ResponseParser, exchange, request_bytes

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def answered(*pieces: bytes, behaviour: Behaviour = PLAIN, hang: bool = False, patience: float = 5.0) -> Reply:
    """What the client makes of a server that sends these pieces and hangs up, or does not."""

    ended = asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        if hang:
            with contextlib.suppress(ConnectionError):
                await reader.read()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        ended.set()

    async def ask() -> Reply:
        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        async with server:
            reply = await exchange(server.sockets[0].getsockname(), request_bytes("GET", "/", b""), behaviour, patience)
            await ended.wait()
            return reply

    return asyncio.run(ask())


def test_a_whole_answer_of_either_framing() -> None:
    assert answered(HEAD + b"Content-Length: 2\r\n\r\nhi").framing is Framing.WHOLE
    reply = answered(CHUNKED, b"3\r\nabc\r\n", b"2\r\nde\r\n0\r\n\r\n")
    assert (reply.framing, reply.status, reply.body) == (Framing.WHOLE, 200, b"abcde")


@pytest.mark.parametrize("piece", [b"3\r\nab", b"3\r\nabc\r\n", b"3\r\nabc\r\n0\r\n", b""])
def test_an_answer_whose_connection_ends_early_is_cut(piece: bytes) -> None:
    assert answered(CHUNKED + piece).framing is Framing.CUT


def test_no_answer_a_hang_and_no_http() -> None:
    assert answered().framing is Framing.NONE
    assert answered(CHUNKED, hang=True, patience=0.2).framing is Framing.HUNG
    assert answered(b"SSH-2.0 hello\r\n\r\n").framing is Framing.GARBLED
    assert answered(CHUNKED + b"1\r\nab\r\n0\r\n\r\n").framing is Framing.GARBLED


def test_a_client_leaves_where_it_is_told_to() -> None:
    within = Behaviour(Manner.LEAVE_WITHIN, after_bytes=3)
    assert answered(CHUNKED + b"3\r\nabc\r\n", hang=True, behaviour=within).framing is Framing.LEFT
    early = Behaviour(Manner.LEAVE_EARLY, after_seconds=0.05, abruptly=True)
    assert answered(hang=True, behaviour=early).framing is Framing.LEFT
    upload = Behaviour(Manner.LEAVE_UPLOAD, after_bytes=10)
    assert answered(behaviour=upload).framing is Framing.LEFT


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=6), st.integers(1, 17))
def test_a_chunked_body_is_read_in_any_pieces(chunks: list[bytes], size: int) -> None:
    wire = CHUNKED + b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
    parser = ResponseParser()
    for at in range(0, len(wire), size):
        assert not parser.complete
        parser.feed(wire[at : at + size])
    assert parser.complete
    assert bytes(parser.body) == b"".join(chunks)


# what is said


def chunk(delta: dict[str, Any], finish: str | None = None) -> bytes:
    value = {"created": 1, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}
    return b"data: " + json.dumps(value).encode() + b"\n\n"


STREAM = chunk({"role": "assistant"}) + chunk({"content": "Hel"}) + chunk({"content": "lo"}) + chunk({}, "stop")
DONE = b"data: [DONE]\n\n"
ERROR = b'event: error\ndata: {"error": {"message": "it died", "type": "server_error"}}\n\n'


def test_a_stream_is_put_together_and_its_beginning_begins_it() -> None:
    whole = read_stream("chat", STREAM + DONE, True)
    assert (whole.text, whole.finish, whole.error) == ("Hello", "stop", "")
    for end in range(len(STREAM)):
        beginning = read_stream("chat", STREAM[:end], False)
        assert beginning.begins(whole)
    assert read_stream("chat", chunk({"content": "Hel"}) + ERROR, True).error == "it died"


@pytest.mark.parametrize(
    "stream",
    [
        STREAM,  # no [DONE]
        STREAM + DONE + chunk({"content": "!"}),  # something behind it
        chunk({"content": "Hel"}) + DONE,  # no finish reason
        STREAM + DONE + b"data: {",
        chunk({"content": "Hel"}) + b"data: {broken\n\n" + STREAM + DONE,
        ERROR + DONE,
        b"nonsense\n\n",
    ],
)
def test_a_stream_that_no_client_could_read_is_refused(stream: bytes) -> None:
    with pytest.raises(BadAnswer):
        read_stream("chat", stream, True)


def test_an_answer_that_lacks_a_member_is_refused() -> None:
    with pytest.raises(BadAnswer):
        read_whole("responses", b'{"output": []}')


@pytest.mark.parametrize(
    "other",
    [
        Said("Hellp", logprobs=("a",)),
        Said("Hel", logprobs=("b",)),
        Said("Hel", reasoning="x"),
        Said("Hello there"),
        Said("Hel", calls=(("look", '{"b'),)),
        Said("Hel", calls=(("see", ""),)),
        Said("Hel", calls=(("look", '{"a"'), ("look", ""))),
    ],
)
def test_what_does_not_begin_an_answer_is_told_from_what_does(other: Said) -> None:
    whole = Said("Hello", logprobs=("a", "c"), calls=(("look", '{"a": 1}'),), finish="stop")
    assert Said("Hel", logprobs=("a",), calls=(("look", '{"a'),)).begins(whole)
    assert not other.begins(whole)


# how it ended

ASK = ask_of(Wish("chat", ("Hi.",), stream=True))


@pytest.mark.parametrize(
    ("reply", "ending", "fates"),
    [
        (Reply(Framing.WHOLE, 200, body=STREAM + DONE), Ending.ANSWERED, {Fate.STOP}),
        (Reply(Framing.WHOLE, 200, body=chunk({}) + ERROR), Ending.FAILED, {Fate.ERROR}),
        (Reply(Framing.WHOLE, 200, body=STREAM), Ending.GARBLED, ENDED),
        (Reply(Framing.CUT, 200, body=chunk({})), Ending.CUT, ENDED),
        (Reply(Framing.LEFT, 200, body=chunk({})), Ending.LEFT, ENDED),
        (Reply(Framing.LEFT, 200, body=STREAM), Ending.LEFT, {Fate.STOP, Fate.ABORT}),
        (Reply(Framing.LEFT), Ending.LEFT, ANY),
        (Reply(Framing.NONE), Ending.CUT, ANY),
        (Reply(Framing.REFUSED), Ending.CUT, ANY),
        (Reply(Framing.HUNG), Ending.HUNG, ANY),
        (Reply(Framing.WHOLE, 400, body=b'{"error": {"message": "no"}}'), Ending.REFUSED, {Fate.INVALID}),
        (Reply(Framing.WHOLE, 400, body=b'{"error": {"code": "context_length_exceeded"}}'), Ending.REFUSED, {Fate.CONTEXT}),
        (Reply(Framing.WHOLE, 404), Ending.REFUSED, {Fate.UNSEEN}),
        (Reply(Framing.WHOLE, 429), Ending.BUSY, {Fate.QUEUE_FULL}),
        (Reply(Framing.WHOLE, 500), Ending.BROKEN, {Fate.ERROR, Fate.UNSEEN}),
        (Reply(Framing.WHOLE, 503), Ending.UNAVAILABLE, {Fate.UNAVAILABLE, Fate.ERROR}),
    ],
)
def test_how_a_request_ended_and_what_it_may_be_counted_as(reply: Reply, ending: Ending, fates: set[Fate]) -> None:
    assert judged(ASK, PLAIN, reply)[:2] == (ending, frozenset(fates))


def test_a_client_that_did_not_read_is_cut_off_and_any_other_is_not() -> None:
    cut = Reply(Framing.CUT, 200, body=chunk({}))
    assert judged(ASK, Behaviour(Manner.STALL), cut)[0] is Ending.CUT_OFF
    assert judged(ASK, Behaviour(Manner.SLOW), cut)[0] is Ending.CUT
    whole = judged(ASK, Behaviour(Manner.STALL), Reply(Framing.WHOLE, 200, body=STREAM + DONE))
    assert whole[1] <= ANSWERED


def test_a_hostile_request_that_is_answered_or_breaks_the_server_is_found() -> None:
    bad = hostile.Hostile("bad", b"", frozenset({400}), Fate.INVALID)
    raw = hostile.Hostile("raw", b"", frozenset({400}), Fate.UNSEEN)
    assert hostile.judged(bad, Reply(Framing.WHOLE, 400))[:2] == (Ending.REFUSED, frozenset({Fate.INVALID}))
    assert hostile.judged(bad, Reply(Framing.WHOLE, 200))[0] is Ending.ACCEPTED
    assert hostile.judged(bad, Reply(Framing.WHOLE, 500))[0] is Ending.BROKEN
    assert hostile.judged(bad, Reply(Framing.NONE))[0] is Ending.CUT
    assert hostile.judged(bad, Reply(Framing.HUNG))[0] is Ending.HUNG
    assert hostile.judged(raw, Reply(Framing.NONE))[0] is Ending.REFUSED
