"""Requests that are hostile below the body: framing, headers, targets, methods, and clients that are slow or leave."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote

from bench.hostile.case import CHAT, COMPLETIONS, MESSAGES, POSTS, RESPONSES, Case, Ending, base, head, posted

_REFUSED = frozenset({400, 404, 405, 408, 413, 414, 417, 431, 501, 505})
"""What may answer a request that is no HTTP, or none that a server has to understand."""
_GETS = ("/", "/health", "/metrics", "/openapi.json", "/status.json", "/v1/models")
_JSON = {"Content-Type": "application/json"}


def _good(path: str = CHAT) -> bytes:
    return json.dumps(base(path)).encode()


def framing() -> list[Case]:
    """Lengths, chunks and pipelines that disagree with themselves."""
    body = _good()
    size = str(len(body))
    ok = frozenset({200, *_REFUSED})

    def raw(name: str, *parts: bytes | float, **more: Any) -> Case:
        return Case("framing", name, parts, **{"statuses": ok, "closes": True, **more})

    def headed(name: str, headers: list[tuple[str, str]], content: bytes, **more: Any) -> Case:
        return raw(name, head("POST", CHAT, [*_JSON.items(), *headers]) + content, **more)

    chunk = f"{len(body):x}\r\n".encode() + body + b"\r\n"
    chunked = ("Transfer-Encoding", "chunked")
    smuggled = b"GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n"
    return [
        headed("a length too large, then the end", [("Content-Length", str(len(body) + 10))], body, ending="half-close"),
        headed("a length too small", [("Content-Length", str(len(body) - 5))], body, answers=2),
        headed("a length of 0", [("Content-Length", "0")], body, answers=2),
        headed("a negative length", [("Content-Length", "-1")], body),
        headed("a length with a plus", [("Content-Length", "+" + size)], body),
        headed("a length of 400 digits", [("Content-Length", "9" * 400)], body),
        headed("a length in hexadecimal", [("Content-Length", hex(len(body)))], body),
        headed("a length with an underscore", [("Content-Length", "1_0")], body),
        headed("a length in words", [("Content-Length", "ten")], body),
        headed("two lengths", [("Content-Length", size), ("Content-Length", "5")], body),
        headed("two equal lengths", [("Content-Length", size), ("Content-Length", size)], body),
        headed("a list of lengths", [("Content-Length", f"{size}, {size}")], body),
        headed("no length", [], body, answers=2),
        headed("good chunks", [chunked], chunk + b"0\r\n\r\n", statuses=frozenset({200}), closes=False),
        headed("chunks of one byte", [chunked], b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n",
        statuses=frozenset({200}), closes=False),
        headed("a chunk that never ends", [chunked], b"FFFFFF\r\n" + body, ending="half-close"),
        headed("no last chunk", [chunked], chunk, ending="half-close"),
        headed("a chunk of words", [chunked], b"ten\r\n" + body),
        headed("a negative chunk", [chunked], b"-5\r\n" + body),
        headed("a chunk of 2^64", [chunked], b"10000000000000000\r\n" + body, ending="half-close"),
        headed("a chunk of 400 digits", [chunked], b"f" * 400 + b"\r\n" + body, ending="half-close"),
        headed("a chunk size of 100,000", [chunked], b"0" * 100_000 + chunk + b"0\r\n\r\n"),
        headed("a chunk extension of 100,000", [chunked],
        f"{len(body):x};a=".encode() + b"x" * 100_000 + b"\r\n" + body + b"\r\n0\r\n\r\n"),
        headed("a chunk longer than it says", [chunked], b"2\r\n" + body + b"\r\n0\r\n\r\n"),
        headed("a line feed for a line", [chunked], f"{len(body):x}\n".encode() + body + b"\n0\n\n", ending="half-close"),
        headed("trailers", [chunked, ("Trailer", "X")], chunk + b"0\r\nX: 1\r\nContent-Length: 5\r\n\r\n"),
        headed("a million of trailers", [chunked], chunk + b"0\r\n" + b"X: 1\r\n" * 150_000 + b"\r\n"),
        headed("CL and TE", [("Content-Length", "4"), chunked], chunk + b"0\r\n\r\n" + smuggled, answers=2),
        headed("TE and CL", [chunked, ("Content-Length", size)], chunk + b"0\r\n\r\n" + smuggled, answers=2),
        headed("CL.0", [("Content-Length", str(len(smuggled)))], smuggled),
        headed("TE twice", [chunked, ("Transfer-Encoding", "identity")], chunk + b"0\r\n\r\n"),
        headed("TE x", [("Transfer-Encoding", "xchunked")], chunk + b"0\r\n\r\n", answers=2),
        headed("TE with a space", [("Transfer-Encoding ", "chunked")], chunk + b"0\r\n\r\n", answers=2),
        headed("TE with a tab", [("Transfer-Encoding", "\tchunked")], chunk + b"0\r\n\r\n", answers=2),
        headed("TE with a control", [("Transfer-Encoding", "\x0bchunked")], chunk + b"0\r\n\r\n", answers=2),
        headed("TE gzip, chunked", [("Transfer-Encoding", "gzip, chunked")], chunk + b"0\r\n\r\n", answers=2),
        headed("TE chunked, chunked", [("Transfer-Encoding", "chunked, chunked")], chunk + b"0\r\n\r\n", answers=2),
        headed("TE CHUNKED", [("Transfer-Encoding", "CHUNKED")], chunk + b"0\r\n\r\n", answers=2),
        headed("Expect 100-continue", [("Content-Length", size), ("Expect", "100-continue")], body, statuses=frozenset({200}),
        closes=False),
        headed("Expect something else", [("Content-Length", size), ("Expect", "200-ok")], body),
        headed("Expect and no body", [("Content-Length", size), ("Expect", "100-continue")], b"", ending="half-close"),
        headed("Upgrade to a websocket", [("Content-Length", size), ("Connection", "Upgrade"), ("Upgrade", "websocket"),
        ("Sec-WebSocket-Version", "13"),
                                          ("Sec-WebSocket-Key", "dGhlIHNhbXBsZSBub25jZQ==")], body, answers=2),
        headed("Upgrade to HTTP/2", [("Content-Length", size), ("Connection", "Upgrade, HTTP2-Settings"), ("Upgrade", "h2c"),
        ("HTTP2-Settings", "AAMAAABk")],
               body, answers=2),
        raw("HTTP/2", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(100)),
        raw("HTTP/0.9", b"GET /health\r\n", ending="half-close"),
        raw("HTTP/1.0", b"GET /health HTTP/1.0\r\n\r\n", statuses=frozenset({200}), closes=False),
        raw("HTTP/1.0 with chunks",
        b"POST " + CHAT.encode() + b" HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk + b"0\r\n\r\n", answers=2),
        raw("HTTP/1.2", b"GET /health HTTP/1.2\r\nHost: x\r\n\r\n"),
        raw("HTTP/9", b"GET /health HTTP/9\r\nHost: x\r\n\r\n"),
        raw("TLS", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500)),
        raw("SSH", b"SSH-2.0-OpenSSH_9.9\r\n", ending="half-close"),
        raw("zeros", bytes(100_000)),
        raw("ones", b"\xff" * 100_000),
        raw("empty lines", b"\r\n" * 30_000, ending="half-close"),
        raw("nothing", ending="half-close"),
        raw("half a request line", b"POST /v1/chat", ending="half-close"),
        raw("half a head", b"GET /health HTTP/1.1\r\nHost:", ending="half-close"),
        raw("a line of 64 KiB", b"GET /" + b"x" * (64 << 10) + b" HTTP/1.1\r\nHost: x\r\n\r\n"),
        raw("a line of 1 MiB that does not end", b"x" * (1 << 20), ending="half-close"),
        raw("a line feed for a line in the head", b"GET /health HTTP/1.1\nHost: x\n\n", ending="half-close"),
        raw("a bare return", b"GET /health HTTP/1.1\r\nHost: x\rX: y\r\n\r\n", ending="half-close"),
        raw("a space before a header", b"GET /health HTTP/1.1\r\n Host: x\r\n\r\n"),
        raw("a folded header", b"GET /health HTTP/1.1\r\nHost: x\r\n y\r\n\r\n"),
        raw("a header without a colon", b"GET /health HTTP/1.1\r\nHost\r\n\r\n"),
        raw("a header without a name", b"GET /health HTTP/1.1\r\n: x\r\n\r\n"),
        raw("a NUL in a header", b"GET /health HTTP/1.1\r\nHost: a\x00b\r\n\r\n"),
        raw("no host", b"GET /health HTTP/1.1\r\n\r\n"),
        raw("two hosts", b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n"),
        raw("a host that is none", b"GET /health HTTP/1.1\r\nHost: [::g]:x/@\r\n\r\n"),
        raw("a host of 60,000", b"GET /health HTTP/1.1\r\nHost: " + b"h" * 60_000 + b"\r\n\r\n"),
        raw("20 pipelined", (head("GET", "/health") * 20), answers=20, statuses=frozenset({200}), closes=False),
        raw("pipelined and broken", head("GET", "/health") * 3 + b"\x00\r\n\r\n", answers=4),
        raw("pipelined posts", posted(CHAT, body) * 3, answers=3, statuses=frozenset({200}), closes=False),
        raw("a pipeline that leaves", posted(CHAT, body) * 5, ending="abort"),
        raw("2000 pipelined, then the end", head("GET", "/v1/models/none") * 2000, answers=2000, ending="half-close"),
    ]  # fmt: skip


def headers() -> list[Case]:
    """Headers by the thousand, of any bytes, and those that ask for what there is not."""
    sets: dict[str, list[tuple[str, str]]] = {
        "1000 headers": [(f"X-{i}", "v") for i in range(1000)],
        "20,000 headers": [(f"X-{i}", "v" * 40) for i in range(20_000)],
        "one header 5000 times": [("Cookie", "a=b")] * 5000,
        "a header of 60 KiB": [("X-Long", "v" * (60 << 10))],
        "a header of 1 MiB": [("X-Long", "v" * (1 << 20))],
        "a name of 60 KiB": [("X" * (60 << 10), "v")],
        "any bytes": [("X-Bytes", bytes(b for b in range(0x21, 0x100) if b != 0x7F).decode("latin-1"))],
        "controls": [("X-Control", "a\x01\x02\x7fb")],
        "a request id of any bytes": [("X-Request-Id", "\xe9\xff<script>")],
        "a request id of 5000": [("X-Request-Id", "r" * 5000)],
        "a request id with a space": [("X-Request-Id", "a b")],
        "a range": [("Range", "bytes=0-1,0-2,5-,-9999999999999999999"), ("If-Range", "x")],
        "conditions": [("If-None-Match", "*"), ("If-Modified-Since", "Thu, 99 Foo 9999"), ("If-Match", "x")],
        "an origin": [("Origin", "http://evil.example"), ("Access-Control-Request-Method", "DELETE"),
        ("Access-Control-Request-Headers", "x" * 5000)],
        "another method": [("X-HTTP-Method-Override", "DELETE"), ("X-Original-URL", "/admin"), ("X-Rewrite-URL", "/admin")],
        "forwarded": [("X-Forwarded-For", "127.0.0.1, " * 500), ("Forwarded", "for=\"[::1]\"")],
        "an authorisation": [("Authorization", "Basic " + "A" * 10_000), ("x-api-key", "\xff")],
        "a length and no body": [("Content-Length", "10")],
        "connections": [("Connection", "close, keep-alive, upgrade, x" * 100), ("Keep-Alive", "timeout=-1, max=0")],
        "close": [("Connection", "close")],
        "languages": [("Accept-Language", "*;q=0." * 5000)],
        "a cookie of quotes": [("Cookie", '"' * 5000 + ";" * 5000 + "=" * 5000)],
    }  # fmt: skip
    ok = frozenset({200, *_REFUSED})
    found = []
    for name, given in sets.items():
        for path in ("/health", "/metrics", "/v1/models"):
            ending: Ending = "half-close" if "length" in name else "read"
            sent = head("GET", path, given)
            found.append(Case("headers", f"{path} {name}", (sent,), "GET", statuses=ok, closes=True, ending=ending))
        body = _good()
        if "length" not in name:
            sent = head("POST", CHAT, [*_JSON.items(), ("Content-Length", str(len(body))), *given]) + body
            found.append(Case("headers", f"{CHAT} {name}", (sent,), statuses=ok, closes=True))
    return found


def routes(description: Mapping[str, Any]) -> list[Case]:
    """Paths and methods that are served, are not, or try to leave the root."""
    known = [path for path in description["paths"] if path != "/status/stream"]
    targets = [
        "/..", "/../../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/..%2f..%2fetc%2fpasswd", "/.%00./x", "/%00", "/%ff%fe",
        "/%", "/%zz", "//", "///health",
        "/health/", "/health/..", "/HEALTH", "/health;a=b", "/health?" + "a=b&" * 5000, "/health?%00=%ff", "/health#x",
        "/static/../server/app.py", "/v1", "/v1/",
        "/v1/models/", "/v1/models/..", "/v1/models/../../health", "/v1/models/" + "x" * 50_000, "/v1/models/%00",
        "/v1/models/%f0%9f", "/v1/models/a/b/c/d",
        "/v1/models/{{7*7}}", "/v1/models/<script>", "/v1/chat", "/v1/chat/completions/", "/v1/chat/completions/x",
        "/v1/embeddings", "/v1/responses/resp_1",
        "/v1/messages/batches", "/v1/files", "/admin", "/.env", "/.git/config", "/favicon.ico", "/robots.txt", "/cgi-bin/x",
        "*", "http://127.0.0.1:1/health",
        "http://[::g]/", "localhost:80", "http://", "\\health", "/\\..\\x", "/\xe9", "/a b", "/a\tb", "?",
        "/?x=" + "%41" * 10_000, "/status.json/../x", "/v1//models",
    ]  # fmt: skip
    any_status = frozenset({200, 204, *_REFUSED})
    found = []
    for target in targets:
        found.append(Case("route", f"GET {target[:60]}", (head("GET", target),), "GET", statuses=any_status, closes=True))
        sent = head("POST", target, {**_JSON, "Content-Length": "2"}) + b"{}"
        found.append(Case("route", f"POST {target[:60]}", (sent,), statuses=any_status, closes=True))
    methods = (
        "GET",
        "HEAD",
        "POST",
        "PUT",
        "PATCH",
        "DELETE",
        "OPTIONS",
        "TRACE",
        "CONNECT",
        "PROPFIND",
        "get",
        "A" * 5000,
        "G\x00T",
        "GÉT",
        "-",
        "G-T",
    )
    for path in known:
        for method in methods:
            target = path.replace("{model}", quote("any/model \x00é"))
            sent = head(method, target, {"Content-Length": "2"}) + b"{}"
            described = method in ("GET", "POST") and method.lower() in description["paths"][path]
            if described:
                found.append(Case("route", f"{method} {path}", (sent,), method, path))
            else:
                found.append(Case("route", f"{method[:9]} {path}", (sent,), method, statuses=any_status, closes=True))
    for path in _GETS:
        found.append(Case("route", f"GET {path} with a query", (head("GET", path + "?x[]=1&x[$ne]=2"),), "GET", path))
    return found


def slow(random: random.Random) -> Case:
    """A good request in small pieces with pauses, or one that its client leaves at some byte."""
    path = random.choice(POSTS)
    stream = random.random() < 0.5 and path in (CHAT, COMPLETIONS, RESPONSES, MESSAGES)
    data = posted(path, json.dumps({**base(path, 8), "stream": stream}).encode())
    cut = random.randrange(1, len(data))
    makers: list[Callable[[], Case]] = [
        lambda: Case("slow", f"{path} byte by byte for a while", _dripped(data, 12, 0.05), path=path),
        lambda: Case("slow", f"{path} in two pieces", (data[:cut], 0.3, data[cut:]), path=path),
        lambda: Case("leaving", f"{path} at byte {cut}", (data[:cut],), ending="abort"),
        lambda: Case(
            "leaving",
            f"{path} at byte {cut}, in order",
            (data[:cut],),
            ending="half-close",
            closes=True,
            statuses=frozenset({400}),
        ),
        lambda: Case("leaving", f"{path} behind the last byte", (data,), ending="abort"),
        lambda: Case("leaving", f"{path} at the first bytes", (data,), path=path, ending="first-bytes"),
        lambda: Case("leaving", f"{path} half-closed", (data,), path=path, ending="half-close", closes=True),
        lambda: Case("leaving", f"{path} a while behind the last byte", (data, random.random() * 0.2), ending="abort"),
    ]
    return random.choice(makers)()


def _dripped(data: bytes, pieces: int, pause: float) -> tuple[bytes | float, ...]:
    out: list[bytes | float] = []
    for i in range(pieces):
        out += [data[i : i + 1], pause]
    return (*out, data[pieces:])
