"""How each dialect's model writes a turn: what a scripted model has to say so that a client gets reasoning, text and calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

Arguments = Mapping[str, Any]

AT = 'https://x.test/?a=1&b="<é>" </think> {"' + "\n\\n'"
"""A string that no writer of calls may trip over."""
LOOK: tuple[str, Arguments] = ("look", {"at": AT, "times": 3})
COUNT: tuple[str, Arguments] = ("count", {"what": "sheep \U0001f411"})
NO_ARGUMENTS: tuple[str, Arguments] = ("rest", {})

SCHEMAS: dict[str, dict[str, Any]] = {
    "look": {
        "type": "object",
        "properties": {"at": {"type": "string"}, "times": {"type": "integer"}},
        "required": ["at"],
    },
    "count": {"type": "object", "properties": {"what": {"type": "string"}}},
    "rest": {"type": "object", "properties": {}},
}
"""Parameters of the tools, by name."""


class Spelling(NamedTuple):
    """One dialect's."""

    grammar: str
    opened: bool  # the prompt leaves the model inside its reasoning
    reasoned: str  # a reasoning, as a format with one place
    gap: str  # before the calls
    calls: Callable[[list[tuple[str, Arguments]]], str]
    unreadable: str  # calls of which nothing can be reported
    closer: str  # what may lack at the end; "" where it would be open whether the call is whole

    def turn(self, reasoning: str, content: str, *calls: tuple[str, Arguments]) -> str:
        """A whole turn; without reasoning there is no think tag."""
        return self.reasoned.format(reasoning) * bool(reasoning) + content + self.block(*calls)

    def block(self, *calls: tuple[str, Arguments]) -> str:
        """Calls and what separates them from the text."""
        return self.gap + self.calls(list(calls)) if calls else ""


def _dsml(prefix: str, block: str) -> Callable[[list[tuple[str, Arguments]]], str]:
    def parameter(name: str, value: Any) -> str:
        text, kind = (value, "true") if isinstance(value, str) else (json.dumps(value), "false")
        return f'<{prefix}parameter name="{name}" string="{kind}">{text}</{prefix}parameter>\n'

    def write(calls: list[tuple[str, Arguments]]) -> str:
        invoked = [
            f'<{prefix}invoke name="{name}">\n{"".join(parameter(*one) for one in given.items())}</{prefix}invoke>\n'
            for name, given in calls
        ]
        return f"<{prefix}{block}>\n{''.join(invoked)}</{prefix}{block}>"

    return write


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _glm(calls: list[tuple[str, Arguments]]) -> str:
    def pairs(given: Arguments) -> str:
        return "".join(f"<arg_key>{k}</arg_key><arg_value>{_text(v)}</arg_value>" for k, v in given.items())

    return "".join(f"<tool_call>{name}{pairs(given)}</tool_call>" for name, given in calls)


def _qwen(calls: list[tuple[str, Arguments]]) -> str:
    def parameters(given: Arguments) -> str:
        return "".join(f"<parameter={k}>\n{_text(v)}\n</parameter>\n" for k, v in given.items())

    return "\n".join(f"<tool_call>\n<function={name}>\n{parameters(given)}</function>\n</tool_call>" for name, given in calls)


def _hermes(calls: list[tuple[str, Arguments]]) -> str:
    return "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(given, ensure_ascii=False)}}}\n</tool_call>'
        for name, given in calls
    )


_BAR = "\uff5cDSML\uff5c"

SPELLINGS = {
    "deepseek-v4": Spelling(
        grammar="dsml",
        opened=True,
        reasoned="{}</think>",
        gap="\n\n",
        calls=_dsml(_BAR, "tool_calls"),
        unreadable=f"\n\n<{_BAR}tool_calls>\nlook at it",
        closer=f"</{_BAR}tool_calls>",
    ),
    "deepseek-v4.1": Spelling(
        grammar="dsml-v41",
        opened=True,
        reasoned="{}</think>",
        gap="\n\n",
        calls=_dsml(_BAR + " ", "calls"),
        unreadable=f"\n\n<{_BAR} calls>\nlook at it",
        closer=f"</{_BAR} calls>",
    ),
    "glm": Spelling(
        grammar="glm",
        opened=True,
        reasoned="{}</think>",
        gap="",
        calls=_glm,
        unreadable="<tool_call></tool_call>",
        closer="",
    ),
    "qwen3.8": Spelling(
        grammar="qwen",
        opened=True,
        reasoned="{}\n</think>\n\n",
        gap="\n\n",
        calls=_qwen,
        unreadable="\n\n<tool_call>\nlook at it\n</tool_call>",
        closer="\n</tool_call>",
    ),
    "jinja": Spelling(
        grammar="hermes",
        opened=False,
        reasoned="<think>\n{}\n</think>\n\n",
        gap="\n",
        calls=_hermes,
        unreadable="\n<tool_call>\nlook at it\n</tool_call>",
        closer="\n</tool_call>",
    ),
}
"""By the name of the dialect. The template of `jinja` is the plain one of a scripted model, which shows no reasoning."""
