"""How large, how slow and how many requests may be; wire tests on real sockets."""

from __future__ import annotations

import concurrent.futures
import contextlib
import gzip
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import anthropic
import openai
import pytest
from harness import PATIENCE, Server, running, script
from test_openapi import DOCUMENT, conforms

from ds4batch.server.connections import most_connections

T = TypeVar("T")
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")


def connect(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE)


def rest(sock: socket.socket) -> bytes:
    """All that comes until the connection ends."""
    out = b""
    with contextlib.suppress(ConnectionError):
        while part := sock.recv(65536):
            out += part
    return out


def drip(sock: socket.socket, piece: bytes) -> threading.Event:
    """Send a piece again and again until the connection breaks or the event is set."""
    done = threading.Event()

    def send() -> None:
        with contextlib.suppress(OSError):
            while not done.wait(0.05):
                sock.sendall(piece)

    threading.Thread(target=send, daemon=True).start()
    return done


def at_once(call: Callable[[str], T]) -> list[tuple[str, T]]:
    """What a call gives for each API; they wait together."""
    with concurrent.futures.ThreadPoolExecutor(len(PATHS)) as pool:
        return list(zip(PATHS, pool.map(call, PATHS), strict=True))


@pytest.fixture(scope="module")
def hasty() -> Iterator[Server]:
    """A front that waits for little."""
    settings = {"header_timeout": 0.4, "body_timeout": 0.6, "max_body_mb": 1, "batched_session": 4, "request_timeout": 1.5}
    with running(settings) as server:
        yield server


# heads


@pytest.mark.parametrize("begun", [b"G", b"GET /health HTTP/1.1\r\nHost: x\r\n", b"POST /v1/completions HTTP/1.1\r\nX: " + b"y" * 5000])
def test_a_head_that_does_not_end_is_answered_and_cut(hasty: Server, begun: bytes) -> None:
    before = hasty.metric('ds4batch_connections_dropped_total{reason="headers"}')
    with connect(hasty) as sock:
        sock.sendall(begun)
        head, _, body = rest(sock).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
    assert b"Connection: close" in head
    assert json.loads(body)["error"]["message"] == "bad HTTP request: its headers did not arrive within 0.4 s"
    assert hasty.metric('ds4batch_connections_dropped_total{reason="headers"}') == before + 1


def test_a_head_that_drips_is_not_waited_for_longer(hasty: Server) -> None:
    with connect(hasty) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\n")
        done = drip(sock, b"X: y\r\n")
        assert rest(sock).startswith(b"HTTP/1.1 408 ")
        done.set()


def test_a_connection_on_which_nothing_comes_is_ended_without_a_word(hasty: Server) -> None:
    with connect(hasty) as sock:
        assert rest(sock) == b""


def test_a_connection_between_two_requests_may_be_idle_but_not_slow(hasty: Server) -> None:
    with connect(hasty) as sock:
        for pause in (1.0, 0.0):
            sock.sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
            assert sock.recv(65536).startswith(b"HTTP/1.1 200")
            time.sleep(pause)  # longer than a head may take
        sock.sendall(b"\r\n")  # some clients end a request so; it begins none
        time.sleep(0.6)
        sock.sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
        assert sock.recv(65536).startswith(b"HTTP/1.1 200")
        sock.sendall(b"GET /v1/mod")
        assert rest(sock).startswith(b"HTTP/1.1 408 ")


def test_an_answer_may_take_longer_than_its_request(hasty: Server) -> None:
    assert hasty.complete(script(n=3, delay=0.25)).body["choices"][0]["text"] == "w0 w1 w2 "
    assert hasty.complete(script(n=3, delay=0.25), stream=True).events[-1] == "[DONE]"


def test_a_head_that_was_begun_during_an_answer_does_not_cut_it(hasty: Server) -> None:
    data = json.dumps({"prompt": script(n=4, delay=0.25), "stream": True}).encode()
    with connect(hasty) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(data), data))
        begun = sock.recv(1000)
        sock.sendall(b"GET /v1/mod")
        answer = begun + rest(sock)
    assert b"data: [DONE]" in answer
    assert answer.rpartition(b"data: [DONE]")[2].count(b"HTTP/1.1 408 ") == 1


# bodies


