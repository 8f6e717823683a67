"""Any model by its own chat template.

Owns how a neutral conversation becomes the messages that templates read, and what is done where a template cannot show
something: what it shows is found when it is loaded, so that a conversation that grows is always arranged the same way. How
templates are run is chat/template.py's.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ds4batch.chat import places
from ds4batch.chat.conversation import Call, Conversation, Message, Tool
from ds4batch.chat.dialects.base import Rendered
from ds4batch.chat.dialects.hermes_form import show_bare_calls, show_calls, show_results, show_tools
from ds4batch.chat.dialects.template_abilities import abilities
from ds4batch.chat.places import MARK, Render
from ds4batch.chat.schemas import canonical
from ds4batch.chat.template import ChatTemplate, TemplateError
from ds4batch.messages import Visible

_ERROR = "Tool error: invalid tool call"
_RETRY = _ERROR + ": {}\nThe call was not carried out. Write it once more, complete and in the right form."
_THOUGHT = "\ue000thought\ue000"
_GOES_ON = "\ue000goes on\ue000"
_CLOSED = re.compile(r"</think>\s*\Z")


class JinjaDialect:
    """A template as a dialect. Rendering does not change it."""

    name = "jinja"
    levels = False

    def __init__(self, template: ChatTemplate, stops: Iterable[str] = (), grammar: str = "") -> None:
        """`stops` are the texts of the tokens that end an answer, `grammar` is what calls in the template's form are read with.

        Without a grammar, and where the template shows no tools, they are shown in a form of our own.
        """
        self.stops = tuple(stops)
        self.abilities = abilities(template)
        self.own_form = not (grammar and self.abilities.tools)
        self.grammar = "hermes" if self.own_form else grammar
        self._template = template

    def render(self, conversation: Conversation) -> Rendered:
        """The full prompt. A conversation that ends with an answer, if one without calls, is continued inside that answer.

        Raises ValueError, with the number of the message, for what the template refuses.
        """
        messages, show = _answered(conversation.messages), self._show(conversation)
        text = _text(messages, show)
        goes_on = _continued(messages)
        start = places.generation_from(text, places.quietly(show, messages[:-1] if goes_on else messages, False))
        return Rendered(
            text,
            start,
            thinking=places.thinking_open(text[start:]),
            visible=None if goes_on else self._visible(text, messages, show),
            continues=places.find_continues(text, messages, show, self.stops),
        )

    def tail(self, conversation: Conversation, first: int) -> str:
        """What follows the answer before message `first`, or before results at the beginning whose calls are not shown.

        Raises ValueError where no answer ends there, and where the template does not tell.
        """
        given, show = conversation.messages, self._show(conversation)
        messages = _answered(given)
        first += len(messages) - len(given)
        if not 0 < first <= len(messages) or messages[first - 1].role != "assistant":
            raise ValueError(f"message {first} of {len(messages)} does not follow an answer")
        rest = places.find_tail(_text(messages, show), messages, first, show, self.stops)
        if rest is None:
            raise ValueError("the model's chat template does not tell where an answer ends")
        return rest

    def retry(self, conversation: Conversation, thinking_open: bool, detail: str) -> str:
        """What follows a call that could not be read. Raises ValueError where the template cannot show that."""
        messages, show = list(_answered(conversation.messages)), self._show(conversation)
        begun = messages.pop() if _continued(messages) else Message("assistant")
        answer = replace(begun, text=begun.text + MARK, reasoning=_THOUGHT if thinking_open else begun.reasoning)
        for told in (Message("tool", _RETRY.format(detail)), Message("user", _RETRY.format(detail))):
            text = places.quietly(show, [*messages, answer, told], True)
            rest = places.behind(text)
            if text is not None and rest is not None and _ERROR in rest:
                return (_closing(text) if thinking_open else "") + rest
        raise ValueError("the model's chat template cannot show an error behind an answer")

    def _visible(self, text: str, messages: Sequence[Message], show: Render) -> Visible | None:
        """How the next request will begin. A template that knows of no reasoning repeats the prompt and shows none that was sampled."""
        return places.find_visible(text, messages, show) if self._template.thinks else Visible(len(text), "")

    def _show(self, conversation: Conversation) -> Render:
        """How messages are rendered in this conversation."""
        variables = _variables(conversation)
        tools = None if self.own_form else [_tool(tool) for tool in conversation.tools]
        head = show_tools(conversation.tools) if self.own_form and conversation.tools else ""

        def write(messages: Sequence[Message], opening: bool) -> str:
            replayed = any(message.raw is not None for message in messages)
            if replayed and self.abilities.spliced:
                marked, raws = _marked(self._arranged(messages, head))
                try:
                    text = self._template.render(_plain(marked), tools, opening, **variables)
                except TemplateError:
                    text = ""  # it takes no such answer: it gets the calls
                spliced = _spliced(text, raws, self.abilities.lead)
                if spliced is not None:
                    return spliced
            written = [replace(message, raw=None) for message in messages] if replayed else messages
            return self._template.render(_plain(self._arranged(written, head)), tools, opening, **variables)

        def show(messages: Sequence[Message], opening: bool) -> str:
            begun = _begun(messages, write) if opening else None
            return write(messages, opening) if begun is None else begun

        return show

    def _arranged(self, messages: Sequence[Message], head: str) -> list[Message]:
        """The messages in forms and an order that the template shows. `head` goes in front of the system text."""
        if self.own_form:
            messages = _without_roles(messages)
        elif not self.abilities.parallel and self.grammar in ("hermes", "llama3"):
            shown = show_bare_calls if self.grammar == "llama3" else show_calls
            messages = [_as_text(m, shown(m.calls)) if len(m.calls) > 1 else m for m in messages]
        leading = list(itertools.takewhile(lambda message: message.role == "system", messages))
        rest = [self._late(message) for message in messages[len(leading) :]]
        rule = "\n\n".join(text for text in (head, *(message.text for message in leading)) if text)
        if rule or leading:
            rest.insert(0, Message("system" if self.abilities.system else "user", rule))
        merged = {
            role for role, fine in (("user", self.abilities.user_runs), ("assistant", self.abilities.answer_runs)) if not fine
        }
        if rule and not self.abilities.system and rest[1:] and rest[1].role == "user":
            rest[:2] = [_joined(rest[0], rest[1])]
        return _merged(rest, merged) if merged else rest

    def _late(self, message: Message) -> Message:
        if message.role != "system" or self.abilities.late_system:
            return message
        return Message("user", f"<system>\n{message.text}\n</system>")


def _answered(messages: Sequence[Message]) -> Sequence[Message]:
    """The messages, with an answer that makes the calls where results come at the beginning: their client does not repeat it."""
    start = next((i for i, message in enumerate(messages) if message.role != "system"), len(messages))
    results = list(itertools.takewhile(lambda message: message.role == "tool", messages[start:]))
    if not results:
        return messages
    calls = tuple(Call(message.call_id, "unknown", "{}") for message in results)
    return [*messages[:start], Message("user", "."), Message("assistant", calls=calls), *messages[start:]]


def _continued(messages: Sequence[Message]) -> bool:
    """Whether the last message is an answer that goes on."""
    return bool(messages) and messages[-1].role == "assistant" and not messages[-1].calls


def _begun(messages: Sequence[Message], write: Render) -> str | None:
    """The text up to the end of an answer that goes on; None where there is none, or the template does not show its end."""
    if not _continued(messages):
        return None
    last = messages[-1]
    text = places.quietly(write, [*messages[:-1], replace(last, text=last.text + _GOES_ON)], False)
    rest = places.behind(text, _GOES_ON)
    return None if text is None or rest is None else text[: len(text) - len(rest) - len(_GOES_ON)]


def _text(messages: Sequence[Message], show: Render) -> str:
    """The prompt. Raises ValueError with the number of the message that cannot be shown."""
    try:
        return show(messages, True)
    except ValueError as error:
        raise _blamed(messages, show, error) from None


def _variables(conversation: Conversation) -> dict[str, Any]:
    """What templates know of thinking, where the request decided it: else the template's own default holds."""
    thinking = conversation.thinking
    if not thinking.explicit:
        return {}
    variables: dict[str, Any] = {"enable_thinking": thinking.enabled, "thinking": thinking.enabled}
    return {**variables, "reasoning_effort": thinking.effort} if thinking.enabled else variables


