"""Which tokens of a request are new to the box: the least that any server could evaluate for it.

Owns the definition. The **box has evaluated** a text when it was the prompt of an earlier request that ended with an
answer, or was given up after a token of it, followed by that answer as far as its tokens were fed back into the model: all
but the last one where a limit or the client ended it. It stays evaluated whatever the server has forgotten since. A token of a
prompt is **known** if it ends within the longest beginning that the prompt shares with any such text; the others are **new**.
The last token of a prompt is always new, since its logits are wanted. A request counts against what had been evaluated when it was sent.

Prompts are rendered and tokenised by the server's own code from the same model file; no request is made for it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from bench.agent_messages import Json
from ds4batch.server.apis.chat_input import read_request
from ds4batch.server.apis.served import Served
from ds4batch.server.run import load_text_model
from ds4batch.server.service import TextModel
from ds4batch.settings import Settings


@dataclass(frozen=True)
class Rendered:
    """A prompt as the model reads it."""

    text: bytes
    ends: Sequence[int]  # where each token ends in `text`; ascending

    @property
    def tokens(self) -> int:
        """Length of the prompt."""
        return len(self.ends)


class Renderer:
    """Renders requests as the server does. Raises OSError or ValueError for a model file it cannot read."""

    def __init__(self, model: str) -> None:
        settings = Settings(model=model)
        self._model: TextModel = load_text_model(settings)
        vocabulary, dialect = self._model.tokenizer.vocab_size, self._model.dialect
        self._served = Served(self._model.id, settings.tokens, settings.ctx, vocabulary, dialect.levels)

    def rendered(self, body: Json) -> Rendered:
        """The prompt of a chat request."""
        text = self._model.dialect.render(read_request(body, self._served).conversation).text
        tokenizer = self._model.tokenizer
        pieces = [tokenizer.token_bytes(token) for token in tokenizer.with_bos(tokenizer.encode(text))]
        return Rendered(b"".join(pieces), list(accumulate(map(len, pieces))))

    def fed_back(self, answer: str, *, stopped: bool) -> bytes:
        """The part of an answer that was evaluated. Its last token was not, unless the model `stopped` with one that has no text."""
        tokenizer = self._model.tokenizer
        tokens = tokenizer.encode(answer)
        return b"".join(map(tokenizer.token_bytes, tokens if stopped else tokens[:-1]))

    def characters_per_token(self, sample: str) -> float:
        """Of a text like `sample`."""
        return len(sample) / len(self._model.tokenizer.encode(sample))


class Box:
    """What has been evaluated so far."""

    def __init__(self) -> None:
        self._texts: list[bytes] = []

    def new_tokens(self, prompt: Rendered) -> int:
        """Tokens of `prompt` that are new, at least 1."""
        shared = max((common_bytes(prompt.text, text) for text in self._texts), default=0)
        known = bisect_right(prompt.ends, shared)
        return prompt.tokens - min(known, prompt.tokens - 1)

    def evaluated(self, prompt: Rendered, answer: bytes) -> None:
        """The box has read `prompt` and then `answer`."""
        self._texts.append(prompt.text + answer)


def common_bytes(a: bytes, b: bytes) -> int:
    """Length of the longest common beginning."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
