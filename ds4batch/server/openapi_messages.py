"""What conversations and tools consist of in each API, by the types that a reader tells apart."""

from __future__ import annotations

from ds4batch.server.openapi_parts import ANY_OBJECT, Object, array, either, flag, nullable, obj, ref, text

_SOME: Object = {**text(), "minLength": 1}
_JSON_OR_TEXT = either(text("JSON"), ANY_OBJECT)


def chat_message() -> Object:
    """A message of a chat."""
    content = either(text(), array(either(text(), obj({"type": text(), "text": text()}))))
    call = obj({"id": text(), "function": obj({"name": text(), "arguments": _JSON_OR_TEXT})})
    members = {
        "role": text("user where it is absent", "system", "developer", "user", "assistant", "tool", "function"),
        "content": content,
        "reasoning_content": content,
        "tool_calls": array(call),
        "tool_call_id": text(),
    }
    return obj(nullable(members))


def anthropic_message() -> Object:
    """A message of the Messages API: one that the system says has texts alone."""
    said = _block("text", {"text": text()})
    blocks = either(
        said,
        _block("thinking", {"thinking": text()}),
        _block("redacted_thinking", {}),
        _block("tool_use", {"id": _SOME, "name": _SOME, "input": ANY_OBJECT}, "id", "name"),
        _block("tool_result", {"tool_use_id": _SOME, "content": either(text(), array(said))}, "tool_use_id"),
    )
    return either(
        obj(nullable({"role": text("user where it is absent", "user", "assistant"), "content": either(text(), array(blocks))})),
        obj({"role": text("", "system", "developer"), "content": either(text(), array(said), {"type": "null"})}, ("role",)),
    )


def item() -> Object:
    """An item of the Responses API's input."""
    part = obj(
        {"type": text("", "input_text", "output_text", "text", "summary_text", "reasoning_text"), "text": text()},
        ("type", "text"),
    )
    content = either(text(), array(either(text(), part)), {"type": "null"})
    sent = text("of an answer", "completed", "incomplete")
    done = text("", "completed")
    call: Object = {"call_id": _SOME, "id": text(), "status": sent, "namespace": text()}
    role = text("user where it is absent", "user", "assistant", "system", "developer")
    tools = either(array(ref("Tool")), {"type": "null"})
    return either(
        obj({"type": text("", "message"), "role": role, "content": content, "status": sent}, ("content",)),
        obj(
            {
                "type": text("", "reasoning"),
                "summary": content,
                "content": content,
                "encrypted_content": text("opaque"),
                "status": sent,
            },
            ("type",),
        ),
        obj({"type": text("", "function_call"), "name": _SOME, "arguments": _JSON_OR_TEXT, **call}, ("type", "name", "call_id")),
        obj({"type": text("", "custom_tool_call"), "name": _SOME, "input": text(), **call}, ("type", "name", "call_id")),
        obj(
            {
                "type": text("", "local_shell_call", "web_search_call", "tool_search_call", "image_generation_call"),
                "action": ANY_OBJECT,
                "arguments": _JSON_OR_TEXT,
                "input": _JSON_OR_TEXT,
                **call,
            },
            ("type",),
        ),
        obj(
            {
                "type": text("", "function_call_output", "custom_tool_call_output", "local_shell_call_output"),
                "call_id": _SOME,
                "output": either(text(), array(part), ANY_OBJECT),
                "status": done,
            },
            ("type", "call_id", "output"),
        ),
        obj(
            {"type": text("", "tool_search_output"), "call_id": _SOME, "tools": tools, "status": done},
            ("type", "call_id", "tools"),
        ),
        obj({"type": text("passed over", "compaction", "context_compaction"), "status": done}, ("type",)),
    )


def function() -> Object:
    """What a tool says of itself."""
    schema = {**ANY_OBJECT, "description": "a JSON schema"}
    return obj(
        {
            "name": _SOME,
            "description": text(),
            "parameters": schema,
            "input_schema": {**schema, "description": "a JSON schema, as Anthropic calls it"},
            "defer_loading": flag("not shown to the model before a search finds it"),
            "type": text("custom takes one text", "function", "custom"),
        },
        ("name",),
    )


def tool() -> Object:
    """A tool in any API's spelling."""
    inner = either(ref("Function"), obj({"function": ref("Function")}, ("function",)))
    searching = {"description": text(), "parameters": ANY_OBJECT, "input_schema": ANY_OBJECT}
    return either(
        ref("Function"),
        obj({"type": text("", "function"), "function": ref("Function")}, ("function",)),
        obj({"type": text("", "namespace"), "name": _SOME, "tools": array(inner)}, ("type", "name", "tools")),
        obj({"type": text("", "tool_search"), **searching}, ("type",)),
        about="A function, flat or in `function`; `custom`: takes one text; `namespace`: holds `tools`; `tool_search`. What a vendor's "
        "own servers would run is left out.",
    )


def _block(kind: str, members: Object, *required: str) -> Object:
    return obj({"type": {"type": "string", "const": kind}, **members}, ("type", *required))
