"""For schedulers whose requests come as token ids."""

from __future__ import annotations

from collections.abc import Sequence


class NoText:
    """Implements scheduler.backend.Text: no request has a text, so nothing is tokenised and no checkpoint is recognised by one."""

    def tokenise(self, text: str) -> list[int]:
        """Raises ValueError: nobody has a text."""
        raise ValueError(f"a text of {len(text)} characters where requests are token ids")

    def render(self, tokens: Sequence[int]) -> str:
        """Nothing."""
        return ""
