"""The server under test: started as a user starts it, in a session of its own, watched from outside, stopped by signals.

Owns the processes and the file of what they print. Talks to the server only to ask for its health, figures and status.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.server_metrics import Reading, parse_metrics
from bench.soak import processes
from bench.soak.wire import Framing, exchange, request_bytes

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 120.0
_READY = re.compile(r"ready on http://([^:]+):(\d+) ")


class SubjectError(Exception):
    """The server is not as it must be for a soak to go on; the message says what happened."""


@dataclass(frozen=True)
class Stopped:
    """How a server ended after SIGTERM."""

    seconds: float
    code: int | None  # None: it had to be killed
    left_over: tuple[int, ...]  # processes of its session that outlived it


class Subject:
    """One life of a server."""

    def __init__(self, options: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> None:
        """`options` are those of `ds4batch serve` but for the address; `environment` is added to this process's own."""
        self._log = log
        self._lines = log.open("wb")
        command = [sys.executable, "-m", "ds4batch.cli", "serve", "--host", "127.0.0.1", "--port", "0", *options]
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=self._lines,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})},
            start_new_session=True,
        )
        self.address = ("127.0.0.1", 0)

    @property
    def front(self) -> int:
        """The front's process id, which is its session's too."""
        return self._process.pid

    async def ready(self) -> None:
        """Wait until it serves. Raises SubjectError."""
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            found = _READY.search(self.printed())
            if found:
                self.address = (found[1], int(found[2]))
                return
            if self._process.poll() is not None:
                raise SubjectError(f"the server ended with status {self._process.returncode}:\n{self.printed()[-2000:]}")
            await asyncio.sleep(0.1)
        raise SubjectError(f"the server was not ready within {START_SECONDS:g} s:\n{self.printed()[-2000:]}")

    def printed(self) -> str:
        """Everything the server has printed."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    # figures

    async def get(self, path: str) -> tuple[int, bytes]:
        """Status and body of a GET. Raises SubjectError when there is no answer."""
        reply = await exchange(self.address, request_bytes("GET", path, b""), patience=30.0)
        if reply.framing is not Framing.WHOLE:
            raise SubjectError(f"GET {path}: {reply.framing} {reply.detail}")
        return reply.status, reply.body

    async def health(self) -> dict[str, Any]:
        """What /health says, whatever its status."""
        answer: dict[str, Any] = json.loads((await self.get("/health"))[1])
        return answer

    async def metrics(self) -> Reading:
        """Every sample of /metrics."""
        return parse_metrics((await self.get("/metrics"))[1].decode())

    async def slots(self) -> list[str]:
        """The state of each slot, as the status page is told."""
        return [slot["state"] for slot in json.loads((await self.get("/status.json"))[1])["slots"]]

    async def engine(self) -> int:
        """The engine's process id. Raises SubjectError while there is none."""
        pid = (await self.health())["engine_pid"]
        if pid is None:
            raise SubjectError("there is no engine process")
        return int(pid)

    async def until_up(self, restarts: int, patience: float) -> bool:
        """Wait until the engine serves and was started again at least `restarts` times."""
        end = time.monotonic() + patience
        while time.monotonic() < end:
            health = await self.health()
            if health["status"] == "ok" and health["restarts"] >= restarts:
                return True
            await asyncio.sleep(0.1)
        return False

    def zombies(self) -> list[int]:
        """Dead processes of the session that nobody has waited for."""
        return [process.pid for process in processes.session(self.front) if process.state == "Z" and process.pid != self.front]

    # the end

    def terminate(self) -> None:
        """SIGTERM to the front, as a supervisor sends it."""
        self._process.send_signal(signal.SIGTERM)

    async def stopped(self, patience: float) -> Stopped:
        """Wait for the end after `terminate`, and kill what is left of the session."""
        began = time.monotonic()
        while self._process.poll() is None and time.monotonic() - began < patience:
            await asyncio.sleep(0.02)
        seconds, code = time.monotonic() - began, self._process.returncode
        return Stopped(seconds, code, tuple(self.kill()))

    def kill(self) -> list[int]:
        """End everything at once; the processes that were still there."""
        there = [process.pid for process in processes.session(self.front) if process.state != "Z"]
        for pid in there:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        self._lines.close()
        return there
