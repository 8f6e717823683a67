from __future__ import annotations

import concurrent.futures
import json
import random
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any

import pytest
from harness import Server, running, script, until

from ds4batch.server.watch import STALL_SECONDS, Watched

FOREVER = {"n": 4000, "delay": 0.05}
PHASES = {"queue": FOREVER, "prefill": {"progress": 4000, "pdelay": 0.05}, "decode": FOREVER}


@pytest.fixture(scope="module")
def two() -> Iterator[Server]:
    """A front with two sessions."""
    with running({"batched_session": 2}) as started:
        yield started


def body(members: dict[str, Any], stream: bool) -> dict[str, Any]:
    return {"messages": [{"content": script(**members)}], "stream": stream}


def cancelled(server: Server, phase: str, cause: str = "client") -> float:
    return server.metric(f'ds4batch_cancelled_total{{cause="{cause}",phase="{phase}"}}')


def wait_for_phase(server: Server, phase: str, generated: float) -> None:
    if phase == "queue":
        server.until_metric("vllm:num_requests_waiting", 1)
    elif phase == "prefill":
        server.until_metric("vllm:num_requests_running", 1)
    else:
        until(lambda: server.metric("vllm:generation_tokens_total") > generated)


def all_quiet(server: Server) -> None:
    server.until_metric("vllm:num_requests_running", 0)
    server.until_metric("vllm:num_requests_waiting", 0)
    assert server.health()["requests_in_flight"] == 0


@pytest.mark.parametrize(
    "trailing",
    [b"", b"\r\n\r\ngarbage", b"x" * 3_000_000, b"POST / HTTP/1.1\r\nContent-Length: 9000000\r\n\r\n" + b"y" * 3_000_000],
    ids=["clean", "garbage", "much garbage", "much of a request"],
)
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("phase", PHASES)
def test_a_client_that_leaves_ends_its_request(two: Server, phase: str, stream: bool, trailing: bytes) -> None:
    before, generated = cancelled(two, phase), two.metric("vllm:generation_tokens_total")
    others = [two.send(body(FOREVER, True)) for _ in range(2)] if phase == "queue" else []
    if others:
        two.until_metric("vllm:num_requests_running", 2)
    sock = two.send(body(PHASES[phase], stream))
    wait_for_phase(two, phase, generated)
    sock.sendall(trailing)
    sock.close()
    until(lambda: cancelled(two, phase) == before + 1)
    for other in others:
        other.close()
    all_quiet(two)
    assert two.chat().status == 200


def test_a_reset_connection_ends_its_request(two: Server) -> None:
    before = cancelled(two, "prefill")
    sock = two.send(body(PHASES["prefill"], False))
    two.until_metric("vllm:num_requests_running", 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()
    until(lambda: cancelled(two, "prefill") == before + 1)
    all_quiet(two)


def test_a_half_closed_connection_counts_as_gone(two: Server) -> None:
    before = cancelled(two, "prefill")
    with two.send(body(PHASES["prefill"], False)) as sock:
        two.until_metric("vllm:num_requests_running", 1)
        sock.shutdown(socket.SHUT_WR)
        until(lambda: cancelled(two, "prefill") == before + 1)
    all_quiet(two)


def test_many_disconnects_at_random_moments_leave_every_session_usable() -> None:
    rnd = random.Random(5)
    with running({"batched_session": 4, "max_queue": 500}) as server:

        def one(i: int) -> None:
            members = {"n": 40, "delay": 0.005, "progress": 4, "pdelay": 0.005}
            sock = server.send(body(members, i % 2 == 0), trailing=b"\r\n" * (i % 3))
            time.sleep(rnd.random() * 0.2)
            sock.close()

        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            list(pool.map(one, range(200)))
        all_quiet(server)
        metrics = server.metrics()
        ended = sum(value for name, value in metrics.items() if name.startswith("vllm:request_success_total"))
        assert metrics["ds4batch_requests_submitted_total"] == ended
        assert ended > 100
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            assert [answer.status for answer in pool.map(lambda _: server.chat(), range(8))] == [200] * 8


def test_a_client_that_stops_reading_is_cut_off_and_others_are_not(two: Server) -> None:
    before = cancelled(two, "decode", "slow_reader")
    flood = json.dumps(body({"n": 100_000, "size": 4000, "burst": 10, "delay": 0.01}, True)).encode()
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        sock.settimeout(20)
        sock.connect(("127.0.0.1", two.port))
        sock.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(flood) + flood)
        other = two.chat(script(n=20, delay=0.05), stream=True)
        assert other.raw.endswith(b"data: [DONE]\n\n")
        until(lambda: cancelled(two, "decode", "slow_reader") == before + 1)
        all_quiet(two)
        tail = b""
        while part := sock.recv(1 << 20):
            tail = (tail + part)[-100:]
        assert not tail.endswith(b"0\r\n\r\n")  # cut off, not ended


class _Transport:
    def __init__(self) -> None:
        self.pending = 0

    def get_extra_info(self, name: str) -> None:
        return None

    def get_write_buffer_size(self) -> int:
        return self.pending


class _Request:
    def __init__(self) -> None:
        self.transport = _Transport()
        self.writer = self
        self.output_size = 0


def test_a_slow_reader_that_still_reads_is_not_stalled() -> None:
    request = _Request()
    watched = Watched(request, lambda why: None)  # type: ignore[arg-type]
    now = time.monotonic()
    for i in range(200):  # the buffer grows all the while, because more is written than read
        request.output_size += 100
        request.transport.pending += 99
        assert not watched.stalled(now + 0.05 * i)
    request.output_size += 100
    request.transport.pending += 100
    assert not watched.stalled(now + 10)
    assert not watched.stalled(now + 10 + STALL_SECONDS - 0.1)
    assert watched.stalled(now + 10 + STALL_SECONDS)


def test_an_idle_stream_with_nothing_unsent_is_not_stalled() -> None:
    watched = Watched(_Request(), lambda why: None)  # type: ignore[arg-type]
    assert not watched.stalled(time.monotonic() + 100)
