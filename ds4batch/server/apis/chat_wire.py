"""What /v1/chat/completions writes: the stream of one answer and the answer as one object. Reads no request, parses no model text.

What a client puts together from the chunks is the object that `whole` gives, but for a call that broke: its beginning was sent and
cannot be taken back, while the object has complete calls only.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from ds4batch.chat.events import CallDelta, CallStart, Content, Reasoning, Turn, TurnEvent
from ds4batch.chat.schemas import compact, members
from ds4batch.messages import Finished, TokenLogprob
from ds4batch.server import logprobs, sse
from ds4batch.server.service import Tokenizer
from ds4batch.server.usage import openai_usage


class ChatWire:
    """One answer. Logprobs are written when a tokenizer to spell them is given."""

    def __init__(self, model: str, include_usage: bool, tokenizer: Tokenizer | None) -> None:
        self._head: dict[str, Any] = {
            "id": "chatcmpl-" + secrets.token_hex(12),
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": model,
        }
        self._include_usage = include_usage
        self._tokenizer = tokenizer

    def opening(self, cached_tokens: int = 0) -> bytes:
        """The role. The usage comes at the end."""
        return self._chunk({"role": "assistant"})

    def events(self, events: Sequence[TurnEvent], items: Sequence[TokenLogprob]) -> bytes:
        """The next part of the turn, one chunk an event. All logprobs go with the first of them, or with an empty one."""
        deltas = [delta for delta in map(_delta, events) if delta is not None]
        if self._tokenizer is None or not items:
            return b"".join([self._chunk(delta) for delta in deltas])
        first, *others = deltas or [{"content": ""}]
        extra = {"logprobs": {"content": logprobs.chat_shape(self._tokenizer, items)}}
        return self._chunk(first, extra=extra) + b"".join([self._chunk(delta) for delta in others])

    def closing(self, finished: Finished) -> bytes:
        """The finish reason, the usage where wanted, the end mark."""
        out = self._chunk({}, finished.reason)
        if self._include_usage:
            out += sse.data(msgspec.json.encode({**self._head, "choices": [], "usage": openai_usage(finished)}))
        return out + sse.DONE

    def whole(self, turn: Turn, items: Sequence[TokenLogprob], finished: Finished) -> dict[str, Any]:
        """The answer in one object."""
        message: dict[str, Any] = {"role": "assistant", "content": turn.content}
        reasoning = "".join(turn.reasoning)
        if reasoning:
            message["reasoning_content"] = reasoning
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": _arguments(call.arguments)}}
            for call in turn.complete_calls
        ]
        if calls:
            message["tool_calls"] = calls
        choice: dict[str, Any] = {"index": 0, "message": message}
        if self._tokenizer is not None:
            choice["logprobs"] = {"content": logprobs.chat_shape(self._tokenizer, items)}
        choice["finish_reason"] = finished.reason
        return {**self._head, "object": "chat.completion", "choices": [choice], "usage": openai_usage(finished)}

    def keepalive(self) -> bytes:
        """A comment, which every client of this API passes over."""
        return sse.KEEPALIVE

    def failed(self, message: str) -> bytes:
        """The end of a stream that cannot be answered; nothing may follow."""
        return sse.event("error", msgspec.json.encode({"error": {"message": message, "type": "server_error"}}))

    def _chunk(self, delta: dict[str, Any], reason: str | None = None, *, extra: dict[str, Any] | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, **(extra or {}), "finish_reason": reason}
        return sse.data(msgspec.json.encode({**self._head, "choices": [choice]}))


def _delta(event: TurnEvent) -> dict[str, Any] | None:
    """What an event adds to the message; None where this API has no words for it."""
    match event:
        case Reasoning(text) if text:
            return {"reasoning_content": text}
        case Content(text) if text:
            return {"content": text}
        case CallStart(index, id, name):
            return {"tool_calls": [{"index": index, "id": id, "type": "function", "function": {"name": name, "arguments": ""}}]}
        case CallDelta(index, text) if text:
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
        case _:
            return None


def _arguments(text: str) -> str:
    return "{}" if members(text) is None else compact(text)
