"""A model's tokenizer as the engine uses it."""

from __future__ import annotations

from collections.abc import Sequence

from ds4batch.tokenizer import ModelTokenizer


class TokenizerVocabulary:
    """Ids to text and back, for the scheduler and the outputs; see ds4batch.engine.service.Vocabulary."""

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        self._tokenizer = tokenizer
        self.stop_ids = tokenizer.stop_ids
        self.special_ids = tokenizer.special_ids
        self.token_bytes = tokenizer.token_bytes

    def tokenise(self, text: str) -> list[int]:
        """Token ids of rendered text; special tokens in it are recognised, none is added."""
        return self._tokenizer.encode(text)

    def render(self, tokens: Sequence[int]) -> str:
        """The text of tokens, special ones included."""
        return b"".join(map(self.token_bytes, tokens)).decode("utf-8", "replace")
