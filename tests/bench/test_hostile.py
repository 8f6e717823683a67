"""The hostile run itself: that it sees what a server must not do, and makes the same requests again."""

from __future__ import annotations

import itertools
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

import pytest

from bench.hostile import openapi_cases
from bench.hostile.case import CHAT, COMPLETIONS, MESSAGES, Case, few_tokens, head, json_case, numbered
from bench.hostile.client import Outcome, send
from bench.hostile.growth import growth
from bench.hostile.http_answers import Answer, parse
from bench.hostile.mix import SHARES, Mix
from bench.hostile.oracle import Oracle
from bench.hostile.serve import tracebacks
from bench.hostile.values import SPELLINGS, spelt
from ds4batch.server.openapi import document

DOCUMENT = document(False)
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Type: application/json\r\n\r\n{}"


def judged(case: Case, status: int, body: Any, kind: str = "application/json") -> list[str]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    outcome = Outcome("answered", [Answer(status, {"content-type": kind}, data)], "", b"", 0.1)
    return Oracle(DOCUMENT).problems(case, outcome)


def error(message: str, **more: Any) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error", **more}}


CHATS = json_case("x", "y", CHAT, {})
VALID = json_case("x", "y", CHAT, {}, valid=True)
SAID = {
    "id": "a", "object": "chat.completion", "created": 1, "model": "m",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "x"}, "finish_reason": "stop"}],
    "usage": {
        "prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2,
        "prompt_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 1},
    },
}  # fmt: skip


def test_what_a_good_server_answers_is_no_problem() -> None:
    assert not judged(CHATS, 200, SAID)
    assert not judged(CHATS, 400, error("top_k: expected a number", param="top_k"))
    assert not judged(CHATS, 400, error("invalid JSON request: at character 1"))
    assert not judged(VALID, 400, error("tool_choice.function.name: no tool is named 'x'", param="tool_choice"))
    stream = b'data: {"choices":[]}\n\ndata: [DONE]\n\n'
    assert not judged(CHATS, 200, stream, "text/event-stream")
    overflow = {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": "prompt is too long: 9 tokens > 8 maximum"},
    }
    assert not judged(json_case("x", "y", MESSAGES, {}), 400, overflow)


@pytest.mark.parametrize(
    ("case", "status", "body", "kind", "problem"),
    [
        (CHATS, 500, error("x"), "application/json", "status 500"),
        (CHATS, 502, error("x"), "application/json", "status 502"),
        (CHATS, 404, error("x"), "application/json", "status 404"),
        (CHATS, 400, b"<html>", "text/html", "an error that is no JSON"),
        (CHATS, 400, {"detail": "x"}, "application/json", "an error of another shape"),
        (json_case("x", "y", MESSAGES, {}), 400, error("messages: x"), "application/json", "an error of another shape"),
        (CHATS, 400, error("it is wrong"), "application/json", "names no field"),
        (CHATS, 400, error("prompt: must not be empty", param="prompt"), "application/json", "names no field"),
        (VALID, 400, error("top_k: expected a number", param="top_k"), "application/json", "although it is as described"),
        (CHATS, 200, {**SAID, "usage": None}, "application/json", "an answer of another shape: usage"),
        (CHATS, 200, b"{", "application/json", "an answer that is no JSON"),
        (CHATS, 200, b"x", "text/plain", "content of the type"),
        (CHATS, 200, b'data: {"choices":[]}\n\n', "text/event-stream", "a stream that ends with"),
        (CHATS, 200, b'data: {"error":{"message":"x"}}\n\ndata: [DONE]\n\n', "text/event-stream", "ends with an error"),
        (CHATS, 200, b"data: [DONE]", "text/event-stream", "a stream that ends with"),
    ],
)
def test_what_a_bad_server_answers_is_a_problem(case: Case, status: int, body: Any, kind: str, problem: str) -> None:
    (found,) = judged(case, status, body, kind)
    assert problem in found


