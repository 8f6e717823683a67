"""A model's own Jinja chat template: messages -> prompt text.

Owns how messages are handed to a template and what stands in for a missing one. Knows no tokens and no protocol; what a
template may do and cost is template_sandbox's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2

from ds4batch.chat.template_sandbox import MAX_LENGTH, TemplateEnvironment, TemplateError
from ds4batch.tokenizer.model_tokenizer import ModelTokenizer

__all__ = ["CHATML", "TRANSCRIPT", "ChatTemplate", "TemplateError", "template_for"]

# For a model whose file has no template: the markers of ChatML, the most common grammar, if the vocabulary has them.
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Else a transcript, which a base model can continue.
TRANSCRIPT = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ message['role'] | capitalize + ': ' + message['content'] + '\n\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)

Message = Mapping[str, Any]


class ChatTemplate:
    """One compiled template. Rendering does not change it, so threads may share it."""

    def __init__(self, source: str, bos: str, eos: str, clock: Callable[[], datetime] = datetime.now) -> None:
        """Compile `source`; `bos` and `eos` are the texts of those tokens, "" for none; strftime_now reads `clock`.

        Raises TemplateError when the source is no template.
        """
        self.source = source
        self._names = {"bos_token": bos, "eos_token": eos}
        self._environment = TemplateEnvironment(clock)
        try:
            self._template = self._environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"the chat template is broken, line {error.lineno}: {error.message}") from error
        except Exception as error:  # constants are computed while compiling and can fail in any way
            raise TemplateError(f"the chat template cannot be compiled: {_reason(error)}") from error

    @property
    def thinks(self) -> bool:
        """Whether it knows of reasoning, and may show an answer without it."""
        return "think" in self.source or "reasoning" in self.source

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The prompt for `messages`, with the opening of the assistant's turn unless it is not wanted.

        A content of None, or none at all, is ""; a list of text parts is their concatenation. `tools` are JSON schemas;
        kwargs are further names for the template, such as enable_thinking. The arguments are not changed. Raises
        TemplateError.
        """
        names = {
            "documents": None,
            **kwargs,
            **self._names,
            "messages": [_plain(message) for message in messages],
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        pieces: list[str] = []
        length = 0
        try:
            with self._environment.budget():
                for piece in self._template.generate(names):
                    pieces.append(piece)
                    length += len(piece)
                    if length > MAX_LENGTH:
                        raise TemplateError(f"the chat template writes more than {MAX_LENGTH} characters")
        except TemplateError:
            raise
        except Exception as error:  # a template can raise anything: a wrong type, a division by zero, deep recursion
            raise TemplateError(f"the chat template cannot render these messages: {_reason(error)}") from error
        return "".join(pieces)


def template_for(tokenizer: ModelTokenizer, clock: Callable[[], datetime] = datetime.now) -> ChatTemplate:
    """The model's own template; without one CHATML if the vocabulary has its markers, else TRANSCRIPT.

    Raises TemplateError when the model's template is broken.
    """
    source = tokenizer.chat_template
    if source is None:
        source = CHATML if tokenizer.tokenizer.token_to_id("<|im_start|>") is not None else TRANSCRIPT
    return ChatTemplate(source, tokenizer.bos_token, tokenizer.eos_token, clock)


def _plain(message: Message) -> dict[str, Any]:
    content = message.get("content")
    if content is None:
        text = ""
    elif isinstance(content, str):
        text = content
    else:
        text = "".join(map(_part_text, content))
    return {**message, "content": text}


def _part_text(part: Any) -> str:
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise TemplateError(f"a content part of type {kind!r} has no text, and this model reads only text")


def _reason(error: BaseException) -> str:
    if isinstance(error, RecursionError):
        return "it recurses too deep"
    text = str(error)
    return text if isinstance(error, jinja2.TemplateError) and text else f"{type(error).__name__}: {text}"
