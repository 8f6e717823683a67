"""A tool choice that forces a call. How each API spells a choice is its reader's matter."""

from __future__ import annotations

from collections.abc import Sequence

from ds4batch.chat.conversation import Tool
from ds4batch.server.apis.tools import ToolChoice
from ds4batch.server.errors import bad_field


def required(tools: Sequence[Tool]) -> ToolChoice:
    """Any of the tools must be called. Raises ApiError 400 where there are none."""
    if not tools:
        raise bad_field("tool_choice", "a call is required, but there are no tools")
    return ToolChoice("required")


def named(tools: Sequence[Tool], name: str, where: str) -> ToolChoice:
    """The tool of that name must be called; a tool in a namespace has two names. `where` is the field. Raises ApiError 400."""
    tool = next((tool for tool in tools if name in (tool.name, tool.wire_name)), None)
    if not name or tool is None:
        raise bad_field(where, f"no tool is named {name[:80]!r}")
    return ToolChoice("named", tool.name)
