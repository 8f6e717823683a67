"""GLM 5.2 and 5.3: turns that open with a role's token and have no end, calls as key and value elements inside one line.

Owns how this family writes a conversation. What it shares with Qwen3.8, the other family of tagged calls, is at the end: the
schemas that are shown, the order of arguments, and where the turn to be answered begins. Parses nothing, knows no tokens.

Text of users and clients stands as it is: one that types the text of a special token gets that token. Only what a tag of ours
closes is escaped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ds4batch.chat.conversation import Call, Conversation, Message
from ds4batch.chat.dialects.base import Rendered
from ds4batch.chat.dialects.history import (
    SPACE,
    answer_due,
    arguments,
    check_first,
    declared_order,
    reasoning_returns,
    results,
    shown_schemas,
)
from ds4batch.chat.escapes import escape
from ds4batch.messages import Continues, Visible

_BEGIN = "[gMASK]<sop>"
_SYSTEM, _USER, _ASSISTANT, _OBSERVATION = "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"
_OPEN, _CLOSE = "<think>", "</think>"
_NO_REASONING = _OPEN + _CLOSE
_EFFORTS = {"medium": "High", "high": "High", "max": "Max"}  # a low effort has no text

_TOOLS_INTRO = "These functions can be called. Each line between <tools> and </tools> describes one as JSON:"
_TOOLS_CALL = (
    "To call a function, close your reasoning and write, with a key and a value for each argument:\n"
    "<tool_call>FUNCTION<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>\n"
    "Strings are written as they are, other values as JSON. Several calls follow each other directly."
)
_RETRY = (
    "Tool error: invalid tool call: {detail}\nNothing was executed. Write the whole call again: <tool_call>, the function's name, "
    "<arg_key> and <arg_value> for each argument, every one of them closed, and </tool_call>."
)


class Glm:
    """The dialect of GLM 5.2 and 5.3.

    System messages stand where they were said. Without tools the reasoning of earlier turns is left out. A conversation that ends
    with an answer is continued inside that answer.
    """

    name = "glm"
    grammar = "glm"
    stops: tuple[str, ...] = (_USER, _OBSERVATION, "<|endoftext|>")
    levels = False

    def render(self, conversation: Conversation) -> Rendered:
        """See Dialect. Refuses nothing."""
        messages = conversation.messages
        kept = _kept_from(conversation)
        pieces = [_head(conversation), *_pieces(conversation, 0, kept)]
        opening = _opening(conversation)
        text = "".join(pieces) + opening
        begin = len(text) - len(opening or pieces[-1])  # of an answer that is continued, its own opening
        opened = bool(opening) and conversation.thinking.enabled
        return Rendered(
            text,
            begin,
            opened,
            _visible(conversation, pieces, kept) if opened else None,
            _continues(messages, pieces),
        )

    def tail(self, conversation: Conversation, first: int) -> str:
        """See Dialect. Nothing ends a turn, so it begins with the messages. Raises ValueError where no turn begins."""
        check_first(conversation.messages, first)
        return "".join(_pieces(conversation, first, _kept_from(conversation))) + _opening(conversation)

    def retry(self, conversation: Conversation, thinking_open: bool, detail: str) -> str:
        """See Dialect."""
        close = _CLOSE if thinking_open else ""
        return f"{close}{_OBSERVATION}{_result(_RETRY.format(detail=detail))}{_answer(conversation.thinking.enabled)}"


def _head(conversation: Conversation) -> str:
    effort = _EFFORTS.get(conversation.thinking.effort) if conversation.thinking.enabled else None
    parts = [_BEGIN]
    if effort:
        parts.append(f"{_SYSTEM}Reasoning Effort: {effort}")
    if conversation.tools:
        schemas = shown_schemas(conversation.tools)
        shown = "\n\n" + "".join(f"{schema}\n\n\n" for schema in schemas) if schemas else "\n"
        parts.append(f"{_SYSTEM}\n# Tools\n\n{_TOOLS_INTRO}\n<tools>{shown}</tools>\n\n{_TOOLS_CALL}")
    return "".join(parts)


def _pieces(conversation: Conversation, first: int, kept: int) -> list[str]:
    """The messages from `first` on, a text each. Reasoning is shown from message `kept` on."""
    order = declared_order(conversation.tools)
    out: list[str] = []
    messages = conversation.messages
    for at in range(first, len(messages)):
        message = messages[at]
        match message.role:
            case "system":
                out.append(_SYSTEM + message.text)
            case "user":
                out.append(_USER + message.text)
            case "tool":
                run = "" if at > first and messages[at - 1].role == "tool" else _OBSERVATION
                out.append(run + _result(message.text))
            case "assistant":
                out.append(_ASSISTANT + _said(message, at >= kept, order))
    return out


def _said(message: Message, keep: bool, order: Mapping[str, Mapping[str, int]]) -> str:
    """What stands behind the token that opens an assistant's turn."""
    content = message.text.strip(SPACE)
    think = f"{_OPEN}{message.reasoning}{_CLOSE}" if keep else _NO_REASONING
    if content.startswith((_OPEN, _CLOSE)):
        think = ""  # the client left the reasoning where it was sampled
    calls = message.raw if message.raw is not None else "".join(_call(call, order) for call in message.calls)
    return think + content + calls


def _call(call: Call, order: Mapping[str, Mapping[str, int]]) -> str:
    pairs = arguments(call, order)
    body = "".join(
        f"<arg_key>{escape(key, '</arg_key>')}</arg_key><arg_value>{escape(value, '</arg_value>')}</arg_value>"
        for key, value in ([("arguments", call.arguments)] if pairs is None else pairs)
    )
    return f"<tool_call>{call.name}{body}</tool_call>"


def _result(text: str) -> str:
    return f"<tool_response>{escape(text, '</tool_response>')}</tool_response>"


def _answer(thinking: bool) -> str:
    return _ASSISTANT + (_OPEN if thinking else _NO_REASONING)


def _opening(conversation: Conversation) -> str:
    return _answer(conversation.thinking.enabled) if answer_due(conversation.messages) else ""


def _kept_from(conversation: Conversation) -> int:
    """The first message whose reasoning is shown: all where tools play a part, else those that no user's message follows."""
    if conversation.tool_context:
        return 0
    messages = conversation.messages
    return next((at + 1 for at in reversed(range(len(messages))) if messages[at].user_like), 0)


def _visible(conversation: Conversation, pieces: Sequence[str], kept: int) -> Visible | None:
    if conversation.tool_context and reasoning_returns(conversation):
        return None
    messages = conversation.messages
    first = len(messages)
    if not conversation.tool_context:
        # The next user's message takes the reasoning from what is answered without one, such as a late system message.
        first = next((at for at in range(kept, len(messages)) if messages[at].reasoning), first)
    later = "".join(_pieces(conversation, first, len(messages)))
    return Visible(sum(map(len, pieces[: first + 1])), f"{later}{_answer(thinking=False)}", "both")


def _continues(messages: Sequence[Message], pieces: Sequence[str]) -> Continues | None:
    found = results(messages)
    return found and Continues(found[1], sum(map(len, pieces[: found[0] + 1])))
