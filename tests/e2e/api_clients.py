"""Three clients that hold a conversation over HTTP, one for each API: they write a neutral history as their API does, and put
together the streams they get. What a stream adds up to is compared with the object that is sent when nothing is streamed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tests.scripted.spellings import SCHEMAS
from tests.server.harness import Answer, Server

Object = dict[str, Any]


class Call(NamedTuple):
    id: str
    name: str
    arguments: str

    @property
    def parsed(self) -> Any:
        return json.loads(self.arguments)


class Usage(NamedTuple):
    prompt: int
    cached: int
    generated: int


class Reply(NamedTuple):
    """An answer, whatever its API."""

    reasoning: str
    content: str
    calls: tuple[Call, ...]
    reason: str  # stop, length, tool_calls
    usage: Usage
    whole: Object  # the object, or what the stream added up to

    @property
    def said(self) -> tuple[str, str, list[tuple[str, Any]], str]:
        return self.reasoning, self.content, [(call.name, call.parsed) for call in self.calls], self.reason


class Asked(NamedTuple):
    text: str


class Results(NamedTuple):
    """In the order in which they are sent."""

    texts: tuple[tuple[str, str], ...]  # id of the call, result


Step = Asked | Reply | Results


class Client:
    """One API's."""

    name: str
    path: str
    streaming: Mapping[str, Any] = {}  # what else a streamed request says
    limit = "max_tokens"
    stop = "stop"

    def body(self, talk: Sequence[Step], *, remember: bool = True, tools: bool = True) -> Object:
        """The request that asks for the next answer. `remember`: reasoning is sent back."""
        raise NotImplementedError

    def whole(self, answer: Object) -> Reply:
        raise NotImplementedError

    def assembled(self, answer: Answer) -> Object:
        """The object a stream stands for; its order is checked on the way."""
        raise NotImplementedError

    def message(self, answer: Answer) -> str:
        """The message of an error, whose shape is checked."""
        assert answer.body["error"]["type"] == "invalid_request_error"
        return str(answer.body["error"]["message"])

    def ask(
        self,
        server: Server,
        talk: Sequence[Step],
        *,
        stream: bool = False,
        remember: bool = True,
        tools: bool = True,
        more: Mapping[str, Any] | None = None,
    ) -> Reply:
        """The next answer; `more` are further members of the request."""
        answer = self.send(server, {**self.body(talk, remember=remember, tools=tools), **(more or {})}, stream=stream)
        assert answer.status == 200, answer.raw
        return self.whole(self.assembled(answer) if stream else answer.body)

    def send(self, server: Server, body: Object, *, stream: bool = False) -> Answer:
        return server.request("POST", self.path, {**body, "stream": True, **self.streaming} if stream else body)


class Chat(Client):
    name, path = "chat", "/v1/chat/completions"
    streaming: Mapping[str, Any] = {"stream_options": {"include_usage": True}}

    def body(self, talk: Sequence[Step], *, remember: bool = True, tools: bool = True) -> Object:
        messages: list[Object] = [{"role": "system", "content": "Be brief."}]
        for step in talk:
            match step:
                case Asked(text):
                    messages.append({"role": "user", "content": text})
                case Results(texts):
                    messages += [{"role": "tool", "tool_call_id": id, "content": text} for id, text in texts]
                case Reply():
                    message: Object = {"role": "assistant", "content": step.content or None}
                    if remember and step.reasoning:
                        message["reasoning_content"] = step.reasoning
                    if step.calls:
                        message["tool_calls"] = [
                            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": _anew(call)}}
                            for call in step.calls
                        ]
                    messages.append(message)
        declared = [{"type": "function", "function": {"name": name, "parameters": form}} for name, form in SCHEMAS.items()]
        return {"messages": messages} | ({"tools": declared} if tools else {})

    def whole(self, answer: Object) -> Reply:
        (choice,) = answer["choices"]
        message, usage = choice["message"], answer["usage"]
        calls = [Call(call["id"], **call["function"]) for call in message.get("tool_calls", [])]
        calls = [call for call in calls if _parsed(call.arguments) is not None]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        details = usage["prompt_tokens_details"]
        assert details["cached_tokens"] + details["cache_write_tokens"] == usage["prompt_tokens"]
        return Reply(
            message.get("reasoning_content", ""),
            message["content"],
            tuple(calls),
            choice["finish_reason"],
            Usage(usage["prompt_tokens"], details["cached_tokens"], usage["completion_tokens"]),
            answer,
        )

    def assembled(self, answer: Answer) -> Object:
        *chunks, done = answer.events
        assert done == "[DONE]"
        head = {key: chunks[0][key] for key in ("id", "object", "created", "model")}
        assert all({key: chunk[key] for key in head} == head for chunk in chunks)
        last, usage = chunks[-2], chunks[-1]
        assert usage["choices"] == []
        message: Object = {"content": ""}
        for chunk in chunks[:-1]:
            delta = chunk["choices"][0]["delta"]
            for key in ("role", "content", "reasoning_content"):
                if key in delta:
                    message[key] = message.get(key, "") + delta[key]
            for part in delta.get("tool_calls", []):
                calls = message.setdefault("tool_calls", [])
                if part["index"] == len(calls):
                    calls.append({"id": part["id"], "type": part["type"], "function": dict(part["function"])})
                else:
                    assert part["index"] == len(calls) - 1
                    calls[-1]["function"]["arguments"] += part["function"]["arguments"]
        choice = {"index": 0, "message": message, "finish_reason": last["choices"][0]["finish_reason"]}
        return {**head, "object": "chat.completion", "choices": [choice], "usage": usage["usage"]}


