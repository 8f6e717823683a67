"""The official Python SDKs of OpenAI and Anthropic against a scripted server: see sdks.py for what it says.

    python sdk_python.py URL MODEL
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import anthropic
import openai

TEXT = "Plain wörds: 日本語 <b>&amp;</b> 🙂."
REASONING = "First I look\nat it."
ZURICH = {"days": 3, "city": 'Zürich "ZH" <&>'}
PLACE = {"city": "Oslo", "days": 3}
OSLO = {"days": 1, "city": "Oslo\n(NO)"}
ASKED = {  # what a prompt is answered with: reasoning, text, arguments of the calls
    "say a text": ("", TEXT, []),
    "think, then say a text": (REASONING, TEXT, []),
    "call once": ("", "I look.", [ZURICH]),
    "think, then call once": (REASONING, "I look.", [ZURICH]),
    "think, then call twice": (REASONING, "I look.", [ZURICH, OSLO]),
}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
FORM = {**SCHEMA, "required": ["city", "days"], "additionalProperties": False}
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
CHANGING = ("id", "call_id", "item_id", "created", "created_at", "completed_at", "signature", "encrypted_content")
"""Fields that differ from answer to answer."""

URL, MODEL = sys.argv[1:]
OPENAI = openai.OpenAI(base_url=f"{URL}/v1", api_key="unused", max_retries=0)
ANTHROPIC = anthropic.Anthropic(base_url=URL, api_key="unused", max_retries=0)
CHECKS: list[tuple[str, Callable[[], None]]] = []


def check(name: str, *arguments: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Have a function called with `arguments` as a check."""

    def add(function: Callable[..., None]) -> Callable[..., None]:
        CHECKS.append((name, lambda: function(*arguments)))
        return function

    return add


def each(api: str) -> Callable[[Callable[[str], None]], Callable[[str], None]]:
    """A check for every kind of answer."""

    def add(function: Callable[[str], None]) -> Callable[[str], None]:
        for asked in ASKED:
            check(f"{api}: {asked}", asked)(function)
        return function

    return add


def same(got: Any, wanted: Any, what: str) -> None:
    """Raise AssertionError unless both are equal."""
    assert got == wanted, f"{what}: {got!r} instead of {wanted!r}"


def plain(value: Any) -> Any:
    """An SDK's object as JSON without what changes, what the SDK itself adds, and what is absent."""
    if hasattr(value, "model_dump"):
        value = value.model_dump(exclude={"usage"}, warnings=False)
    if isinstance(value, dict):
        kept = {key: one for key, one in value.items() if key not in CHANGING and not key.startswith("parsed")}
        return {key: plain(one) for key, one in kept.items() if one is not None and key != "output_parsed"}
    return [plain(one) for one in value] if isinstance(value, list) else value


def refused(request: Callable[[], Any], kind: type[Exception], *parts: str) -> Any:
    """The error that `request` is refused with; it must be a `kind` and mention `parts`."""
    try:
        request()
    except kind as error:
        same([part for part in parts if part not in str(error)], [], f"missing in {error}")
        return error
    raise AssertionError(f"no {kind.__name__}")


# Chat completions


def chat_request(asked: str, *more: Any) -> dict[str, Any]:
    thinking = "enabled" if ASKED[asked][0] else "disabled"
    function = {"name": "weather", "description": "Tells the weather", "parameters": SCHEMA}
    return {
        "model": MODEL,
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": asked}, *more],
        "tools": [{"type": "function", "function": function}],
        "extra_body": {"thinking": {"type": thinking}},
    }


