"""A conversation as every API hands it on and every dialect renders it. Plain values; knows no wire format and no template.

An API's adapter makes it from a request: checks the fields, names what is wrong, and leaves nothing for the dialects to refuse.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

Role = Literal["system", "user", "assistant", "tool"]
Effort = Literal["low", "medium", "high", "max"]


class Image(NamedTuple):
    """One image of a message."""

    fingerprint: str  # of its bytes
    media_type: str
    data: bytes


class Call(NamedTuple):
    """One call of a replayed assistant turn."""

    id: str
    name: str  # as the prompt shows it, a namespace included
    arguments: str  # JSON of an object, as the client sent it; or whatever text it sent


@dataclass(frozen=True, slots=True)
class Message:
    """One message. A user message that brings results of calls is one message a result and one a piece of text, in order."""

    role: Role
    text: str = ""
    reasoning: str = ""  # of an assistant
    calls: tuple[Call, ...] = ()  # of an assistant
    call_id: str = ""  # of a tool: the call whose result `text` is
    images: tuple[Image, ...] = ()
    raw: str | None = None  # of an assistant with calls: the very text it sampled for them, separator before it included

    @property
    def user_like(self) -> bool:
        """Whether an answer is due after it."""
        return self.role in ("user", "tool")


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str  # as the prompt shows it, a namespace included
    schema: str  # the function's object in canonical JSON, see chat/schemas.py
    parameters: Mapping[str, Any]  # its JSON schema, parsed; {} where it has none
    kind: Literal["function", "custom", "tool_search"] = "function"
    wire_name: str = ""  # the name without its namespace
    namespace: str = ""
    deferred: bool = False  # not shown before a search found it, in the families that know this

    @property
    def properties(self) -> Mapping[str, Any]:
        """The schema of each parameter, in the order it was declared."""
        found = self.parameters.get("properties")
        return found if isinstance(found, Mapping) else {}

    @property
    def strings(self) -> frozenset[str]:
        """Parameters whose value is a string and nothing else."""
        return frozenset(k for k, v in self.properties.items() if isinstance(v, Mapping) and v.get("type") == "string")


class Thinking(NamedTuple):
    """Whether, and how hard, the model thinks before it answers."""

    enabled: bool = True
    effort: Effort = "high"
    level: int | None = None  # 1..100, where the request gave a number
    explicit: bool = False  # the request said so itself: a default of the model gives way


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a request asks the model to go on with."""

    messages: Sequence[Message]
    tools: Sequence[Tool] = ()  # none when the request forbids calls
    thinking: Thinking = field(default_factory=Thinking)

    @property
    def tool_context(self) -> bool:
        """Whether tools play a part: then the reasoning of every turn is kept."""
        return bool(self.tools) or any(m.calls or m.role == "tool" for m in self.messages)
