"""What a model's turn consists of, as a stream of events and as one object. The same for every grammar and every API.

The object is the sum of the events, so that an answer is the same streamed or whole. The order of events: reasoning and content
alternate as the model wrote them; a call is a start, its arguments in pieces, and an end; calls do not overlap.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec


class Reasoning(msgspec.Struct, frozen=True, array_like=True, tag="reasoning"):
    """A piece of reasoning."""

    text: str


class ReasoningEnd(msgspec.Struct, frozen=True, array_like=True, tag="reasoning_end"):
    """The model closed its reasoning; more may follow, as a new block."""


class Content(msgspec.Struct, frozen=True, array_like=True, tag="content"):
    """A piece of the answer."""

    text: str


class CallStart(msgspec.Struct, frozen=True, array_like=True, tag="call"):
    """A call begins. Calls are numbered from 0."""

    index: int
    id: str
    name: str


class CallDelta(msgspec.Struct, frozen=True, array_like=True, tag="arguments"):
    """A piece of a call's arguments. All pieces of a call are a JSON object."""

    index: int
    text: str


class CallEnd(msgspec.Struct, frozen=True, array_like=True, tag="call_end"):
    """A call is complete."""

    index: int


class CallBroken(msgspec.Struct, frozen=True, array_like=True, tag="call_broken"):
    """A call that was begun will not be complete: it is no call. What it consists of follows as content."""

    index: int


TurnEvent = Reasoning | ReasoningEnd | Content | CallStart | CallDelta | CallEnd | CallBroken


@dataclass
class TurnCall:
    """One call of a turn."""

    id: str
    name: str
    arguments: str = ""  # JSON of an object
    complete: bool = False


@dataclass
class Turn:
    """A turn as one object."""

    reasoning: list[str] = field(default_factory=list)  # a text a block
    reasoning_open: bool = False  # the last block was not closed
    content: str = ""
    calls: list[TurnCall] = field(default_factory=list)

    def add(self, events: Iterable[TurnEvent]) -> None:
        """Take events in order."""
        for event in events:
            match event:
                case Reasoning(text):
                    if not self.reasoning_open:
                        self.reasoning.append("")
                        self.reasoning_open = True
                    self.reasoning[-1] += text
                case ReasoningEnd():
                    self.reasoning_open = False
                case Content(text):
                    self.content += text
                case CallStart(_, id, name):
                    self.calls.append(TurnCall(id, name))
                case CallDelta(index, text):
                    self.calls[index].arguments += text
                case CallEnd(index):
                    self.calls[index].complete = True
                case CallBroken():
                    pass

    @property
    def complete_calls(self) -> list[TurnCall]:
        """The calls that came to their end."""
        return [call for call in self.calls if call.complete]