class Responses(Client):
    name, path = "responses", "/v1/responses"
    limit = "max_output_tokens"

    def body(self, talk: Sequence[Step], *, remember: bool = True, tools: bool = True) -> Object:
        items: list[Object] = []
        for step in talk:
            match step:
                case Asked(text):
                    items.append({"role": "user", "content": [{"type": "input_text", "text": text}]})
                case Results(texts):
                    items += [{"type": "function_call_output", "call_id": id, "output": text} for id, text in texts]
                case Reply():
                    items += [item for item in step.whole["output"] if remember or item["type"] != "reasoning"]
        declared = [{"type": "function", "name": name, "parameters": form} for name, form in SCHEMAS.items()]
        shown = {"include": ["reasoning.encrypted_content"], "reasoning": {"summary": "auto"}}
        return {"instructions": "Be brief.", "input": items, **shown} | ({"tools": declared} if tools else {})

    def whole(self, answer: Object) -> Reply:
        parts: dict[str, list[str]] = {"reasoning": [], "message": []}
        calls = []
        for item in answer["output"]:
            match item["type"]:
                case "reasoning":
                    parts["reasoning"] += [part["text"] for part in item["summary"]]
                case "message":
                    parts["message"] += [part["text"] for part in item["content"]]
                case _ if item["status"] == "completed":
                    calls.append(Call(item["call_id"], item["name"], item["arguments"]))
        usage = answer["usage"]
        details = usage["input_tokens_details"]
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
        assert details["cached_tokens"] + details["cache_write_tokens"] == usage["input_tokens"]
        status = {"incomplete": "length", "completed": "tool_calls" if calls else "stop"}[answer["status"]]
        assert answer["incomplete_details"] == ({"reason": "max_output_tokens"} if status == "length" else None)
        return Reply(
            "".join(parts["reasoning"]),
            "".join(parts["message"]),
            tuple(calls),
            status,
            Usage(usage["input_tokens"], details["cached_tokens"], usage["output_tokens"]),
            answer,
        )

    def assembled(self, answer: Answer) -> Object:
        events = answer.events
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert events[0]["type"] == "response.created"
        response: Object = events[-1]["response"]
        assert events[-1]["type"] == "response." + response["status"]
        items: list[Object] = []
        texts: dict[str, str] = {}
        for event in events[1:-1]:
            kind = event["type"]
            if kind == "response.output_item.added":
                assert event["output_index"] == len(items)
                items.append(event["item"])
            elif kind == "response.output_item.done":
                assert event["output_index"] == len(items) - 1
                items[-1] = event["item"]
            elif kind.endswith(".delta"):
                assert event["item_id"] == items[-1]["id"]
                texts[items[-1]["id"]] = texts.get(items[-1]["id"], "") + event["delta"]
            elif kind in ("response.output_text.done", "response.reasoning_summary_text.done"):
                assert event["text"] == texts[items[-1]["id"]]
            elif kind == "response.function_call_arguments.done":
                assert event["arguments"] == texts[items[-1]["id"]]
        assert items == response["output"]
        return response


