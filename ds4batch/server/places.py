"""Places in a rendered conversation that tell the engine how its next request will look. Found with the template alone.

A template may render an answer otherwise once another message follows it: without its reasoning, or without what opened it.
So it is asked, with an answer that is easy to find again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ds4batch.messages import Continues, Visible

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message]], str]
"""A conversation's text, without the opening of an answer. Raises ValueError for one the template refuses."""

_ANSWER = "\ue000answer\ue000"  # private characters, which no template trims


class Places(NamedTuple):
    """What is known of a prompt's text. Offsets are in characters."""

    generation_from: int | None = None  # where the opening of the answer begins, behind the last message
    visible: Visible | None = None
    continues: Continues | None = None

    def shifted(self, by: int) -> Places:
        """The same places in a text with `by` characters more at its beginning."""
        if not by:
            return self
        return Places(
            None if self.generation_from is None else self.generation_from + by,
            self.visible and Visible(self.visible.shared + by, self.visible.head),
            self.continues and Continues(self.continues.calls, self.continues.suffix_from + by),
        )


def find_places(text: str, messages: Sequence[Message], render: Render, thinks: bool, ends: Iterable[bytes]) -> Places:
    """The places of `text`, the rendering of `messages`. `ends` are the bytes of the tokens that end an answer.

    Costs up to three renderings; nothing for a conversation that its next request will repeat as it is.
    """
    results = _results(messages)
    if not (thinks or results):
        return Places()
    said = _rendered(render, messages)
    generation_from = len(said) if said and text.startswith(said) and len(said) < len(text) else None
    visible = _visible(text, messages, render) if thinks else None
    if not results:
        return Places(generation_from, visible)
    marks = [end.decode("utf-8", "replace") for end in ends]
    return Places(generation_from, visible, _continues(text, messages[: -len(results)], results, render, marks))


def _results(messages: Sequence[Message]) -> list[str]:
    """The calls that the messages at the end bring the results of, when all say which."""
    ids: list[str] = []
    for message in reversed(messages):
        if message["role"] != "tool":
            break
        ids.append(message.get("tool_call_id", ""))
    return ids if all(ids) else []


def _visible(text: str, messages: Sequence[Message], render: Render) -> Visible | None:
    later = _rendered(render, [*messages, {"role": "assistant", "content": _ANSWER}, {"role": "user", "content": "."}])
    head, found, _ = (later or "").partition(_ANSWER)
    if not found:
        return None
    shared = _common(text, head)
    return Visible(shared, head[shared:])


def _continues(
    text: str, before: Sequence[Message], calls: Sequence[str], render: Render, ends: Iterable[str]
) -> Continues | None:
    """The results' part of the text begins where the answer that made the calls was ended."""
    if not before or before[-1]["role"] != "assistant":
        return None
    said = _rendered(render, before)
    if not said or not text.startswith(said):
        return None
    at = max((said.rfind(end) for end in ends if end), default=-1)
    return Continues(sorted(set(calls)), at) if at > 0 else None


def _common(a: str, b: str) -> int:
    """Characters that both begin with."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[:middle] == b[:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _rendered(render: Render, messages: Sequence[Message]) -> str | None:
    try:
        return render(messages)
    except ValueError:
        return None
