"""HTTPS by the server itself: what is negotiated, what is refused at start, and that streams and disconnects are as without it."""

from __future__ import annotations

import concurrent.futures
import http.client
import json
import logging
import os
import pathlib
import shutil
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from harness import PATIENCE, ROOT, Answer, Server, script, until

from ds4batch import cli
from ds4batch.server.tls import Certificate, TlsError

CERTS = pathlib.Path(__file__).with_name("certs")
FIRST, FIRST_KEY, SECOND, SECOND_KEY, ENCRYPTED = (
    str(CERTS / name) for name in ("first.pem", "first.key", "second.pem", "second.key", "encrypted.key")
)
CLOSE = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


class TlsServer(Server):
    """A front that speaks TLS."""

    def __init__(self, settings: dict[str, Any], ca: str) -> None:
        super().__init__(settings, wait=False)
        try:
            self.port = int(self.line("ready on https://").split("https://127.0.0.1:")[1].split()[0])
        except BaseException:
            self.close()
            raise
        self.ca = ca

    def wrapped(self, receive_bytes: int = 0, **versions: ssl.TLSVersion) -> ssl.SSLSocket:
        """A connection on which the certificate was checked."""
        context = ssl.create_default_context(cafile=self.ca)
        for name, version in versions.items():
            setattr(context, name, version)
        sock = socket.socket()
        sock.settimeout(PATIENCE)
        if receive_bytes:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        try:
            sock.connect(("127.0.0.1", self.port))
            return context.wrap_socket(sock, server_hostname="localhost")
        except BaseException:
            sock.close()
            raise

    def ask(self, method: str, path: str, body: Any = None) -> Answer:
        with self.wrapped() as sock:
            data = json.dumps(body).encode()
            sock.sendall(
                f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data
            )
            response = http.client.HTTPResponse(sock)
            response.begin()
            return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())

    def figure(self, start: str) -> float:
        text = self.ask("GET", "/metrics").raw.decode()
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(start))


@pytest.fixture(scope="module")
def secure() -> Iterator[TlsServer]:
    server = TlsServer({"tls_cert": FIRST, "tls_key": FIRST_KEY, "batched_session": 4, "header_timeout": 1.0}, FIRST)
    yield server
    server.close()


def test_tls_1_2_and_1_3_are_spoken_and_nothing_older(secure: TlsServer) -> None:
    for version, name in ((ssl.TLSVersion.TLSv1_2, "TLSv1.2"), (ssl.TLSVersion.TLSv1_3, "TLSv1.3")):
        with secure.wrapped(minimum_version=version, maximum_version=version) as sock:
            assert sock.version() == name
            sock.sendall(CLOSE)
            assert sock.recv(100).startswith(b"HTTP/1.1 200")
    context = Certificate(FIRST, FIRST_KEY).context
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2


def test_what_is_no_tls_gets_no_answer_and_leaves_no_trace_in_the_log(secure: TlsServer) -> None:
    lines = len(secure.lines)
    for data in (CLOSE, b"\x16\x03\x01nonsense", b""):
        with socket.create_connection(("127.0.0.1", secure.port), timeout=PATIENCE) as sock:
            sock.sendall(data)
            try:
                while part := sock.recv(100):
                    assert b"HTTP" not in part
            except ConnectionError:
                pass
    assert secure.ask("GET", "/health").status == 200
    assert not [line for line in secure.lines[lines:] if "Traceback" in line]


def test_a_slow_head_is_cut_off_inside_tls_too(secure: TlsServer) -> None:
    with secure.wrapped() as sock:
        sock.sendall(b"GET /hea")
        answer = b""
        while part := sock.recv(1000):
            answer += part
    assert answer.startswith(b"HTTP/1.1 408 ")


def test_answers_and_streams_pass(secure: TlsServer) -> None:
    whole = secure.ask("POST", "/v1/completions", {"prompt": script(n=3)})
    assert json.loads(whole.raw)["choices"][0]["text"] == "w0 w1 w2 "
    stream = secure.ask("POST", "/v1/completions", {"prompt": script(n=300, size=2000), "stream": True})
    assert stream.raw.endswith(b"data: [DONE]\n\n")
    large = {"prompt": script(n=2), "x": "y" * (3 << 20)}
    assert secure.ask("POST", "/v1/completions", large).status == 200


def test_the_official_clients_talk_to_it(secure: TlsServer) -> None:
    trust = ssl.create_default_context(cafile=FIRST)
    url = f"https://localhost:{secure.port}"
    with openai.OpenAI(base_url=url + "/v1", api_key="any", http_client=openai.DefaultHttpxClient(verify=trust)) as client:
        chunks = client.completions.create(model="m", prompt=script(n=3), stream=True)
        assert "".join(chunk.choices[0].text for chunk in chunks) == "w0 w1 w2 "
    with anthropic.Anthropic(base_url=url, api_key="any", http_client=anthropic.DefaultHttpxClient(verify=trust)) as client:
        assert client.messages.create(model="m", max_tokens=9, messages=[{"role": "user", "content": "x"}]).content


