"""The proxies' files, run before small servers that stand for the boxes."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.queries import DEPLOY

HAPROXY = shutil.which("haproxy", path="/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin")
CADDY = shutil.which("caddy")
HEADERS = ["X-Claude-Code-Session-Id", "session-id", "x-session-affinity"]
PAUSE = 0.4
with_haproxy = pytest.mark.skipif(
    HAPROXY is None or shutil.which("openssl") is None, reason="haproxy or openssl is not installed"
)
with_caddy = pytest.mark.skipif(CADDY is None, reason="caddy is not installed")


class Box(http.server.ThreadingHTTPServer):
    """Answers with its name; /stream sends an event every PAUSE, /silent nothing for long."""

    daemon_threads = True

    def __init__(self, name: str) -> None:
        self.name, self.healthy, self.left = name, True, threading.Event()
        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def handle_error(self, request: object, client_address: object) -> None:
        """Health checks leave before they have read everything."""


class Handler(http.server.BaseHTTPRequestHandler):
    server: Box

    def do_GET(self) -> None:
        status = 503 if self.path == "/health" and not self.server.healthy else 200
        self.send_response(status)
        if self.path == "/stream":
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Connection", "close")
            self.end_headers()
            with contextlib.suppress(OSError):
                for _ in range(3):
                    self.wfile.write(b"data: x\n\n")
                    self.wfile.flush()
                    time.sleep(PAUSE)
        elif self.path == "/silent":
            self.connection.settimeout(10)
            try:
                gone = not self.connection.recv(1)
            except OSError as error:
                gone = isinstance(error, ConnectionError)
            if gone:
                self.server.left.set()
            self.close_connection = True
        else:
            self.send_header("Content-Length", str(len(self.server.name)))
            self.end_headers()
            self.wfile.write(self.server.name.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextlib.contextmanager
def boxes() -> Iterator[tuple[Box, Box]]:
    pair = Box("box1"), Box("box2")
    try:
        yield pair
    finally:
        for box in pair:
            box.shutdown()
            box.server_close()


@contextlib.contextmanager
def started(command: list[str], port: int, env: dict[str, str] | None = None) -> Iterator[int]:
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env) as process:
        try:
            for _ in range(100):
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                    break
                time.sleep(0.1)
            yield port
        finally:
            process.terminate()
            process.wait(10)


def client(port: int, plain: bool = False) -> http.client.HTTPConnection:
    if plain:
        return http.client.HTTPConnection("127.0.0.1", port, timeout=15)
    context = ssl._create_unverified_context()
    return http.client.HTTPSConnection("127.0.0.1", port, timeout=15, context=context)


def asked(connection: http.client.HTTPConnection, path: str = "/", **headers: str) -> tuple[int, str]:
    with contextlib.closing(connection):
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def check_streams(connection: http.client.HTTPConnection) -> None:
    """Events come as they are sent."""
    with contextlib.closing(connection):
        connection.request("GET", "/stream")
        answer = connection.getresponse()
        begun = time.monotonic()
        gaps = []
        for _ in range(3):
            answer.readline()
            answer.readline()
            gaps.append(time.monotonic() - begun)
        assert gaps[0] < PAUSE / 2
        assert PAUSE / 2 < gaps[1] < 1.7 * PAUSE


def check_leaves(connection: http.client.HTTPConnection, *servers: Box) -> None:
    """The server hears of a client that leaves while it waits."""
    connection.request("GET", "/silent")
    time.sleep(0.3)
    connection.sock.close()
    connection.close()
    deadline = time.monotonic() + 5
    while not any(box.left.is_set() for box in servers):
        assert time.monotonic() < deadline, "the server was not told"
        time.sleep(0.05)


def haproxy_file(folder: Path, pair: tuple[Box, Box] | None = None, port: int = 443) -> Path:
    key, cert, pem = folder / "key", folder / "cert", folder / "pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=x", "-keyout", key, "-out", cert],
        check=True,
        capture_output=True,
    )
    pem.write_text(cert.read_text() + key.read_text())
    text = (DEPLOY / "haproxy" / "haproxy.cfg").read_text().replace("/etc/haproxy/certs/ds4batch.pem", str(pem))
    if pair:
        text = text.replace("192.0.2.11:8000", f"127.0.0.1:{pair[0].server_port}")
        text = text.replace("192.0.2.12:8000", f"127.0.0.1:{pair[1].server_port}")
        text = text.replace("bind :443", f"bind 127.0.0.1:{port}").replace("inter 2s", "inter 200ms")
        text = text.replace("    log /dev/log local0\n", "")
    file = folder / "haproxy.cfg"
    file.write_text(text)
    return file


def command(file: Path) -> list[str]:
    return [str(HAPROXY), "-db", "-f", str(file)]


@with_haproxy
def test_haproxy_takes_the_file(tmp_path: Path) -> None:
    done = subprocess.run([str(HAPROXY), "-c", "-f", haproxy_file(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stderr


@with_haproxy
def test_haproxy_keeps_a_conversation_on_its_box(tmp_path: Path) -> None:
    port = free_port()
    with boxes() as pair, started(command(haproxy_file(tmp_path, pair, port)), port):
        for header in HEADERS:
            where = {}
            for i in range(8):
                where[i] = asked(client(port), **{header: f"{header}-{i}"})[1]
            assert set(where.values()) == {"box1", "box2"}, header
            for i in range(8):
                assert asked(client(port), **{header: f"{header}-{i}"})[1] == where[i], header
        assert len({asked(client(port))[1] for _ in range(6)}) == 1  # by address
        assert asked(client(port), "/metrics")[0] == 404


@with_haproxy
def test_haproxy_moves_conversations_off_a_box_that_is_not_well(tmp_path: Path) -> None:
    port = free_port()
    with boxes() as pair, started(command(haproxy_file(tmp_path, pair, port)), port):
        home = asked(client(port), **{HEADERS[0]: "a"})[1]
        (sick,) = (box for box in pair if box.name == home)
        sick.healthy = False
        deadline = time.monotonic() + 10
        while (now := asked(client(port), **{HEADERS[0]: "a"})[1]) == home:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        sick.healthy = True
        time.sleep(1)
        assert asked(client(port), **{HEADERS[0]: "a"})[1] == now


@with_haproxy
def test_haproxy_streams_and_passes_on_that_a_client_left(tmp_path: Path) -> None:
    port = free_port()
    with boxes() as pair, started(command(haproxy_file(tmp_path, pair, port)), port):
        check_streams(client(port))
        check_leaves(client(port), *pair)


@with_caddy
def test_caddy_takes_the_file() -> None:
    file = DEPLOY / "caddy" / "Caddyfile"
    done = subprocess.run(
        [str(CADDY), "validate", "--adapter", "caddyfile", "--config", file], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "not formatted" not in done.stderr


@with_caddy
def test_caddy_streams_and_passes_on_that_a_client_left(tmp_path: Path) -> None:
    """Without its TLS, which would install an authority."""
    port = free_port()
    with boxes() as pair:
        text = (DEPLOY / "caddy" / "Caddyfile").read_text()
        text = text.replace("box.lan {", f"http://127.0.0.1:{port} {{").replace("\ttls internal\n", "")
        text = text.replace("127.0.0.1:8000", f"127.0.0.1:{pair[0].server_port}")
        file = tmp_path / "Caddyfile"
        file.write_text("{\n\tadmin off\n}\n" + text)
        run = [str(CADDY), "run", "--adapter", "caddyfile", "--config", str(file)]
        with started(run, port, {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}):
            assert asked(client(port, plain=True)) == (200, "box1")
            assert asked(client(port, plain=True), "/metrics")[0] == 404
            check_streams(client(port, plain=True))
            check_leaves(client(port, plain=True), *pair)
