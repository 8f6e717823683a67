"""Who is let in where, what the others are told, and that a key is in nothing that the server writes."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import pathlib
import socket
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from harness import PATIENCE, Server, script, until
from keyed import ADMIN, USER, Keyring, basic, bearer, guarded
from test_openapi import DOCUMENT, conforms
from test_status import service

from ds4batch import cli
from ds4batch.server import access
from ds4batch.server.app import Front
from ds4batch.server.keys import KeyInfo, new_key

ROUTES = sorted(Front(service()).routes)
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/completions": {"prompt": "x"},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "x"}]},
}


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Keyring]]:
    with guarded(tmp_path_factory.mktemp("keys"), {"batched_session": 4, "cors": True}) as both:
        yield both


def status(server: Server, method: str, path: str, headers: dict[str, str]) -> int:
    """Of an answer; a stream's is not read to its end."""
    body = json.dumps(BODIES[path]).encode() if path in BODIES else b""
    asked = {"Host": "x", "Content-Length": str(len(body)), "Connection": "close", **headers}
    head = f"{method} {path.replace('{model}', 'fake-model')} HTTP/1.1\r\n" + "".join(f"{k}: {v}\r\n" for k, v in asked.items())
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as sock:
        sock.sendall(head.encode() + b"\r\n" + body)
        return int(sock.recv(15).split()[1])


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_every_route_lets_in_whom_its_scope_names(front: tuple[Server, Keyring], method: str, path: str) -> None:
    server, ring = front
    admin_only, is_open = path in access.ADMIN, path in access.OPEN
    for spell in (bearer, lambda key: {"x-api-key": key}, lambda key: {"authorization": f"BEARER   {key} "}):
        assert status(server, method, path, spell(ring.admin)) == 200
        assert status(server, method, path, spell(ring.user)) == (403 if admin_only else 200)
        for wrong in (new_key(), ring.user[:-1], ring.user + "x", ring.user.upper(), "x" * 60_000):
            assert status(server, method, path, spell(wrong)) == (200 if is_open else 401)
    for nothing in ({}, {"Authorization": "Bearer"}, {"Authorization": ring.admin}, {"x-api-key": ""}, {"Cookie": ring.admin}):
        assert status(server, method, path, nothing) == (200 if is_open else 401)


def test_what_is_open_and_what_is_the_admins_are_routes() -> None:
    paths = {path for _, path in ROUTES}
    assert paths > (access.OPEN | access.ADMIN)
    assert sorted(access.ADMIN) == ["/", "/metrics", "/status.json", "/status/stream"]


def test_a_password_opens_what_a_browser_shows_and_no_api(front: tuple[Server, Keyring]) -> None:
    server, ring = front
    for path in sorted(access.ADMIN):
        assert status(server, "GET", path, basic(ring.admin)) == 200
        assert status(server, "GET", path, basic(ring.user)) == 403
        assert status(server, "GET", path, basic(new_key())) == 401
        assert status(server, "GET", path, {"Authorization": "Basic ###"}) == 401
    for path in BODIES:
        assert status(server, "POST", path, basic(ring.admin)) == 401
    assert status(server, "GET", "/v1/models", basic(ring.admin)) == 401


def test_of_two_keys_one_that_holds_is_enough(front: tuple[Server, Keyring]) -> None:
    server, ring = front
    assert status(server, "GET", "/v1/models", {**bearer("sk-of-another-service"), "x-api-key": ring.user}) == 200
    assert status(server, "GET", "/v1/models", {**bearer(ring.user), "x-api-key": "sk-of-another-service"}) == 200


def test_unknown_paths_and_wrong_methods_tell_strangers_nothing(front: tuple[Server, Keyring]) -> None:
    server, ring = front
    assert server.get("/v1/nothing").status == 401
    assert server.request("DELETE", "/v1/models").status == 401
    assert server.request("GET", "/v1/nothing", headers=bearer(ring.user)).status == 404


