"""The bodies that each API's reader takes: every member it looks at, with the bounds it enforces.

tests/server/test_openapi.py watches the readers and holds this to what they read. Members that are not here are passed over.
"""

from __future__ import annotations

from ds4batch.server import openapi_messages as messages
from ds4batch.server import sampling
from ds4batch.server.openapi_parts import ANY_OBJECT, Object, array, either, flag, nullable, number, obj, ref, text, whole

_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_ONE = "1 is the only value that is taken"


def request_schemas(levels: bool) -> dict[str, Object]:
    """By name. `levels`: the model takes efforts as numbers of 0 to 100 in a string."""
    named = text("", *_EFFORTS)
    number_of = {"type": "string", "pattern": "^([1-9]?[0-9]|100)$"}
    effort = either(named, number_of, about="or a number from 0 to 100 in a string") if levels else named
    return {
        "ChatRequest": _body(_chat(effort), ("messages",)),
        "ChatMessage": messages.chat_message(),
        "CompletionRequest": _body(_completion(), ("prompt",)),
        "ResponsesRequest": _body(_responses(effort), ("input",)),
        "MessagesRequest": _body(_messages(effort), ("messages",)),
        "CountTokensRequest": _body(_messages(effort), ("messages",), "Read as the call that it stands for, max_tokens aside."),
        "AnthropicMessage": messages.anthropic_message(),
        "Item": messages.item(),
        "Tool": messages.tool(),
        "Function": messages.function(),
    }


def _body(properties: Object, required: tuple[str, ...], about: str = "") -> Object:
    return obj(nullable(properties, required), required, about)


def _sampled() -> Object:
    """Of all APIs; beyond those of OpenAI and Anthropic each takes the others'."""
    return {
        "temperature": number("0 is greedy", 0, 100, 1),
        "top_k": whole("0 is off", default=0),
        "top_p": number("", 0, 1, 1),
        "min_p": number("", 0, 1, 0.05),
        "seed": whole("the same seed gives the same text under any load; 0 and absent draw one"),
        "repetition_penalty": {**number("", None, 100, 1), "exclusiveMinimum": 0},
        "presence_penalty": number("", -2, 2, 0),
        "frequency_penalty": number("", -2, 2, 0),
        "logit_bias": {
            "type": "object",
            "propertyNames": {"type": "string", "pattern": "^[0-9]{1,10}$"},
            "additionalProperties": number("", -100, 100),
            "description": "by token id",
        },
    }


def _stop() -> Object:
    one = {**text(), "maxLength": sampling.MAX_STOP_BYTES}
    return either(one, {**array(one), "maxItems": sampling.MAX_STOPS}, about="what ends the answer and is not part of it")


def _limits(*names: str) -> Object:
    first = "the context's room is the other limit"
    return {
        **{name: whole(first if i == 0 else f"as {names[0]}, which comes first", 1) for i, name in enumerate(names)},
        "stream": flag("server-sent events"),
    }


def _openai_limits(*names: str) -> Object:
    return {
        **_limits(*names),
        "stop": _stop(),
        "stream_options": obj({"include_usage": flag()}),
        "n": number(_ONE, 1, 1),
        "best_of": number(_ONE, 1, 1),
    }


def _chat(effort: Object) -> Object:
    return {
        "messages": {**array(ref("ChatMessage")), "minItems": 1},
        "model": text("any; echoed in the answer"),
        **_sampled(),
        **_openai_limits("max_completion_tokens", "max_tokens"),
        "ignore_eos": flag("never ends by itself; needs a temperature of 0"),
        "logprobs": flag(),
        "top_logprobs": number("needs logprobs", 0, sampling.MAX_TOP_LOGPROBS),
        "tools": array(ref("Tool")),
        "tool_choice": either(text("", "auto", "none", "required"), _wrapped_choice("function"), _wrapped_choice("custom")),
        "response_format": either(
            obj({"type": text("", "text")}),
            obj({"type": text("", "json_object"), "json_schema": obj({"schema": ANY_OBJECT})}, ("type",)),
            obj({"type": text("", "json_schema"), "json_schema": obj({"schema": ANY_OBJECT}, ("schema",))}, ("type", "json_schema")),
        ),
        "reasoning_effort": effort,
        "thinking": _switch(),
        "think": flag("whether to think"),
        "chat_template_kwargs": obj({"enable_thinking": flag(), "reasoning_effort": effort}),
    }


def _wrapped_choice(kind: str) -> Object:
    return obj({"type": text("", kind), kind: obj({"name": {**text(), "minLength": 1}}, ("name",))}, ("type", kind))


def _switch() -> Object:
    return either(flag(), obj({"type": text("enabled or disabled; another leaves it to the model")}), about="whether to think")


def _completion() -> Object:
    words, ids = {**text(), "minLength": 1}, {**array({"type": "integer", "minimum": 0}), "minItems": 1}
    return {
        "prompt": either(
            words, ids, {**array(either(words, ids)), "minItems": 1, "maxItems": 1}
        ),
        "model": text("any; echoed in the answer"),
        **_sampled(),
        **_openai_limits("max_tokens"),
        "ignore_eos": flag("never ends by itself; needs a temperature of 0"),
        "logprobs": number("how many rivals of each token", 0, sampling.MAX_TOP_LOGPROBS),
        "echo": {**flag("not supported"), "const": False},
        "suffix": {**text("not supported"), "const": ""},
    }


def _responses(effort: Object) -> Object:
    never = {"type": "null", "description": "nothing is stored: replay the input instead"}
    return {
        "input": either(text(), {**array(ref("Item")), "minItems": 1}, about="what an answer had as output may come back"),
        "instructions": text("a system message before the input"),
        "model": text("any; echoed in the answer"),
        **_sampled(),
        **_openai_limits("max_output_tokens", "max_tokens"),
        "tools": array(ref("Tool")),
        "tool_choice": either(
            text("", "auto", "none", "required"),
            obj({"type": text("", "function", "custom"), "name": text(), "namespace": text()}, ("type", "name")),
        ),
        "text": obj(
            {
                "format": either(
                    obj({"type": text("", "text", "json_object"), "schema": ANY_OBJECT}),
                    obj({"type": text("", "json_schema"), "schema": ANY_OBJECT}, ("type", "schema")),
                )
            }
        ),
        "reasoning": obj({"effort": effort, "summary": text("", "auto", "concise", "detailed")}),
        "include": array(text(), "reasoning.encrypted_content and message.output_text.logprobs are heeded"),
        "top_logprobs": number("", 0, sampling.MAX_TOP_LOGPROBS),
        "background": {**flag("not supported"), "const": False},
        "previous_response_id": never,
        "conversation": never,
        "prompt": never,
    }


def _messages(effort: Object) -> Object:
    form = obj({"type": {"type": "string", "const": "json_schema"}, "schema": ANY_OBJECT}, ("type", "schema"))
    return {
        "messages": {**array(ref("AnthropicMessage")), "minItems": 1},
        "system": either(text(), array(obj({"type": {"type": "string", "const": "text"}, "text": text()}, ("type",)))),
        "model": text("any; echoed in the answer"),
        **_sampled(),
        **_limits("max_tokens"),
        "stop_sequences": _stop(),
        "tools": array(ref("Tool")),
        "tool_choice": obj({"type": text("", "auto", "any", "tool", "none"), "name": text("with tool")}, ("type",)),
        "thinking": _switch(),
        "reasoning_effort": effort,
        "output_config": obj({"effort": effort, "format": form}),
        "output_format": form,
    }
