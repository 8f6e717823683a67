"""Log-probabilities in OpenAI's two shapes."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Any

from ds4batch.messages import TokenLogprob
from ds4batch.server.service import Tokenizer


def chat_shape(tokenizer: Tokenizer, items: Iterable[TokenLogprob]) -> list[dict[str, Any]]:
    """The `content` list of a chat answer's logprobs: per token its text, bytes, logprob and rivals, best first."""
    return [
        _entry(tokenizer, item.token, item.logprob)
        | {"top_logprobs": [_entry(tokenizer, token, logprob) for token, logprob in item.top]}
        for item in items
    ]


def _entry(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token)
    return {"token": raw.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(raw)}


class CompletionShape:
    """The logprobs of one text completion. Offsets count characters of the answer and run on over the chunks of a stream."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def shape(self, items: Iterable[TokenLogprob]) -> dict[str, Any]:
        """{tokens, token_logprobs, top_logprobs, text_offset} of the next tokens."""
        out: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for item in items:
            out["tokens"].append(self._spelling(item.token))
            out["token_logprobs"].append(item.logprob)
            out["top_logprobs"].append(self._rivals(item))
            out["text_offset"].append(self._offset)
            self._offset += len(self._decoder.decode(self._tokenizer.token_bytes(item.token)))
        return out

    def _rivals(self, item: TokenLogprob) -> dict[str, float]:
        """By spelling, the chosen token included; of two tokens spelled alike the likelier stays."""
        rivals: dict[str, float] = {}
        for token, logprob in [*item.top, (item.token, item.logprob)]:
            rivals.setdefault(self._spelling(token), logprob)
        return rivals

    def _spelling(self, token: int) -> str:
        raw = self._tokenizer.token_bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
