"""DeepSeek V4: turns that open with a role's token, answers that end with one, calls in DSML, results inside the user's turn.

Owns how this family writes a conversation, V4.1 included as far as it writes the same. Parses nothing, knows no tokens.

Text of users and clients stands as it is: one that types the text of a special token gets that token. Only what a tag of ours
closes is escaped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from ds4batch.chat.conversation import Call, Conversation, Effort, Message, Tool
from ds4batch.chat.dialects.base import Rendered
from ds4batch.chat.dialects.history import answer_due, check_first, leading_systems, orphans_at, reasoning_returns, results
from ds4batch.chat.escapes import attribute, escape
from ds4batch.chat.schemas import members
from ds4batch.messages import Continues, Visible

BEGIN, END = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
OPEN, CLOSE = "<think>", "</think>"
BREAK = "\n\n"  # before calls, behind the tools, between texts of one turn

_THOROUGH = (
    "Reasoning Effort: Absolute maximum.\n"
    "Take the problem apart before you solve it, follow every branch to its end, and write down each step and each assumption.\n"
    "Check the result against edge cases and doubts of your own before you answer.\n\n"
)
_BEYOND = (
    "Reasoning Effort: Beyond maximum.\n"
    "Take the problem apart, solve each part in more than one way, and go on until the ways agree.\n"
    "Try to refute what you found, trace every doubt to its cause, and answer only when nothing is left to check.\n\n"
)
EFFORTS_PREVIEW: Mapping[Effort, str] = {"max": _THOROUGH}
"""What the checkpoints before 0731 are told, by effort."""
EFFORTS_0731: Mapping[Effort, str] = {"medium": _THOROUGH, "high": _THOROUGH, "max": _BEYOND}
"""What 0731 and later ones are told. A low effort needs no words."""

_TOOLS = """## Tools

The tools described below can be called. A call is written in this form, with a parameter element for each argument:

<{calls}>
<{invoke} name="$TOOL_NAME">
<{parameter} name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{parameter}>
...
</{invoke}>
</{calls}>

Strings are written as they are, with string="true"; values of any other type as JSON, with string="false". Several calls stand in \
one block. Reasoning that was begun is finished with </think> before anything is called.

### Available Tool Schemas

{schemas}

