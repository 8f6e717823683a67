"""What a dialect is: a model family's way of writing a conversation, and the name of the grammar its answers are read with.

A dialect renders; it parses nothing (chat/grammars does) and knows no tokens. Rendering is pure, and the rendering of a history
that only grew begins with the rendering of what it grew from, wherever the family's own rules allow that.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from ds4batch.chat.conversation import Conversation
from ds4batch.messages import Continues, Visible


class Rendered(NamedTuple):
    """A conversation as a prompt. Offsets are in characters of `text`."""

    text: str
    generation_from: int  # where the opening of the answer begins, behind the last message
    thinking: bool  # the opening leaves the model inside its reasoning
    visible: Visible | None = None  # how the next request will begin, where it will show less than was sampled
    continues: Continues | None = None  # the tool results at its end, and where everything begins that follows the calls


class Dialect(Protocol):
    """One family."""

    name: str
    grammar: str  # of chat/grammars; "" for a model that calls no tools
    stops: tuple[str, ...]  # texts of the tokens that end an answer, beside the tokenizer's own
    levels: bool  # an effort may be a number of 1..100

    def render(self, conversation: Conversation) -> Rendered:
        """The full prompt. Raises ValueError, with a message for the client, for what cannot be shown to this model."""

    def tail(self, conversation: Conversation, first: int) -> str:
        """What follows the last sampled token of the turn before message `first`: the end of `render`'s text, byte for byte."""

    def retry(self, conversation: Conversation, thinking_open: bool, detail: str) -> str:
        """What is appended to a turn whose call could not be read, so that the model tries once more: the turn's end, a result
        that names `detail`, and the opening of another answer. `thinking_open`: the turn is still inside its reasoning."""
