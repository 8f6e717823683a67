"""From a conversation or a raw prompt to token ids, off the event loop when it is long, and whether it fits the context."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from ds4batch.server.anchor import anchor
from ds4batch.server.errors import bad_field, context_length_exceeded
from ds4batch.server.places import Message, Places, find_places
from ds4batch.server.service import INLINE_CHARS, Service

T = TypeVar("T")

CHARS_PER_POSITION = 32
"""A text of twice this many characters a position of the context is counted by its beginning first. A token has about four."""


class Prompt(NamedTuple):
    """A request's prompt. `text` is what the tokens were made from; empty when the client sent token ids. `messages` are those that
    were rendered, of a chat."""

    text: str
    tokens: list[int]
    places: Places = Places()
    messages: Sequence[Message] = ()
    anchor: int = 0  # tokens before its first user message, see server/anchor.py


async def chat_prompt(
    service: Service, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, variables: dict[str, Any]
) -> Prompt:
    """Render and tokenise a conversation. Raises ApiError 400 when the template refuses it or it does not fit."""

    template, tokenizer = service.model.template, service.model.tokenizer

    def render(some: Sequence[Message]) -> str:
        return template.render(some, tools=tools, add_generation_prompt=False, **variables)

    def make() -> Prompt:
        try:
            text = template.render(messages, tools=tools, add_generation_prompt=True, **variables)
        except ValueError as error:
            raise bad_field("messages", f"the model's chat template refuses them: {error}") from None
        prompt = _tokenised(service, text, "messages")
        places = find_places(text, messages, render, template.thinks, map(tokenizer.token_bytes, tokenizer.stop_ids))
        if service.settings.kv_disk_dir:
            prompt = prompt._replace(anchor=anchor(prompt.tokens, text, messages, render, tokenizer.encode))
        return prompt._replace(places=places.shifted(len(prompt.text) - len(text)), messages=messages)

    size = sum(len(message["content"]) + 64 for message in messages) + (1024 * len(tools) if tools else 0)
    return _fitting(service, await _off_loop(service, size, make), "messages")


async def raw_prompt(service: Service, text: str) -> Prompt:
    """Tokenise a text as it is, behind the model's beginning token where it has one."""
    if not text:
        raise bad_field("prompt", "must not be empty")
    return _fitting(service, await _off_loop(service, len(text), lambda: _tokenised(service, text, "prompt")), "prompt")


def token_prompt(service: Service, tokens: list[Any]) -> Prompt:
    """Token ids as they are. No text goes with them: a session with the same text might have been cut into other tokens."""
    prompt = _fitting(service, Prompt("", tokens), "prompt")
    vocab_size = service.model.tokenizer.vocab_size
    for i, token in enumerate(tokens):
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise bad_field(f"prompt[{i}]", f"expected a token id below {vocab_size}")
    return prompt


def _tokenised(service: Service, text: str, param: str) -> Prompt:
    """The text's tokens. A beginning token that is added shows in the text, as it will in the text of the session.

    Of a text far beyond the context only the beginning is tokenised, and the count in the error is projected from it.
    """
    tokenizer, ctx = service.model.tokenizer, service.settings.ctx
    if len(text) > 2 * CHARS_PER_POSITION * ctx:
        part = CHARS_PER_POSITION * ctx
        counted = len(tokenizer.encode(text[:part]))
        if counted >= 2 * ctx:  # beyond doubt, although the cut may have split a token
            raise context_length_exceeded(counted * len(text) // part, ctx, param)
    plain = tokenizer.encode(text)
    tokens = tokenizer.with_bos(plain)
    return Prompt(tokenizer.decode(tokens[: len(tokens) - len(plain)]) + text, tokens)


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
