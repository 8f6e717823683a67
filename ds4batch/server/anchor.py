"""Where conversations with one system prompt part: a prompt is best stored up to there, so that all of them find it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ds4batch.chat.conversation import Conversation
from ds4batch.chat.dialects.base import Dialect


def anchor(
    tokens: Sequence[int], text: str, conversation: Conversation, dialect: Dialect, encode: Callable[[str], list[int]]
) -> int:
    """Tokens before the last user message that precedes the first answer; 0 when there are none.

    `tokens` end with those of `text`, the rendering of `conversation`; what is before them counts as well. Raises nothing: where
    the beginning alone cannot be shown there is no anchor.
    """
    messages = conversation.messages
    asked = next((i for i, message in enumerate(messages) if message.role == "assistant"), len(messages))
    before = max((i for i, message in enumerate(messages[:asked]) if message.role == "user"), default=0)
    if not before:
        return 0
    try:
        rendered = dialect.render(replace(conversation, messages=messages[:before]))
    except ValueError:
        return 0
    head = rendered.text[: rendered.generation_from]
    if not head or not text.startswith(head):
        return 0
    ids = encode(head)
    start = next((at for at in (0, 1) if list(tokens[at : at + len(ids)]) == ids), None)  # 1: behind a beginning token
    return 0 if start is None else start + len(ids)
