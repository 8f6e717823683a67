"""The scripted model's device: sessions that are lists of tokens, and logits that come from a script.

Everything else is the server's own: scheduling, reuse, sampling, the reading of answers.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ds4batch.engine.sampler import Draw, draw
from ds4batch.scripted.script import Script
from ds4batch.tokenizer.model_tokenizer import ModelTokenizer
from scheduler.backend import Sampled, Work
from scheduler.fake import FakeBackend


class ScriptedBackend(FakeBackend):
    """N sessions. A turn begins where a launch brought anything but the token that was drawn last."""

    def __init__(self, script: Script, tokenizer: ModelTokenizer, slots: int, ctx: int) -> None:
        super().__init__(slots, ctx)
        self._model = script
        self._tokenizer = tokenizer
        self._lines: list[tuple[int, list[int], float] | None] = [None] * slots  # where a turn begins, its tokens, their margin
        self._last: list[int | None] = [None] * slots

    def launch(self, work: Sequence[Work]) -> None:
        """Append every row's tokens."""
        super().launch(work)
        if self._model.step_seconds:
            time.sleep(self._model.step_seconds)
        for row in work:
            if list(row.tokens) != [self._last[row.slot]]:
                self._lines[row.slot] = None

    def truncate(self, slot: int, length: int) -> bool:
        """Cut the session back. A turn begins with what comes next, be it the very token that was drawn last."""
        cut = super().truncate(slot, length)
        if cut:
            self._last[slot] = None
        return cut

    def fork(self, source: int, target: int, length: int) -> bool:
        """Take over a beginning, as `truncate` leaves one."""
        forked = super().fork(source, target, length)
        if forked:
            self._last[target] = None
        return forked

    def drawn(self, slot: int, sampling: Draw) -> Sampled:
        """The next token of the slot's turn, drawn as from any model's logits."""
        one = draw(self._logits_after(slot), sampling, len(self._tokens[slot]))
        sampling.note(one.token)
        self._last[slot] = one.token
        return one

    def _logits_after(self, slot: int) -> npt.NDArray[np.float32]:
        history = self._tokens[slot]
        line = self._lines[slot]
        if line is None:
            answer = self._model.answer(self._tokenizer.decode(history))
            text = answer.say.decode("utf-8", "surrogateescape")
            said = [t for part in _parts(text) for t in self._bytes_or_tokens(part)]
            ends = [self._tokenizer.eos_id] if answer.end and self._tokenizer.eos_id is not None else []
            line = self._lines[slot] = (len(history), said + ends, answer.margin)
        start, tokens, margin = line
        logits = np.zeros(self._tokenizer.vocab_size, np.float32)
        at = len(history) - start
        if at < len(tokens):
            logits[tokens[at]] = margin
        else:  # an open end: a space, for as long as somebody asks
            logits[self._space] = margin
        return logits

    @property
    def _space(self) -> int:
        return self._tokenizer.encode(" ")[0]

    def _bytes_or_tokens(self, part: str) -> list[int]:
        try:
            return self._tokenizer.encode(part)
        except ValueError:  # not UTF-8: byte by byte
            by_bytes = {data: i for i, data in enumerate(self._tokenizer.bytes_by_id) if len(data) == 1}
            return [by_bytes[bytes([byte])] for byte in part.encode("utf-8", "surrogateescape")]


def _parts(text: str) -> list[str]:
    """The text cut so that bytes which are no character stand apart."""
    parts: list[str] = []
    for letter in text:
        broken = "\udc80" <= letter <= "\udcff"
        if parts and ("\udc80" <= parts[-1][-1] <= "\udcff") == broken:
            parts[-1] += letter
        else:
            parts.append(letter)
    return parts
