"""POST /v1/completions: continues a raw prompt, no chat template around it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

import msgspec
from aiohttp import web

from ds4batch.chat.events import Content, Turn, TurnEvent
from ds4batch.messages import Finished, TokenLogprob
from ds4batch.server import fields, sampling, sse
from ds4batch.server.errors import SERVER, ApiError, bad_field
from ds4batch.server.fields import Object
from ds4batch.server.generation import Plan, generate
from ds4batch.server.logprobs import CompletionShape
from ds4batch.server.prompts import Prompt, raw_prompt, token_prompt
from ds4batch.server.service import Exchange, Service
from ds4batch.server.usage import openai_usage


async def completions(service: Service, exchange: Exchange, body: Object) -> web.StreamResponse:
    """Answer one text completion."""
    model = fields.text(body, "model", service.model.id)
    limits = sampling.read_limits(body, default_max_tokens=service.settings.tokens, names=("max_tokens",))
    wanted = sampling.completion_logprobs(body)
    tokenizer = service.model.tokenizer
    drawn = sampling.read_sampling(body, logprobs=wanted, vocab_size=tokenizer.vocab_size, allow_ignore_eos=True)
    _refuse_unsupported(body)
    given = _read_prompt(body)
    service.link.check_available()
    prompt: Prompt = await raw_prompt(service, given) if isinstance(given, str) else token_prompt(service, given)
    wire = CompletionWire(model, limits.include_usage, CompletionShape(tokenizer) if wanted is not None else None)
    return await generate(service, exchange, Plan(prompt, drawn, limits, "completions"), wire)


def _refuse_unsupported(body: Object) -> None:
    if fields.flag(body, "echo"):
        raise bad_field("echo", "repeating the prompt is not supported")
    if body.get("suffix"):
        raise bad_field("suffix", "filling in before a suffix is not supported")


def _read_prompt(body: Object) -> str | list[Any]:
    """One text, or one list of what should be token ids."""
    prompt = body.get("prompt")
    if prompt is None:
        raise ApiError(400, "missing prompt", param="prompt")
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list):
        wanted = "a string, a list of one string or a list of token ids"
        raise bad_field("prompt", f"expected {wanted}, got {fields.describe(prompt)}")
    if not prompt:
        raise bad_field("prompt", "must not be empty")
    if isinstance(prompt[0], str | list):
        if len(prompt) > 1:
            raise bad_field("prompt", f"one prompt a request, got {len(prompt)}")
        return _read_prompt({"prompt": prompt[0]})
    return prompt


class CompletionWire:
    """The shapes of a text completion."""

    def __init__(self, model: str, include_usage: bool, shape: CompletionShape | None) -> None:
        self._head: dict[str, Any] = {
            "id": "cmpl-" + secrets.token_hex(12),
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._include_usage = include_usage
        self._shape = shape

    def opening(self, cached_tokens: int = 0) -> bytes:
        """Nothing: a completion has no role."""
        return b""

    def events(self, events: Sequence[TurnEvent], items: Sequence[TokenLogprob]) -> bytes:
        """A piece of text."""
        text = _text(events)
        return sse.data(msgspec.json.encode({**self._head, "choices": [self._choice(text, items, None)]}))

    def keepalive(self) -> bytes:
        """A comment."""
        return sse.KEEPALIVE

    def failed(self, message: str) -> bytes:
        """What ends a stream that cannot be answered."""
        return sse.event("error", msgspec.json.encode({"error": {"message": message, "type": SERVER}}))

    def closing(self, finished: Finished) -> bytes:
        """The finish reason, the usage where wanted, the end mark."""
        out = sse.data(msgspec.json.encode({**self._head, "choices": [self._choice("", None, finished.reason)]}))
        if self._include_usage:
            out += sse.data(msgspec.json.encode({**self._head, "choices": [], "usage": openai_usage(finished)}))
        return out + sse.DONE

    def whole(self, turn: Turn, items: Sequence[TokenLogprob], finished: Finished) -> dict[str, Any]:
        """The answer in one object."""
        return {**self._head, "choices": [self._choice(turn.content, items, finished.reason)], "usage": openai_usage(finished)}

    def _choice(self, text: str, items: Sequence[TokenLogprob] | None, reason: str | None) -> dict[str, Any]:
        choice: dict[str, Any] = {"text": text, "index": 0}
        if self._shape is not None and items is not None:
            choice["logprobs"] = self._shape.shape(items)
        choice["finish_reason"] = reason
        return choice


def _text(events: Sequence[TurnEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, Content))
