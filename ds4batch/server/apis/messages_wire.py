"""What /v1/messages writes: the stream of one answer, the answer as one object, errors. Reads no request, parses no model text.

The stream is a row of content blocks that never overlap, so each event of a turn either goes on with the open block or closes it
and opens the next. What a client puts together from them is the object that `whole` gives, but for a call that broke: its block was
begun and cannot be taken back, while the object has complete calls only.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import msgspec

from ds4batch.chat.events import CallBroken, CallDelta, CallEnd, CallStart, Content, Reasoning, ReasoningEnd, Turn, TurnEvent
from ds4batch.chat.schemas import compact, members
from ds4batch.messages import Finished, TokenLogprob
from ds4batch.server import sse
from ds4batch.server.errors import ApiError

PING = sse.event("ping", b'{"type":"ping"}')

_STOP_REASONS = {"tool_calls": "tool_use", "length": "max_tokens"}
_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}

_THINKING = {"type": "thinking", "thinking": "", "signature": ""}
_TEXT = {"type": "text", "text": ""}


class MessagesWire:
    """One answer. `prompt_tokens` are those of the request, for the usage that a stream begins with."""

    def __init__(self, model: str, prompt_tokens: int) -> None:
        self._id = "msg_" + secrets.token_hex(12)
        self._model = model
        self._prompt_tokens = prompt_tokens
        self._index = -1  # of the newest block
        self._open = ""  # the type of the block that is open
        self._answered = False  # there was a text block or a complete call

    def opening(self, cached_tokens: int = 0) -> bytes:
        """The message without content. `cached_tokens` of the prompt were not evaluated anew."""
        usage = _usage(self._prompt_tokens, cached_tokens, 0)
        return _event({"type": "message_start", "message": self._message([], None, usage)})

    def events(self, events: Sequence[TurnEvent], logprobs: Sequence[TokenLogprob]) -> bytes:
        """The next part of the turn. This API has no logprobs."""
        return b"".join([self._write(event) for event in events])

    def closing(self, finished: Finished) -> bytes:
        """The end of the last block, why the turn ended and what it took."""
        out = self._close()
        if not self._answered:
            out += self._start("text", _TEXT) + self._close()
        delta = {"stop_reason": _stop_reason(finished), "stop_sequence": None}
        out += _event({"type": "message_delta", "delta": delta, "usage": _finished_usage(finished)})
        return out + _event({"type": "message_stop"})

    def whole(self, turn: Turn, logprobs: Sequence[TokenLogprob], finished: Finished) -> dict[str, Any]:
        """The answer in one object, to be encoded by msgspec. A call's input is the JSON text as it stands in the stream."""
        blocks: list[dict[str, Any]] = [
            {"type": "thinking", "thinking": text, "signature": self._id} for text in turn.reasoning if text
        ]
        calls = turn.complete_calls
        if turn.content or not calls:
            blocks.append({"type": "text", "text": turn.content})
        blocks += [{"type": "tool_use", "id": call.id, "name": call.name, "input": _input(call.arguments)} for call in calls]
        return self._message(blocks, _stop_reason(finished), _finished_usage(finished))

    def keepalive(self) -> bytes:
        """The event that clients count as a sign of life."""
        return PING

    def failed(self, message: str) -> bytes:
        """The end of a stream that cannot be answered; nothing may follow."""
        return _event({"type": "error", "error": {"type": "api_error", "message": message}})

    def _message(self, content: list[dict[str, Any]], stop_reason: str | None, usage: dict[str, int]) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": stop_reason,
            "stop_sequence": None,
            "usage": usage,
        }

    def _write(self, event: TurnEvent) -> bytes:
        match event:
            case Reasoning(text) if text:
                opened = b"" if self._open == "thinking" else self._start("thinking", _THINKING)
                return opened + self._delta({"type": "thinking_delta", "thinking": text})
            case ReasoningEnd() if self._open == "thinking":
                return self._close()
            case Content(text) if text:
                self._answered = True
                opened = b"" if self._open == "text" else self._start("text", _TEXT)
                return opened + self._delta({"type": "text_delta", "text": text})
            case CallStart(_, id, name):
                return self._start("tool_use", {"type": "tool_use", "id": id, "name": name, "input": {}})
            case CallDelta(_, text) if text:
                return self._delta({"type": "input_json_delta", "partial_json": text})
            case CallEnd():
                self._answered = True
                return self._close()
            case CallBroken():
                return self._close()
            case _:
                return b""

    def _start(self, kind: str, block: dict[str, Any]) -> bytes:
        out = self._close()
        self._open = kind
        self._index += 1
        return out + _event({"type": "content_block_start", "index": self._index, "content_block": block})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event({"type": "content_block_delta", "index": self._index, "delta": delta})

    def _close(self) -> bytes:
        """End the open block, if there is one. Clients send thinking back only with a signature; any will do."""
        if not self._open:
            return b""
        out = self._delta({"type": "signature_delta", "signature": self._id}) if self._open == "thinking" else b""
        self._open = ""
        return out + _event({"type": "content_block_stop", "index": self._index})


def error_body(error: ApiError) -> bytes:
    """An error's JSON in this API's shape, and a newline. The message of an overflow has the words on which agents compact."""
    message = error.message
    if error.code == "context_length_exceeded":
        most = error.extra["n_ctx"] - 1  # one position is left for the answer
        message = f"prompt is too long: {error.extra['n_prompt_tokens']} tokens > {most} maximum"
    kind = _ERROR_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": message} | error.extra}) + b"\n"


def _stop_reason(finished: Finished) -> str:
    return _STOP_REASONS.get(finished.reason, "end_turn")


def _finished_usage(finished: Finished) -> dict[str, int]:
    return _usage(finished.prompt_tokens, finished.cached_tokens, finished.completion_tokens)


def _usage(prompt: int, cached: int, generated: int) -> dict[str, int]:
    """What was not reused is written to the session for the next request, so no token of a prompt is input alone."""
    cached = max(0, min(cached, prompt))
    return {
        "input_tokens": 0,
        "cache_creation_input_tokens": prompt - cached,
        "cache_read_input_tokens": cached,
        "output_tokens": generated,
    }


def _input(arguments: str) -> msgspec.Raw:
    return msgspec.Raw(b"{}" if members(arguments) is None else compact(arguments).encode())


def _event(payload: dict[str, Any]) -> bytes:
    return sse.event(payload["type"], msgspec.json.encode(payload))