@pytest.mark.parametrize("path", sorted(BODIES))
def test_refusals_have_the_shape_of_their_api(front: tuple[Server, Keyring], path: str) -> None:
    server, _ = front
    described = DOCUMENT["paths"][path]["post"]["responses"]["401"]
    for headers, challenge in (({}, 'Bearer realm="ds4batch"'), (bearer("no"), 'Bearer realm="ds4batch", error="invalid_token"')):
        refused = server.request("POST", path, BODIES[path], headers)
        assert refused.status == 401
        assert refused.headers["www-authenticate"] == challenge
        assert refused.headers["access-control-allow-origin"] == "*"
        assert len(refused.headers["x-request-id"]) == 24
        conforms(refused.body, described["content"]["application/json"]["schema"])
        error = refused.body["error"]
        if path.startswith("/v1/messages"):
            assert (refused.body["type"], error["type"]) == ("error", "authentication_error")
        else:
            assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")


def test_the_models_refuse_each_client_in_its_shape(front: tuple[Server, Keyring]) -> None:
    server, _ = front
    assert server.get("/v1/models").body["error"]["code"] == "invalid_api_key"
    refused = server.request("GET", "/v1/models", headers={"anthropic-version": "2023-06-01"}).body
    assert refused["error"]["type"] == "authentication_error"


def test_a_browser_is_asked_for_a_password(front: tuple[Server, Keyring]) -> None:
    server, ring = front
    for path in ("/", "/status.json", "/status/stream", "/metrics"):
        refused = server.get(path)
        assert (refused.status, refused.headers["www-authenticate"]) == (401, 'Basic realm="ds4batch", charset="UTF-8"')
        forbidden = server.request("GET", path, headers=bearer(ring.user))
        assert (forbidden.status, forbidden.body["error"]["code"]) == (403, "insufficient_permissions")
        conforms(forbidden.body, DOCUMENT["paths"][path]["get"]["responses"]["403"]["content"]["application/json"]["schema"])
    assert b"<!doctype html>" in server.request("GET", "/", headers=basic(ring.admin)).raw


def test_preflights_are_answered_without_a_key(front: tuple[Server, Keyring]) -> None:
    server, _ = front
    answer = server.request("OPTIONS", "/v1/chat/completions", headers={"Access-Control-Request-Headers": "authorization"})
    assert answer.status == 204
    assert answer.headers["access-control-allow-headers"] == "*, Authorization"
    assert answer.headers["connection"] == "close"  # who has no key holds none open


def test_health_tells_strangers_the_status_alone(front: tuple[Server, Keyring]) -> None:
    server, ring = front
    stranger = server.get("/health")
    assert (stranger.status, stranger.body) == (200, {"status": "ok"})
    assert stranger.headers["connection"] == "close"
    assert server.request("GET", "/health", headers=bearer(ring.user)).body["slots"] == 4


def test_a_key_travels_to_the_engine_with_its_share(front: tuple[Server, Keyring]) -> None:
    server, ring = front
    for path in ("/v1/chat/completions", "/v1/completions"):
        body = {"prompt": script(echo=True), "messages": [{"content": script(echo=True)}]}
        for key, info in ((ring.user, USER), (ring.admin, ADMIN)):
            choice = server.request("POST", path, body, bearer(key)).body["choices"][0]
            told = json.loads(choice.get("text") or choice["message"]["content"])
            assert (told["owner"], told["owner_limit"], told["owner_weight"]) == (info.name, info.concurrency, info.weight)


def test_without_keys_nobody_has_a_name(server: Server) -> None:
    told = json.loads(server.complete(script(echo=True)).body["choices"][0]["text"])
    assert (told["owner"], told["owner_limit"], told["owner_weight"]) == ("", 0, 1.0)
    assert server.request("GET", "/metrics", headers=bearer("any")).status == 200


# what a stranger sends is not taken