@each("chat")
def chat(asked: str) -> None:
    """Whole and streamed answers agree, and are what the model said."""
    reasoning, text, calls = ASKED[asked]
    whole = OPENAI.chat.completions.create(**chat_request(asked))
    with OPENAI.chat.completions.stream(**chat_request(asked), stream_options={"include_usage": True}) as stream:
        streamed = stream.until_done().get_final_completion()
    message = whole.choices[0].message
    same(message.content, text, "content")
    same(getattr(message, "reasoning_content", None) or "", reasoning, "reasoning_content")
    same([json.loads(call.function.arguments) for call in message.tool_calls or []], calls, "arguments")
    same(whole.choices[0].finish_reason, "tool_calls" if calls else "stop", "finish_reason")
    got, wanted = plain(streamed), plain(whole)
    for one in (got, wanted):
        one.pop("object")  # the SDK leaves that of the chunks
        for call in one["choices"][0]["message"].get("tool_calls", []):
            call.pop("index", None)
    same(got, wanted, "streamed")
    assert whole.usage is not None
    assert streamed.usage is not None
    same(streamed.usage.prompt_tokens, whole.usage.prompt_tokens, "prompt_tokens")
    same(streamed.usage.completion_tokens, whole.usage.completion_tokens, "completion_tokens")


@check("chat: results of two calls are continued")
def chat_loop() -> None:
    asked = "think, then call twice"
    first = OPENAI.chat.completions.create(**chat_request(asked))
    message = first.choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in message.tool_calls or []]
    second = OPENAI.chat.completions.create(**chat_request(asked, message.model_dump(exclude_none=True), *results))
    same(second.choices[0].message.content, "It is sunny.", "content")
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    cached = second.usage.prompt_tokens_details.cached_tokens or 0
    assert cached >= first.usage.total_tokens - 1, f"{cached} cached of {first.usage.total_tokens}"


@check("chat: an image is refused")
def chat_image() -> None:
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}
    request: Any = {"model": MODEL, "messages": [{"role": "user", "content": [{"type": "text", "text": "what?"}, image]}]}
    refused(lambda: OPENAI.chat.completions.create(**request), openai.BadRequestError, "image")
    refused(lambda: OPENAI.chat.completions.create(**(request | {"stream": True})), openai.BadRequestError, "image")


@check("chat: errors have their classes")
def chat_errors() -> None:
    request = chat_request("say a text")
    refused(lambda: OPENAI.chat.completions.create(**(request | {"temperature": "hot"})), openai.BadRequestError, "temperature")
    long: Any = {"model": MODEL, "messages": [{"role": "user", "content": "long " * 40_000}]}
    error = refused(lambda: OPENAI.chat.completions.create(**long), openai.BadRequestError, "context")
    same(error.code, "context_length_exceeded", "code")
    refused(lambda: OPENAI.get("/nowhere", cast_to=object), openai.NotFoundError)


@check("chat: an answer is held to a schema")
def chat_form() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": FORM, "strict": True}}
    request: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "as JSON"}], "response_format": form}
    request["extra_body"] = {"thinking": {"type": "disabled"}}
    whole = OPENAI.chat.completions.create(**request)
    same(json.loads(whole.choices[0].message.content or ""), PLACE, "content")
    with OPENAI.chat.completions.stream(**request) as stream:
        streamed = stream.until_done().get_final_completion()
    same(streamed.choices[0].message.content, whole.choices[0].message.content, "streamed")


@check("chat: a call is required")
def chat_forced() -> None:
    request = chat_request("say a text") | {"tool_choice": "required"}
    request["messages"][1]["content"] = "must call"
    whole = OPENAI.chat.completions.create(**request)
    calls = whole.choices[0].message.tool_calls or []
    same([json.loads(call.function.arguments) for call in calls], [ZURICH], "arguments")
    same(whole.choices[0].finish_reason, "tool_calls", "finish_reason")


@check("completions: whole and streamed agree")
def completions() -> None:
    request: Any = {"model": MODEL, "prompt": "please say a text", "max_tokens": 200}
    whole = OPENAI.completions.create(**request)
    streamed = "".join(chunk.choices[0].text for chunk in OPENAI.completions.create(**request, stream=True))
    same((whole.choices[0].text, streamed), (TEXT, TEXT), "texts")


@check("models: the model is listed")
def models() -> None:
    assert MODEL in [one.id for one in OPENAI.models.list()]
    same(OPENAI.models.retrieve(MODEL).id, MODEL, "id")


# Responses


