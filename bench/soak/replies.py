"""What an answer says, in whichever API and whether streamed or not, complete or not.

Owns the grammar of the four APIs' answers and streams as a client sees them. Reads bytes, does no input or output.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]

PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
}
_MESSAGES_ENDS = {"end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length", "tool_use": "tool_calls"}
_RESPONSES_ENDS = {"completed": "stop", "incomplete": "length"}


class BadAnswer(Exception):
    """An answer that no client could read; the message says where."""


@dataclass(frozen=True)
class Said:
    """An answer or its beginning. Counts are the server's, 0 where it did not say."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = ()  # name and arguments of each
    logprobs: tuple[str, ...] = ()  # of each token its spelling, log-probability and rivals, as JSON
    finish: str = ""  # stop, length, tool_calls; empty while there is no end
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    created: int = 0  # Unix seconds by the server's clock, 0 where it did not say
    error: str = ""  # of an error event, which ends the stream

    @property
    def bits(self) -> tuple[object, ...]:
        """All that must be the same when the same is asked again."""
        return self.text, self.reasoning, self.calls, self.logprobs, self.finish, self.tokens

    @property
    def empty(self) -> bool:
        """Whether nothing of an answer has come."""
        return not (self.text or self.reasoning or self.calls or self.logprobs or self.finish)

    def begins(self, whole: Said) -> bool:
        """Whether `whole` goes on from here."""
        if not (whole.text.startswith(self.text) and whole.reasoning.startswith(self.reasoning)):
            return False
        if self.logprobs != whole.logprobs[: len(self.logprobs)] or len(self.calls) > len(whole.calls):
            return False
        *closed, last = self.calls or (("", ""),)
        if list(whole.calls[: len(closed)]) != closed:
            return False
        if not self.calls:
            return True
        name, arguments = whole.calls[len(closed)]
        return name == last[0] and arguments.startswith(last[1])


def read_whole(api: str, body: bytes) -> Said:
    """An answer in one object. Raises BadAnswer."""
    try:
        answer = json.loads(body)
        return _WHOLE[api](answer)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise BadAnswer(f"{type(error).__name__}: {error} in {body[:300]!r}") from None


def read_stream(api: str, body: bytes, complete: bool) -> Said:
    """An answer in events. Of an incomplete one the last event may be half there. Raises BadAnswer.

    A complete one must end as its API ends an answer, or with an error event.
    """
    stream = _Stream(api)
    events, _, rest = body.rpartition(b"\n\n")
    try:
        for event in events.split(b"\n\n"):
            stream.take(event)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise BadAnswer(f"{type(error).__name__}: {error} near {event[:300]!r}") from None
    if complete and rest:
        raise BadAnswer(f"the stream ends within an event: {rest[:200]!r}")
    if complete and not stream.ended and not stream.error:
        raise BadAnswer(f"the stream ends without an end: {body[-200:]!r}")
    return stream.said()


