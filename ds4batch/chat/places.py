"""Places in a rendered conversation that tell the engine how its next request will look. Found by rendering alone.

A template may render an answer otherwise once another message follows it: without its reasoning, or without what opened it.
So it is asked, with an answer that is easy to find again. Knows no template and no tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from ds4batch.chat.conversation import Call, Message
from ds4batch.chat.dialects.base import Rendered
from ds4batch.messages import Continues, Visible

Render = Callable[[Sequence[Message], bool], str]
"""A conversation's text, and whether it ends with the opening of an answer. Raises ValueError for one that cannot be shown."""

MARK = "\ue000answer\ue000"
"""Stands for what is looked for: private characters, which no template trims."""

_OPEN, _CLOSE = "<think>", "</think>"


def quietly(render: Render, messages: Sequence[Message], opening: bool) -> str | None:
    """The rendering, None where there is none."""
    try:
        return render(messages, opening)
    except ValueError:
        return None


def behind(text: str | None, mark: str = MARK) -> str | None:
    """What follows `mark`, None unless it stands in `text` once."""
    head, found, rest = (text or "").partition(mark)
    return rest if found and mark not in rest and mark not in head else None


def generation_from(text: str, said: str | None) -> int:
    """Where the opening of the answer begins, given the rendering without it; the end of `text` where nobody can say."""
    return len(said) if said and text.startswith(said) else len(text)


def thinking_open(opening: str) -> bool:
    """Whether the opening of an answer leaves the model inside its reasoning."""
    return opening.rfind(_OPEN) > opening.rfind(_CLOSE)


def find_visible(text: str, messages: Sequence[Message], render: Render) -> Visible | None:
    """How the next request will begin, as far as it does not repeat `text`. One rendering."""
    later = quietly(render, [*messages, Message("assistant", MARK), Message("user", ".")], False)
    head, found, _ = (later or "").partition(MARK)
    if not found:
        return None
    shared = common(text, head)
    return Visible(shared, head[shared:])


def find_continues(text: str, messages: Sequence[Message], render: Render, ends: Iterable[str]) -> Continues | None:
    """The results that follow the last answer, when all say of which calls. Up to two renderings, none without results."""
    first = results_from(messages)
    if not first:
        return None
    calls = [message.call_id for message in messages[first:] if message.role == "tool"]
    rest = find_tail(text, messages, first, render, ends)
    return None if rest is None else Continues(sorted(set(calls)), len(text) - len(rest))


def results_from(messages: Sequence[Message]) -> int:
    """The index of the message behind the last answer, when that made calls and results of named calls follow; else 0."""
    first = next((i for i in range(len(messages), 0, -1) if messages[i - 1].role == "assistant"), 0)
    results = [message for message in messages[first:] if message.role == "tool"]
    named = bool(results) and all(message.call_id for message in results)
    return first if first and named and messages[first - 1].calls else 0


def find_tail(text: str, messages: Sequence[Message], first: int, render: Render, ends: Iterable[str]) -> str | None:
    """The end of `text` that follows what was sampled for the answer before message `first`; None where it cannot be told.

    The answer's end is looked for behind its content; where the template does not take such an answer without calls, behind its
    last call, at the first of `ends`, the texts that end an answer.
    """
    answer = messages[first - 1]
    said = replace(answer, text=answer.text + MARK, calls=(), raw=None)
    rest = behind(quietly(render, [*messages[: first - 1], said, *messages[first:]], True))
    if rest is not None and text.endswith(rest):
        return rest
    if not answer.calls:
        return None
    calls = (*answer.calls[:-1], Call(answer.calls[-1].id, answer.calls[-1].name, f'{{"mark": "{MARK}"}}'))
    called = replace(answer, calls=calls, raw=None)
    rest = behind(quietly(render, [*messages[: first - 1], called, *messages[first:]], True)) or ""
    at = min((found for end in ends if end and (found := rest.find(end)) >= 0), default=None)
    return rest[at:] if at is not None and text.endswith(rest[at:]) else None


def shifted(rendered: Rendered, by: str) -> Rendered:
    """The same prompt with `by` in front, such as a beginning token that the template leaves to the tokenizer."""
    if not by:
        return rendered
    visible, continues, more = rendered.visible, rendered.continues, len(by)
    return Rendered(
        by + rendered.text,
        rendered.generation_from + more,
        rendered.thinking,
        visible and Visible(visible.shared + more, visible.head, visible.trimmed),
        continues and Continues(continues.calls, continues.suffix_from + more),
    )


def common(a: str, b: str) -> int:
    """Characters that both begin with."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[:middle] == b[:middle]:
            low = middle
        else:
            high = middle - 1
    return low
