"""DeepSeek V4.1: V4 with a token for system messages, one turn for all that is said between two answers, and efforts as numbers.

Owns where it writes otherwise than V4. Parses nothing, knows no tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from ds4batch.chat.conversation import Conversation, Message, Thinking
from ds4batch.chat.dialects.deepseek_v4 import BREAK, USER, DeepSeekV4, Tags

SYSTEM = "<｜System｜>"
_LEVELS = {"low": 50, "medium": 75, "high": 75, "max": 100}


class DeepSeekV41(DeepSeekV4):
    """The dialect of DeepSeek V4.1 Flash.

    What users say and tools return between two answers is one turn, with blank lines between. A system message that is not the
    first one asks for an answer like a user's.
    """

    name = "deepseek-v4.1"
    grammar = "dsml-v41"
    levels = True
    tags = Tags("｜DSML｜ calls", "｜DSML｜ invoke", "｜DSML｜ parameter")

    def __init__(self) -> None:
        super().__init__({})

    def head(self, conversation: Conversation) -> str:
        """See DeepSeekV4. Opens the first system turn if there is something to say before it."""
        text = _effort(conversation.thinking) + self.tools(conversation.tools)
        return text and SYSTEM + text

    def leads(self, messages: Sequence[Message]) -> int:
        """See DeepSeekV4."""
        return 1 if messages and messages[0].role == "system" else 0

    def start(self, conversation: Conversation, at: int) -> str:
        """See DeepSeekV4."""
        messages = conversation.messages
        if messages[at].user_like:
            return BREAK if at and messages[at - 1].user_like else USER
        if at or not (conversation.tools or conversation.thinking.enabled):
            return SYSTEM
        return BREAK if conversation.tools else ""


def _effort(thinking: Thinking) -> str:
    if not thinking.enabled:
        return ""
    level = _LEVELS[thinking.effort] if thinking.level is None else thinking.level
    return f"Reasoning Effort: {level} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"
