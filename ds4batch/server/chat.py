"""POST /v1/chat/completions: reads the request, shapes the answer. The generation itself is generation.py's."""

from __future__ import annotations

import secrets
import time
from typing import Any

import msgspec
from aiohttp import web

from ds4batch.messages import Finished, TokenLogprob
from ds4batch.server import conversation, fields, logprobs, sampling, sse
from ds4batch.server.fields import Object
from ds4batch.server.generation import Plan, generate
from ds4batch.server.prompts import chat_prompt
from ds4batch.server.service import Exchange, Service, Tokenizer
from ds4batch.server.thinking import read_thinking
from ds4batch.server.usage import openai_usage

# Of the two names of the output limit the newer is the more deliberate.
_LIMIT_NAMES = ("max_completion_tokens", "max_tokens")


async def chat_completions(service: Service, exchange: Exchange, body: Object) -> web.StreamResponse:
    """Answer one chat request."""
    model = fields.text(body, "model", service.model.id)
    limits = sampling.read_limits(body, default_max_tokens=service.settings.tokens, names=_LIMIT_NAMES)
    wanted = sampling.chat_logprobs(body)
    drawn = sampling.read_sampling(body, logprobs=wanted, vocab_size=service.model.tokenizer.vocab_size, allow_ignore_eos=True)
    conversation.refuse_structured_output(body)
    tools = conversation.read_tools(body)
    messages = conversation.read_messages(body)
    variables = read_thinking(body)
    service.link.check_available()
    prompt = await chat_prompt(service, messages, tools, variables)
    wire = ChatWire(model, limits.include_usage, service.model.tokenizer if wanted is not None else None)
    return await generate(service, exchange, Plan(prompt, drawn, limits, "chat"), wire)


class ChatWire:
    """The shapes of a chat answer. Logprobs are written when a tokenizer to spell them is given."""

    def __init__(self, model: str, include_usage: bool, tokenizer: Tokenizer | None) -> None:
        self._head: dict[str, Any] = {
            "id": "chatcmpl-" + secrets.token_hex(12),
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": model,
        }
        self._include_usage = include_usage
        self._tokenizer = tokenizer

    def opening(self) -> bytes:
        """The role."""
        return self._choice({"role": "assistant"})

    def delta(self, text: str, items: list[TokenLogprob]) -> bytes:
        """A piece of content."""
        extra = {} if self._tokenizer is None else {"logprobs": {"content": logprobs.chat_shape(self._tokenizer, items)}}
        return self._choice({"content": text}, extra=extra)

    def closing(self, finished: Finished) -> bytes:
        """The finish reason, the usage where wanted, the end mark."""
        out = self._choice({}, finished.reason)
        if self._include_usage:
            out += sse.data(msgspec.json.encode({**self._head, "choices": [], "usage": openai_usage(finished)}))
        return out + sse.DONE

    def whole(self, text: str, items: list[TokenLogprob], finished: Finished) -> dict[str, Any]:
        """The answer in one object."""
        choice: dict[str, Any] = {"index": 0, "message": {"role": "assistant", "content": text}}
        if self._tokenizer is not None:
            choice["logprobs"] = {"content": logprobs.chat_shape(self._tokenizer, items)}
        choice["finish_reason"] = finished.reason
        return {**self._head, "object": "chat.completion", "choices": [choice], "usage": openai_usage(finished)}

    def _choice(self, delta: dict[str, Any], reason: str | None = None, *, extra: dict[str, Any] | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, **(extra or {}), "finish_reason": reason}
        return sse.data(msgspec.json.encode({**self._head, "choices": [choice]}))
