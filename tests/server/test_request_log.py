"""One record a request, whatever becomes of it."""

from __future__ import annotations

import concurrent.futures
import json
import os
import pathlib
import re
import signal
import socket
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from harness import ROOT, Server, running, script, until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ds4batch.server.openapi import document
from ds4batch.server.request_log import APIS
from ds4batch.server.request_record import Record

CANARY = "xyzzy-user-text"
FIELDS = list(Record.__struct_fields__)


class Logged(NamedTuple):
    server: Server
    file: pathlib.Path

    @property
    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.file.read_text().splitlines()]

    def record(self, request: str) -> dict[str, Any]:
        """The one record of a request."""
        until(lambda: any(one["request"] == request for one in self.records), lambda: self.file.read_text())
        (found,) = [one for one in self.records if one["request"] == request]
        return found


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Logged]:
    file = tmp_path_factory.mktemp("log") / "requests.jsonl"
    with running({"batched_session": 2, "max_queue": 1, "request_log": str(file), "served_name": "demo"}) as server:
        yield Logged(server, file)


def posted(at: Logged, id: str, body: Any, path: str = "/v1/chat/completions") -> dict[str, Any]:
    """The record of one request; the answer's status is in it."""
    answer = at.server.request("POST", path, body, {"X-Request-Id": id})
    assert answer.headers["x-request-id"] == id
    record = at.record(id)
    assert list(record) == FIELDS
    assert record["status"] == answer.status
    assert record["route"] == path
    return record


def chat(text: str = "hi", **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "model": "mine", **more}


def test_the_documented_members_are_those_of_the_record() -> None:
    text = (ROOT / "docs" / "operations.md").read_text().partition("| member | meaning |")[2].partition("\n\n")[0]
    assert [name for row in text.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1] if "|" in row else "")] == FIELDS


def test_an_answered_request_has_its_tokens_and_times(logged: Logged) -> None:
    got = posted(logged, "a1", chat(script(n=5, burst=2, cached=3, tier="memory-token", delay=0.01, silent=1)))
    assert (got["api"], got["model"], got["stream"], got["status"]) == ("chat", "mine", False, 200)
    assert (got["finish"], got["error"], got["gone"], got["key"]) == ("stop", None, None, "")
    assert (got["tier"], got["slot"] in (0, 1), got["retries"], len(got["jobs"])) == ("memory-token", True, 0, 1)
    assert (got["tokens_cached"], got["tokens_out"]) == (3, 6)
    assert got["tokens_in"] > 3
    assert 0 < got["ttft_seconds"] < got["e2e_seconds"]
    assert 0 < got["itl_mean_seconds"] < got["itl_max_seconds"]  # two tokens came at a time
    assert (got["drafts"], got["drafts_accepted"], got["device_memory_bytes"]) == (None, None, None)
    assert got["time"].endswith("Z")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "api"), list(APIS.items())[:4])
def test_every_api_has_its_record(logged: Logged, path: str, api: str, stream: bool) -> None:
    body = {
        "chat": chat(),
        "completions": {"prompt": "hi"},
        "responses": {"input": "hi"},
        "anthropic": chat(max_tokens=9),
    }[api]
    got = posted(logged, f"api-{api}-{stream}", {**body, "stream": stream}, path)
    assert (got["api"], got["stream"], got["finish"], got["tokens_out"]) == (api, stream, "stop", 4)


def test_counting_tokens_is_recorded_without_any(logged: Logged) -> None:
    got = posted(logged, "count", chat(), "/v1/messages/count_tokens")
    assert (got["api"], got["status"], got["tokens_in"], got["jobs"]) == ("count_tokens", 200, 0, [])


@pytest.mark.parametrize(
    ("body", "status", "param", "message"),
    [
        (b'{"messages": [' + CANARY.encode(), 400, None, True),
        ({"messages": [{"role": CANARY, "content": "x"}]}, 400, "messages", False),
        (chat(n=2), 400, "n", False),
        ({"model": "m"}, 400, "messages", True),
        (chat("x" * 5000), 400, "messages", True),
        (chat(tool_choice={"type": "function", "function": {"name": CANARY}}), 400, "tool_choice", False),
        (chat(script(fail=500)), 500, None, True),
        (chat(script(fail=503, fail_after=2)), 503, None, True),
    ],
)
def test_a_refused_request_says_why_without_quoting_it(
    logged: Logged, body: Any, status: int, param: str | None, message: bool
) -> None:
    got = posted(logged, f"refused-{len(logged.records)}", body)
    assert (got["status"], got["error"]["param"], got["finish"]) == (status, param, None)
    assert (got["error"]["message"] is not None) == message
    assert CANARY not in json.dumps(got)


