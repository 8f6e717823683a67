"""One hostile request as bytes on a connection, what may come back, and the lines that send it again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Object = dict[str, Any]
Ending = Literal["read", "half-close", "abort", "first-bytes"]
"""What the client does behind the last byte: read the answer; the same, but say first that nothing follows; reset the connection
without reading; read the first bytes of the answer and leave."""
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
POSTS = (CHAT, COMPLETIONS, RESPONSES, MESSAGES, COUNT)
_INLINE_REPRODUCTION = 3000  # bytes of a request that a reproduction spells out


@dataclass(frozen=True)
class Case:
    """What is sent and what may be answered."""

    kind: str
    name: str
    parts: tuple[bytes | float, ...]  # a number is a pause in seconds
    method: str = "POST"
    path: str = ""  # as the description has it; "" where the request is none of the description's
    statuses: frozenset[int] | None = None  # None: those that the description has, or 404 and 405 for what it does not have
    answers: int = 1  # that must come; with `closes` at most so many
    closes: bool = False  # the server may close the connection instead of answering
    valid: bool = False  # of the description's schema, so that no refusal may be for its form
    ending: Ending = "read"
    again: str = field(default="", compare=False)  # GROUP:NUMBER, which makes it again

    @property
    def size(self) -> int:
        """Bytes that are sent."""
        return sum(len(part) for part in self.parts if isinstance(part, bytes))

    def reproduction(self, url: str, seed: int) -> str:
        """Lines for a shell that send it again."""
        again = f"python -m bench.hostile --url {url} --seed {seed} --only {self.again}"
        if self.size > _INLINE_REPRODUCTION:
            return again
        host, _, port = url.removeprefix("http://").rpartition(":")
        steps = ["import socket, time", f"s = socket.create_connection(({host!r}, {port}))"]
        steps += [f"s.sendall({part!r})" if isinstance(part, bytes) else f"time.sleep({part})" for part in self.parts]
        if self.ending == "half-close":
            steps.append("s.shutdown(socket.SHUT_WR)")
        if self.ending != "abort":
            steps.append("s.settimeout(60); print(s.recv(1 << 20).decode(errors='replace'))")
        return again + "\n    python - <<'END'\n" + "\n".join(steps) + "\nEND"


def head(method: str, target: str, headers: Mapping[str, str] | Sequence[tuple[str, str]] = ()) -> bytes:
    """The request line and the header lines, the empty one included. Latin-1, so that any byte can be sent."""
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    lines = [f"{method} {target} HTTP/1.1", "Host: localhost", *(f"{name}: {value}" for name, value in pairs)]
    return "\r\n".join([*lines, "", ""]).encode("latin-1", "replace")


def posted(path: str, body: bytes, headers: Mapping[str, str] | None = None) -> bytes:
    """A POST with a body of that many bytes."""
    given = {"Content-Type": "application/json", "Content-Length": str(len(body)), **(headers or {})}
    return head("POST", path, given) + body


def json_case(kind: str, name: str, path: str, body: Any, *, valid: bool = False, ending: Ending = "read") -> Case:
    """A POST of JSON; lone surrogates go as escapes."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Case(kind, f"{path} {name}", (posted(path, data),), path=path, valid=valid, ending=ending)


def numbered(case: Case, group: str, number: int) -> Case:
    """The case, told how it is made again."""
    return replace(case, again=f"{group}:{number}")


def base(path: str, tokens: int = 2) -> Object:
    """A good request of an API, with a member of every kind, that makes few tokens."""
    turn = [{"role": "user", "content": "Say hi."}]
    parameters = {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]}
    match path:
        case "/v1/chat/completions":
            return {"messages": turn, "max_completion_tokens": tokens, "temperature": 0}
        case "/v1/completions":
            return {"prompt": "Say hi.", "max_tokens": tokens, "temperature": 0}
        case "/v1/responses":
            return {"input": turn, "max_output_tokens": tokens, "temperature": 0}
        case "/v1/messages":
            return {"messages": turn, "max_tokens": tokens, "temperature": 0}
        case "/v1/messages/count_tokens":
            return {"messages": turn, "tools": [{"name": "look", "input_schema": parameters}]}
    raise KeyError(path)


def limit_of(path: str) -> str:
    """The member that limits the answer."""
    return {CHAT: "max_completion_tokens", RESPONSES: "max_output_tokens"}.get(path, "max_tokens")


def few_tokens(path: str, body: Object, tokens: int = 2) -> Object:
    """The body with a small limit where it has none or a larger one; a limit of the wrong type stays."""
    name = limit_of(path)
    given = body.get(name)
    large = isinstance(given, int | float) and not isinstance(given, bool) and not given <= tokens and given >= 1
    return {**body, name: tokens} if given is None or large else body
