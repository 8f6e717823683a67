"""A reader of Responses streams that refuses every event that is out of order, and answers to be read."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import msgspec
from hypothesis import strategies as st
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter
from turns import finished

from ds4batch.chat.events import TurnEvent
from ds4batch.server.apis.responses import read_request
from ds4batch.server.apis.responses_wire import ResponsesWire
from ds4batch.server.apis.served import Served

SERVED = Served(model="served", max_tokens=1000, ctx=4096, vocab_size=100, levels=False)
TOOLS: list[Any] = [
    {"type": "function", "name": "cat", "parameters": {"type": "object"}, "strict": False},
    {"type": "namespace", "name": "l", "description": "", "tools": [{"type": "function", "name": "s"}]},
    {"type": "custom", "name": "spähen"},
    {"type": "tool_search", "execution": "client"},
]
OPT_INS = st.fixed_dictionaries(
    {}, optional={"reasoning": st.just({"summary": "auto"}), "include": st.just(["reasoning.encrypted_content"])}
)
REASONS = st.sampled_from(["stop", "length", "tool_calls", "error", "abort"])
SHOWN: dict[str, Any] = {"reasoning": {"summary": "auto"}}

_any_event: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
_DELTAS = {
    "response.output_text.delta": "message",
    "response.reasoning_summary_text.delta": "reasoning",
    "response.function_call_arguments.delta": "function_call",
}


class Spelling:
    """A tokenizer that spells tokens."""

    def token_bytes(self, token: int) -> bytes:
        return b"t%d" % token


def wire(*, logprobs: bool = False, **body: Any) -> ResponsesWire:
    """With ids that count, so that two wires make the same."""
    numbers = itertools.count()
    request = read_request({"input": "hi", "tools": TOOLS, "model": "m", **body}, SERVED)
    tokenizer: Any = Spelling() if logprobs else None
    return ResponsesWire(request, tokenizer, new_id=lambda prefix: f"{prefix}{next(numbers)}")


def parsed(stream: bytes) -> list[dict[str, Any]]:
    """The data of each event, which must be what the vendor's library takes for an event of that type."""
    out = []
    for frame in stream.decode().split("\n\n")[:-1]:
        assert "\n" not in frame
        event = json.loads(frame.removeprefix("data: "))
        assert list(event)[:2] == ["type", "sequence_number"]
        assert _any_event.validate_python(event).type == event["type"]
        out.append(event)
    assert [event["sequence_number"] for event in out] == list(range(len(out)))
    return out


def streamed(made: ResponsesWire, *events: TurnEvent, reason: str = "stop") -> list[dict[str, Any]]:
    return parsed(made.opening() + made.events(events, []) + made.closing(finished(reason)))


def names(events: Sequence[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


def plain(value: Any) -> dict[str, Any]:
    """An answer as its client sees it; its time is no matter here."""
    got = json.loads(msgspec.json.encode(value))
    assert isinstance(got, dict)
    got.pop("created_at")
    return got


class Client:
    """Puts a response together from its events and refuses every event that is out of order."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self.final: dict[str, Any] | None = None
        self._id = ""
        self._open: dict[str, Any] | None = None
        self._text = ""
        self._parts = 0

    def take(self, event: dict[str, Any]) -> None:
        assert self.final is None
        kind = event["type"]
        assert bool(self._id) == (kind != "response.created")
        if "response" in event:
            self._response(kind, event["response"])
            return
        assert event["output_index"] == len(self.items) - (self._open is not None)
        if kind == "response.output_item.added":
            assert self._open is None
            self._open, self._text, self._parts = event["item"], "", 0
            assert self._open["status"] == "in_progress"
            self.items.append(self._open)
        elif kind == "response.output_item.done":
            self._done(event["item"])
        else:
            assert self._open is not None
            assert event["item_id"] == self._open["id"]
            self._piece(kind, event)

    def _response(self, kind: str, response: dict[str, Any]) -> None:
        self._id = self._id or response["id"]
        assert response["id"] == self._id
        if kind in ("response.created", "response.in_progress"):
            assert (response["status"], response["output"]) == ("in_progress", [])
            return
        assert self._open is None
        assert kind == f"response.{response['status']}"
        assert response["output"] == self.items
        self.final = response

    def _piece(self, kind: str, event: dict[str, Any]) -> None:
        assert self._open is not None
        if kind in _DELTAS:
            assert self._open["type"] == _DELTAS[kind]
            self._text += event["delta"]
        elif kind.endswith("part.added"):
            self._parts += 1
            assert event["part"]["text"] == ""
        elif kind.endswith("part.done"):
            self._parts -= 1
            assert event["part"]["text"] == self._text
        elif kind == "response.function_call_arguments.done":
            assert event["arguments"] == self._text
            assert event["name"] == self._open["name"]
        else:
            assert kind in ("response.output_text.done", "response.reasoning_summary_text.done")
            assert event["text"] == self._text

    def _done(self, item: dict[str, Any]) -> None:
        assert self._open is not None
        assert not self._parts
        assert item["status"] in ("completed", "incomplete")
        for name in ("id", "type", "call_id", "name", "namespace", "role", "execution"):
            assert item.get(name) == self._open.get(name)
        if item["type"] == "message":
            assert [part["text"] for part in item["content"]] == [self._text]
        if item["type"] == "function_call":
            assert item["arguments"] == self._text
        if item["type"] == "reasoning" and item["summary"]:
            assert item["summary"] == [{"type": "summary_text", "text": self._text}]
        self._open.update(item)
        self._open = None
