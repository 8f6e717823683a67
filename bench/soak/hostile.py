"""A few hostile requests of each sort, mixed into the load: what is refused must be refused in the right words and counted once.

Small on purpose: `bench.hostile` generates them by the thousand.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from random import Random
from typing import Any

from bench.soak.ledger import Ending, Fate
from bench.soak.replies import PATHS, error_message
from bench.soak.wire import Framing, Reply, request_bytes

_HI: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi."}], "max_tokens": 4}


@dataclass(frozen=True)
class Hostile:
    """One request that must be refused."""

    name: str
    data: bytes
    statuses: frozenset[int]
    fate: Fate


def draw(rnd: Random, ctx: int) -> Hostile:
    """One of them. `ctx` is the server's context in tokens."""
    return rnd.choice(_MAKERS)(rnd, ctx)


def judged(hostile: Hostile, reply: Reply) -> tuple[Ending, frozenset[Fate], str]:
    """How it ended, what it may be counted as, and what is odd about it."""
    message = f"{hostile.name}: {reply.status} {error_message(reply.body) or reply.body[:100]!r}"
    if reply.framing is Framing.HUNG:
        return Ending.HUNG, frozenset(Fate), f"{hostile.name}: {reply.detail}"
    if reply.status == 503:
        return Ending.UNAVAILABLE, frozenset({Fate.UNAVAILABLE, Fate.ERROR}), message
    if reply.status in hostile.statuses and (reply.framing is Framing.WHOLE or hostile.fate is Fate.UNSEEN):
        return Ending.REFUSED, frozenset({hostile.fate}), ""
    if reply.framing is not Framing.WHOLE:
        # A server may hang up on what is not HTTP, but not on a request that it could read.
        ending = Ending.REFUSED if hostile.fate is Fate.UNSEEN and not reply.status else Ending.CUT
        return ending, frozenset({Fate.UNSEEN, hostile.fate}), f"{hostile.name}: {reply.framing} {reply.detail}"
    return Ending.BROKEN if reply.status >= 500 else Ending.ACCEPTED, frozenset(Fate), message


def _json(name: str, path: str, body: Any, status: int = 400, fate: Fate = Fate.INVALID) -> Hostile:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Hostile(name, request_bytes("POST", path, data), frozenset({status}), fate)


def _not_json(rnd: Random, ctx: int) -> Hostile:
    whole = json.dumps(_HI).encode()
    body = rnd.choice(
        (b"", whole[: rnd.randrange(1, len(whole))], b"\xff\xfe" + whole, rnd.randbytes(40), b"[" * 5000, b'"hi"', b"[]")
    )
    return _json("not a JSON object", rnd.choice(list(PATHS.values())), body)


def _bad_field(rnd: Random, ctx: int) -> Hostile:
    field, value = rnd.choice(
        (
            ("messages", "Hi."),
            ("messages", [{"role": "user", "content": 7}]),
            ("messages", [{"role": "wizard", "content": "Hi."}]),
            ("max_tokens", 0),
            ("max_tokens", "many"),
            ("temperature", "hot"),
            ("n", 3),
            ("stop", {"a": 1}),
            ("stop", [f"x{i}" for i in range(100)]),
            ("logit_bias", {"-1": 5}),
            ("top_logprobs", 50),
            ("tools", {"a": 1}),
            ("stream", "yes"),
            ("response_format", {"type": "json_schema", "json_schema": {"schema": {"type": 7}}}),
        )
    )
    return _json(f"{field} is {str(value)[:30]}", PATHS["chat"], {**_HI, field: value})


def _too_long(rnd: Random, ctx: int) -> Hostile:
    prompt = [rnd.randrange(100, 40_000) for _ in range(ctx + rnd.randrange(1, ctx))]
    return _json("prompt beyond the context", PATHS["completions"], {"prompt": prompt, "max_tokens": 4}, fate=Fate.CONTEXT)


def _bad_token(rnd: Random, ctx: int) -> Hostile:
    return _json(
        "token beyond the vocabulary", PATHS["completions"], {"prompt": [1, 1 << rnd.randrange(20, 70)], "max_tokens": 4}
    )


def _nowhere(rnd: Random, ctx: int) -> Hostile:
    path = rnd.choice(("/v1/nowhere", "/../../etc/passwd", "/v1/models/" + "a" * 3000, "/%00", "/v1/chat/completions/"))
    return Hostile(f"path {path[:30]}", request_bytes("GET", path, b""), frozenset({404}), Fate.UNSEEN)


def _wrong_method(rnd: Random, ctx: int) -> Hostile:
    method = rnd.choice(("GET", "PUT", "DELETE", "PATCH"))
    return Hostile(method, request_bytes(method, rnd.choice(list(PATHS.values())), b""), frozenset({405}), Fate.UNSEEN)


def _not_http(rnd: Random, ctx: int) -> Hostile:
    data = rnd.choice(
        (
            b"\x16\x03\x01\x02\x00" + rnd.randbytes(200) + b"\r\n\r\n",
            b"GET / HTTP/9.9\r\n\r\n",
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n\r\n",
            b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 200_000 + b"\r\n\r\n",
        )
    )
    return Hostile(f"not HTTP: {data[:20]!r}", data, frozenset({400, 431, 505}), Fate.UNSEEN)


_MAKERS = (_not_json, _bad_field, _bad_field, _bad_field, _too_long, _bad_token, _nowhere, _wrong_method, _not_http)
