"""Reads one request's tokens: bytes to text without cutting a character, stop strings, and the parts of the turn.

Owns no protocol and no grammar: text goes to a `Tracker`, which says what it is. Special tokens have no text of their own, but for
those that a grammar reads.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from ds4batch.chat.events import ReasoningEnd, Turn, TurnEvent
from ds4batch.chat.tracker import End, Tracker
from ds4batch.engine.constraint import Matching
from ds4batch.engine.sampler import Draw
from ds4batch.messages import TokenLogprob
from scheduler.backend import Answered, Sampled, Verdict


class Piece(NamedTuple):
    """What is shown at once."""

    text: str
    events: list[TurnEvent]  # what the text is; none without a tracker
    tokens: int  # since the last piece
    logprobs: list[TokenLogprob]


class TextOutput:
    """The text of one turn. Text that may still become part of a stop string is held back."""

    def __init__(
        self,
        token_bytes: Callable[[int], bytes],
        special: Collection[int],
        stop: Sequence[str],
        emit: Callable[[Piece], None],
        tracker: Callable[[], Tracker] | None = None,
        draw: Draw | None = None,
        matching: Matching | None = None,
    ) -> None:
        """`tracker` makes one; `draw` is told when the next token is structure, which is not left to chance, and what it may be
        by `matching`. Raises ValueError where that leaves nothing.
        """
        self._token_bytes = token_bytes
        self._special = special
        self._stop = [s for s in stop if s]
        self._hold = max((len(s) for s in self._stop), default=1) - 1
        self._emit = emit
        self._tracker = tracker() if tracker is not None else None  # of what is shown
        self._ahead = tracker() if tracker is not None and self._hold else self._tracker  # of what is decoded
        self._draw = draw
        self._matching = matching
        self._reasoned = False  # the reasoning is over in what is decoded
        if draw is not None and matching is not None:
            draw.mask = matching.mask()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._text = ""  # decoded and not shown
        self._shown = 0  # characters shown
        self._ends: list[int] = []  # for each token, the characters decoded once it was taken
        self._decoded = 0
        self._ended = False  # by a stop string
        self._tokens = 0
        self._logprobs: list[TokenLogprob] = []
        self.turn = Turn()
        self.end: End | None = None
        """How the tracker saw the turn end."""

    def push(self, sampled: Sampled) -> Verdict | None:
        """Take one token; a verdict says that a stop string was found, or all calls were made, and how many tokens precede that."""
        self._note(sampled)
        if sampled.token not in self._special:
            self._take(self._decoder.decode(self._token_bytes(sampled.token)))
        self._ends.append(self._decoded)
        at = self._find_stop()
        if at is None:
            self._show(len(self._text) - self._hold)
            return self._steer(sampled.token)
        border = self._shown + at
        self._show(at)
        self._text, self._ended = "", True
        return Verdict("stop", sum(1 for end in self._ends if end <= border))

    @property
    def cut(self) -> bool:
        """Whether a stop string ended the text, perhaps inside a token."""
        return self._ended

    def finish(self, reason: Answered) -> Answered:
        """Show what was held back, a cut character as U+FFFD. After a stop string there is nothing to show."""
        if not self._ended:
            self._take(self._decoder.decode(b"", final=True))
            at = self._find_stop()
            self._show(len(self._text) if at is None else at)
        if self._tracker is None:
            return reason
        end = self.end = self._tracker.finish("cut" if self._ended else "stop" if reason == "tool_calls" else reason)
        self.turn.add(end.events)
        return "tool_calls" if end.reason == "tool_calls" else reason

    def _steer(self, token: int) -> Verdict | None:
        if self._ahead is not None and self._ahead.done:
            return Verdict("tool_calls", len(self._ends))
        if self._draw is not None:
            if self._ahead is not None:
                self._draw.greedy = self._ahead.greedy
            if self._matching is not None:
                self._matching.take(token, self._reasoned)
                self._draw.mask = self._matching.mask()
        return None

    def _note(self, sampled: Sampled) -> None:
        self._tokens += 1
        if sampled.logprob is not None:
            self._logprobs.append(TokenLogprob(sampled.token, sampled.logprob, list(sampled.top)))

    def _take(self, text: str) -> None:
        self._text += text
        self._decoded += len(text)
        if self._ahead is not None and self._ahead is not self._tracker:
            self._notice(self._ahead.push(text))

    def _notice(self, events: Sequence[TurnEvent]) -> None:
        self._reasoned = self._reasoned or any(isinstance(event, ReasoningEnd) for event in events)

    def _find_stop(self) -> int | None:
        found = [at for at in (self._text.find(s) for s in self._stop) if at >= 0]
        return min(found) if found else None

    def _show(self, count: int) -> None:
        count = max(count, 0)
        text, self._text = self._text[:count], self._text[count:]
        self._shown += count
        events = self._tracker.push(text) if self._tracker is not None and text else []
        self._notice(events)
        self.turn.add(events)
        if text or self._logprobs or self._tokens:
            self._emit(Piece(text, events, self._tokens, self._logprobs))
            self._tokens, self._logprobs = 0, []
