"""From a conversation or a raw prompt to token ids, off the event loop when it is long, and whether it fits the context."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from ds4batch.chat.conversation import Conversation, Message
from ds4batch.chat.dialects.base import Rendered
from ds4batch.chat.places import shifted
from ds4batch.messages import Continues, Visible
from ds4batch.server.anchor import anchor
from ds4batch.server.errors import bad_field, context_length_exceeded
from ds4batch.server.service import INLINE_CHARS, Service
from ds4batch.server.tool_memory import Replay

T = TypeVar("T")

CHARS_PER_POSITION = 32
"""A text of twice this many characters a position of the context is counted by its beginning first. A token has about four."""


class Prompt(NamedTuple):
    """A request's prompt. `text` is what the tokens were made from; empty when the client sent token ids."""

    text: str
    tokens: list[int]
    conversation: Conversation | None = None  # that was rendered
    thinking: bool = False  # it ends inside the model's reasoning
    generation_from: int | None = None  # character at which the opening of the answer begins
    visible: Visible | None = None
    continues: Continues | None = None
    anchor: int = 0  # tokens before its first user message, see server/anchor.py
    replay: Replay = Replay()

    @property
    def messages(self) -> Sequence[Message]:
        """Those that were rendered."""
        return self.conversation.messages if self.conversation is not None else ()


async def chat_prompt(service: Service, conversation: Conversation, param: str, results_from: int | None = None) -> Prompt:
    """Render and tokenise a conversation, its calls as they were sampled where that is known.

    `results_from`: only the results from that message on are rendered, because nothing stands before them: what a session goes on
    with. Raises ApiError 400 naming `param` when the dialect refuses the conversation or it does not fit.
    """
    dialect, tokenizer = service.model.dialect, service.model.tokenizer
    unknown = service.memory.unknown(conversation.messages)
    if unknown:
        await asyncio.get_running_loop().run_in_executor(service.pool, service.memory.load, unknown)

    def make() -> Prompt:
        messages, replay = service.memory.attach(conversation, dialect.grammar)
        known = replace(conversation, messages=messages)
        try:
            rendered = dialect.render(known)
            if results_from is not None:
                ids = sorted({message.call_id for message in messages[results_from:] if message.call_id})
                rendered = Rendered(dialect.tail(known, results_from), 0, rendered.thinking, None, Continues(ids, 0))
        except ValueError as error:
            raise bad_field(param, str(error)) from None
        prompt = _tokenised(service, rendered.text, param, begins=results_from is None)
        if service.settings.kv_disk_dir:
            prompt = prompt._replace(anchor=anchor(prompt.tokens, rendered.text, known, dialect, tokenizer.encode))
        return _placed(prompt, rendered)._replace(conversation=known, thinking=rendered.thinking, replay=replay)

    size = sum(len(m.text) + len(m.reasoning) + 64 for m in conversation.messages) + 1024 * len(conversation.tools)
    return _fitting(service, await _off_loop(service, size, make), param)


async def retry_prompt(service: Service, prompt: Prompt, sampled: str, thinking_open: bool, detail: str) -> Prompt:
    """The prompt of a second try: the first one, what was sampled, and why its calls could not be read.

    Raises ApiError 400 when it does not fit.
    """
    assert prompt.conversation is not None
    text = prompt.text + sampled + service.model.dialect.retry(prompt.conversation, thinking_open, detail)
    again = _fitting(service, await _off_loop(service, len(text), lambda: _tokenised(service, text, "messages")), "messages")
    return again._replace(conversation=prompt.conversation, thinking=prompt.thinking)


def _placed(prompt: Prompt, rendered: Rendered) -> Prompt:
    """With the places of `rendered`, whose text the prompt's ends with."""
    moved = shifted(rendered, prompt.text[: len(prompt.text) - len(rendered.text)])
    at = moved.generation_from
    return prompt._replace(
        generation_from=at if 0 < at < len(prompt.text) else None, visible=moved.visible, continues=moved.continues
    )


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


def _tokenised(service: Service, text: str, param: str, begins: bool = True) -> Prompt:
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
    tokens = tokenizer.with_bos(plain) if begins else plain
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