def test_a_wrong_method_is_recorded_and_a_preflight_is_not(logged: Logged) -> None:
    logged.server.request("OPTIONS", "/v1/chat/completions", headers={"X-Request-Id": "preflight"})
    logged.server.request("GET", "/v1/chat/completions", headers={"X-Request-Id": "wrong"})
    assert logged.record("wrong")["status"] == 405
    assert not any(one["request"] == "preflight" for one in logged.records)


def test_what_is_too_large_is_recorded_without_being_read(logged: Logged) -> None:
    with socket.create_connection(("127.0.0.1", logged.server.port)) as sock:
        sock.sendall(b"POST /v1/responses HTTP/1.1\r\nHost: x\r\nX-Request-Id: large\r\nContent-Length: 9999999999\r\n\r\n")
        assert sock.recv(1000).startswith(b"HTTP/1.1 413 ")
    got = logged.record("large")
    assert (got["api"], got["status"], got["jobs"]) == ("responses", 413, [])
    assert "bytes" in got["error"]["message"]


def test_every_route_that_takes_posts_is_recorded() -> None:
    assert set(APIS) == {path for path, methods in document(False)["paths"].items() if "post" in methods}


def test_a_stream_that_fails_has_its_error_behind_status_200(logged: Logged) -> None:
    got = posted(logged, "late", chat(script(n=9, fail=503, fail_after=3), stream=True))
    assert (got["status"], got["error"]["message"], got["finish"], got["tokens_out"]) == (200, "scripted failure", None, 3)


def test_a_request_that_finds_the_queue_full_is_recorded(logged: Logged) -> None:
    held = [logged.server.send(chat(script(n=4000, delay=0.05))) for _ in range(2)]
    logged.server.until_metric("vllm:num_requests_running", 2)
    waiting = logged.server.send(chat())
    logged.server.until_metric("vllm:num_requests_waiting", 1)
    got = posted(logged, "full", chat())
    assert (got["status"], got["slot"], got["queue_seconds"], got["tokens_out"]) == (429, None, None, 0)
    assert got["tokens_in"] > 0
    before = len(logged.records)
    waiting.close()
    until(lambda: len(logged.records) == before + 1)
    for sock in held:
        sock.close()
    until(lambda: len(logged.records) == before + 3)
    assert [(one["status"], one["gone"]) for one in logged.records[before:]] == [(499, "client")] * 3
    assert [one["slot"] is None for one in logged.records[before:]] == [True, False, False]


def test_a_request_that_is_tried_twice_is_one_record_of_both_tries(logged: Logged) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    got = posted(logged, "twice", chat(script(n=3, malformed="no JSON"), tools=[tool], max_tokens=50))
    assert (got["status"], got["retries"], len(got["jobs"]), got["tokens_out"]) == (200, 1, 2, 6)


class Outcome(NamedTuple):
    body: Any
    leaves: bool = False  # the client, after the first byte


def generation(stream: bool, **members: Any) -> dict[str, Any]:
    return chat(script(**members), stream=stream, max_tokens=50)


TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
outcomes = st.one_of(
    st.builds(
        lambda stream, n, burst, silent, cached: Outcome(generation(stream, n=n, burst=burst, silent=silent, cached=cached)),
        st.booleans(),
        st.integers(0, 6),
        st.integers(1, 3),
        st.integers(0, 2),
        st.integers(0, 40),
    ),
    st.builds(lambda stream, after: Outcome(generation(stream, n=5, fail=500, fail_after=after)), st.booleans(), st.integers(-1, 4)),
    st.builds(lambda n: Outcome(generation(True, n=4000, progress=n, pdelay=0.002, delay=0.002, silent=2), leaves=True), st.integers(1, 5)),
    st.builds(lambda stream: Outcome({**generation(stream, n=3, malformed="no JSON"), "tools": [TOOL]}), st.booleans()),
    st.sampled_from([Outcome(b"{"), Outcome(chat(n=2)), Outcome(chat("x" * 5000)), Outcome(chat(temperature="hot"))]),
)


