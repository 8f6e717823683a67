"""What every handler shares: the settings, the model's text side, the engine link, and how one HTTP exchange is answered."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from aiohttp import web

from ds4batch.chat.dialects.base import Dialect
from ds4batch.server.account import Account
from ds4batch.server.apis.served import Served
from ds4batch.server.engine_link import EngineLink
from ds4batch.server.errors import ApiError
from ds4batch.server.keys import ANYBODY, KeyInfo, Keys
from ds4batch.server.metrics import Metrics
from ds4batch.server.tool_memory import ToolMemory
from ds4batch.server.watch import ConnectionWatch
from ds4batch.settings import Settings

if TYPE_CHECKING:
    from ds4batch.server.request_log import RequestLog

OWNER = "ds4batch"
INLINE_CHARS = 8 << 10
"""Longer texts are rendered and tokenised off the event loop."""


class Tokenizer(Protocol):
    """What the front needs of the model's tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""

    def encode(self, text: str) -> list[int]:
        """The token ids of `text`; the text of a special token becomes that token. Adds nothing."""

    def with_bos(self, ids: list[int]) -> list[int]:
        """`ids` behind the token that begins a text, where the model wants one and it is not there."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids, special tokens included."""

    def token_bytes(self, token: int) -> bytes:
        """The bytes one token stands for."""

    @property
    def stop_ids(self) -> frozenset[int]:
        """The tokens that end a turn."""


@dataclass(frozen=True)
class TextModel:
    """The loaded model as the front sees it."""

    id: str  # in /v1/models
    name: str  # the file's own name for the model
    tokenizer: Tokenizer
    dialect: Dialect


@dataclass(frozen=True)
class Service:
    """Passed to every handler."""

    settings: Settings
    model: TextModel
    link: EngineLink
    metrics: Metrics
    watch: ConnectionWatch
    pool: ThreadPoolExecutor
    requests: RequestLog
    memory: ToolMemory
    keys: Keys | None = None  # None: everybody may do everything
    started_at: float = field(default_factory=time.monotonic)

    @property
    def served(self) -> Served:
        """What requests are read against."""
        model, settings = self.model, self.settings
        return Served(model.id, settings.tokens, settings.ctx, model.tokenizer.vocab_size, model.dialect.levels)


@dataclass(frozen=True)
class Exchange:
    """One HTTP request under way and the headers its answer carries."""

    request: web.BaseRequest
    request_id: str
    headers: Mapping[str, str]
    arrival: float = field(default_factory=time.monotonic)
    key: KeyInfo = ANYBODY
    account: Account = field(default_factory=Account)

    def json(self, value: Any, status: int = 200) -> web.Response:
        """A JSON answer."""
        return self.content(msgspec.json.encode(value) + b"\n", "application/json", status)

    def content(self, body: bytes, content_type: str, status: int = 200) -> web.Response:
        """An answer of any type."""
        return web.Response(status=status, body=body, headers={**self.headers, "Content-Type": content_type})

    def error(self, error: ApiError, spelled: Callable[[ApiError], bytes]) -> web.Response:
        """An error's answer; `spelled` gives the body that the API's clients read."""
        headers = {**self.headers, **error.headers(), "Content-Type": "application/json"}
        return web.Response(status=error.status, body=spelled(error), headers=headers)
