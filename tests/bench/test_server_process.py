"""A server of its own for a run: its address, its end, and what is told when it does not start."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from clients import process


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    options = ("-m", str(tmp_path / "no such model"))
    with (
        pytest.raises(process.NotStarted, match="no such model: cannot open the model"),
        process.logging_to(tmp_path / "log", options),
    ):
        raise AssertionError("it started")


def test_the_address_is_in_the_line_that_says_it_is_ready() -> None:
    assert process.address("INFO loading\nINFO ready on http://127.0.0.1:8000\nmore") == "http://127.0.0.1:8000"
    assert process.address("INFO loading http://elsewhere\n") is None


def test_a_server_that_ignores_its_signal_is_ended_by_force(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "STOP_SECONDS", 0.05)
    deaf = "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "deaf\n"
        process.stop(server)
        assert server.returncode == -signal.SIGKILL
