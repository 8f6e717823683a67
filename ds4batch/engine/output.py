"""Reads one request's tokens: bytes to text without cutting a character, stop strings, and what may be shown already.

Owns no protocol: it turns tokens into deltas of plain text. Special tokens have no text of their own.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Collection, Sequence

from ds4batch.messages import TokenLogprob
from scheduler.backend import Sampled, Verdict

Emit = Callable[[str, int, list[TokenLogprob]], None]
"""Called with new text, the number of tokens since the last call, and their log-probabilities."""


class TextOutput:
    """The text of one turn. Text that may still become part of a stop string is held back."""

    def __init__(self, token_bytes: Callable[[int], bytes], special: Collection[int], stop: Sequence[str], emit: Emit) -> None:
        self._token_bytes = token_bytes
        self._special = special
        self._stop = [s for s in stop if s]
        self._hold = max((len(s) for s in self._stop), default=1) - 1
        self._emit = emit
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._text = ""  # decoded and not shown
        self._shown = 0  # characters shown
        self._ends: list[int] = []  # for each token, the characters decoded once it was taken
        self._decoded = 0
        self._ended = False  # by a stop string
        self._tokens = 0
        self._logprobs: list[TokenLogprob] = []

    def push(self, sampled: Sampled) -> Verdict | None:
        """Take one token; a verdict says that a stop string was found and how many tokens precede it."""
        self._note(sampled)
        if sampled.token not in self._special:
            self._take(self._decoder.decode(self._token_bytes(sampled.token)))
        self._ends.append(self._decoded)
        at = self._find_stop()
        if at is None:
            self._show(len(self._text) - self._hold)
            return None
        border = self._shown + at
        self._show(at)
        self._text, self._ended = "", True
        return Verdict("stop", sum(1 for end in self._ends if end <= border))

    @property
    def cut(self) -> bool:
        """Whether a stop string ended the text, perhaps inside a token."""
        return self._ended

    def finish(self) -> None:
        """Show what was held back, a cut character as U+FFFD. After a verdict there is nothing to show."""
        if self._ended:
            return
        self._take(self._decoder.decode(b"", final=True))
        at = self._find_stop()
        self._show(len(self._text) if at is None else at)

    def _note(self, sampled: Sampled) -> None:
        self._tokens += 1
        if sampled.logprob is not None:
            self._logprobs.append(TokenLogprob(sampled.token, sampled.logprob, list(sampled.top)))

    def _take(self, text: str) -> None:
        self._text += text
        self._decoded += len(text)

    def _find_stop(self) -> int | None:
        found = [at for at in (self._text.find(s) for s in self._stop) if at >= 0]
        return min(found) if found else None

    def _show(self, count: int) -> None:
        count = max(count, 0)
        text, self._text = self._text[:count], self._text[count:]
        self._shown += count
        if text or self._logprobs or self._tokens:
            self._emit(text, self._tokens, self._logprobs)
            self._tokens, self._logprobs = 0, []
