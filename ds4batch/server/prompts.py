"""From a conversation or a raw prompt to token ids, off the event loop when it is long, and the check that it fits the context."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from ds4batch.server.errors import ApiError, bad_field, context_length_exceeded
from ds4batch.server.service import INLINE_CHARS, Service

T = TypeVar("T")


class Prompt(NamedTuple):
    """A request's prompt. `text` is what the tokens were made from; empty when the client sent token ids."""

    text: str
    tokens: list[int]


async def chat_prompt(service: Service, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None,
                      variables: dict[str, Any]) -> Prompt:
    """Render and tokenise a conversation. Raises ApiError 400 when the template refuses it or it does not fit."""
    template = service.model.template
    if template is None:
        raise ApiError(400, "the loaded model has no chat template; use /v1/completions", param="messages")

    def make() -> Prompt:
        try:
            text = template.render(messages, tools=tools, add_generation_prompt=True, **variables)
        except ValueError as error:
            raise bad_field("messages", f"the model's chat template refuses them: {error}") from None
        return _encoded(service, text)

    size = sum(len(message["content"]) + 64 for message in messages) + (1024 * len(tools) if tools else 0)
    return _fitting(service, await _off_loop(service, size, make), "messages")


async def raw_prompt(service: Service, text: str) -> Prompt:
    """Tokenise a text as it is, behind the model's beginning token where it has one."""
    prompt = await _off_loop(service, len(text), lambda: _encoded(service, text))
    if not prompt.tokens:
        raise bad_field("prompt", "must not be empty")
    return _fitting(service, prompt, "prompt")


def _encoded(service: Service, text: str) -> Prompt:
    """The text behind the model's beginning token, unless a template wrote that already."""
    prefix = service.model.prefix
    whole = text if text.startswith(prefix) else prefix + text
    return Prompt(whole, service.model.tokenizer.encode(whole))


def token_prompt(service: Service, tokens: list[int]) -> Prompt:
    """Token ids as they are. No text goes with them: a session with the same text might have been cut into other tokens."""
    return _fitting(service, Prompt("", tokens), "prompt")


def _fitting(service: Service, prompt: Prompt, param: str) -> Prompt:
    if len(prompt.tokens) >= service.settings.ctx:
        raise context_length_exceeded(len(prompt.tokens), service.settings.ctx, param)
    if not prompt.tokens:
        raise bad_field(param, "the prompt has no tokens")
    return prompt


async def _off_loop(service: Service, size: int, make: Callable[[], T]) -> T:
    if size <= INLINE_CHARS:
        return make()
    return await asyncio.get_running_loop().run_in_executor(service.pool, make)