def test_the_chat_trusts_whom_it_is_told_to(secure: TlsServer, capsys: pytest.CaptureFixture[str]) -> None:
    chat = ["chat", "--url", f"https://localhost:{secure.port}", "-p", script(n=2)]
    assert cli.main(chat) == 1
    assert "its certificate is not trusted: self-signed certificate" in capsys.readouterr().err
    command = [sys.executable, "-m", "ds4batch.cli", *chat]
    done = subprocess.run(command, env={**os.environ, "SSL_CERT_FILE": FIRST}, cwd=ROOT, capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (0, b"w0 w1 \n")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_noticed(secure: TlsServer, stream: bool) -> None:
    data = json.dumps({"prompt": script(n=5000, delay=0.02), "stream": stream}).encode()
    gone = 'ds4batch_cancelled_total{cause="client"'
    before = secure.figure(gone)
    with secure.wrapped() as sock:
        sock.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
        until(lambda: secure.figure("vllm:num_requests_running") == 1)
    until(lambda: secure.figure(gone) == before + 1)
    until(lambda: secure.figure("vllm:num_requests_running") == 0)


def test_a_client_that_stops_reading_is_cut_off(secure: TlsServer) -> None:
    slow = 'ds4batch_cancelled_total{cause="slow_reader"'
    before = secure.figure(slow)
    data = json.dumps({"prompt": script(n=100_000, size=4000, burst=10, delay=0.01), "stream": True}).encode()
    with secure.wrapped(8192) as sock:
        sock.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
        until(lambda: secure.figure(slow) == before + 1)


def test_a_signal_ends_streams_properly() -> None:
    server = TlsServer({"tls_cert": FIRST, "tls_key": FIRST_KEY}, FIRST)
    try:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            stream = pool.submit(server.ask, "POST", "/v1/completions", {"prompt": script(n=5000, delay=0.02), "stream": True})
            until(lambda: server.figure("vllm:generation_tokens_total") > 2)
            server.process.terminate()
            assert b"server shutting down" in stream.result(PATIENCE).raw
            assert server.wait() == 0
    finally:
        server.close()


# the files


def copied(folder: pathlib.Path, certificate: str, key: str) -> tuple[str, str]:
    """Put a pair at one place, its time of change surely another."""
    pair = str(folder / "cert.pem"), str(folder / "cert.key")
    for source, place in zip((certificate, key), pair, strict=True):
        shutil.copy(source, place + ".new")
        later = time.time_ns() + 5_000_000_000
        os.utime(place + ".new", ns=(later, later))
        os.replace(place + ".new", place)
    return pair


def peer(server: TlsServer, ca: str) -> bool:
    """Whether the certificate that is shown is the one of `ca`."""
    server.ca = ca
    try:
        with server.wrapped():
            return True
    except ssl.SSLCertVerificationError:
        return False


def test_a_renewed_certificate_is_shown_and_a_wrong_pair_is_not(tmp_path: pathlib.Path) -> None:
    certificate, key = copied(tmp_path, FIRST, FIRST_KEY)
    server = TlsServer({"tls_cert": certificate, "tls_key": key}, FIRST)
    try:
        with server.wrapped() as held:
            copied(tmp_path, SECOND, FIRST_KEY)
            server.line("do not belong together")
            assert peer(server, FIRST)
            copied(tmp_path, SECOND, SECOND_KEY)
            until(lambda: peer(server, SECOND))
            assert not peer(server, FIRST)
            held.sendall(CLOSE)  # a connection that stood goes on
            assert held.recv(100).startswith(b"HTTP/1.1 200")
    finally:
        server.close()


@pytest.mark.parametrize(
    ("certificate", "key", "complaint"),
    [
        ("/no/such.pem", FIRST_KEY, "/no/such.pem: No such file or directory"),
        (FIRST, "/no/such.key", "/no/such.key: No such file or directory"),
        (FIRST, SECOND_KEY, f"{SECOND_KEY}: the certificate and the key do not belong together"),
        (FIRST, ENCRYPTED, f"{ENCRYPTED}: the key is encrypted"),
        (FIRST_KEY, FIRST_KEY, f"{FIRST_KEY}: no usable PEM block"),
        (FIRST, FIRST, f"{FIRST}: no usable PEM block"),
    ],
)
def test_what_cannot_be_used_is_named(certificate: str, key: str, complaint: str) -> None:
    with pytest.raises(TlsError) as caught:
        Certificate(certificate, key)
    assert complaint in str(caught.value)


def test_a_damaged_file_is_named(tmp_path: pathlib.Path) -> None:
    text = pathlib.Path(FIRST).read_text()
    (tmp_path / "cert.pem").write_text(text[:200] + text[260:])
    with pytest.raises(TlsError, match=r"cert\.pem: "):
        Certificate(str(tmp_path / "cert.pem"), FIRST_KEY)


def test_a_pair_that_stays_is_not_read_again(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    held = Certificate(*copied(tmp_path, FIRST, FIRST_KEY))
    held.poll()
    assert not caplog.records
    os.unlink(tmp_path / "cert.key")
    held.poll()
    held.poll()
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "cert.key: No such file" in caplog.text


def test_a_server_does_not_start_on_a_wrong_pair() -> None:
    server = Server({"tls_cert": FIRST, "tls_key": SECOND_KEY}, wait=False)
    try:
        assert server.wait() == 1
        assert server.lines == [f"ds4batch: {SECOND_KEY}: the certificate and the key do not belong together"]
    finally:
        server.close()


@pytest.mark.parametrize("flag", ["--tls-cert", "--tls-key"])
def test_each_file_needs_the_other(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["serve", "-m", "x", flag, FIRST])
    assert left.value.code == 2
    assert "--tls-cert and --tls-key" in capsys.readouterr().err