class Messages(Client):
    name, path = "messages", "/v1/messages?beta=true"
    stop = "stop_sequences"

    def body(self, talk: Sequence[Step], *, remember: bool = True, tools: bool = True) -> Object:
        messages: list[Object] = []
        for step in talk:
            match step:
                case Asked(text):
                    messages.append({"role": "user", "content": text})
                case Results(texts):
                    blocks = [{"type": "tool_result", "tool_use_id": id, "content": text} for id, text in texts]
                    messages.append({"role": "user", "content": blocks})
                case Reply():
                    blocks = [_replayed(block) for block in step.whole["content"]]
                    kept = [block for block in blocks if remember or block["type"] != "thinking"]
                    messages.append({"role": "assistant", "content": kept})
        declared = [{"name": name, "input_schema": form} for name, form in SCHEMAS.items()]
        return {"max_tokens": 4000, "system": "Be brief.", "messages": messages} | ({"tools": declared} if tools else {})

    def whole(self, answer: Object) -> Reply:
        blocks, usage = answer["content"], answer["usage"]
        cached = usage["cache_read_input_tokens"]
        calls = [
            Call(block["id"], block["name"], json.dumps(block["input"]))
            for block in blocks
            if block["type"] == "tool_use" and block["input"] is not None
        ]
        assert answer["stop_sequence"] is None
        return Reply(
            "".join(block["thinking"] for block in blocks if block["type"] == "thinking"),
            "".join(block["text"] for block in blocks if block["type"] == "text"),
            tuple(calls),
            {"end_turn": "stop", "max_tokens": "length", "tool_use": "tool_calls"}[answer["stop_reason"]],
            Usage(usage["input_tokens"] + usage["cache_creation_input_tokens"] + cached, cached, usage["output_tokens"]),
            answer,
        )

    def assembled(self, answer: Answer) -> Object:
        names = [line.removeprefix(b"event: ").decode() for line in answer.raw.splitlines() if line.startswith(b"event: ")]
        events = [event for event in answer.events if event["type"] != "ping"]
        assert names == [event["type"] for event in answer.events]
        assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
        message: Object = dict(events[0]["message"])
        message["content"], is_open = [], False
        for event in events[1:-2]:
            if event["type"] == "content_block_start":
                assert not is_open
                assert event["index"] == len(message["content"])
                message["content"].append(dict(event["content_block"]))
                is_open, pieces = True, ""
                continue
            assert is_open
            assert event["index"] == len(message["content"]) - 1
            block = message["content"][-1]
            if event["type"] == "content_block_stop":
                is_open = False
                if block["type"] == "tool_use":
                    assert block["input"] == {}
                    block["input"] = _parsed(pieces)
                continue
            match event["delta"]:
                case {"type": "text_delta", "text": text}:
                    block["text"] += text
                case {"type": "thinking_delta", "thinking": text}:
                    block["thinking"] += text
                case {"type": "signature_delta", "signature": text}:
                    block["signature"] += text
                case {"type": "input_json_delta", "partial_json": text}:
                    pieces += text
                case other:
                    raise AssertionError(other)
        assert not is_open
        return {**message, **events[-2]["delta"], "usage": {**message["usage"], **events[-2]["usage"]}}

    def message(self, answer: Answer) -> str:
        assert answer.body["type"] == "error"
        return super().message(answer)


def _parsed(text: str) -> Any:
    """The arguments of a call; None for those of one that broke off."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def _replayed(block: Object) -> Object:
    """A block as an agent sends it back: with a mark for the cache, and its arguments in another order."""
    if block["type"] == "tool_use":
        return block | {"input": dict(reversed(block["input"].items())), "cache_control": {"type": "ephemeral"}}
    return block


def _anew(call: Call) -> str:
    """Arguments as a client writes them from its own copy."""
    return json.dumps(dict(reversed(call.parsed.items())))


CLIENTS = (Chat(), Responses(), Messages())
_OWN = ("id", "call_id", "created", "created_at", "signature", "encrypted_content", "usage")


def without_own(value: Any) -> Any:
    """A value without what differs between two answers that say the same."""
    if isinstance(value, dict):
        return {key: without_own(one) for key, one in value.items() if key not in _OWN}
    return [without_own(one) for one in value] if isinstance(value, list) else value
