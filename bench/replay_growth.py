"""How many tokens of a prompt are new, told from its rendering alone. See bench/replay.py for the definition."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from bench.replay_transcript import Json
from ds4batch.chat.conversation import Conversation
from ds4batch.server.apis import chat_input, messages, responses
from ds4batch.server.apis.served import Served
from ds4batch.server.run import load_text_model
from ds4batch.settings import Settings


class _Request(Protocol):
    @property
    def conversation(self) -> Conversation: ...


READERS: Mapping[str, Callable[[Json, Served], _Request]] = {
    "chat": chat_input.read_request,
    "responses": responses.read_request,
    "messages": messages.read_request,
}


class Growth:
    """Renders requests as the server of a script does. Raises OSError or ValueError for a script it cannot read."""

    def __init__(self, script: Path) -> None:
        settings = Settings(script=str(script))
        self._model = load_text_model(settings)
        model = self._model
        self._served = Served(model.id, settings.tokens, settings.ctx, model.tokenizer.vocab_size, model.dialect.levels)

    def new_tokens(self, api: str, body: Json, prompt: str) -> int:
        """New tokens of a request that the server rendered as `prompt`. Raises ValueError where that is not its rendering."""
        conversation = READERS[api](body, self._served).conversation
        roles = [message.role for message in conversation.messages]
        if "assistant" not in roles:
            return len(self._model.tokenizer.encode(prompt))
        first = len(roles) - roles[::-1].index("assistant")
        added = self._model.dialect.tail(conversation, first)
        if not prompt.endswith(added):
            raise ValueError(f"the prompt does not end with what was added: {added[:200]!r}")
        return len(self._model.tokenizer.encode(added))
