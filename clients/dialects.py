"""How a model of each family writes an answer with reasoning and calls: what a scripted server is to say."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


class Call(NamedTuple):
    """One call, its arguments in the order in which the model writes them."""

    tool: str
    arguments: Sequence[tuple[str, Any]]  # values of JSON


def answer(dialect: str, reasoning: str, text: str, calls: Sequence[Call] = ()) -> str:
    """A whole turn. With no `reasoning` it is one of a model that was told not to think."""
    thought = reasoning + _REASONED[dialect] if reasoning else ""
    return thought + text + (_CALLS[dialect](calls) if calls else "")


def _dsml(outer: str, inner: str, parameter: str) -> Callable[[Sequence[Call]], str]:
    def write(calls: Sequence[Call]) -> str:
        written = [f"\n\n<{outer}>\n"]
        for call in calls:
            written.append(f'<{inner} name="{call.tool}">\n')
            for key, value in call.arguments:
                kind = "true" if isinstance(value, str) else "false"
                written.append(f'<{parameter} name="{key}" string="{kind}">{_value(value)}</{parameter}>\n')
            written.append(f"</{inner}>\n")
        return "".join(written) + f"</{outer}>"

    return write


def _glm(calls: Sequence[Call]) -> str:
    def one(call: Call) -> str:
        pairs = (f"<arg_key>{key}</arg_key><arg_value>{_value(value)}</arg_value>" for key, value in call.arguments)
        return f"<tool_call>{call.tool}{''.join(pairs)}</tool_call>"

    return "".join(map(one, calls))


def _qwen(calls: Sequence[Call]) -> str:
    def one(call: Call) -> str:
        pairs = (f"<parameter={key}>\n{_value(value)}\n</parameter>\n" for key, value in call.arguments)
        return f"<tool_call>\n<function={call.tool}>\n{''.join(pairs)}</function>\n</tool_call>"

    return "\n\n" + "\n".join(map(one, calls))


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


_CALLS: dict[str, Callable[[Sequence[Call]], str]] = {
    "deepseek-v4": _dsml("｜DSML｜tool_calls", "｜DSML｜invoke", "｜DSML｜parameter"),
    "deepseek-v4.1": _dsml("｜DSML｜ calls", "｜DSML｜ invoke", "｜DSML｜ parameter"),
    "glm": _glm,
    "qwen3.8": _qwen,
}
_REASONED = dict.fromkeys(_CALLS, "</think>") | {"qwen3.8": "\n</think>\n\n"}
"""What stands between reasoning and answer."""
DIALECTS = tuple(_CALLS)