def test_a_strangers_body_is_not_waited_for(front: tuple[Server, Keyring]) -> None:
    server, _ = front
    head = b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 60000000\r\n%b\r\n"
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        answers = pool.map(lambda more: raw(server, head % more), (b"", b"Expect: 100-continue\r\n"))
    for answer in answers:
        assert answer.startswith(b"HTTP/1.1 401 ")  # no 100 before it, and the connection ends
        assert b"authentication_error" in answer


def test_a_stranger_can_send_little(front: tuple[Server, Keyring]) -> None:
    server, _ = front
    sent, piece = 0, b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            while sent < 1 << 30:
                sock.sendall(piece)
                sent += len(piece)
    assert sent < 64 << 20  # what was taken, and what fits the buffers on the way


# while it runs


def test_keys_come_and_go_while_the_server_runs(tmp_path: pathlib.Path) -> None:
    with guarded(tmp_path) as (server, ring):
        ring.infos["bob"], ring.keys["bob"] = KeyInfo("bob"), new_key()
        assert server.request("GET", "/v1/models", headers=bearer(ring.keys["bob"])).status == 401
        ring.write()
        until(lambda: server.request("GET", "/v1/models", headers=bearer(ring.keys["bob"])).status == 200)

        good = ring.path.read_text()
        ring.path.write_text("nonsense\n")
        server.line(f"{ring.path}:1: expected NAME SCOPE")
        assert server.request("GET", "/v1/models", headers=bearer(ring.keys["bob"])).status == 200

        ring.path.write_text(good)
        del ring.infos["bob"]
        ring.write()
        until(lambda: server.request("GET", "/v1/models", headers=bearer(ring.keys["bob"])).status == 401)


def test_a_status_stream_ends_with_its_key(tmp_path: pathlib.Path) -> None:
    with guarded(tmp_path) as (server, ring), concurrent.futures.ThreadPoolExecutor(1) as pool:
        stream = pool.submit(server.request, "GET", "/status/stream", None, basic(ring.admin))
        ring.infos["boss"], ring.keys["boss"] = KeyInfo("boss", "admin"), new_key()
        del ring.infos["ops"]
        ring.write()
        assert stream.result(PATIENCE).events[0]["name"] == "ds4batch"
        assert server.request("GET", "/status.json", headers=basic(ring.admin)).status == 401


