from __future__ import annotations

import asyncio
import json
import socket
from contextlib import aclosing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4batch.chat.events import Content, Reasoning
from ds4batch.repl.client import Client, Finish, ServerError
from ds4batch.repl.sse import Event, Events
from tests.repl.fake_server import FakeServer, chunk

DONE = b"data: [DONE]\n\n"
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


def pieces(client: Client) -> list[Reasoning | Content | Finish]:
    """All of an answer."""

    async def collect() -> list[Reasoning | Content | Finish]:
        async with aclosing(client.stream(ASK)) as stream:
            return [piece async for piece in stream]

    return asyncio.run(collect())


def failure(client: Client) -> str:
    with pytest.raises(ServerError) as caught:
        pieces(client)
    return str(caught.value)


@given(st.data())
def test_events_do_not_depend_on_where_the_stream_is_cut(data: st.DataObject) -> None:
    whole = ": ping\r\n\r\ndata: 你\r\ndata:好\n\nevent: error\nid: 3\ndata:  x: y\n\nevent: lost\n\ndata\n\ndata: z\n".encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)))))
    events = Events()
    found = [event for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True) for event in events.feed(whole[a:b])]
    assert found == [Event("message", "你\n好"), Event("error", " x: y"), Event("message", "")]


def test_an_answer_comes_in_pieces_with_its_finish_last(server: FakeServer) -> None:
    server.says({"role": "assistant"}, {"reasoning_content": "hm"}, "a", "", "b", reason="length")
    assert pieces(Client(server.url)) == [Reasoning("hm"), Content("a"), Content("b"), Finish("length")]
    assert server.bodies == [{**ASK, "stream": True}]


def test_keepalive_comments_say_nothing(server: FakeServer) -> None:
    server.sends(b": prefill\n\n", b": prefill\n\n", chunk({"content": "a"}), b":\n\n", chunk({}, "stop") + DONE)
    assert pieces(Client(server.url)) == [Content("a"), Finish("stop")]


def test_chunks_without_a_choice_say_nothing(server: FakeServer) -> None:
    server.sends(chunk({"content": "a"}), b'data: {"choices": [], "usage": {}}\n\ndata: {}\n\n', chunk({}, "stop"), DONE)
    assert pieces(Client(server.url)) == [Content("a"), Finish("stop")]


def test_an_answer_ends_with_its_end_mark_or_its_finish_reason(server: FakeServer) -> None:
    server.sends(chunk({"content": "a"}), DONE, chunk({"content": "not this"}))
    server.sends(chunk({"content": "a"}), chunk({}, "stop"))
    assert pieces(Client(server.url)) == pieces(Client(server.url)) == [Content("a"), Finish("stop")]


def test_a_large_event_arrives_whole(server: FakeServer) -> None:
    text = "x" * 3_000_000
    server.says(text)
    assert pieces(Client(server.url)) == [Content(text), Finish("stop")]


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (b'event: error\ndata: {"error": {"message": "engine\\ndied \\u001b[31m"}}\n\n', "engine died [31m"),
        (b'data: {"error": {"message": "overloaded"}}\n\n', "overloaded"),
        (b'data: {"error": "plain"}\n\n', "plain"),
        (b"event: error\ndata: oh no\n\n", "oh no"),
        (b'data: {"error": {"code": 3}}\n\n', '{"error": {"code": 3}}'),
        (b"data: {broken\n\n", "the server sent an event that is no JSON object: {broken"),
        (b"data: [1]\n\n", "the server sent an event that is no JSON object: [1]"),
        (b"", "the server broke off"),
    ],
)
def test_what_goes_wrong_in_a_stream_is_one_line(server: FakeServer, event: bytes, message: str) -> None:
    server.sends(chunk({"content": "a"}), event)
    assert failure(Client(server.url)) == message


@pytest.mark.parametrize(
    ("status", "body", "headers", "message"),
    [
        (400, json.dumps({"error": {"message": "messages: must not be empty"}}), {}, "messages: must not be empty (HTTP 400)"),
        (429, json.dumps({"error": {"message": "busy"}}), {"Retry_After": "7"}, "busy (HTTP 429; try again in 7 s)"),
        (404, "", {}, "Not Found (HTTP 404)"),
        (502, "<html>\n<b>Bad</b>\n</html>", {}, "<html> <b>Bad</b> </html> (HTTP 502)"),
        (302, "", {"Location": "http://elsewhere.invalid/"}, "Found (HTTP 302)"),
        (500, "x" * 10_000, {}, "x" * 400 + " (HTTP 500)"),
    ],
)
def test_a_refusal_is_one_line(server: FakeServer, status: int, body: str, headers: dict[str, str], message: str) -> None:
    server.refuses(status, body, **headers)
    assert failure(Client(server.url)) == message


def test_an_answer_that_is_no_stream_is_refused(server: FakeServer) -> None:
    server.refuses(200, "welcome")
    assert "answers with text/plain, which is no stream" in failure(Client(server.url))


def test_a_dropped_connection_is_an_error(server: FakeServer) -> None:
    server.breaks(chunk({"content": "a"}))
    assert failure(Client(server.url)).startswith(server.url)


def test_a_server_that_shows_no_sign_of_life_is_given_up(server: FakeServer) -> None:
    server.stays_silent()
    assert failure(Client(server.url, silence_seconds=0.2)) == f"{server.url}: no sign of life"


def test_a_dead_server_is_named() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        assert failure(Client(url)) == f"cannot reach {url}: Connection refused"
