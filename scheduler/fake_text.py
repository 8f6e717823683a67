"""The fakes' vocabulary, and the token that follows a history: a function of the tokens before it, through a hash."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Script = Callable[[Sequence[int]], int | None]
"""The token that follows a history, or None to leave it to the hash."""

SPECIALS = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
END = SPECIALS.index("<|end|>")  # the stop token
_MERGES = ("th", "he", "in", "er", "an", "the", "ing", "and", "  ", "e ", "s ", "o w")
_PIECES = (*SPECIALS, *(chr(c) for c in range(0x20, 0x7F)), "\n", *_MERGES)
VISIBLE = range(len(SPECIALS), len(_PIECES))
_LETTERS = tuple(_PIECES.index(letter) for letter in "thein")
_CODEPOINTS = len(_PIECES)  # any other character is this and its code point
VOCABULARY = _CODEPOINTS + 0x110000
LOGGED = 4096  # what a long-lived instance remembers of its calls
_MASK = (1 << 64) - 1


class FakeText:
    """A greedy vocabulary of characters and a few merges, so that a text has several tokenisations. Implements Text."""

    def __init__(self) -> None:
        self._ids = {piece: i for i, piece in enumerate(_PIECES)}
        self._by_size = sorted({len(piece) for piece in _PIECES}, reverse=True)
        self.tokenised: deque[str] = deque(maxlen=LOGGED)  # the latest texts
        self.rendered = 0  # tokens

    def tokenise(self, text: str) -> list[int]:
        """The longest piece that fits, again and again."""
        self.tokenised.append(text)
        tokens: list[int] = []
        at = 0
        while at < len(text):
            for size in self._by_size:
                known = self._ids.get(text[at : at + size])
                if known is not None:
                    tokens.append(known)
                    at += len(_PIECES[known])
                    break
            else:
                tokens.append(_CODEPOINTS + ord(text[at]))
                at += 1
        return tokens

    def render(self, tokens: Sequence[int]) -> str:
        """The pieces, one after another."""
        self.rendered += len(tokens)
        return "".join(_PIECES[t] if t < _CODEPOINTS else chr(t - _CODEPOINTS) for t in tokens)


def scripted(answers: Mapping[tuple[int, ...], Sequence[int]]) -> Script:
    """A script that continues each prompt with its answer, and says nothing after it or elsewhere."""

    def follow(history: Sequence[int]) -> int | None:
        seen = tuple(history)
        for prompt, answer in answers.items():
            said = seen[len(prompt) :]
            if seen[: len(prompt)] == prompt and len(said) < len(answer) and said == tuple(answer[: len(said)]):
                return answer[len(said)]
        return None

    return follow


def mix(state: int, token: int) -> int:
    """A step of a 64-bit hash; the constants are those of splitmix64."""
    state = (state + token + 0x9E3779B97F4A7C15) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


def next_token(state: int, sampling: Any) -> int:
    """A visible token, or the stop token once in a while. Half of them are letters that the tokeniser would merge."""
    drawn = mix(state, sampling if isinstance(sampling, int) else 0)
    if drawn % 41 == 0:
        return END
    among = _LETTERS if drawn & 128 else VISIBLE
    return among[(drawn >> 8) % len(among)]