def test_a_body_that_drips_gets_408_in_its_apis_shape(hasty: Server) -> None:
    def send(path: str) -> bytes:
        with connect(hasty) as sock:
            sock.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n{{".encode())
            done = drip(sock, b" ")
            try:
                return rest(sock)
            finally:
                done.set()

    for path, answer in at_once(send):
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408 ")
        assert b"connection: close" in head.lower()
        refusal(path, "408", json.loads(body), "timeout_error", "bad HTTP request: the body did not arrive within 0.6 s")


@pytest.mark.parametrize("path", PATHS)
def test_a_body_that_is_too_large_gets_413_in_its_apis_shape(hasty: Server, path: str) -> None:
    before = hasty.metric('ds4batch_requests_rejected_total{reason="too_large"}')
    large = b'{"x":"' + b"y" * (1 << 20) + b'"}'
    told = hasty.request("POST", path, large)
    chunked = _chunked(hasty, path, large)
    packed = hasty.request("POST", path, gzip.compress(large), {"Content-Encoding": "gzip"})
    for status, body in ((told.status, told.body), chunked, (packed.status, packed.body)):
        assert status == 413
        refusal(path, "413", body, "request_too_large", "bad HTTP request: the body exceeds 1048576 bytes")
    assert hasty.metric('ds4batch_requests_rejected_total{reason="too_large"}') == before + 3
    assert hasty.request("POST", path, b'{"x":"' + b"y" * (1 << 19) + b'"}').status == 400  # it was read


def _chunked(server: Server, path: str, body: bytes) -> tuple[int, Any]:
    with connect(server) as sock:
        sock.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        sock.sendall(b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
        head, _, answer = rest(sock).partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(answer)


def refusal(path: str, status: str, body: Any, kind: str, message: str) -> None:
    conforms(body, DOCUMENT["paths"][path]["post"]["responses"][status]["content"]["application/json"]["schema"])
    assert body["error"]["message"] == message
    assert body["error"]["type"] == (kind if path == "/v1/messages" else "invalid_request_error")


# connections


def test_more_connections_than_may_be_open_are_turned_away() -> None:
    with running({"max_connections": 3, "header_timeout": 0}) as server, contextlib.ExitStack() as stack:
        held = []
        for _ in range(3):
            sock = stack.enter_context(connect(server))
            sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert sock.recv(65536).startswith(b"HTTP/1.1 200")
            held.append(sock)
        with connect(server) as fourth:
            head, _, body = rest(fourth).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
        assert b"Retry-After: 1" in head
        conforms(json.loads(body), DOCUMENT["components"]["schemas"]["OpenAIError"])
        held[0].sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert held[0].recv(65536).startswith(b"HTTP/1.1 200")  # the others are as ever
        held[2].sendall(b"GET /hea")
        time.sleep(0.3)
        held[2].sendall(b"lth HTTP/1.1\r\nHost: x\r\n\r\n")  # 0 waits for ever
        assert held[2].recv(65536).startswith(b"HTTP/1.1 200")
        held[1].close()
        deadline = time.monotonic() + PATIENCE
        while server.request("GET", "/health").status != 200:
            assert time.monotonic() < deadline


def test_connections_leave_files_to_everything_else() -> None:
    room = most_connections(0)
    assert room > 100
    assert most_connections(5) == 5
    assert most_connections(10**9) == room


# the whole time of a request


def bodies(path: str, prompt: str, **more: Any) -> dict[str, Any]:
    if path == "/v1/completions":
        return {"prompt": prompt, **more}
    if path == "/v1/responses":
        return {"input": prompt, **more}
    return {"messages": [{"role": "user", "content": prompt}], "max_tokens": 5000, **more}


SLOW = script(n=5000, delay=0.02)
LIMIT = "the request took longer than 1.5 s, which is this server's limit"


def test_a_request_beyond_its_time_gets_504_and_is_not_sent_again(hasty: Server) -> None:
    cancelled = 'ds4batch_cancelled_total{cause="deadline",phase="decode"}'
    before = hasty.metric(cancelled)
    for path, late in at_once(lambda path: hasty.request("POST", path, bodies(path, SLOW))):
        assert (late.status, late.headers["x-should-retry"]) == (504, "false")
        conforms(late.body, DOCUMENT["paths"][path]["post"]["responses"]["504"]["content"]["application/json"]["schema"])
        assert late.body["error"]["message"] == LIMIT
        assert late.body["error"]["type"] == ("timeout_error" if path == "/v1/messages" else "server_error")
    assert hasty.metric(cancelled) == before + len(PATHS)
    hasty.until_metric("vllm:num_requests_running", 0)  # the engine was told


def test_a_stream_beyond_its_time_ends_with_an_error_event(hasty: Server) -> None:
    for path, late in at_once(lambda path: hasty.request("POST", path, bodies(path, SLOW, stream=True))):
        assert late.status == 200, path
        last = late.raw.rstrip().rsplit(b"\n\n", 1)[-1]
        assert LIMIT.encode() in last
        assert b"[DONE]" not in late.raw
        assert b"w0 " in late.raw
    hasty.until_metric("vllm:num_requests_running", 0)


@pytest.mark.parametrize("stream", [False, True])
def test_time_counts_before_the_first_token(hasty: Server, stream: bool) -> None:
    cancelled = 'ds4batch_cancelled_total{cause="deadline",phase="prefill"}'
    before = hasty.metric(cancelled)
    late = hasty.chat(script(progress=1000, pdelay=0.1), stream=stream)
    assert LIMIT in late.raw.decode()
    assert (late.status, hasty.metric(cancelled)) == (200 if stream and late.raw.startswith(b":") else 504, before + 1)


def test_a_request_within_its_time_is_answered_as_ever(hasty: Server) -> None:
    for _ in range(3):
        assert hasty.complete(script(n=3)).body["choices"][0]["text"] == "w0 w1 w2 "


def test_the_official_clients_see_a_late_request_once(hasty: Server) -> None:
    submitted = hasty.metric("ds4batch_requests_submitted_total")
    url = f"http://127.0.0.1:{hasty.port}"
    turn: Any = {"model": "m", "max_tokens": 5000, "messages": [{"role": "user", "content": SLOW}]}
    with openai.OpenAI(base_url=url + "/v1", api_key="any") as one, anthropic.Anthropic(base_url=url, api_key="any") as other:
        asked: list[Callable[[], Any]] = [
            lambda: one.completions.create(model="m", prompt=SLOW),
            lambda: other.messages.create(**turn),
            lambda: list(other.messages.create(**turn, stream=True)),
        ]
        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            errors = [pool.submit(ask).exception for ask in asked]
            told = [error(PATIENCE) for error in errors]
    assert isinstance(told[0], openai.InternalServerError)
    assert isinstance(told[1], anthropic.APIStatusError)
    assert (told[0].status_code, told[1].status_code) == (504, 504)
    assert isinstance(told[2], anthropic.APIStatusError)
    assert all("took longer" in str(error) for error in told)
    assert hasty.metric("ds4batch_requests_submitted_total") == submitted + 3  # none of them was sent again