@contextmanager
def answering(answer: Callable[[socket.socket], None]) -> Iterator[tuple[str, int]]:
    """A server that does one thing with every connection."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:

        def run() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with closing(connection), suppress(OSError):  # the client may leave
                    answer(connection)

        thread = threading.Thread(target=run)
        thread.start()
        yield listener.getsockname()
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()


def sent(answer: Callable[[socket.socket], None], case: Case = CHATS) -> tuple[Outcome, list[str]]:
    rounds = itertools.count()
    with answering(answer) as address:
        outcome = send(case, address, lambda: next(rounds), 5)
    return outcome, Oracle(DOCUMENT).problems(case, outcome)


def silent(connection: socket.socket) -> None:
    while connection.recv(1 << 16):
        pass


def test_silence_is_a_hang_by_the_rounds_of_the_probe() -> None:
    outcome, problems = sent(silent)
    assert outcome.end == "hung"
    assert "hung" in problems[0]


def test_a_connection_that_closes_is_an_answer_only_where_it_may_be() -> None:
    def close(connection: socket.socket) -> None:
        connection.recv(1 << 16)

    assert sent(close)[1] == ["the connection was closed without an answer"]
    assert not sent(close, Case("x", "y", (b"\x00\r\n\r\n",), closes=True))[1]


def test_half_an_answer_and_what_is_none_are_problems() -> None:
    def cut(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        connection.sendall(OK[:-1])

    def garbage(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        connection.sendall(b"oops\r\n\r\n")

    assert sent(cut)[1] == ["a body of 2 bytes is cut at 1"]
    assert sent(garbage)[1] == ["no answer: b'oops'"]


def test_pipelined_answers_are_counted() -> None:
    def two(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        connection.sendall(OK + OK)

    case = Case("x", "y", (head("GET", "/health") * 3,), "GET", statuses=frozenset({200}), answers=3)
    assert sent(two, case)[1] == ["2 answers of 3"]
    assert not sent(two, Case("x", "y", case.parts, "GET", statuses=case.statuses, answers=2))[1]


def test_a_client_that_leaves_expects_nothing() -> None:
    for ending in ("abort", "first-bytes"):
        case = Case("x", "y", (b"GET",), statuses=frozenset({200}), ending=ending)  # type: ignore[arg-type]  # both are endings
        outcome, problems = sent(lambda connection: connection.sendall(OK), case)
        assert (outcome.end, problems) == ("left", [])


def test_answers_are_read_strictly() -> None:
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n"
    assert [answer.body for answer in parse(b"HTTP/1.1 100 Continue\r\n\r\n" + chunked + OK, ended=True).answers] == [
        b"ab",
        b"{}",
    ]
    for end in range(1, len(chunked)):
        assert parse(chunked[:end], ended=False) == ([], ""), end
        assert parse(chunked[:end], ended=True).problem, end
    assert parse(OK[:-2], ended=True, head=True).answers
    assert "no header" in parse(b"HTTP/1.1 200 OK\r\nbad name: x\r\n\r\n", ended=True).problem


def test_memory_that_grows_with_requests_is_growth_and_a_peak_is_none() -> None:
    flat = [(i * 250, (200 << 20) + (i % 3 << 18)) for i in range(1, 41)]
    assert not growth(flat).grew
    assert not growth([(n, size + (300 << 20 if n == 6000 else 0)) for n, size in flat]).grew
    assert growth([(n, size + n * 2000) for n, size in flat]).grew
    assert not growth([(n, size + (20 << 20) - min(n, 2500) * 8000) for n, size in flat]).grew  # all of it in the warm-up
    assert not growth([]).grew


def test_the_same_seed_makes_the_same_requests_and_each_can_be_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openapi_cases, "CHUNK", 3)
    first = [case for batch in Mix(DOCUMENT, 5).batches(110, 50) for case in batch]
    assert len(first) == 110
    assert {case.again.split(":")[0] for case in first} == set(SHARES)
    alone = Mix(DOCUMENT, 5)
    for case in reversed(first[::4]):
        group, _, number = case.again.partition(":")
        assert alone.case(group, int(number)) == case
    other = Mix(DOCUMENT, 6)
    groups = ("field", "mutation", "random-history")
    assert [other.case(group, 0) for group in groups] != [alone.case(group, 0) for group in groups]


def test_a_reproduction_is_a_program() -> None:
    case = numbered(Case("x", "y", (b"GET /\xff HTTP/1.1\r\n\r\n", 0.5, b"x"), ending="half-close"), "group", 7)
    text = case.reproduction("http://127.0.0.1:9", 3)
    assert "--seed 3 --only group:7" in text
    program = text.split("<<'END'\n")[1].removesuffix("\nEND")
    compile(program, "reproduction", "exec")
    assert repr(case.parts[0]) in program
    large = json_case("x", "y", CHAT, {"a": "x" * 10_000}).reproduction("http://127.0.0.1:9", 3)
    assert "END" not in large


def test_a_value_goes_where_it_is_to_be_however_it_is_spelt() -> None:
    body = {"messages": [{"content": "x"}]}
    for value in SPELLINGS:
        data = spelt(body, ("messages", 0, "content"), value)
        assert data.startswith(b'{"messages": [{"content": ')
        assert value.encode("utf-8", "replace") in data
    assert json.loads(spelt(body, ("a", 1, "b"), "5")) == {**body, "a": [None, {"b": 5}]}


def test_answers_stay_short_unless_the_limit_is_what_is_wrong() -> None:
    assert few_tokens(COMPLETIONS, {})["max_tokens"] == 2
    assert few_tokens(COMPLETIONS, {"max_tokens": 10**9})["max_tokens"] == 2
    for given in (1, 0, -5, "x", True, 0.5):
        assert few_tokens(CHAT, {"max_completion_tokens": given})["max_completion_tokens"] == given


def test_tracebacks_are_found_in_a_log() -> None:
    log = "a\nERROR x\nTraceback (most recent call last):\n  File\n    y\nValueError: z\nb\n"
    assert tracebacks(log) == ["ERROR x\nTraceback (most recent call last):\n  File\n    y\nValueError: z"]
    assert not tracebacks("a\nb\n")
