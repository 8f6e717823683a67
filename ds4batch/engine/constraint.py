"""Holds answers to a form: which tokens may come next, by the grammar of a request's `Constraint`.

Grammars are llguidance's: it compiles them and computes the masks. This module knows how a model's vocabulary looks to it, and that
nothing is masked while the model reasons. It reads no text and draws no token.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from ds4batch.chat.markup import MARKUP
from ds4batch.grammar_limits import LIMITS
from ds4batch.messages import Constraint
from ds4batch.recent import Recent
from ds4batch.tokenizer import ModelTokenizer
from scheduler.backend import Unanswerable

Mask = npt.NDArray[np.int32]
"""A bit a token, the lowest first, set where the token may be drawn. Ids past its end may not."""

_KEPT_CHARS = 2 << 20
"""Of the grammars that are kept compiled: some 30 bytes of memory a character."""
_KEPT_LEAST = _KEPT_CHARS // 32  # what a grammar counts for at least, so that no more than 32 are kept
_REASONING_TAGS = frozenset({"<think>", "</think>"})  # markup, but none that may stand in an answer


class Constraints:
    """Makes matchers over one vocabulary. Building it takes a quarter of a second for 150,000 tokens, compiling a grammar 1 to 20 ms;
    those used last are kept, because an agent sends the same tools with every turn."""

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        """The vocabulary needs a token that ends an answer."""
        texts = {i: tokenizer.token_bytes(i).decode("utf-8", "replace") for i in tokenizer.special_ids}
        spelt = frozenset(i for i, text in texts.items() if text in MARKUP - _REASONING_TAGS)
        wrapped = TokenizerWrapper(_Words(tokenizer, (tokenizer.special_ids | tokenizer.stop_ids) - spelt))
        self._tokenizer = LLTokenizer(wrapped, eos_token=sorted(tokenizer.stop_ids))
        self._compiled: Recent[str, LLMatcher] = Recent(_KEPT_CHARS)
        self._all = _bits(set(range(tokenizer.vocab_size)), tokenizer.vocab_size)
        self._plain = _bits(set(range(tokenizer.vocab_size)) - spelt, tokenizer.vocab_size)

    def matching(self, constraint: Constraint, thinking: bool) -> Matching:
        """What one answer is held to; `thinking`: it begins inside the model's reasoning.

        Raises Unanswerable for a grammar that is none, or goes beyond what may be spent on one.
        """
        grammar = constraint.grammar
        matcher = self._compiled.get(grammar, lambda: self._compile(constraint), max(len(grammar), _KEPT_LEAST)).deep_copy()
        return Matching(matcher, self._all if constraint.calls else self._plain, thinking, constraint.field)

    @property
    def kept_chars(self) -> int:
        """Of the grammars that are kept compiled, a small one counted as more."""
        return self._compiled.weight

    def _compile(self, constraint: Constraint) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer, constraint.grammar, log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise Unanswerable(f"{constraint.field}: the form of the answer cannot be enforced: {_reason(matcher)}")
        return matcher


def constraints_of(tokenizer: ModelTokenizer) -> Constraints | None:
    """None for a vocabulary without a token that ends an answer: nothing could end what is held to a form."""
    return Constraints(tokenizer) if tokenizer.stop_ids else None


class Matching:
    """Where one answer stands in its grammar."""

    def __init__(self, matcher: LLMatcher, keeps: Mask, thinking: bool, field: str) -> None:
        """`keeps`: the tokens to use where there is a choice; a marker of calls inside a JSON text would be read as one.
        `field`: of the request, for errors.
        """
        self._matcher = matcher
        self._keeps = keeps
        self._begun = not thinking
        self._field = field

    def take(self, token: int, reasoned: bool) -> None:
        """A token was drawn that ends no answer; `reasoned`: the reasoning is over with it or was before. Raises Unanswerable."""
        if self._begun and not self._matcher.consume_token(token):
            raise self._lost(f"token {token} does not fit it: {_reason(self._matcher)}")
        self._begun = self._begun or reasoned

    def mask(self) -> Mask | None:
        """What may come next, None for anything. Never empty.

        Raises Unanswerable where the grammar has become too complex, or the vocabulary cannot spell it.
        """
        if not self._begun:
            return None
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.int32)[: len(self._keeps)]  # there may be a word more
        if self._matcher.is_error():
            raise self._lost(_reason(self._matcher))
        kept = mask & self._keeps
        mask = kept if kept.any() else mask
        if not mask.any():
            raise self._lost("no token fits it")
        return mask

    def _lost(self, why: str) -> Unanswerable:
        return Unanswerable(f"{self._field}: the form of the answer cannot be followed further: {why}")


class _Words:
    """A vocabulary as llguidance asks for it, and the tokens that a model would write a given text with."""

    bos_token_id = None

    def __init__(self, tokenizer: ModelTokenizer, special: frozenset[int]) -> None:
        """`special`: tokens that stand for themselves and never for their text."""
        self._tokenizer = tokenizer
        self._special = special
        self.eos_token_id = min(tokenizer.stop_ids)
        self.tokens = tokenizer.bytes_by_id
        self.special_token_ids = sorted(special)

    def __call__(self, text: bytes) -> list[int]:
        """Where the form leaves nothing open, these are the tokens of it."""
        try:
            ids = self._tokenizer.encode(text.decode())
        except ValueError:  # no UTF-8
            return self._longest_first(text)
        exact = b"".join(map(self._tokenizer.token_bytes, ids)) == text and self._special.isdisjoint(ids)
        return ids if exact else self._longest_first(text)  # it adds a space in front, say

    def _longest_first(self, text: bytes) -> list[int]:
        ids, at = [], 0
        longest = max(map(len, self._by_bytes))
        while at < len(text):
            ends = range(min(len(text), at + longest), at, -1)
            found = next((i for end in ends if (i := self._by_bytes.get(text[at:end])) is not None), None)
            if found is None:
                break  # the vocabulary cannot spell it: the matcher will find no token
            ids.append(found)
            at += len(self.tokens[found])
        return ids

    @functools.cached_property
    def _by_bytes(self) -> dict[bytes, int]:
        return {data: i for i, data in enumerate(self.tokens) if data and i not in self._special}


def _reason(matcher: LLMatcher) -> str:
    """What is wrong, without the dump of the parser that follows it."""
    return matcher.get_error().partition("\n")[0]


def _bits(ids: set[int], size: int) -> Mask:
    """The mask of these tokens out of `size`."""
    flags = np.zeros(-(-size // 32) * 32, np.uint8)
    flags[sorted(ids)] = 1
    return np.packbits(flags, bitorder="little").view(np.int32)
