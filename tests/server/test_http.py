from __future__ import annotations

import contextlib
import http.client
import json
import socket

import pytest
from harness import Server, running


def raw(server: Server, data: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as sock:
        sock.sendall(data)
        out = b""
        while part := sock.recv(65536):
            out += part
        return out


def test_the_loaded_model_is_listed_and_found_under_its_id(server: Server) -> None:
    listed = server.get("/v1/models").body
    assert listed["object"] == "list"
    (model,) = listed["data"]
    assert model == server.get("/v1/models/fake-model").body
    assert (model["id"], model["object"], model["owned_by"], model["context_length"]) == ("fake-model", "model", "ds4batch", 4096)
    assert model["top_provider"] == {"context_length": 4096, "max_completion_tokens": 4096, "is_moderated": False}
    missing = server.get("/v1/models/some/other")
    assert (missing.status, missing.body["error"]["code"]) == (404, "model_not_found")


def test_a_model_id_may_hold_slashes() -> None:
    with running({"served_name": "zai/some model"}) as server:
        assert server.get("/v1/models/zai/some%20model").body["id"] == "zai/some model"
        assert server.chat().body["model"] == "zai/some model"


def test_unknown_paths_and_wrong_methods_are_json_errors(server: Server) -> None:
    unknown = server.get("/v1/nothing")
    assert (unknown.status, unknown.body) == (404, {"error": {"message": "unknown endpoint", "type": "invalid_request_error"}})
    wrong = server.get("/v1/chat/completions")
    assert (wrong.status, wrong.headers["allow"]) == (405, "POST, OPTIONS")
    assert server.request("DELETE", "/health").status == 405


def test_the_query_is_cut_before_routing(server: Server) -> None:
    assert server.get("/v1/models?x=/v1/nothing").status == 200


def test_head_of_the_root_answers_without_a_body(server: Server) -> None:
    answer = server.request("HEAD", "/")
    assert (answer.status, answer.raw) == (200, b"")


def test_a_request_id_is_echoed_or_made(server: Server) -> None:
    assert server.request("GET", "/health", headers={"X-Request-Id": "abc-1"}).headers["x-request-id"] == "abc-1"
    made = server.request("GET", "/health", headers={"X-Request-Id": "a b" + "x" * 200}).headers["x-request-id"]
    assert len(made) == 24
    body = {"messages": [{"content": "x"}], "stream": True}
    stream = server.request("POST", "/v1/chat/completions", body, {"X-Request-Id": "abc-2"})
    assert stream.headers["x-request-id"] == "abc-2"


def test_without_cors_no_origin_is_allowed(server: Server) -> None:
    preflight = server.request("OPTIONS", "/any/path")
    assert (preflight.status, preflight.raw) == (204, b"")
    assert "content-type" not in preflight.headers
    assert not any(name.startswith("access-control") for name in preflight.headers)


def test_with_cors_every_answer_allows_every_origin() -> None:
    with running({"cors": True}) as server:
        answers = [
            server.request("OPTIONS", "/any"),
            server.get("/health"),
            server.get("/none"),
            server.chat(),
            server.chat(stream=True),
            server.chat(n=2),
        ]
        assert [answer.status for answer in answers] == [204, 200, 404, 200, 200, 400]
        for answer in answers:
            assert answer.headers["access-control-allow-origin"] == "*"
            assert answer.headers["access-control-allow-methods"] == "GET, POST, OPTIONS"
            assert answer.headers["access-control-allow-headers"] == "*"


@pytest.mark.parametrize(
    "data",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/1.1\r\nbad header\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: " + b"x" * 70000 + b"\r\n\r\n",
    ],
)
def test_what_is_no_http_gets_a_json_error(server: Server, data: bytes) -> None:
    head, _, body = raw(server, data).partition(b"\r\n\r\n")
    assert head.startswith((b"HTTP/1.1 400", b"HTTP/1.0 400"))
    assert json.loads(body)["error"]["message"].startswith("bad HTTP request")


def test_a_body_beyond_the_limit_is_refused_by_its_length(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 67108865\r\n\r\n{")
        response = http.client.HTTPResponse(sock)
        response.begin()
        assert response.status == 413
        assert json.loads(response.read())["error"]["message"] == "bad HTTP request: the body exceeds 67108864 bytes"
        response.close()


def test_a_chunked_body_is_read(server: Server) -> None:
    body = b'{"prompt":"x"}'
    data = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    data += b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    assert raw(server, data).startswith(b"HTTP/1.1 200")


def test_an_expected_continue_is_sent(server: Server) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nExpect: 100-continue\r\nContent-Length: 14\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as sock:
        sock.sendall(head)
        assert sock.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(b'{"prompt":"x"}')
        assert sock.recv(100).startswith(b"HTTP/1.1 200")


def test_one_connection_serves_many_requests_a_stream_among_them(server: Server) -> None:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)) as connection:
        connection.connect()
        local = connection.sock.getsockname()
        for stream in (False, True, False):
            connection.request("POST", "/v1/completions", json.dumps({"prompt": "x", "stream": stream}))
            assert b"w0" in connection.getresponse().read()
            assert connection.sock.getsockname() == local


def test_two_pipelined_requests_are_both_answered(server: Server) -> None:
    one = b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 14\r\n\r\n{"prompt":"x"}'
    two = b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 14\r\n\r\n{"prompt":"x"}'
    assert raw(server, one + two).count(b"w0 w1 w2 w3 ") == 2


def test_http_1_0_gets_a_stream_that_ends_with_the_connection(server: Server) -> None:
    answer = raw(server, b'POST /v1/completions HTTP/1.0\r\nContent-Length: 28\r\n\r\n{"prompt":"x","stream":true}')
    assert answer.endswith(b"data: [DONE]\n\n")
    assert b"chunked" not in answer


def test_health_shows_what_runs(server: Server) -> None:
    answer = server.get("/health")
    assert answer.status == 200
    got = answer.body
    assert (got["status"], got["slots"], got["ctx"], got["restarts"], got["exact_path"]) == ("ok", 4, 4096, 0, "native")
