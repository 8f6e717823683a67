from __future__ import annotations

import concurrent.futures
import os
import pathlib
import signal
import socket

from harness import Answer, Server, running, script, until

from ds4batch.server.engine_link import Backoff


def kill_engine(server: Server) -> int:
    pid = int(server.health()["engine_pid"])
    os.kill(pid, signal.SIGKILL)
    return pid


def test_a_killed_engine_ends_every_stream_with_an_error_and_comes_back() -> None:
    with running({"batched_session": 8}) as server, concurrent.futures.ThreadPoolExecutor(9) as pool:
        front = server.process.pid
        streams = [pool.submit(server.chat, script(n=4000, delay=0.02), stream=True) for _ in range(8)]
        server.until_metric("vllm:num_requests_running", 8)
        until(lambda: server.metric("vllm:generation_tokens_total") >= 16)
        old = kill_engine(server)
        for answer in [stream.result() for stream in streams]:
            assert answer.status == 200
            assert b"event: error\ndata: " in answer.raw
            assert b"was killed by SIGKILL" in answer.raw
            assert b"[DONE]" not in answer.raw
        down = server.get("/health")
        assert (down.status, down.body["status"]) == (503, "restarting")
        assert "SIGKILL" in down.body["last_error"]
        refused = server.chat()
        assert (refused.status, refused.body["error"]["type"]) == (503, "server_error")
        assert int(refused.headers["retry-after"]) >= 1
        metrics = server.metrics()
        assert (metrics["vllm:num_requests_running"], metrics["ds4batch_engine_up"]) == (0, 0)
        assert metrics['vllm:request_success_total{finished_reason="error"}'] == 8
        until(lambda: server.get("/health").status == 200)
        assert server.chat().status == 200
        health = server.health()
        assert health["restarts"] == 1
        assert health["engine_pid"] != old
        assert server.process.pid == front
        assert server.process.poll() is None


def test_a_whole_answer_cut_by_the_engines_death_is_a_503() -> None:
    with running() as server:
        answer = server.chat(script(die=True))
        assert answer.status == 503
        assert "SIGKILL" in answer.body["error"]["message"]
        assert "retry-after" in answer.headers
        until(lambda: server.get("/health").status == 200)
        assert server.complete().status == 200


def test_an_engine_that_sends_nonsense_is_replaced() -> None:
    with running() as server:
        answer = server.chat(script(garbage=True, n=100, delay=0.05))
        assert answer.status == 503
        assert "the engine sent what is no message" in answer.body["error"]["message"]
        until(lambda: server.get("/health").status == 200)
        assert server.health()["restarts"] == 1


def test_a_full_queue_refuses_with_a_time_to_retry() -> None:
    with running({"batched_session": 1, "max_queue": 2}) as server:
        busy = [server.send({"prompt": script(n=4000, delay=0.05)}, "/v1/completions") for _ in range(3)]
        server.until_metric("vllm:num_requests_waiting", 2)
        answers = [server.complete("x", stream=stream) for stream in (False, True)]
        for answer in answers:
            assert answer.status == 429
            assert answer.headers["retry-after"] == "3"
            assert answer.body["error"]["message"] == "the queue is full"
        metrics = server.metrics()
        assert metrics['ds4batch_requests_rejected_total{reason="queue_full"}'] == 2
        assert sum(v for k, v in metrics.items() if k.startswith("vllm:request_success_total")) == 0
        for sock in busy:
            sock.close()
        server.until_metric("vllm:num_requests_running", 0)
        assert server.complete("x").status == 200


def test_while_the_model_loads_health_answers_and_requests_are_told_to_wait() -> None:
    port = free_port()
    server = Server({"port": port}, "--load", "0.7", wait=False)
    try:
        server.port = port
        first = until(lambda: answer_or_none(server, "/health"))
        assert (first.status, first.body["status"]) == (503, "starting")
        refused = server.chat()
        assert (refused.status, refused.body["error"]["message"]) == (503, "the model is still loading")
        assert server.metric('ds4batch_requests_rejected_total{reason="unavailable"}') == 1
        assert server.metric("ds4batch_engine_up") == 0
        server.line("ready on http://")
        assert server.chat().status == 200
    finally:
        server.close()


def test_a_first_start_that_fails_ends_the_server_with_the_message() -> None:
    server = Server({}, "--start-failed", "x.gguf: tensor blk.0 is missing", wait=False)
    try:
        assert server.wait() == 1
        assert "ds4batch: x.gguf: tensor blk.0 is missing" in server.lines
    finally:
        server.close()


def test_a_restart_that_fails_is_tried_again(tmp_path: pathlib.Path) -> None:
    block = tmp_path / "block"
    with running({}, "--fail-while", str(block)) as server:
        block.touch()
        kill_engine(server)
        until(lambda: server.health()["status"] == "down")
        assert server.health()["last_error"] == "the file is there"
        block.unlink()
        until(lambda: server.get("/health").status == 200)
        assert server.health()["restarts"] >= 2
        assert server.chat().status == 200


def test_the_wait_before_a_restart_doubles_up_to_its_limit_and_a_steady_life_resets_it() -> None:
    backoff = Backoff()
    assert [backoff.after(-1) for _ in range(7)] == [0.5, 1, 2, 4, 8, 10, 10]
    assert backoff.after(29) == 10
    assert [backoff.after(30), backoff.after(0)] == [0.5, 1]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def answer_or_none(server: Server, path: str) -> Answer | None:
    try:
        return server.get(path)
    except OSError:
        return None


def test_the_engine_is_in_the_servers_process_group(server: Server) -> None:
    assert os.getpgid(int(server.health()["engine_pid"])) == os.getpgid(server.process.pid)
