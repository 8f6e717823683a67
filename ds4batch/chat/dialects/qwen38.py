"""Qwen3.8 Flash Next: ChatML turns with a think block in every answer, calls as function and parameter elements on lines of their own.

Owns how this family writes a conversation. Parses nothing, knows no tokens. Text of users and clients stands as it is, but for the
white space around it: one that types the text of a special token gets that token. Only what a tag of ours closes is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ds4batch.chat.conversation import Call, Conversation, Message, Thinking, Tool
from ds4batch.chat.dialects.base import Rendered
from ds4batch.chat.dialects.history import (
    SPACE,
    answer_due,
    arguments,
    check_first,
    declared_order,
    leading_systems,
    orphans_at,
    reasoning_returns,
    results,
    shown_schemas,
)
from ds4batch.chat.escapes import escape
from ds4batch.messages import Continues, Visible

_START, _END = "<|im_start|>", "<|im_end|>\n"
_OPEN, _CLOSE = "<think>\n", "\n</think>"
_BREAK = "\n\n"  # between reasoning, answer and calls
_EFFORTS = {  # a medium effort has no text
    "low": "Reasoning effort is set to low.",
    "high": "Reasoning effort is set to xhigh.",
    "max": "Reasoning effort is set to xhigh.",
}

_TOOLS_INTRO = "These functions can be called. Each line between <tools> and </tools> describes one as JSON:"
_TOOLS_CALL = (
    "To call a function, close your reasoning and write, with an element for each argument:\n"
    "<tool_call>\n<function=FUNCTION>\n<parameter=NAME>\nVALUE\n</parameter>\n</function>\n</tool_call>\n"
    "Strings are written as they are, other values as JSON. Further calls follow on the next line."
)
_RETRY = (
    "Tool error: invalid tool call: {detail}\nNothing was executed. Write the whole call again: <tool_call>, <function=FUNCTION>, a "
    "<parameter=NAME> element for each argument, every one of them closed, </function> and </tool_call>."
)


class Qwen38:
    """The dialect of Qwen3.8 Flash Next.

    System messages at the beginning stand behind the tools in one system turn, later ones where they were said. Reasoning is shown
    wherever the client sends it. A conversation that ends with an answer is continued inside that answer.
    """

    name = "qwen3.8"
    grammar = "qwen"
    stops: tuple[str, ...] = ("<|im_end|>", "<|endoftext|>")
    levels = False

    def render(self, conversation: Conversation) -> Rendered:
        """See Dialect. Raises ValueError for tools whose calls this family cannot write."""
        messages = conversation.messages
        lead = leading_systems(messages)
        pieces = [_head(conversation, lead), *_pieces(conversation, lead)]
        opening = _opening(conversation)
        text = "".join(pieces) + opening
        opened = bool(opening) and conversation.thinking.enabled
        return Rendered(
            text,
            len(text) - len(opening or pieces[-1]),  # of an answer that is continued, its own opening
            opened,
            Visible(len(text), _CLOSE + _BREAK, "start") if opened and not reasoning_returns(conversation) else None,
            _continues(messages, pieces, lead),
        )

    def tail(self, conversation: Conversation, first: int) -> str:
        """See Dialect. Begins with the end of the turn. Raises ValueError where no turn begins."""
        check_first(conversation.messages, first)
        return "".join(_pieces(conversation, first)) + _opening(conversation)

    def retry(self, conversation: Conversation, thinking_open: bool, detail: str) -> str:
        """See Dialect."""
        close = _CLOSE + _BREAK if thinking_open else ""
        result = _result(_RETRY.format(detail=detail))
        return f"{close}{_END}{_START}user{result}{_END}{_answer(conversation.thinking)}"


def _head(conversation: Conversation, lead: int) -> str:
    """The system turn that begins the prompt, "" where it has nothing to say. Takes the first `lead` messages."""
    thinking = conversation.thinking
    parts = [_EFFORTS.get(thinking.effort, "") if thinking.enabled else "", _tools(conversation.tools)]
    parts += [message.text.strip(SPACE) for message in conversation.messages[:lead]]
    text = _BREAK.join(part for part in parts if part)
    return f"{_START}system\n{text}{_END}" if text else ""


def _tools(tools: Iterable[Tool]) -> str:
    tools = [tool for tool in tools if not tool.deferred]
    for tool in tools:
        for what, name in [("name", tool.name), *(("parameter", key) for key in tool.properties)]:
            if _splits(name):
                raise ValueError(
                    f"tools: {tool.name!r} has the {what} {name!r}; this model's calls cannot hold a name with '<' or '>'"
                )
    schemas = shown_schemas(tools)
    if not schemas:
        return ""
    shown = "".join(f'\n{{"type": "function", "function": {schema}}}' for schema in schemas)
    return f"# Tools\n\n{_TOOLS_INTRO}\n\n<tools>{shown}\n</tools>\n\n{_TOOLS_CALL}"


def _splits(name: str) -> bool:
    return "<" in name or ">" in name


def _pieces(conversation: Conversation, first: int) -> list[str]:
    """The messages from `first` on, a text each. The end of a turn stands before the message that follows it."""
    order = declared_order(conversation.tools)
    messages = conversation.messages
    orphans = orphans_at(messages)
    out: list[str] = []
    for at in range(first, len(messages)):
        message = messages[at]
        before = messages[at - 1].role if at else ""
        end = _END if before == "assistant" or at == orphans else ""
        match message.role:
            case "assistant":
                piece = f"{_START}assistant\n{_said(message, order)}"
            case "tool":
                run = "" if before == "tool" else f"{_START}user"
                last = at + 1 == len(messages) or messages[at + 1].role != "tool"
                piece = run + _result(message.text) + (_END if last else "")
            case _:
                piece = f"{_START}{message.role}\n{message.text.strip(SPACE)}{_END}"
        out.append(end + piece)
    return out


def _said(message: Message, order: Mapping[str, Mapping[str, int]]) -> str:
    """What stands behind the opening of an assistant's turn."""
    raw, reasoning = message.raw, message.reasoning.strip(SPACE)
    # What a plain answer ends with was sampled as tokens that trimming would change; before calls it belongs to their text.
    content = message.text.strip(SPACE) if message.calls else message.text.lstrip(SPACE)
    calls = "\n".join(_call(call, order) for call in message.calls) if raw is None else raw
    if raw is None and calls and content:
        calls = _BREAK + calls
    if content.startswith(("<think>", "</think>")):
        return content + calls  # the client left the reasoning where it was sampled
    # Sampled calls without an answer before them begin with the break themselves, unless it stood in the prompt.
    own = raw is not None and not content and (bool(reasoning) or raw.startswith(_BREAK))
    return f"{_OPEN}{reasoning}{_CLOSE}{'' if own else _BREAK}{content}{calls}"


def _call(call: Call, order: Mapping[str, Mapping[str, int]]) -> str:
    pairs = arguments(call, order)
    if pairs is None or any(_splits(key) for key, _ in pairs):
        pairs = [("arguments", call.arguments)] if call.arguments.strip(SPACE) else []
    body = "".join(f"<parameter={key}>\n{escape(value, '</parameter>')}\n</parameter>\n" for key, value in pairs)
    return f"<tool_call>\n<function={call.name}>\n{body}</function>\n</tool_call>"


def _result(text: str) -> str:
    return f"\n<tool_response>\n{escape(text, '</tool_response>')}\n</tool_response>"


def _answer(thinking: Thinking) -> str:
    return f"{_START}assistant\n{_OPEN}" + ("" if thinking.enabled else _CLOSE + _BREAK)


def _opening(conversation: Conversation) -> str:
    return _answer(conversation.thinking) if answer_due(conversation.messages) else ""


def _continues(messages: Sequence[Message], pieces: Sequence[str], lead: int) -> Continues | None:
    found = results(messages)
    return found and Continues(found[1], sum(map(len, pieces[: found[0] - lead + 1])))
