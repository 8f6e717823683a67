"""The `messages` and `tools` of a chat request, checked and brought to the form chat templates read. Renders nothing."""

from __future__ import annotations

from typing import Any

import msgspec

from ds4batch.server import fields
from ds4batch.server.errors import ApiError, bad_field
from ds4batch.server.fields import Object, describe

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool", "function": "tool"}
_MEDIA = {
    "image_url": "images",
    "input_image": "images",
    "image": "images",
    "input_audio": "audio",
    "video_url": "video",
    "file": "files",
}


def read_messages(body: Object) -> list[Object]:
    """The conversation as a list of {role, content, ...}. Linear in its length. Raises ApiError 400 naming the message."""
    messages = body.get("messages")
    if messages is None:
        raise ApiError(400, "missing messages", param="messages")
    if not isinstance(messages, list):
        raise bad_field("messages", f"expected a list, got {describe(messages)}")
    if not messages:
        raise bad_field("messages", "must not be empty")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def read_tools(body: Object) -> list[Object] | None:
    """The tools the template may show, None when there are none or tool_choice is `none`."""
    tools = body.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise bad_field("tools", f"expected a list, got {describe(tools)}")
    schemas = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools or [])]
    choice = body.get("tool_choice")
    if isinstance(choice, dict) or choice == "required":
        raise bad_field("tool_choice", "forcing a tool call is not supported yet; use auto or none")
    if choice is not None and choice not in ("auto", "none"):
        raise bad_field("tool_choice", "expected auto, none, required or an object")
    return None if choice == "none" or not schemas else schemas


def refuse_structured_output(body: Object) -> None:
    """Only plain text comes out; asking for more is refused rather than ignored."""
    wanted = fields.obj(body, "response_format")
    if wanted is not None and wanted.get("type", "text") != "text":
        raise bad_field("response_format", "only the type text is supported yet")


def _message(message: Any, where: str) -> Object:
    if not isinstance(message, dict):
        raise bad_field(where, f"expected an object, got {describe(message)}")
    given = fields.text(message, "role", "user", where=where + ".")
    role = _ROLES.get(given)
    if role is None:
        raise bad_field(where + ".role", f"unknown role {given[:40]!r}")
    out: Object = {"role": role, "content": _content(message.get("content"), where + ".content")}
    reasoning = _content(message.get("reasoning_content"), where + ".reasoning_content")
    if reasoning:
        out["reasoning_content"] = reasoning
    for name in ("tool_call_id", "name"):
        value = fields.text(message, name, where=where + ".")
        if value:
            out[name] = value
    calls = _tool_calls(message.get("tool_calls"), where + ".tool_calls")
    if calls:
        out["tool_calls"] = calls
    return out


def _content(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_field(where, f"expected a string or a list, got {describe(content)}")
    return "".join(_part(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise bad_field(where, f"expected a string or an object, got {describe(part)}")
    kind = part.get("type")
    if isinstance(kind, str) and kind in _MEDIA:
        raise bad_field(where, f"the loaded model takes text only, no {_MEDIA[kind]}")
    return fields.text(part, "text", where=where + ".")


def _tool_calls(calls: Any, where: str) -> list[Object]:
    """The calls of a replayed assistant turn; one without a name or arguments says nothing and is left out."""
    if calls is None:
        return []
    if not isinstance(calls, list):
        raise bad_field(where, f"expected a list, got {describe(calls)}")
    out: list[Object] = []
    for i, call in enumerate(calls):
        if not isinstance(call, dict):
            raise bad_field(f"{where}[{i}]", f"expected an object, got {describe(call)}")
        function = fields.obj(call, "function", where=f"{where}[{i}].") or {}
        name = fields.text(function, "name", where=f"{where}[{i}].function.")
        if name and "arguments" in function:
            out.append(
                {
                    "id": fields.text(call, "id", where=f"{where}[{i}]."),
                    "type": "function",
                    "function": {"name": name, "arguments": _arguments(function["arguments"])},
                }
            )
    return out


def _arguments(value: Any) -> Any:
    """Templates expect an object. Text that is none, such as a call cut short, stays the text it was."""
    if not isinstance(value, str):
        return value
    try:
        parsed = msgspec.json.decode(value)
    except (msgspec.DecodeError, RecursionError):
        return value
    return parsed if isinstance(parsed, dict) else value


def _tool(tool: Any, where: str) -> Object:
    """{"type": "function", "function": schema}, whether the schema was wrapped so or lies flat in the tool."""
    if not isinstance(tool, dict):
        raise bad_field(where, f"expected an object, got {describe(tool)}")
    schema = fields.obj(tool, "function", where=where + ".")
    if schema is None:
        schema = {key: value for key, value in tool.items() if key not in ("type", "input_schema")}
        if "input_schema" in tool:
            schema["parameters"] = tool["input_schema"]
    if not fields.text(schema, "name", where=where + ".function."):
        raise bad_field(where + ".function.name", "is missing")
    return {"type": "function", "function": schema}