def test_a_server_does_not_start_on_a_bad_key_file(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "keys"
    path.write_text("\nalice user\n")
    path.chmod(0o600)
    server = Server({"api_key_file": str(path)}, wait=False)
    try:
        assert server.wait() == 1
        assert server.lines == [f"ds4batch: {path}:2: expected NAME SCOPE sha256:HEX [concurrency=N] [weight=W]"]
    finally:
        server.close()


# figures, and what is written down


def test_refused_logins_and_what_each_key_used_are_counted(tmp_path: pathlib.Path) -> None:
    with guarded(tmp_path) as (server, ring):
        body = {"prompt": script(n=3)}
        server.request("POST", "/v1/completions", body, bearer(ring.user))
        server.request("POST", "/v1/completions", body, {"x-api-key": ring.user})
        server.request("POST", "/v1/completions", body, bearer(ring.admin))
        server.request("POST", "/v1/completions", {"n": 2}, bearer(ring.user))
        server.get("/v1/models")
        server.get("/health")
        server.request("GET", "/v1/models", headers=bearer("x"))
        server.request("GET", "/v1/models", headers=bearer("x"))
        server.request("GET", "/", headers=bearer(ring.user))
        text = server.request("GET", "/metrics", headers=bearer(ring.admin)).raw.decode()

    def value(name: str, label: str) -> float:
        (line,) = [line for line in text.splitlines() if line.startswith(name) and label in line]
        return float(line.rsplit(" ", 1)[1])

    refused = {reason: value("ds4batch_logins_refused_total", f'reason="{reason}"') for reason in ("missing", "unknown", "scope")}
    assert refused == {"missing": 1, "unknown": 2, "scope": 1}
    assert value("ds4batch_key_requests_total", 'key="alice"') == 2
    assert value("ds4batch_key_requests_total", 'key="ops"') == 1
    assert value("ds4batch_key_generation_tokens_total", 'key="alice"') == 6
    assert value("ds4batch_key_prompt_tokens_total", 'key="ops"') == len(body["prompt"])


CUT = b"Content-Length: 10\r\n\r\n"  # a body that does not come is not waited for


def raw(server: Server, data: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as sock:
        sock.sendall(data)
        if data.endswith(CUT):
            sock.shutdown(socket.SHUT_WR)
        out = b""
        try:
            while part := sock.recv(65536):
                out += part
        except ConnectionError:
            pass
        return out


def test_a_key_is_in_nothing_that_the_server_writes_or_answers(tmp_path: pathlib.Path) -> None:
    trace, records, heard = tmp_path / "trace", tmp_path / "records", b""
    loud = {"trace": str(trace), "request_log": str(records), "log_level": "debug", "log_text": True, "gpu_stats": True}
    with guarded(tmp_path, loud) as (server, ring):
        wrong = new_key()
        for key in (ring.user, ring.admin, wrong):
            for headers in (bearer(key), {"x-api-key": key}, basic(key)):
                for method, path in ROUTES:
                    if path == "/status/stream":
                        continue
                    for body in (BODIES.get(path), {"messages": 3, "prompt": {}, "input": 4}, b"{", b"[" * 9):
                        answer = server.request(method, path, body, headers)
                        heard += answer.raw + repr(answer.headers).encode()
                heard += server.request("GET", "/v1/nothing", headers=headers).raw
                heard += server.request("PUT", "/v1/messages", headers=headers).raw
                heard += server.request("GET", "/v1/models/none", headers=headers).raw
            for head in (
                f"GET / HTTP/1.1\r\nAuthorization: Bearer {key}\r\nbroken\r\n\r\n",
                f"GET / HTTP/1.1\r\nAuthorization: Bearer {key}\x00\r\n\r\n",
                f"GET / HTTP/1.1\r\nAuthor\x01ization: Bearer {key}\r\n\r\n",
                f"Authorization: Bearer {key}\r\n\r\n",
                f"POST /v1/messages HTTP/1.1\r\nx-api-key: {key}\r\nContent-Length: {key}\r\n\r\n",
                f"POST /v1/messages HTTP/1.1\r\nx-api-key: {key}\r\nContent-Length: 10\r\n\r\n",
                f"POST /v1/messages HTTP/1.1\r\nx-api-key: {key}\r\nTransfer-Encoding: chunked\r\n\r\n{key}\r\n",
                f"GET /v1/models?api_key={key} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
            ):
                heard += raw(server, head.encode())
            failing = {"prompt": script(fail=500)}
            heard += server.request("POST", "/v1/completions", failing, bearer(key)).raw
            heard += server.request("POST", "/v1/completions", {**failing, "stream": True}, bearer(key)).raw
        streaming = {"prompt": script(n=500, delay=0.01), "stream": True}
        with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as sock:
            data = json.dumps(streaming).encode()
            sock.sendall(
                f"POST /v1/completions HTTP/1.1\r\nx-api-key: {ring.user}\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data
            )
            sock.recv(1000)
        heard += server.request("POST", "/v1/completions", {"prompt": script(die=True)}, bearer(ring.user)).raw
        server.line("it again in")
        heard += server.request("GET", "/metrics", headers=bearer(ring.admin)).raw
        heard += server.request("GET", "/status.json", headers=bearer(ring.admin)).raw
        title = b"".join((pathlib.Path("/proc") / str(server.process.pid) / name).read_bytes() for name in ("cmdline", "comm"))
    written = "\n".join(server.lines).encode() + trace.read_bytes() + records.read_bytes()
    assert b"bad HTTP request: " in heard
    assert b"scripted failure" in heard
    assert b"scripted failure" in written
    for key in (ring.user, ring.admin, wrong):
        secret = key.removeprefix("ds4b_")[:12].encode()
        coded = basic(key)["Authorization"].split()[1][8:28].encode()
        for where in (heard, written, title):
            assert secret not in where
            assert coded not in where


# the official clients


def test_the_clients_of_openai_raise_what_their_users_catch(front: tuple[Server, Keyring]) -> None:
    server, ring = front
    url = f"http://127.0.0.1:{server.port}/v1"
    with openai.OpenAI(base_url=url, api_key=ring.user, max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["fake-model"]
        with pytest.raises(openai.PermissionDeniedError) as forbidden:
            client.get("/../metrics", cast_to=object)
        assert forbidden.value.code == "insufficient_permissions"
    with openai.OpenAI(base_url=url, api_key="sk-wrong", max_retries=0) as client:
        for ask in (
            lambda: client.models.list(),
            lambda: client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}]),
            lambda: client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}], stream=True),
            lambda: client.responses.create(model="m", input="x"),
            lambda: client.completions.create(model="m", prompt="x"),
        ):
            with pytest.raises(openai.AuthenticationError) as refused:
                ask()
            assert (refused.value.code, refused.value.status_code) == ("invalid_api_key", 401)
            assert "sk-wrong" not in str(refused.value)