def _plain(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages as templates read them."""
    names: dict[str, str] = {}
    plain: list[dict[str, Any]] = []
    for message in messages:
        shown: dict[str, Any] = {"role": message.role, "content": message.text}
        if message.reasoning:
            shown["reasoning_content"] = message.reasoning
        if message.calls:
            names.update((call.id, call.name) for call in message.calls)
            shown["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": _arguments(call.arguments)}}
                for call in message.calls
            ]
        if message.call_id:
            shown["tool_call_id"] = message.call_id
            if message.call_id in names:
                shown["name"] = names[message.call_id]
        plain.append(shown)
    return plain


def _arguments(text: str) -> Mapping[str, Any]:
    """Templates go through the members of an object; text that is none becomes its only one."""
    parsed = _parsed(text)
    return parsed if isinstance(parsed, dict) else {"arguments": text}


def _tool(tool: Tool) -> dict[str, Any]:
    schema = _parsed(tool.schema)
    return {
        "type": "function",
        "function": schema if isinstance(schema, dict) else {"name": tool.name, "parameters": dict(tool.parameters)},
    }


def _parsed(text: str) -> Any:
    """A JSON value, None for what is none; without lone surrogates, which no tokenizer takes."""
    try:
        return json.loads(canonical(text))
    except (ValueError, RecursionError):
        return None


def _as_text(message: Message, calls: str) -> Message:
    """An answer whose calls are text. What it sampled for them stays to be put in their place."""
    if message.raw is not None:
        return replace(message, calls=())
    return replace(message, text=f"{message.text}\n{calls}" if message.text else calls, calls=())


def _without_roles(messages: Sequence[Message]) -> list[Message]:
    """Calls and results as text; a run of results is one user message."""
    shown: list[Message] = []
    for tool, run in itertools.groupby(messages, lambda message: message.role == "tool"):
        if tool:
            shown.append(Message("user", show_results(message.text for message in run)))
        else:
            shown += [_as_text(message, show_calls(message.calls)) if message.calls else message for message in run]
    return shown


def _merged(messages: Sequence[Message], roles: set[str]) -> list[Message]:
    """The messages with neighbours of these roles joined; an answer with calls is the last of its run."""
    merged: list[Message] = []
    for message in messages:
        last = merged[-1] if merged else None
        if last and last.role == message.role and message.role in roles and not last.calls and last.raw is None:
            merged[-1] = _joined(last, message)
        else:
            merged.append(message)
    return merged


def _joined(first: Message, second: Message) -> Message:
    text = "\n\n".join(text for text in (first.text, second.text) if text)
    reasoning = "\n\n".join(text for text in (first.reasoning, second.reasoning) if text)
    return replace(second, text=text, reasoning=reasoning)


def _marked(messages: Sequence[Message]) -> tuple[list[Message], list[Message]]:
    """The messages with a mark each for what was sampled, and those that are marked."""
    marked: list[Message] = []
    raws: list[Message] = []
    for message in messages:
        if message.raw is None:
            marked.append(message)
        else:
            marked.append(replace(message, text=message.text + _mark(len(raws)), calls=(), raw=None))
            raws.append(message)
    return marked, raws


def _mark(i: int) -> str:
    return f"\ue000sampled {i}\ue000"


def _spliced(text: str, raws: Sequence[Message], lead: str) -> str | None:
    """`text` with what was sampled in the place of its marks. None unless each stands there once, in order."""
    pieces: list[str] = []
    at = 0
    for i, message in enumerate(raws):
        mark = _mark(i)
        found = text.find(mark, at)
        if found < 0:
            return None
        pieces += [_before(text[at:found], message, lead), message.raw or ""]
        at = found + len(mark)
    pieces.append(text[at:])
    return None if any("\ue000sampled" in piece for piece in pieces[::2]) else "".join(pieces)


def _before(text: str, message: Message, lead: str) -> str:
    """What precedes a sampled text. Where no content is in between, the model wrote the white space before its calls itself."""
    if message.text:
        return text
    return _CLOSED.sub("</think>", text) if message.reasoning else text.removesuffix(lead)


def _closing(text: str) -> str:
    """What this template writes between a reasoning and the answer."""
    _, found, rest = text.partition(_THOUGHT)
    between = rest.partition(MARK)[0]
    return between if found and "</think>" in between else "</think>\n\n"


def _blamed(messages: Sequence[Message], show: Render, error: ValueError) -> ValueError:
    """The error with the message that brings it about: the last of a beginning that is refused, where one less is not."""
    fine, refused = 0, len(messages)
    while refused - fine > 1:
        middle = (fine + refused) // 2
        if places.quietly(show, messages[:middle], True) is None:
            refused = middle
        else:
            fine = middle
    role = messages[refused - 1].role if messages else "none"
    return ValueError(f"message {refused} of {len(messages)} ({role}): the model's chat template refuses it: {error}")
