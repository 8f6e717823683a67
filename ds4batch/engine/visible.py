"""How a conversation will begin in its client's next request, when that shows less of the answer than was sampled."""

from __future__ import annotations

from ds4batch.messages import Visible

_OPEN, _CLOSE = "<think>", "</think>"


def shown(answer: str) -> str | None:
    """The answer behind its reasoning, as templates keep it; None while the reasoning is not closed."""
    _, close, rest = answer.rpartition(_CLOSE)
    if close:
        return None if _OPEN in rest else rest.lstrip("\n")
    return None if _OPEN in answer else answer


def next_text(text: str, visible: Visible, answer: str) -> str | None:
    """The beginning of the request that follows `answer` to the prompt `text`; None when nobody can say."""
    rest = shown(answer)
    return None if rest is None else text[: visible.shared] + visible.head + rest