@pytest.mark.parametrize("how", ["api_key", "auth_token"])
def test_the_client_of_anthropic_raises_what_its_users_catch(front: tuple[Server, Keyring], how: str) -> None:
    server, ring = front
    url = f"http://127.0.0.1:{server.port}"
    turn: Any = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "x"}]}
    with anthropic.Anthropic(base_url=url, max_retries=0, **{"api_key": None, how: ring.user}) as client:
        assert client.messages.create(**turn).content
        with pytest.raises(anthropic.PermissionDeniedError) as forbidden:
            client.get("/metrics", cast_to=object)
        assert forbidden.value.response.json()["error"]["type"] == "permission_error"
    with anthropic.Anthropic(base_url=url, max_retries=0, **{"api_key": None, how: "sk-wrong"}) as client:
        for ask in (
            lambda: client.messages.create(**turn),
            lambda: client.messages.create(**turn, stream=True),
            lambda: client.messages.count_tokens(model="m", messages=turn["messages"]),
            lambda: client.models.list(),
        ):
            with pytest.raises(anthropic.AuthenticationError) as refused:
                ask()
            assert refused.value.response.json()["error"]["type"] == "authentication_error"


# our own


def test_the_chat_sends_its_key(
    front: tuple[Server, Keyring], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, ring = front
    chat = ["chat", "--url", f"http://127.0.0.1:{server.port}", "-p", script(n=2)]
    monkeypatch.delenv("DS4BATCH_API_KEY", raising=False)
    assert cli.main(chat) == 1
    assert "this server needs an API key" in capsys.readouterr().err
    assert cli.main([*chat, "--api-key", ring.user]) == 0
    assert capsys.readouterr().out == "w0 w1 \n"
    monkeypatch.setenv("DS4BATCH_API_KEY", ring.user)
    assert cli.main(chat) == 0
    assert cli.main([*chat, "--api-key", "wrong"]) == 1
    assert capsys.readouterr().err == "ds4batch: the API key is not known to this server (HTTP 401)\n"
    monkeypatch.setenv("DS4BATCH_API_KEY", "se cret")
    assert cli.main(chat) == 1
    assert capsys.readouterr().err == "ds4batch: DS4BATCH_API_KEY: a key is printable ASCII without spaces\n"
    with pytest.raises(SystemExit):
        cli.main([*chat, "--api-key", "sécret"])
    assert "cret" not in capsys.readouterr().err.rsplit("error:", 1)[1]