def error_message(body: bytes) -> str:
    """The message of an error in one object; empty where the body is none."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return ""


@dataclass
class _Stream:
    api: str
    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[list[str]] = field(default_factory=list)
    logprobs: list[str] = field(default_factory=list)
    finish: str = ""
    usage: Json = field(default_factory=dict)
    created: int = 0
    error: str = ""
    ended: bool = False

    def take(self, event: bytes) -> None:
        name, data = "", []
        for line in event.decode().split("\n"):
            field_, _, value = line.partition(":")
            if field_ == "event":
                name = value.removeprefix(" ")
            elif field_ == "data":
                data.append(value.removeprefix(" "))
            elif field_:
                raise ValueError(f"not a line of an event: {line[:80]!r}")
        if not data:
            return  # a comment
        if self.ended or self.error:
            raise ValueError("an event after the end")
        text = "\n".join(data)
        if text == "[DONE]":
            if self.api not in ("chat", "completions") or not self.finish:
                raise ValueError("[DONE] before the end of an answer")
            self.ended = True
            return
        value = json.loads(text)
        if name == "error" or value.get("type") in ("error", "response.failed"):
            error = value.get("error") or value["response"]["error"]
            self.error = str(error["message"])
            return
        {"chat": self._chat, "completions": self._completion, "responses": self._response, "messages": self._message}[self.api](
            value
        )

    def _chat(self, chunk: Json) -> None:
        self.created = chunk["created"]
        self.usage = chunk.get("usage") or self.usage
        for choice in chunk["choices"]:
            delta = choice["delta"]
            self.text.append(delta.get("content") or "")
            self.reasoning.append(delta.get("reasoning_content") or "")
            for part in delta.get("tool_calls") or ():
                if part["index"] == len(self.calls):
                    self.calls.append([part["function"]["name"], ""])
                self.calls[part["index"]][1] += part["function"].get("arguments", "")
            self.logprobs += _entries((choice.get("logprobs") or {}).get("content"))
            self.finish = choice["finish_reason"] or self.finish

    def _completion(self, chunk: Json) -> None:
        self.created = chunk["created"]
        self.usage = chunk.get("usage") or self.usage
        for choice in chunk["choices"]:
            self.text.append(choice["text"])
            self.logprobs += _columns(choice.get("logprobs"))
            self.finish = choice["finish_reason"] or self.finish

    def _response(self, event: Json) -> None:
        kind = event["type"]
        if kind == "response.created":
            self.created = event["response"]["created_at"]
        elif kind == "response.output_text.delta":
            self.text.append(event["delta"])
            self.logprobs += _entries(event.get("logprobs"))
        elif kind == "response.output_item.added" and event["item"]["type"] == "function_call":
            self.calls.append([event["item"]["name"], ""])
        elif kind == "response.function_call_arguments.delta":
            self.calls[-1][1] += event["delta"]
        elif kind in ("response.completed", "response.incomplete"):
            self.usage = event["response"]["usage"]
            self.finish = _response_end(event["response"])
            self.ended = True

    def _message(self, event: Json) -> None:
        match event["type"]:
            case "message_start":
                self.usage = event["message"]["usage"]
            case "content_block_start" if event["content_block"]["type"] == "tool_use":
                self.calls.append([event["content_block"]["name"], ""])
            case "content_block_delta":
                delta = event["delta"]
                self.text.append(delta.get("text", ""))
                self.reasoning.append(delta.get("thinking", ""))
                if "partial_json" in delta:
                    self.calls[-1][1] += delta["partial_json"]
            case "message_delta":
                self.usage = event["usage"]
                self.finish = _MESSAGES_ENDS[event["delta"]["stop_reason"]]
            case "message_stop":
                self.ended = bool(self.finish)

    def said(self) -> Said:
        return Said(
            "".join(self.text),
            "".join(self.reasoning),
            tuple((name, arguments) for name, arguments in self.calls),
            tuple(self.logprobs),
            self.finish,
            *_counts(self.usage),
            created=self.created,
            error=self.error,
        )


def _chat_whole(answer: Json) -> Said:
    (choice,) = answer["choices"]
    message = choice["message"]
    return Said(
        message["content"] or "",
        message.get("reasoning_content", ""),
        tuple((call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())),
        tuple(_entries((choice.get("logprobs") or {}).get("content"))),
        choice["finish_reason"],
        *_counts(answer["usage"]),
        created=answer["created"],
    )


def _completion_whole(answer: Json) -> Said:
    (choice,) = answer["choices"]
    logprobs = tuple(_columns(choice.get("logprobs")))
    return Said(choice["text"], "", (), logprobs, choice["finish_reason"], *_counts(answer["usage"]), created=answer["created"])


def _response_whole(answer: Json) -> Said:
    parts = [part for item in answer["output"] if item["type"] == "message" for part in item["content"]]
    return Said(
        "".join(part["text"] for part in parts),
        "",
        tuple((item["name"], item["arguments"]) for item in answer["output"] if item["type"] == "function_call"),
        tuple(entry for part in parts for entry in _entries(part.get("logprobs"))),
        _response_end(answer),
        *_counts(answer["usage"]),
        created=answer["created_at"],
    )


def _message_whole(answer: Json) -> Said:
    blocks = answer["content"]
    return Said(
        "".join(block["text"] for block in blocks if block["type"] == "text"),
        "".join(block["thinking"] for block in blocks if block["type"] == "thinking"),
        tuple((block["name"], json.dumps(block["input"])) for block in blocks if block["type"] == "tool_use"),
        (),
        _MESSAGES_ENDS[answer["stop_reason"]],
        *_counts(answer["usage"]),
    )


_WHOLE = {"chat": _chat_whole, "completions": _completion_whole, "responses": _response_whole, "messages": _message_whole}


def _response_end(response: Json) -> str:
    called = any(item["type"] == "function_call" for item in response["output"])
    end = _RESPONSES_ENDS[response["status"]]
    return "tool_calls" if called and end == "stop" else end


def _entries(content: list[Json] | None) -> list[str]:
    return [json.dumps(entry, sort_keys=True) for entry in content or ()]


def _columns(table: Json | None) -> list[str]:
    if not table:
        return []
    rows = zip(table["tokens"], table["token_logprobs"], table["top_logprobs"], table["text_offset"], strict=True)
    return [json.dumps(row, sort_keys=True) for row in rows]


def _counts(usage: Json) -> tuple[int, int, int]:
    """Prompt, cached and generated tokens, whatever the API calls them."""
    if "output_tokens" not in usage:
        details = usage.get("prompt_tokens_details") or {}
        return usage.get("prompt_tokens", 0), details.get("cached_tokens", 0), usage.get("completion_tokens", 0)
    if "cache_read_input_tokens" in usage:
        cached = usage["cache_read_input_tokens"]
        return usage["input_tokens"] + cached + usage["cache_creation_input_tokens"], cached, usage["output_tokens"]
    return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"], usage["output_tokens"]