def response_request(asked: str, *more: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "instructions": "Be brief.",
        "input": [{"role": "user", "content": asked}, *more],
        "tools": [{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": False}],
        "reasoning": {"effort": "medium", "summary": "auto"} if ASKED[asked][0] else {"effort": "none"},
        "include": ["reasoning.encrypted_content"],
        "store": False,
    }


@each("responses")
def responses(asked: str) -> None:
    """Whole and streamed answers agree, and are what the model said."""
    reasoning, text, calls = ASKED[asked]
    whole = OPENAI.responses.create(**response_request(asked))
    with OPENAI.responses.stream(**response_request(asked)) as stream:
        streamed = stream.until_done().get_final_response()
    same(whole.output_text, text, "output_text")
    same([json.loads(item.arguments) for item in whole.output if item.type == "function_call"], calls, "arguments")
    thoughts = [part.text for item in whole.output if item.type == "reasoning" for part in item.summary or item.content or []]
    same("".join(thoughts), reasoning, "reasoning")
    same(plain(streamed), plain(whole), "streamed")
    assert whole.usage is not None
    assert streamed.usage is not None
    same(streamed.usage.input_tokens, whole.usage.input_tokens, "input_tokens")
    same(streamed.usage.output_tokens, whole.usage.output_tokens, "output_tokens")


def response_results(first: Any) -> list[dict[str, Any]]:
    return [{"type": "function_call_output", "call_id": item.call_id, "output": "sunny"} for item in first.output
            if item.type == "function_call"]  # fmt: skip


@check("responses: an answer is held to a schema")
def response_form() -> None:
    form = {"format": {"type": "json_schema", "name": "place", "schema": FORM, "strict": True}}
    request: dict[str, Any] = {"model": MODEL, "input": "as JSON", "text": form, "reasoning": {"effort": "none"}}
    whole = OPENAI.responses.create(**request)
    same(json.loads(whole.output_text), PLACE, "output_text")
    with OPENAI.responses.stream(**request) as stream:
        same(stream.until_done().get_final_response().output_text, whole.output_text, "streamed")


@check("responses: results of two calls are continued")
def response_loop() -> None:
    asked = "think, then call twice"
    first = OPENAI.responses.create(**response_request(asked))
    history = [item.model_dump(exclude_none=True) for item in first.output]
    second = OPENAI.responses.create(**response_request(asked, *history, *response_results(first)))
    same(second.output_text, "It is sunny.", "output_text")
    assert first.usage is not None
    assert second.usage is not None
    cached = second.usage.input_tokens_details.cached_tokens
    assert cached >= first.usage.total_tokens - 1, f"{cached} cached of {first.usage.total_tokens}"


@check("responses: an image is refused")
def response_image() -> None:
    image = {"type": "input_image", "image_url": f"data:image/png;base64,{PIXEL}"}
    request: Any = {"model": MODEL, "input": [{"role": "user", "content": [image]}]}
    refused(lambda: OPENAI.responses.create(**request), openai.BadRequestError, "image")


@check("responses: errors have their classes")
def response_errors() -> None:
    request: Any = {"model": MODEL, "input": "x", "temperature": "hot"}
    refused(lambda: OPENAI.responses.create(**request), openai.BadRequestError, "temperature")
    error = refused(lambda: OPENAI.responses.create(model=MODEL, input="long " * 40_000), openai.BadRequestError, "context")
    same(error.code, "context_length_exceeded", "code")


# Messages


def message_request(asked: str, *more: Any) -> dict[str, Any]:
    thinking = {"type": "enabled", "budget_tokens": 1024} if ASKED[asked][0] else {"type": "disabled"}
    return {
        "model": MODEL,
        "max_tokens": 2048,
        "system": "Be brief.",
        "messages": [{"role": "user", "content": asked}, *more],
        "tools": [{"name": "weather", "description": "Tells the weather", "input_schema": SCHEMA}],
        "thinking": thinking,
    }


def read(usage: Any) -> int:
    """All tokens of a prompt."""
    return int(usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0))


def of_type(blocks: Iterable[Any], kind: str) -> list[Any]:
    return [block for block in blocks if block.type == kind]


@each("messages")
def messages(asked: str) -> None:
    """Whole and streamed answers agree, and are what the model said; their input is as long as it was counted."""
    reasoning, text, calls = ASKED[asked]
    request = message_request(asked)
    counted = ANTHROPIC.messages.count_tokens(**{key: value for key, value in request.items() if key != "max_tokens"})
    whole = ANTHROPIC.messages.create(**request)
    with ANTHROPIC.messages.stream(**request) as stream:
        streamed = stream.get_final_message()
    same("".join(block.text for block in of_type(whole.content, "text")), text, "text")
    same("".join(block.thinking for block in of_type(whole.content, "thinking")), reasoning, "thinking")
    assert all(block.signature for block in of_type(whole.content, "thinking")), "no signature"
    same([block.input for block in of_type(whole.content, "tool_use")], calls, "input")
    same(whole.stop_reason, "tool_use" if calls else "end_turn", "stop_reason")
    same(plain(streamed), plain(whole), "streamed")
    same((counted.input_tokens, read(streamed.usage)), (read(whole.usage), read(whole.usage)), "tokens of the input")
    same(streamed.usage.output_tokens, whole.usage.output_tokens, "output_tokens")


@check("messages: an answer is held to a schema")
def message_form() -> None:
    request: dict[str, Any] = {"model": MODEL, "max_tokens": 500, "messages": [{"role": "user", "content": "as JSON"}]}
    request |= {"thinking": {"type": "disabled"}, "output_config": {"format": {"type": "json_schema", "schema": FORM}}}
    whole = ANTHROPIC.messages.create(**request)
    same(json.loads(of_type(whole.content, "text")[0].text), PLACE, "text")
    with ANTHROPIC.messages.stream(**request) as stream:
        same(plain(stream.get_final_message()), plain(whole), "streamed")


@check("messages: a call of one tool is required")
def message_forced() -> None:
    request = message_request("say a text") | {"tool_choice": {"type": "tool", "name": "weather"}}
    request["messages"] = [{"role": "user", "content": "must call"}]
    whole = ANTHROPIC.messages.create(**request)
    same([block.input for block in of_type(whole.content, "tool_use")], [ZURICH], "input")
    same(whole.stop_reason, "tool_use", "stop_reason")


@check("messages: results of two calls are continued")
def message_loop() -> None:
    asked = "think, then call twice"
    first = ANTHROPIC.messages.create(**message_request(asked))
    results = [{"type": "tool_result", "tool_use_id": block.id, "content": "sunny"} for block in of_type(first.content, "tool_use")]
    said = [block.model_dump(exclude_none=True) for block in first.content]
    second = ANTHROPIC.messages.create(
        **message_request(asked, {"role": "assistant", "content": said}, {"role": "user", "content": results})
    )
    same(of_type(second.content, "text")[0].text, "It is sunny.", "text")
    held = read(first.usage) + first.usage.output_tokens
    cached = second.usage.cache_read_input_tokens or 0
    assert cached >= held - 1, f"{cached} cached of {held}"


@check("messages: an image is refused")
def message_image() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}}
    request: Any = {"model": MODEL, "max_tokens": 64, "messages": [{"role": "user", "content": [image]}]}
    error = refused(lambda: ANTHROPIC.messages.create(**request), anthropic.BadRequestError, "image")
    same(error.body["error"]["type"], "invalid_request_error", "type")


@check("messages: errors have their classes")
def message_errors() -> None:
    request: Any = {"model": MODEL, "max_tokens": 64, "messages": [{"role": "user", "content": "x"}]}
    refused(lambda: ANTHROPIC.messages.create(**(request | {"max_tokens": 0})), anthropic.BadRequestError, "max_tokens")
    long = request | {"messages": [{"role": "user", "content": "long " * 40_000}]}
    refused(lambda: ANTHROPIC.messages.create(**long), anthropic.BadRequestError, "prompt is too long")
    refused(lambda: ANTHROPIC.get("/v1/nowhere", cast_to=object), anthropic.NotFoundError)


def main() -> None:
    """Run all checks."""
    for name, function in CHECKS:
        problem = None
        try:
            function()
        except Exception as error:  # whatever it is, it is this check's alone
            where = traceback.extract_tb(error.__traceback__)[-1]
            problem = f"{type(error).__name__}: {str(error)[:1500]} (line {where.lineno} of {where.name})"
        print(json.dumps({"check": name, "problem": problem}), flush=True)


main()