def act(server: Server, outcome: Outcome) -> None:
    if not outcome.leaves:
        server.request("POST", "/v1/chat/completions", outcome.body)
        return
    with server.send(outcome.body) as sock:
        sock.recv(1)


def test_records_are_one_a_request_and_their_tokens_those_of_the_metrics(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "requests.jsonl"
    sent = 0
    with running({"batched_session": 3, "max_queue": 2, "request_log": str(file)}) as server:
        logged = Logged(server, file)

        @settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
        @given(st.lists(outcomes, min_size=1, max_size=12))
        def holds(mix: list[Outcome]) -> None:
            nonlocal sent
            with concurrent.futures.ThreadPoolExecutor(8) as pool:
                list(pool.map(lambda outcome: act(server, outcome), mix))
            sent += len(mix)
            until(lambda: len(file.read_bytes().splitlines()) >= sent)
            server.until_metric("vllm:num_requests_running", 0)
            records, metrics = logged.records, server.metrics()
            assert len(records) == sent == len({one["request"] for one in records})
            assert sum(one["tokens_out"] for one in records) == metrics["vllm:generation_tokens_total"]
            assert sum(one["tokens_cached"] for one in records) == metrics["vllm:prefix_cache_hits_total"]
            # A second try that found the queue full was not looked up, and its first one is the answer.
            placed = sum(one["tokens_in"] for one in records if one["slot"] is not None)
            assert placed >= metrics["vllm:prefix_cache_queries_total"]
            if not any(one["retries"] for one in records):
                assert placed == metrics["vllm:prefix_cache_queries_total"]
            jobs = [job for one in records for job in one["jobs"]]
            assert len(jobs) == len(set(jobs)) == metrics["ds4batch_requests_submitted_total"]

        holds()
        assert len(logged.records) == sent


def test_a_request_whose_body_never_comes_is_recorded_when_the_server_ends(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "requests.jsonl"
    with running({"request_log": str(file)}) as server, socket.create_connection(("127.0.0.1", server.port)) as sock:
        sock.sendall(b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\nExpect: 100-continue\r\n\r\n")
        assert sock.recv(100).startswith(b"HTTP/1.1 100 ")  # it is read from now on
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0
    (record,) = Logged(server, file).records
    assert (record["api"], record["status"], record["gone"], record["jobs"]) == ("anthropic", 499, "shutdown", [])


def test_drafts_are_those_of_the_request_where_anything_drafts(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "requests.jsonl"
    with running({"request_log": str(file), "draft": "lookup"}) as server:
        server.chat(script(drafts=5))
        server.chat()
        server.chat(n=2)
    found = [(one["drafts"], one["drafts_accepted"]) for one in Logged(server, file).records]
    assert found == [(5, 4), (0, 0), (None, None)]


def test_an_engine_that_is_killed_and_one_that_is_not_there_are_in_the_records(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "requests.jsonl"
    with running({"request_log": str(file)}) as server, concurrent.futures.ThreadPoolExecutor(2) as pool:
        logged = Logged(server, file)
        stream = pool.submit(server.chat, script(n=4000, delay=0.02), stream=True)
        until(lambda: server.metric("vllm:generation_tokens_total") > 2)
        os.kill(int(server.health()["engine_pid"]), signal.SIGKILL)
        stream.result()
        server.chat()
        died, refused = until(lambda: logged.records if len(logged.records) == 2 else None)
    assert (died["status"], died["finish"]) == (200, None)
    assert "killed by SIGKILL" in died["error"]["message"]
    assert (refused["status"], refused["jobs"], refused["error"]["kind"]) == (503, [], "server_error")


def test_the_end_of_the_server_ends_and_records_its_requests(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "requests.jsonl"
    with running({"batched_session": 2, "request_log": str(file)}) as server, concurrent.futures.ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(server.chat, script(n=4000, delay=0.02), stream=stream) for stream in (True, False)]
        server.until_metric("vllm:num_requests_running", 2)
        until(lambda: server.metric("vllm:generation_tokens_total") > 4)
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0
        assert [one.result().status for one in asked] == [200, 503]
    records = Logged(server, file).records
    assert sorted((one["status"], one["error"]["message"]) for one in records) == [
        (200, "server shutting down"),
        (503, "server shutting down"),
    ]
