"""The watchdog over the engine process itself: an idle one answers, one that hangs is replaced; and its log is the server's kind."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from tests.server.harness import RealServer, until


def test_an_idle_engine_answers_and_one_that_hangs_is_replaced(tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"dialect": "deepseek-v4", "answers": [{"after": "", "say": "</think>Hello."}]}))
    config = tmp_path / "ds4batch.toml"
    config.write_text(f'script = "{script}"\nctx = 2000\nstall-timeout = 1.5\nlog-format = "json"\nlog-level = "debug"\n')
    server = RealServer("--config", str(config))
    try:
        until(lambda: sum("is asked for a sign of life" in line for line in server.lines) >= 3)
        health = server.health()
        assert (health["status"], health["restarts"]) == ("ok", 0)
        os.kill(health["engine_pid"], signal.SIGSTOP)
        assert server.chat().status == 503  # it was sent, and nothing came
        until(lambda: server.get("/health").status == 200)
        assert server.health()["restarts"] == 1
        assert server.chat().body["choices"][0]["message"]["content"] == "Hello."
    finally:
        server.close()
    logged = [json.loads(line) for line in server.lines if line.startswith("{")]
    assert any("made no step and answered nothing for 1.5 s" in line["message"] for line in logged)
    records = [line["request"] for line in logged if "request" in line]
    assert [(one["status"], one["finish"]) for one in records] == [(503, None), (200, "stop")]
