"""The tokenizer of one model, with what a server asks of it.

Owns encoding, the bytes of each token and the rule for BOS. Knows no file format and no chat template.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

# Tokens that end an assistant's turn wherever the vocabulary has them as units of their own.
END_OF_TURN = frozenset(
    {
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end_of_text|>",
        "<|endoftext|>",
        "<|end_of_turn|>",
        "<end_of_turn>",
        "<|end|>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
    }
)

REMEMBERED_WORDS = 1000
"""Words of which the package remembers the tokens, in each thread of its own, and never forgets one: up to 8 KB a word. It would remember
ten times as many, and takes as long for a text with either."""


@dataclass(frozen=True)
class ModelTokenizer:
    """Immutable, and safe to share between threads."""

    tokenizer: Any  # a `tokenizers.Tokenizer`
    bytes_by_id: list[bytes] = field(repr=False)  # index is the token id
    bos_id: int | None
    eos_id: int | None
    add_bos: bool  # the model was trained with BOS at the start of every text
    stop_ids: frozenset[int]  # any of these ends a turn
    special_ids: frozenset[int]  # control tokens: not part of the text that a user sees
    chat_template: str | None = field(repr=False)  # Jinja source
    model_name: str
    context: int  # positions the model was trained for
    architecture: str = ""  # what the file calls it: general.architecture, or model_type

    @property
    def vocab_size(self) -> int:
        """Number of token ids with a text; the model's logits may have more rows, for padding."""
        return len(self.bytes_by_id)

    @property
    def bos_token(self) -> str:
        """The text of BOS, "" without one: what templates call bos_token."""
        return "" if self.bos_id is None else self.bytes_by_id[self.bos_id].decode("utf-8", "replace")

    @property
    def eos_token(self) -> str:
        """The text of EOS, "" without one: what templates call eos_token."""
        return "" if self.eos_id is None else self.bytes_by_id[self.eos_id].decode("utf-8", "replace")

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; the text of a special token becomes its one id. BOS is not added: see with_bos.

        A byte for which the vocabulary has no token is left out, as the model's own tokenizer does; SmolLM2 has none for
        six control characters and for the first bytes of planes 4 to 11.

        Raises ValueError for a lone surrogate, which has no UTF-8.
        """
        try:
            # The batch call, unlike the plain one, lets other threads run while it works.
            ids: list[int] = self.tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except TypeError:
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise ValueError(f"the text has a lone surrogate at character {error.start}") from None
            raise
        return ids

    def with_bos(self, ids: list[int]) -> list[int]:
        """`ids` with BOS in front if the model wants one and they do not begin with it.

        The one rule for a rendered chat and for a raw completion: a template that writes BOS itself does not get a
        second one, and a template that leaves it to the tokenizer gets the first.
        """
        if not self.add_bos or self.bos_id is None or ids[:1] == [self.bos_id]:
            return ids
        return [self.bos_id, *ids]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, special tokens included; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        """The exact bytes of one token; a special token gives its text, an id past the vocabulary nothing."""
        return self.bytes_by_id[token] if 0 <= token < len(self.bytes_by_id) else b""
