from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys

import pytest
from harness import PATIENCE, ROOT, SERVE, Server, running, script, until

from ds4batch.server.run import model_id
from ds4batch.settings import Settings


def test_the_front_loads_no_torch() -> None:
    code = "import sys, ds4batch.server.app, ds4batch.server.run; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = {module.split(".")[0] for module in done.stdout.split()}
    assert "aiohttp" in loaded
    assert not loaded & {"torch", "triton", "transformers"}


def test_a_port_in_use_is_told_before_anything_loads() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = Server({"port": port}, "--load", "60", wait=False)
        try:
            assert server.wait() == 1
            assert server.lines == [f"ds4batch: cannot listen on 127.0.0.1:{port}: Address already in use"]
        finally:
            server.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"host": "no.such.host.invalid"}, "cannot listen on no.such.host.invalid:0: "),
        ({"trace": "/no/such/folder/trace"}, "/no/such/folder/trace"),
    ],
)
def test_what_cannot_be_opened_is_named(settings: dict[str, str], message: str) -> None:
    server = Server(settings, wait=False)
    try:
        assert server.wait() == 1
        assert message in server.lines[0]
    finally:
        server.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_streams_with_an_error_and_the_server_with_zero(number: int) -> None:
    with running({"batched_session": 2}) as server, concurrent.futures.ThreadPoolExecutor(3) as pool:
        stream = pool.submit(server.chat, script(n=4000, delay=0.02), stream=True)
        server.until_metric("vllm:num_requests_running", 1)
        whole = pool.submit(server.chat, script(n=4000, delay=0.02))
        server.until_metric("vllm:num_requests_running", 2)
        until(lambda: server.metric("vllm:generation_tokens_total") > 4)
        server.process.send_signal(number)
        assert stream.result().raw.endswith(
            b'event: error\ndata: {"error":{"message":"server shutting down","type":"server_error"}}\n\n'
        )
        assert (whole.result().status, whole.result().body["error"]["message"]) == (503, "server shutting down")
        assert server.wait() == 0
        with pytest.raises(ConnectionRefusedError):
            server.get("/health")


def test_a_signal_while_the_model_loads_ends_the_server() -> None:
    server = Server({}, "--load", "60", wait=False)
    try:
        until(lambda: subprocess.run(["pgrep", "-P", str(server.process.pid)], capture_output=True, check=False).stdout)
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0
    finally:
        server.close()


def test_a_second_signal_ends_it_at_once() -> None:
    with running({}, "--ignore-shutdown") as server:
        engine = server.health()["engine_pid"]
        server.process.send_signal(signal.SIGINT)
        server.line("a second signal")
        server.process.send_signal(signal.SIGINT)
        assert server.wait() == 130
        until(lambda: not pathlib.Path(f"/proc/{engine}").exists() or "Z" in pathlib.Path(f"/proc/{engine}/stat").read_text())


def listens(port: int) -> bool:
    with contextlib.suppress(ConnectionError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


def test_a_signal_ends_a_server_whose_output_nobody_reads() -> None:
    given = json.dumps({"model": "x", "ctx": 64, "port": 0})
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for engine_options, signals, code in (((), 1, 0), (("--ignore-shutdown",), 2, 130)):
        reader, writer = os.pipe()
        process = subprocess.Popen(
            [sys.executable, str(SERVE), given, *engine_options], stdout=writer, stderr=writer, env=environment
        )
        os.close(writer)
        try:
            output = b""
            while b"ready on" not in output:
                part = os.read(reader, 4096)
                assert part, output
                output += part
            os.close(reader)
            port = int(output.partition(b"127.0.0.1:")[2].split()[0])
            for _ in range(signals):
                process.send_signal(signal.SIGTERM)
                until(lambda port=port: not listens(port))
            assert process.wait(PATIENCE) == code
        finally:
            process.kill()
            process.wait()


def test_idle_connections_do_not_hold_up_the_end() -> None:
    with running() as server, socket.create_connection(("127.0.0.1", server.port)) as idle:
        idle.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert idle.recv(1000)
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0


def test_each_request_leaves_a_line_in_the_trace(tmp_path: pathlib.Path) -> None:
    trace = tmp_path / "trace.jsonl"
    with running({"trace": str(trace)}) as server:
        server.request(
            "POST",
            "/v1/chat/completions",
            {"messages": [{"content": script(n=2, cached=3, tier="memory-token")}], "temperature": 0},
            {"X-Request-Id": "r1"},
        )
        server.complete("raw", stream=True)
        server.chat(script(fail=500))
        server.chat(n=2)
    first, second, third, refused = map(json.loads, trace.read_text().splitlines())
    assert (first["request"], first["api"], first["output"]) == ("r1", "chat", "w0 w1 ")
    assert first["prompt"].endswith("\nassistant:")
    assert first["sampling"]["temperature"] == 0
    assert (first["routed"]["slot"], first["routed"]["tier"], first["routed"]["cached_tokens"]) == (0, "memory-token", 3)
    assert first["end"]["reason"] == "stop"
    times = first["seconds"]
    assert 0 <= times["routed"] <= times["first_token"] <= times["last_token"] <= times["end"]
    assert (second["prompt"], second["stream"], second["output"]) == ("raw", True, "w0 w1 w2 w3 ")
    assert third["end"]["message"] == "scripted failure"
    assert refused["error"] == {"status": 400, "message": "n: only 1 is supported, got 2", "param": "n"}


def test_gpu_stats_are_logged_with_each_request() -> None:
    with running({"gpu_stats": True}) as server:
        server.chat()
        server.line("device memory 0 bytes")


@pytest.mark.parametrize(
    ("settings", "id"),
    [
        (Settings(model="/a/b/SmolLM2-135M-Instruct.Q4_1.gguf"), "SmolLM2-135M-Instruct.Q4_1"),
        (Settings(model="/"), ""),
        (Settings(model="x.gguf", served_name="mine"), "mine"),
    ],
)
def test_the_model_id_is_the_served_name_or_the_files(settings: Settings, id: str) -> None:
    assert model_id(settings) == id
