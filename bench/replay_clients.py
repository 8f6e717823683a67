"""How agents' clients talk: the requests they write from their own copy of a history, and what they make of a stream.

Each client keeps what it was sent and encodes it anew for every request, in the form that the agent of its name uses. Knows no
dialect and no transcript beyond one turn; does no input or output.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from bench.replay_transcript import FREEFORM, TOOLS, Json

_MARK: Json = {"cache_control": {"type": "ephemeral"}}


class Made(NamedTuple):
    """A call as the client got it."""

    id: str
    tool: str
    arguments: str


class Reply(NamedTuple):
    """What a stream added up to."""

    reasoning: str
    text: str
    calls: tuple[Made, ...]
    reason: str
    prompt: int  # tokens
    cached: int
    generated: int


class Client(ABC):
    """One agent's client in one conversation."""

    name: str
    api: str
    path: str

    def __init__(self, system: str) -> None:
        self.system = system
        self.requests = 0

    @abstractmethod
    def ask(self, text: str) -> None:
        """The user says something."""

    @abstractmethod
    def remind(self, text: str) -> None:
        """The client says something as the system, behind what was said so far."""

    @abstractmethod
    def bring(self, results: Sequence[tuple[Made, str]]) -> None:
        """The results of calls."""

    @abstractmethod
    def body(self) -> Json:
        """The next request."""

    @abstractmethod
    def take(self, events: Iterable[Json]) -> Reply:
        """Read a whole stream and keep the answer. Raises ValueError for one that does not end as it should."""


class _Chat(Client):
    api, path = "chat", "/v1/chat/completions"
    keeps_reasoning = True

    def __init__(self, system: str) -> None:
        super().__init__(system)
        self._messages: list[Json] = [{"role": "system", "content": system}]

    def ask(self, text: str) -> None:
        """See Client."""
        self._messages.append({"role": "user", "content": text})

    def remind(self, text: str) -> None:
        """See Client."""
        self._messages.append({"role": "system", "content": text})

    def bring(self, results: Sequence[tuple[Made, str]]) -> None:
        """See Client."""
        self._messages += [{"role": "tool", "tool_call_id": call.id, "content": text} for call, text in results]

    def body(self) -> Json:
        """See Client."""
        self.requests += 1
        tools = [{"type": "function", "function": _function(name, "parameters")} for name in TOOLS]
        options = {"include_usage": True}
        return {"model": "any", "messages": self._messages, "tools": tools, "stream": True, "stream_options": options}

    def take(self, events: Iterable[Json]) -> Reply:
        """See Client."""
        reasoning, text, calls, reason, usage = "", "", list[Made](), "", None
        for event in events:
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                delta, reason = choice["delta"], choice["finish_reason"] or reason
                reasoning += delta.get("reasoning_content") or ""
                text += delta.get("content") or ""
                for part in delta.get("tool_calls", ()):
                    if part["index"] == len(calls):
                        calls.append(Made(part["id"], part["function"]["name"], ""))
                    calls[-1] = calls[-1]._replace(arguments=calls[-1].arguments + part["function"]["arguments"])
        if usage is None:
            raise ValueError("the stream ended without its usage")
        self._keep(reasoning, text, calls)
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return Reply(reasoning, text, tuple(calls), reason, usage["prompt_tokens"], cached, usage["completion_tokens"])

    def _keep(self, reasoning: str, text: str, calls: Sequence[Made]) -> None:
        message: Json = {"role": "assistant", "content": text}
        if reasoning and self.keeps_reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.tool, "arguments": self.written(call)}}
                for call in calls
            ]
        self._messages.append(message)

    def written(self, call: Made) -> str:
        """A call's arguments as they are sent back."""
        return call.arguments


class OpenCode(_Chat):
    """Sends reasoning back, and arguments as compact JSON of its own."""

    name = "opencode"

    def written(self, call: Made) -> str:
        """See _Chat."""
        return json.dumps(_as_script_numbers(json.loads(call.arguments)), ensure_ascii=False, separators=(",", ":"))


class PlainSdk(_Chat):
    """Sends back the message without the reasoning that the library does not know."""

    name = "sdk"
    keeps_reasoning = False


class Codex(Client):
    """Sends items back to the byte, without what the server would need to store them."""

    name, api, path = "codex", "responses", "/v1/responses"

    def __init__(self, system: str) -> None:
        super().__init__(system)
        self._items: list[Json] = [self._said("developer", system), self._said("user", "<environment>cwd=/srv</environment>")]

    def ask(self, text: str) -> None:
        """See Client."""
        self._items.append(self._said("user", text))

    def remind(self, text: str) -> None:
        """See Client."""
        self._items.append(self._said("developer", text))

    def bring(self, results: Sequence[tuple[Made, str]]) -> None:
        """See Client."""
        for call, text in results:
            kind = "custom_tool_call_output" if call.tool == FREEFORM else "function_call_output"
            self._items.append({"type": kind, "call_id": call.id, "output": text})

    def body(self) -> Json:
        """See Client."""
        self.requests += 1
        tools: list[Json] = [
            {"type": "custom", "name": name, "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}}
            if name == FREEFORM
            else {"type": "function", "strict": False, **_function(name, "parameters")}
            for name in TOOLS
        ]
        return {
            "model": "any",
            "input": self._items,
            "tools": [*tools, {"type": "web_search"}],
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "reasoning": {"summary": "auto"},
            "store": False,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "0f0f",
            "stream": True,
        }

    def take(self, events: Iterable[Json]) -> Reply:
        """See Client."""
        items: list[Json] = []
        last: Json = {}
        for event in events:
            last = event
            if event["type"] == "response.output_item.done":
                items.append(event["item"])
        if last.get("type") != "response.completed":
            raise ValueError(f"the stream ended with {last.get('type')!r}")
        self._items += [{key: value for key, value in item.items() if key not in ("id", "status")} for item in items]
        calls = [_made(item) for item in items if item["type"].endswith("_call")]
        usage = last["response"]["usage"]
        return Reply(
            "".join(part["text"] for item in items if item["type"] == "reasoning" for part in item["summary"]),
            "".join(part["text"] for item in items if item["type"] == "message" for part in item["content"]),
            tuple(calls),
            "tool_calls" if calls else "stop",
            usage["input_tokens"],
            usage["input_tokens_details"]["cached_tokens"],
            usage["output_tokens"],
        )

    @staticmethod
    def _said(role: str, text: str) -> Json:
        return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}


