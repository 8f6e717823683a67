"""The text of a checkpoint, kept up to date when a job leaves its slot.

The memory-text tier trusts this text blindly, so it must be the text of exactly those tokens, or None.
"""

from __future__ import annotations

from collections.abc import Sequence

from scheduler.backend import Text

_REPLACEMENT = "\ufffd"  # what `Text.render` shows for bytes that are no character
_OVERLAP = 8  # tokens rendered again to join two pieces


def checkpoint_text(text: Text, tokens: Sequence[int], known: str, covered: int) -> str | None:
    """The text of `tokens`, of which `known` is the text of the first `covered`.

    Only what follows is rendered, with a few tokens before it: their own text must come out as the start, which proves that no
    character is split there and that the first token of a piece is rendered like any other. If it does not, everything is rendered.
    None when a character is incomplete: the bytes behind U+FFFD are not what a client would send back for it.
    """
    if covered == len(tokens) and covered:
        return known
    if covered:
        tail = list(tokens[max(0, covered - _OVERLAP) : covered])
        before = text.render(tail)
        after = text.render(tail + list(tokens[covered:]))
        if _REPLACEMENT not in before and after.startswith(before):
            added = after[len(before) :]
            return None if _REPLACEMENT in added else known + added
    whole = text.render(tokens)
    return None if _REPLACEMENT in whole else whole
