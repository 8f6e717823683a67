"""Starts the front as a process and talks to it over real sockets."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

SERVE = pathlib.Path(__file__).with_name("serve_fake.py")
ROOT = SERVE.parents[2]
PATIENCE = 60.0  # seconds until a wait for something that must happen gives up


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    raw: bytes

    @property
    def body(self) -> Any:
        return json.loads(self.raw)

    @property
    def events(self) -> list[Any]:
        """The data of a stream's events; `[DONE]` as text."""
        found = re.findall(rb"^data: (.*)$", self.raw, re.M)
        return [item.decode() if item == b"[DONE]" else json.loads(item) for item in found]


class Server:
    """A front over the scripted engine."""

    def __init__(self, settings: dict[str, Any], *engine_options: str, wait: bool = True) -> None:
        given = json.dumps({"model": "x", "ctx": 4096, "port": 0, **settings})
        self._start([sys.executable, str(SERVE), given, *engine_options], wait)

    def _start(self, command: list[str], wait: bool) -> None:
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            cwd=ROOT,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.port = 0
        if wait:
            try:
                line = self.line("ready on http://")
            except BaseException:
                self.close()  # nobody else can: there is no server to be held
                raise
            self.port = int(re.search(r":(\d+) ", line)[1])  # type: ignore[index]

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())

    def line(self, part: str) -> str:
        found: str = until(lambda: next((line for line in self.lines if part in line), None), lambda: "\n".join(self.lines))
        return found

    def wait(self) -> int:
        code = self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.process.wait()
        self._reader.join(PATIENCE)
        assert self.process.stdout is not None
        self.process.stdout.close()

    # requests

    def request(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        with contextlib.closing(connection):
            data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
            connection.request(method, path, data, headers or {})
            response = connection.getresponse()
            return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())

    def get(self, path: str) -> Answer:
        return self.request("GET", path)

    def chat(self, content: str = "hi", **more: Any) -> Answer:
        return self.request("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": content}], **more})

    def complete(self, prompt: Any = "hi", **more: Any) -> Answer:
        return self.request("POST", "/v1/completions", {"prompt": prompt, **more})

    def send(self, body: Any, path: str = "/v1/chat/completions", trailing: bytes = b"") -> socket.socket:
        """A connected socket on which one POST has been sent, and `trailing` behind it."""
        data = json.dumps(body).encode()
        sock = socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE)
        sock.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data + trailing)
        return sock

    # figures

    def metrics(self) -> dict[str, float]:
        """Every sample by its name and its own labels, e.g. `vllm:request_success_total{finished_reason="stop"}`."""
        out = {}
        for line in self.get("/metrics").raw.decode().splitlines():
            if not line.startswith("#"):
                key, value = line.rsplit(" ", 1)
                name, _, labels = key.partition("{")
                own = [part for part in re.findall(r'[a-z_]+="[^"]*"', labels) if not re.match("model_name=|engine=", part)]
                out[name + ("{" + ",".join(own) + "}" if own else "")] = float(value)
        return out

    def metric(self, key: str) -> float:
        return self.metrics()[key]

    def until_metric(self, key: str, value: float) -> None:
        until(lambda: self.metric(key) == value, lambda: f"{key} is {self.metric(key)}, not {value}")

    def health(self) -> Any:
        return self.get("/health").body


def script(**members: Any) -> str:
    """Prompt text that tells the fake engine what to do."""
    return f"<<{json.dumps(members)}>>"


def until(probe: Callable[[], Any], complaint: Callable[[], str] = lambda: "it did not happen") -> Any:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        found = probe()
        if found:
            return found
        time.sleep(0.01)
    raise AssertionError(complaint())


@contextlib.contextmanager
def running(settings: dict[str, Any] | None = None, *engine_options: str) -> Iterator[Server]:
    server = Server(settings or {}, *engine_options)
    try:
        yield server
    finally:
        server.close()


class RealServer(Server):
    """`ds4batch serve` as a user starts it."""

    def __init__(self, *arguments: str, wait: bool = True) -> None:
        self._start([sys.executable, "-m", "ds4batch.cli", "serve", "--port", "0", *arguments], wait)
