"""The real front over the fake engine, as a process: `serve_fake.py SETTINGS_JSON [ENGINE_OPTION ...]`."""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

from ds4batch.chat.conversation import Conversation
from ds4batch.chat.dialects.base import Rendered
from ds4batch.server.run import serve
from ds4batch.server.service import TextModel
from ds4batch.settings import Settings

FAKE_ENGINE = pathlib.Path(__file__).with_name("fake_engine.py")


class ByteTokenizer:
    """One token a byte."""

    vocab_size = 256
    stop_ids = frozenset({10})

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def with_bos(self, ids: list[int]) -> list[int]:
        return ids

    def decode(self, ids: Any) -> str:
        return bytes(ids).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        return bytes([token])


class PlainDialect:
    """`role: content` lines; refuses a system message that is not the first, as real templates do."""

    name = "plain"
    grammar = "hermes"
    stops: tuple[str, ...] = ()
    levels = False

    def render(self, conversation: Conversation) -> Rendered:
        messages = conversation.messages
        if any(message.role == "system" for message in messages[1:]):
            raise ValueError("a system message must come first")
        lines = [f"tools: {tool.schema}" for tool in conversation.tools]
        thinking = conversation.thinking
        lines += [f"thinking: {thinking.effort if thinking.enabled else 'none'}"] if thinking.explicit else []
        lines += [
            f"{message.role}: {message.text}" + "".join(f" calls {call.name} {call.arguments}" for call in message.calls)
            for message in messages
        ]
        said = "\n".join(lines)
        return Rendered(f"{said}\nassistant:", len(said), False)

    def tail(self, conversation: Conversation, first: int) -> str:
        raise ValueError("this model cannot go on without a history")

    def retry(self, conversation: Conversation, thinking_open: bool, detail: str) -> str:
        return f"\ntool: {detail}\nassistant:"


def load(settings: Settings) -> TextModel:
    return TextModel(id=settings.served_name or "fake-model", name="Fake", tokenizer=ByteTokenizer(), dialect=PlainDialect())


if __name__ == "__main__":
    engine = [sys.executable, str(FAKE_ENGINE), *sys.argv[2:]]
    sys.exit(serve(Settings(**json.loads(sys.argv[1])), engine_command=engine, load=load))
