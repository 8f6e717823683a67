"""Reads one streamed chat completion and decides whether it may be counted.

Owns what counts as a token, and the rules by which a stream is rejected. It does no
input or output: bytes and arrival times come in, so that every rule can be tested without a socket.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from ds4batch.repl import sse

FINISH_REASONS = frozenset({"stop", "length", "tool_calls"})
TOKEN_FIELDS = (
    "content",
    "reasoning_content",
    "reasoning",
    "tool_calls",
)  # "reasoning": newer vLLM's name of the second


class Rejection(StrEnum):
    """Why a stream is left out of every latency list. An HTTP error is counted as `http_<status>`."""

    NO_DONE = "no_done"
    BAD_FINISH_REASON = "bad_finish_reason"
    ERROR_EVENT = "error_event"
    USAGE_MISSING = "usage_missing"
    USAGE_OUT_OF_RANGE = "usage_out_of_range"
    BROKEN_JSON = "broken_json"
    NO_TOKEN = "no_token"
    WRONG_TOKEN_COUNT = "wrong_token_count"
    NETWORK_ERROR = "network_error"
    TIMEOUT = "timeout"
    SKIPPED = "skipped_after_failure"  # a later turn of a session whose history was lost
    INTERRUPTED = "interrupted"  # the load was stopped from the keyboard before this request ended


class StreamRejected(Exception):
    """A stream that may not be counted, with the name it is counted under and a sentence for the reader."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


class Events(sse.Events):
    """The events of one stream, none of whose bytes may be damaged."""

    def __init__(self) -> None:
        super().__init__(errors="strict")

    def feed(self, block: bytes) -> list[sse.Event]:
        """The events completed by `block`. Raises StreamRejected on bytes that are not UTF-8."""
        try:
            return super().feed(block)
        except UnicodeDecodeError as error:
            raise StreamRejected(Rejection.BROKEN_JSON, f"an event is not UTF-8: {error}") from None


@dataclass
class ChatStream:
    """What one stream has said so far."""

    token_times: list[float] = field(default_factory=list)  # arrival of each chunk that carries text or a tool call, seconds
    content: list[str] = field(default_factory=list)  # visible text, which a session appends to its history
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    done_at: float | None = None

    def accept(self, event: sse.Event, now: float) -> None:
        """Take one event that arrived at `now`. Raises StreamRejected for an error event or broken JSON."""
        if event.name == "error":
            raise StreamRejected(Rejection.ERROR_EVENT, event.data[:300])
        if event.data.strip() == "[DONE]":
            self.done_at = now
            return
        chunk = _json_object(event.data)
        if chunk.get("error") is not None:
            raise StreamRejected(Rejection.ERROR_EVENT, json.dumps(chunk["error"])[:300])
        if isinstance(chunk.get("usage"), dict):
            self.usage = chunk["usage"]  # the last one counts: some servers send a running total
        for choice in _list_of_objects(chunk, "choices"):
            self._choice(choice, now)

    def _choice(self, choice: dict[str, Any], now: float) -> None:
        delta = choice.get("delta")
        if isinstance(delta, dict):
            # A chunk that only names the role carries no token, and neither does one with empty text.
            if any(delta.get(name) for name in TOKEN_FIELDS):
                self.token_times.append(now)
            if isinstance(delta.get("content"), str):
                self.content.append(delta["content"])
        if choice.get("finish_reason") is not None:
            self.finish_reason = str(choice["finish_reason"])

    def check(self, max_tokens: int, exact: bool) -> None:
        """Raise StreamRejected unless the whole stream may be counted; `exact` demands exactly `max_tokens` tokens."""
        if self.done_at is None:
            raise StreamRejected(Rejection.NO_DONE, "the stream ended without data: [DONE]")
        if self.finish_reason not in FINISH_REASONS:
            raise StreamRejected(Rejection.BAD_FINISH_REASON, f"finish_reason is {self.finish_reason!r}")
        if self.usage is None:
            raise StreamRejected(Rejection.USAGE_MISSING, "no chunk carried usage")
        tokens = self.output_tokens
        if not 0 < tokens <= max_tokens:
            raise StreamRejected(Rejection.USAGE_OUT_OF_RANGE, f"usage.completion_tokens is {tokens}, max_tokens {max_tokens}")
        if not self.token_times:
            raise StreamRejected(Rejection.NO_TOKEN, f"no chunk carried text although usage counts {tokens} tokens")
        if exact and tokens != max_tokens:
            raise StreamRejected(Rejection.WRONG_TOKEN_COUNT, f"{tokens} tokens instead of {max_tokens} with --ignore-eos")

    @property
    def output_tokens(self) -> int:
        """Generated tokens as the server counts them; -1 where usage does not say."""
        return _count((self.usage or {}).get("completion_tokens"), -1)

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens as the server counts them; 0 where usage does not say."""
        return _count((self.usage or {}).get("prompt_tokens"), 0)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens served from an earlier prefill; 0 where usage does not say."""
        details = (self.usage or {}).get("prompt_tokens_details")
        return _count(details.get("cached_tokens"), 0) if isinstance(details, dict) else 0


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise StreamRejected(Rejection.BROKEN_JSON, f"{error}: {text[:120]!r}") from None
    if not isinstance(value, dict):
        raise StreamRejected(Rejection.BROKEN_JSON, f"a chunk is no JSON object: {text[:120]!r}")
    return value


def _list_of_objects(chunk: dict[str, Any], name: str) -> list[dict[str, Any]]:
    value = chunk.get(name)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise StreamRejected(Rejection.BROKEN_JSON, f"{name} is no list of objects")
    return value


def _count(value: Any, default: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else default
