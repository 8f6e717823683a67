"""Where records and traces go: the process log, files that are renamed, disks that are full; and what is never in them."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import pathlib
import signal
import stat
import threading
from typing import Any

import pytest
from harness import Server, running, script, until

from ds4batch.server import line_file
from ds4batch.server.line_file import LineFile

CANARY = "xyzzy-user-text"


def count(file: pathlib.Path) -> int:
    return len(file.read_bytes().splitlines()) if file.exists() else 0


def test_sighup_opens_both_files_anew(tmp_path: pathlib.Path) -> None:
    log, trace = tmp_path / "requests.jsonl", tmp_path / "trace.jsonl"
    with running({"request_log": str(log), "trace": str(trace)}) as server:
        for number in (1, 2, 3):
            assert server.chat().status == 200
            until(lambda: (count(log), count(trace)) == (1, 1))
            for file in (log, trace):
                file.rename(f"{file}.{number}")
            server.process.send_signal(signal.SIGHUP)
            until(lambda: log.exists() and trace.exists())
        assert server.chat().status == 200
        until(lambda: (count(log), count(trace)) == (1, 1))
        assert [count(pathlib.Path(f"{file}.{n}")) for file in (log, trace) for n in (1, 2, 3)] == [1] * 6
        assert not any("request" in line and "chat" in line for line in server.lines)  # not in the process log as well


def test_a_path_that_is_gone_keeps_the_old_file(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    file = folder / "requests.jsonl"
    with running({"request_log": str(file)}) as server:
        server.chat()
        until(lambda: count(file) == 1)
        moved = tmp_path / "moved"
        folder.rename(moved)
        server.process.send_signal(signal.SIGHUP)
        server.line("the request log cannot be opened anew, the old file is written")
        assert server.chat().status == 200
        until(lambda: count(moved / "requests.jsonl") == 2)


def test_without_files_sighup_ends_the_server_as_it_does_any_program() -> None:
    with running() as server:
        server.process.send_signal(signal.SIGHUP)
        assert server.wait() == -signal.SIGHUP


def test_a_full_disk_fails_no_request_and_is_told_once() -> None:
    with running({"request_log": "/dev/full", "trace": "/dev/full"}) as server:
        for _ in range(5):
            assert server.chat().status == 200
            assert server.chat(stream=True).raw.endswith(b"data: [DONE]\n\n")
    told = [line for line in server.lines if "is not written, lines are lost: [Errno 28]" in line]
    assert len(told) == 2
    assert {"request log" in line for line in told} == {True, False}


def test_a_line_that_a_full_disk_cut_short_is_ended_before_the_next(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    room, real = 15, os.write

    def write(fd: int, data: memoryview) -> int:
        nonlocal room
        if room <= 0:
            raise OSError(errno.ENOSPC, "full")
        written = real(fd, data[: min(room, 4)])
        room -= written
        return written

    monkeypatch.setattr(line_file.os, "write", write)
    file = LineFile(str(tmp_path / "log"), 0o640, "the log")
    with caplog.at_level(logging.WARNING):
        for number in range(4):
            file.add(lambda number=number: b"line %d, long" % number, 20)
        file._writer.submit(lambda: None).result()
        assert (tmp_path / "log").read_bytes() == b"line 0, long\nli"
        room = 1000
        file.add(lambda: b"fits again", 20)
        file.close()
    assert (tmp_path / "log").read_bytes() == b"line 0, long\nli\nfits again\n"
    assert [record.message.rpartition(": ")[2] for record in caplog.records] == [
        "[Errno 28] full",
        f"{tmp_path}/log is written again, 3 lines were lost",
    ]


def test_lines_that_a_hanging_disk_does_not_take_are_lost_and_not_kept(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_file, "MAX_PENDING_BYTES", 100)
    hangs = threading.Event()
    file = LineFile(str(tmp_path / "log"), 0o640, "the log")
    file.add(lambda: b"0" if hangs.wait(60) else b"", 40)
    for number in range(1, 9):
        file.add(lambda number=number: b"%d" % number, 40)
    hangs.set()
    file._writer.submit(lambda: None).result()
    file.add(lambda: b"after", 40)
    file.close()
    assert (tmp_path / "log").read_bytes() == b"0\n1\nafter\n"


def test_a_trace_is_its_owners_alone_and_an_old_one_that_is_not_is_told(tmp_path: pathlib.Path) -> None:
    old, new = tmp_path / "old.jsonl", tmp_path / "new.jsonl"
    old.touch()
    old.chmod(0o644)
    with running({"trace": str(old)}) as server:
        server.line("its mode 644 lets others at it")
        new_log = tmp_path / "requests.jsonl"
    with running({"trace": str(new), "request_log": str(new_log)}) as server:
        server.chat()
    assert stat.S_IMODE(new.stat().st_mode) == 0o600
    assert stat.S_IMODE(new_log.stat().st_mode) & 0o137 == 0


def requests_with_texts(server: Server) -> None:
    """Requests whose every text is the canary, good ones and such as are refused."""
    tool = {"type": "function", "function": {"name": CANARY, "description": CANARY, "parameters": {"type": "object"}}}
    messages = [
        {"role": "system", "content": CANARY},
        {"role": "user", "content": CANARY + script(n=2, diverges=3, echo=True)},
    ]
    for stream in (False, True):
        server.request("POST", "/v1/chat/completions", {"messages": messages, "tools": [tool], "stop": CANARY, "stream": stream})
        server.request("POST", "/v1/completions", {"prompt": CANARY, "stream": stream})
        server.request("POST", "/v1/responses", {"input": CANARY, "instructions": CANARY, "stream": stream})
        server.request("POST", "/v1/messages", {"messages": messages[1:], "max_tokens": 5, "stream": stream, "system": CANARY})
    bad: list[tuple[str, Any]] = [
        ("/v1/chat/completions", {"messages": [{"role": CANARY, "content": "x"}]}),
        ("/v1/chat/completions", {"messages": [*messages, messages[0]]}),
        ("/v1/chat/completions", {"messages": messages, "tool_choice": {"type": CANARY}}),
        ("/v1/chat/completions", {"messages": messages, "temperature": CANARY}),
        ("/v1/chat/completions", {"messages": messages, "logit_bias": {CANARY: 1}}),
        ("/v1/chat/completions", {"messages": messages, "response_format": {"type": CANARY}}),
        (
            "/v1/chat/completions",
            {
                "messages": messages,
                "response_format": {"type": "json_schema", "json_schema": {"schema": {"properties": {CANARY: {"type": CANARY}}}}},
            },
        ),
        ("/v1/responses", {"input": [{"type": "function_call_output", "call_id": CANARY, "output": CANARY}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": CANARY}]}], "max_tokens": 5}),
        ("/v1/chat/completions", b'{"' + CANARY.encode()),
        ("/v1/completions", {"prompt": [CANARY, CANARY]}),
    ]
    for path, body in bad:
        assert 400 <= server.request("POST", path, body).status < 500, (path, body)


@pytest.mark.parametrize(("log_format", "to_file"), [("text", False), ("json", False), ("text", True)])
def test_the_log_holds_nothing_that_a_user_wrote(tmp_path: pathlib.Path, log_format: str, to_file: bool) -> None:
    file = tmp_path / "requests.jsonl"
    more = {"request_log": str(file)} if to_file else {}
    with running({"log_format": log_format, "log_level": "debug", **more}) as server:
        requests_with_texts(server)
    logged = "\n".join(server.lines) + (file.read_text() if to_file else "")
    assert "slot 1 agrees up to token 3 of its 99" in logged or '"live":99,"held":null,"asked":null' in logged
    assert logged.count("anthropic") >= 3
    assert CANARY not in logged
    assert "'left'" not in logged


def test_an_owner_may_have_users_texts_in_the_log() -> None:
    with running({"log_text": True}) as server:
        requests_with_texts(server)
    logged = "\n".join(server.lines)
    assert "slot 1 agrees up to token 3 of its 99: it holds 'left', the request 'right'" in logged
    assert f"unknown role {CANARY!r}" in logged.replace('\\"', '"')


def test_the_json_log_is_json_line_by_line_with_the_record_in_it() -> None:
    with running({"log_format": "json"}) as server:
        server.request("POST", "/v1/chat/completions", {"messages": [{"content": "hi"}]}, {"X-Request-Id": "r1"})
        os.kill(int(server.health()["engine_pid"]), signal.SIGKILL)
        server.line("starting it again")
    lines = [json.loads(line) for line in server.lines if line.startswith("{")]
    assert all(list(line)[:5] == ["time", "level", "process", "logger", "message"] for line in lines)
    (request,) = [line for line in lines if line["logger"] == "ds4batch.request"]
    assert (request["request"]["request"], request["request"]["status"], request["level"]) == ("r1", 200, "info")
    assert request["message"].startswith("request r1: chat, 200 stop; ")
    assert [line["level"] for line in lines if "starting it again" in line["message"]] == ["error"]


def test_levels_leave_out_what_is_below_them_but_not_in_a_file(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "requests.jsonl"
    with running({"log_level": "warning", "request_log": str(file)}) as server:
        server.chat()
    assert count(file) == 1
    assert [line for line in server.lines if " INFO " in line] == []
    with running({"log_level": "warning"}) as server:
        server.chat()
    assert [line for line in server.lines if "request" in line] == []


def test_a_request_with_a_key_names_it_and_one_without_is_recorded_too(tmp_path: pathlib.Path) -> None:
    keys, file = tmp_path / "keys", tmp_path / "requests.jsonl"
    keys.write_text(f"anna user sha256:{hashlib.sha256(b'secret-of-anna').hexdigest()}\n")
    keys.chmod(0o600)
    with running({"api_key_file": str(keys), "request_log": str(file)}) as server:
        body = {"messages": [{"content": "hi"}]}
        server.request("POST", "/v1/chat/completions", body, {"Authorization": "Bearer secret-of-anna"})
        server.request("POST", "/v1/chat/completions", body, {"Authorization": "Bearer wrong"})
        until(lambda: count(file) == 2)
    let_in, refused = map(json.loads, file.read_text().splitlines())
    assert (let_in["key"], let_in["status"]) == ("anna", 200)
    assert (refused["key"], refused["status"], refused["jobs"]) == ("", 401, [])
    assert "secret-of-anna" not in file.read_text()
    assert "wrong" not in file.read_text()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
def test_the_request_id_is_echoed_on_every_answer(server: Server, path: str) -> None:
    good: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "prompt": "hi", "input": "hi", "max_tokens": 5}
    if path == "/v1/responses":
        del good["prompt"], good["max_tokens"]
    anthropic = path == "/v1/messages"
    for body in (good, {**good, "stream": True}, {**good, "temperature": "hot"}, b"{"):
        answer = server.request("POST", path, body, {"X-Request-Id": "mine-1"})
        assert answer.headers["x-request-id"] == "mine-1"
        assert answer.headers.get("request-id") == ("mine-1" if anthropic else None)
        made = server.request("POST", path, body, {"X-Request-Id": "not fit: spaces"}).headers["x-request-id"]
        assert len(made) == 24


def test_the_trace_has_both_tries_of_a_request_and_the_window_of_tokens(tmp_path: pathlib.Path) -> None:
    trace = tmp_path / "trace.jsonl"
    messages = [{"role": "user", "content": "first"}, {"role": "user", "content": script(n=2, malformed="no JSON", diverges=20)}]
    with running({"trace": str(trace)}) as server:
        server.request("POST", "/v1/chat/completions", {"messages": messages, "max_tokens": 50})
        server.chat()
    first, second = (json.loads(line) for line in trace.read_text().splitlines())
    (earlier,) = first["earlier_tries"]
    assert first["prompt"].startswith(earlier["prompt"] + "w0 w1 \ntool: no JSON")
    assert (earlier["output"], first["output"]) == ("w0 w1 ", "w0 w1 ")
    assert (earlier["end"]["malformed"], first["end"]["malformed"]) == ("no JSON", "")
    assert earlier["routed"]["divergence"]["at"] == 20
    assert earlier["divergence_message"] == 1
    window = earlier["window"]
    assert window["from"] == 12
    assert "".join(text for _, text in window["asked"]) == earlier["prompt"][12:29]
    assert "".join(text for _, text in window["held"]) == "left"
    assert (second["window"], second["divergence_message"], second["earlier_tries"]) == (None, None, [])
    assert first["record"]["retries"] == 1