class ClaudeCode(Client):
    """Sends arguments back in the order of the schema, moves its cache mark, and says who pays in words that always change."""

    name, api, path = "claude-code", "messages", "/v1/messages?beta=true"

    def __init__(self, system: str) -> None:
        super().__init__(system)
        self._messages: list[Json] = []

    def ask(self, text: str) -> None:
        """See Client."""
        self._messages.append({"role": "user", "content": text})

    def remind(self, text: str) -> None:
        """See Client."""
        self._messages.append({"role": "system", "content": text})

    def bring(self, results: Sequence[tuple[Made, str]]) -> None:
        """See Client."""
        blocks = [{"type": "tool_result", "tool_use_id": call.id, "content": text} for call, text in results]
        self._messages.append({"role": "user", "content": blocks})

    def body(self) -> Json:
        """See Client. Only the last block of the last message has the mark."""
        self.requests += 1
        *earlier, last = self._messages
        content = last["content"]
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        marked = {**last, "content": [*blocks[:-1], {**blocks[-1], **_MARK}]}
        tools = [_function(name, "input_schema") for name in TOOLS]
        return {
            "model": "any",
            "max_tokens": 32000,
            "system": [
                {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1; cch={self.requests:05x};"},
                {"type": "text", "text": "You are a tool for the command line.", **_MARK},
                {"type": "text", "text": self.system, **_MARK},
            ],
            "messages": [*earlier, marked],
            "tools": [*tools[:-1], {**tools[-1], **_MARK}],
            "thinking": {"type": "adaptive"},
            "context_management": {"edits": []},
            "metadata": {"user_id": f"user_{self.requests}"},
            "stream": True,
        }

    def take(self, events: Iterable[Json]) -> Reply:
        """See Client."""
        blocks: list[Json] = []
        pieces: dict[int, str] = {}
        usage: Json = {}
        reason = ""
        for event in events:
            match event:
                case {"type": "message_start", "message": message}:
                    usage |= message["usage"]
                case {"type": "content_block_start", "content_block": block}:
                    blocks.append(dict(block))
                case {"type": "content_block_delta", "index": index, "delta": delta}:
                    key = delta["type"].removesuffix("_delta")
                    if key == "input_json":
                        pieces[index] = pieces.get(index, "") + delta["partial_json"]
                    else:
                        blocks[index][key] += delta[key]
                case {"type": "message_delta", "delta": delta}:
                    usage |= event["usage"]
                    reason = delta["stop_reason"]
        if not reason:
            raise ValueError("the stream ended without a stop reason")
        for index, text in pieces.items():
            blocks[index]["input"] = _in_order(blocks[index]["name"], json.loads(text))
        self._messages.append({"role": "assistant", "content": blocks})
        cached = usage["cache_read_input_tokens"]
        return Reply(
            "".join(block["thinking"] for block in blocks if block["type"] == "thinking"),
            "".join(block["text"] for block in blocks if block["type"] == "text"),
            tuple(Made(b["id"], b["name"], json.dumps(b["input"])) for b in blocks if b["type"] == "tool_use"),
            {"end_turn": "stop", "tool_use": "tool_calls"}.get(reason, reason),
            usage["input_tokens"] + usage["cache_creation_input_tokens"] + cached,
            cached,
            usage["output_tokens"],
        )


CLIENTS: tuple[type[Client], ...] = (OpenCode, PlainSdk, Codex, ClaudeCode)


def sse_events(sent: bytes) -> Iterator[Json]:
    """The events of a whole stream, without the mark at its end."""
    for line in sent.split(b"\n"):
        if line.startswith(b"data: ") and line != b"data: [DONE]":
            yield json.loads(line.removeprefix(b"data: "))


def _function(name: str, parameters: str) -> Json:
    properties = TOOLS[name]
    schema = {"type": "object", "properties": properties, "required": [next(iter(properties))]}
    return {"name": name, "description": f"{name}: does what its name says – über alles.", parameters: schema}


def _made(item: Json) -> Made:
    if item["type"] == "custom_tool_call":
        return Made(item["call_id"], item["name"], json.dumps({"input": item["input"]}))
    return Made(item["call_id"], item["name"], item["arguments"])


def _in_order(tool: str, arguments: Json) -> Json:
    """The arguments in the order of the tool's schema, numbers as a script engine has them."""
    found = {key: arguments[key] for key in TOOLS.get(tool, {}) if key in arguments}
    return {key: _as_script_numbers(value) for key, value in {**found, **arguments}.items()}


def _as_script_numbers(value: Any) -> Any:
    """A value as it leaves a client written in JavaScript, where 30.0 is 30."""
    if isinstance(value, dict):
        return {key: _as_script_numbers(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_as_script_numbers(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
