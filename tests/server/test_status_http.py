"""The status page's routes over real sockets."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.client
import json
import re
import time
from collections.abc import Iterator
from typing import Any

from harness import Server, running, script, until

from ds4batch.server.status import MAX_LISTENERS


@contextlib.contextmanager
def listening(server: Server) -> Iterator[http.client.HTTPResponse]:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)) as connection:
        connection.request("GET", "/status/stream")
        yield connection.getresponse()


def event(response: http.client.HTTPResponse) -> Any:
    line = response.readline()
    assert line.startswith(b"data: ")
    assert response.readline() == b"\n"
    return json.loads(line[6:])


def test_the_page_is_one_file_that_may_run_nothing_but_its_own_script(server: Server) -> None:
    answer = server.get("/")
    assert (answer.status, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert (answer.headers["x-content-type-options"], answer.headers["cache-control"]) == ("nosniff", "no-store")
    page, policy = answer.raw.decode(), answer.headers["content-security-policy"]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert (rules["default-src"], rules["connect-src"], rules["frame-ancestors"]) == ("'none'", "'self'", "'none'")
    for tag in ("style", "script"):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.S)
        assert rules[f"{tag}-src"] == f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|style=|\son[a-z]+=|src=", page)
    assert set(re.findall(r"https?://[^\s\"']+", page)) <= {"http://www.w3.org/2000/svg"}


def test_one_snapshot_is_json(server: Server) -> None:
    answer = server.get("/status.json")
    assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
    assert (answer.headers["x-content-type-options"], answer.headers["cache-control"]) == ("nosniff", "no-store")
    got = answer.body
    assert (got["model"], got["engine"]["state"], len(got["slots"]), got["ctx"]) == ("fake-model", "ok", 4, 4096)
    assert (got["engine"]["device"], got["memory"]["planned"]) == ("fake", {"weights": 100, "kv_total": 50})


def test_a_request_shows_in_its_slot_without_a_word_of_it() -> None:
    secret = "ZEBRA"
    with running({"batched_session": 2}) as server:
        prompt = f"{secret} {script(n=2000, delay=0.01, tier='fork', cached=3)}"
        with contextlib.closing(server.send({"prompt": prompt, "stream": True, "max_tokens": 2000}, "/v1/completions")):
            until(lambda: (server.get("/status.json").body["slots"][0]["generated"] or 0) > 1)
            answer = server.get("/status.json")
        busy, free = answer.body["slots"]
        assert (busy["state"], busy["tier"], busy["cached_tokens"], busy["limit"]) == ("decode", "fork", 3, 2000)
        assert (free["state"], free["generated"], answer.body["queue"]["running"]) == ("empty", None, 1)
        assert busy["prompt_tokens"] == len(prompt)
        assert secret.encode() not in answer.raw
        until(lambda: server.get("/status.json").body["slots"][0]["generated"] is None)


def test_the_stream_brings_a_snapshot_a_second_and_headers_first(server: Server) -> None:
    with listening(server) as response:
        assert (response.status, response.headers["Content-Type"]) == (200, "text/event-stream")
        assert (response.headers["Cache-Control"], response.headers["X-Content-Type-Options"]) == ("no-store", "nosniff")
        began = time.monotonic()
        uptimes = [event(response)["uptime_seconds"] for _ in range(3)]
        assert 1.5 < time.monotonic() - began < 10
        assert uptimes[0] < uptimes[1] < uptimes[2]


def test_only_so_many_listen_and_one_that_leaves_makes_room() -> None:
    with running() as server, contextlib.ExitStack() as stack:
        others = [contextlib.ExitStack() for _ in range(MAX_LISTENERS)]
        for one in others:
            stack.callback(one.close)
            event(one.enter_context(listening(server)))
        refused = server.get("/status/stream")
        assert refused.status == 503
        assert f"{MAX_LISTENERS} listeners" in refused.body["error"]["message"]
        assert refused.headers["retry-after"] == "10"
        assert server.get("/status.json").status == 200
        others[0].close()

        def admitted() -> bool:
            with listening(server) as response:
                return response.status == 200

        until(admitted)


def test_the_stream_ends_when_the_server_stops() -> None:
    with running() as server, listening(server) as response:
        event(response)
        began = time.monotonic()
        server.close()
        rest = response.read()
        assert server.process.returncode == 0
        assert time.monotonic() - began < 10
        assert not rest or rest.endswith(b"\n\n")


def test_the_page_stays_when_the_engine_is_gone_and_says_so() -> None:
    with running({"batched_session": 1}, "--load", "0.5") as server:
        server.complete(script(die=True))
        got = until(lambda: (s := server.get("/status.json").body)["engine"]["state"] == "restarting" and s)
        assert "SIGKILL" in got["engine"]["last_error"]
        assert (got["slots"][0]["state"], got["queue"]["running"]) == ("empty", 0)
        assert server.get("/").status == 200
        until(lambda: server.get("/status.json").body["engine"]["state"] == "ok")
        assert server.get("/status.json").body["engine"]["restarts"] == 1


def test_only_get_streams_and_head_has_no_body(server: Server) -> None:
    assert server.request("HEAD", "/status/stream").status == 405
    assert server.request("POST", "/status.json").status == 405
    head = server.request("HEAD", "/")
    assert (head.status, head.raw) == (200, b"")
