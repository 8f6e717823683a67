"""The real front over the fake engine, as a process: `serve_fake.py SETTINGS_JSON [ENGINE_OPTION ...]`."""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

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


class PlainTemplate:
    """`role: content` lines; refuses a system message that is not the first, as real templates do."""

    thinks = False

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        if any(message["role"] == "system" for message in messages[1:]):
            raise ValueError("a system message must come first")
        lines = [f"tools: {json.dumps(tools)}"] if tools else []
        lines += [f"{name}={value}" for name, value in sorted(variables.items())]
        lines += [
            f"{message['role']}: {message['content']}"
            + (f" calls {json.dumps(message['tool_calls'])}" if "tool_calls" in message else "")
            for message in messages
        ]
        return "\n".join(lines) + ("\nassistant:" if add_generation_prompt else "")


def load(settings: Settings) -> TextModel:
    return TextModel(id=settings.served_name or "fake-model", name="Fake", tokenizer=ByteTokenizer(), template=PlainTemplate())


if __name__ == "__main__":
    engine = [sys.executable, str(FAKE_ENGINE), *sys.argv[2:]]
    sys.exit(serve(Settings(**json.loads(sys.argv[1])), engine_command=engine, load=load))