Names and types of parameters are those of the schemas."""
_FAILED = "Tool error: invalid DSML tool call: {detail}\nNothing was executed."
_REMINDER = (
    'Write the whole call again, as the tools were described: <{calls}>, <{invoke} name="...">, a <{parameter} name="..." '
    'string="true|false"> for each argument, and the end tags of all three.'
)


class Tags(NamedTuple):
    """Names of the elements that calls consist of."""

    calls: str
    invoke: str
    parameter: str


class DeepSeekV4:
    """The dialect of DeepSeek V4 Flash and PRO.

    System messages at the beginning stand behind the tools, later ones where they were said; the family has no token for them.
    Without tools the reasoning of earlier turns is left out. A conversation that ends with an answer is continued inside it.
    """

    name = "deepseek-v4"
    grammar = "dsml"
    stops: tuple[str, ...] = (END,)
    levels = False
    tags = Tags("｜DSML｜tool_calls", "｜DSML｜invoke", "｜DSML｜parameter")

    def __init__(self, efforts: Mapping[Effort, str] = EFFORTS_0731) -> None:
        """`efforts`: what the prompt begins with, by effort, its blank line included: the checkpoint's habit."""
        self._efforts = efforts

    def render(self, conversation: Conversation) -> Rendered:
        """See Dialect. Refuses nothing."""
        messages = conversation.messages
        pieces = [BEGIN + self.head(conversation), *self._pieces(conversation, 0)]
        opening = _opening(conversation)
        text = "".join(pieces) + opening
        opened = bool(opening) and conversation.thinking.enabled
        return Rendered(
            text,
            len(text) - len(opening or pieces[-1]),  # of an answer that is continued, its own opening
            opened,
            self._visible(conversation, len(text)) if opened else None,
            _continues(messages, pieces),
        )

    def tail(self, conversation: Conversation, first: int) -> str:
        """See Dialect. Begins with the end of the turn. Raises ValueError where no turn begins."""
        check_first(conversation.messages, first)
        return "".join(self._pieces(conversation, first)) + _opening(conversation)

    def retry(self, conversation: Conversation, thinking_open: bool, detail: str) -> str:
        """See Dialect. Reminds of the form as a system message would."""
        said = (
            Message("assistant"),
            Message("tool", _FAILED.format(detail=detail)),
            Message("system", _REMINDER.format(**self.tags._asdict())),
        )
        return (CLOSE if thinking_open else "") + self.tail(Conversation(said, (), conversation.thinking), 1)

    # Where V4.1 writes otherwise.

    def head(self, conversation: Conversation) -> str:
        """What stands before the first message."""
        thinking = conversation.thinking
        effort = self._efforts.get(thinking.effort, "") if thinking.enabled else ""
        tools = self.tools(conversation.tools)
        return effort + (tools and tools + BREAK)

    def leads(self, messages: Sequence[Message]) -> int:
        """How many system messages belong to the head: they ask for no answer."""
        return leading_systems(messages)

    def start(self, conversation: Conversation, at: int) -> str:
        """What stands before the text of message `at`, which is no assistant's."""
        before = _role_before(conversation.messages, at)
        match conversation.messages[at].role:
            case "system":
                return BREAK if before not in ("", "assistant") else ""
            case "tool":
                return USER if before != "tool" else ""
            case _:
                return USER

    # What both write alike.

    def tools(self, tools: Sequence[Tool]) -> str:
        """The block that describes the tools, "" for none."""
        return _TOOLS.format(**self.tags._asdict(), schemas="\n".join(tool.schema for tool in tools)) if tools else ""

    def _pieces(self, conversation: Conversation, first: int) -> list[str]:
        """The messages from `first` on, a text each. The end of an answer stands before the message that follows it."""
        messages = conversation.messages
        leads, orphans = self.leads(messages), orphans_at(messages)
        kept = self._kept_from(conversation, leads) if conversation.thinking.enabled else len(messages)
        out: list[str] = []
        for at, message in enumerate(_in_call_order(messages, first), first):
            before = _role_before(messages, at)
            end = END if before == "assistant" or at == orphans else ""
            match message.role:
                case "assistant":
                    asked = at > leads and before != "assistant"
                    thought = f"{OPEN}{message.reasoning}{CLOSE}" if at >= kept else CLOSE
                    calls = self._calls(message.calls) if message.raw is None else message.raw
                    piece = (ASSISTANT + thought if asked else "") + message.text + calls
                case "tool":
                    piece = f"{self.start(conversation, at)}<tool_result>{escape(message.text, '</tool_result>')}</tool_result>"
                case _:
                    piece = self.start(conversation, at) + message.text
            out.append(end + piece)
        return out

    def _kept_from(self, conversation: Conversation, leads: int) -> int:
        """The first message whose reasoning is shown: all where tools play a part, else those that nothing asks behind."""
        if conversation.tool_context:
            return 0
        messages = conversation.messages
        return next((at + 1 for at in range(len(messages) - 1, leads - 1, -1) if messages[at].role != "assistant"), 0)

    def _visible(self, conversation: Conversation, length: int) -> Visible | None:
        """What the next request shows instead of the reasoning that is about to be sampled, behind `length` characters."""
        messages = conversation.messages
        if len(messages) <= self.leads(messages):
            return None  # what answers a head alone stands behind it without an opening
        if not conversation.tool_context:
            return Visible(length - len(OPEN), CLOSE)
        return None if reasoning_returns(conversation) else Visible(length, CLOSE)

    def _calls(self, calls: Sequence[Call]) -> str:
        if not calls:
            return ""
        invoked = "".join(map(self._invoke, calls))
        return f"{BREAK}<{self.tags.calls}>\n{invoked}</{self.tags.calls}>"

    def _invoke(self, call: Call) -> str:
        invoke, parameter = self.tags.invoke, self.tags.parameter
        close = f"</{parameter}>"
        found = members(call.arguments)
        out = [f'<{invoke} name="{attribute(call.name)}">\n']
        for key, text, spelt in [("arguments", call.arguments, "")] if found is None else found:
            if text is None:  # the tag can only stand in a string of it
                kind, value = "false", spelt.replace(close, "\\u003c" + close[1:])
            else:
                kind, value = "true", escape(text, close)
            out.append(f'<{parameter} name="{attribute(key)}" string="{kind}">{value}{close}\n')
        return "".join([*out, f"</{invoke}>\n"])


def _role_before(messages: Sequence[Message], at: int) -> str:
    return messages[at - 1].role if at else ""


def _opening(conversation: Conversation) -> str:
    return ASSISTANT + (OPEN if conversation.thinking.enabled else CLOSE) if answer_due(conversation.messages) else ""


def _in_call_order(messages: Sequence[Message], first: int) -> list[Message]:
    """The messages from `first` on, results in the order of the calls before them, those of other calls first.

    Results change places within a run of users' messages and results; what users say keeps its own. No such run goes on at `first`.
    """
    out: list[Message] = []
    places = _places(messages[first - 1]) if first else {}
    for asks, run in groupby(messages[first:], key=lambda message: message.user_like):
        group = list(run)
        if asks:
            at = [i for i, message in enumerate(group) if message.role == "tool"]
            ordered = sorted((group[i] for i in at), key=lambda message: places.get(message.call_id, -1))
            for i, message in zip(at, ordered, strict=True):
                group[i] = message
        else:
            places = next((_places(message) for message in reversed(group) if message.role == "assistant"), places)
        out += group
    return out


def _places(message: Message) -> dict[str, int]:
    return {call.id: place for place, call in enumerate(message.calls)}


def _continues(messages: Sequence[Message], pieces: Sequence[str]) -> Continues | None:
    found = results(messages)
    return found and Continues(found[1], sum(map(len, pieces[: found[0] + 1])))
