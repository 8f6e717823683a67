"""What a chat template can show, found by asking it: it renders small conversations, and what they said is looked for.

Reading the template's source would be guessing. Owns the questions; what follows from the answers is jinja.py's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ds4batch.chat.places import MARK, behind, common
from ds4batch.chat.template import ChatTemplate

_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "d",
            "parameters": {"type": "object", "properties": {"key_q": {"type": "string", "description": "d"}}, "required": []},
        },
    }
    for name in ("fn_alpha", "fn_beta")
]
_ASK = {"role": "user", "content": "ask_one"}
_MORE = {"role": "user", "content": "ask_two"}
_ANSWER = {"role": "assistant", "content": "answer_one"}
_SYSTEM = {"role": "system", "content": "rule_one"}


class Abilities(NamedTuple):
    """What a template shows, all of it and without a complaint."""

    tools: bool  # tools, a call and its result
    parallel: bool  # several calls in one answer
    spliced: bool  # text in the place of calls shows where they would stand
    system: bool  # a system message at the beginning
    late_system: bool  # one further on, in its place
    user_runs: bool  # two user messages in a row
    answer_runs: bool  # two answers in a row
    lead: str  # white space that it writes before the content of an answer, if there is any


def abilities(template: ChatTemplate) -> Abilities:
    """Ask `template`. A dozen renderings of a few messages."""
    called = [_ASK, _calls("", 1), _result(1)]
    tools = _shows(template, called, ["fn_alpha", "key_q", "fn_beta", "value_1", "result_1"], _TOOLS)
    late = [_SYSTEM, _ASK, _ANSWER, {"role": "system", "content": "rule_two"}, _MORE]
    return Abilities(
        tools=tools,
        parallel=tools and _shows(template, [_ASK, _calls("", 2), _result(1), _result(2)], ["value_1", "value_2"], _TOOLS),
        spliced=not tools or _splices(template),
        system=_shows(template, [_SYSTEM, _ASK], ["rule_one", "ask_one"]),
        late_system=_shows(template, late, ["answer_one", "rule_two", "ask_two"]),
        user_runs=_shows(template, [_ASK, _MORE], ["ask_one", "ask_two"]),
        answer_runs=_shows(
            template, [_ASK, _ANSWER, {**_ANSWER, "content": "answer_two"}, _MORE], ["answer_one", "answer_two", "ask_two"]
        ),
        lead=_lead(template),
    )


def _shows(template: ChatTemplate, messages: Sequence[Any], wanted: Sequence[str], tools: list[Any] | None = None) -> bool:
    """Whether `wanted` all stand in the rendering; without tools, which may be shown anywhere, in this order."""
    text = _rendered(template, messages, tools)
    places = [-1 if text is None else text.find(word) for word in wanted]
    return min(places) >= 0 and (tools is not None or places == sorted(places))


def _splices(template: ChatTemplate) -> bool:
    """Whether an answer with text for calls is rendered like one with calls, up to the text and behind it."""
    thought = {"reasoning_content": "thought_one"}
    as_calls = _rendered(template, [_ASK, {**_calls("answer_one", 1), **thought}, _result(1)], _TOOLS)
    content = {"role": "assistant", "content": "answer_one" + MARK, **thought}
    as_text = _rendered(template, [_ASK, content, _result(1)], _TOOLS)
    rest = behind(as_text)
    if as_calls is None or as_text is None or rest is None:
        return False
    before = as_text[: len(as_text) - len(rest) - len(MARK)].removesuffix("answer_one")  # which some leave out beside calls
    return as_calls.startswith(before) and as_calls.endswith(rest)


def _lead(template: ChatTemplate) -> str:
    said = _rendered(template, [_ASK, {**_ANSWER, "content": MARK}, _MORE], None) or ""
    silent = _rendered(template, [_ASK, {**_ANSWER, "content": ""}, _MORE], None) or ""
    before = said.partition(MARK)[0]
    space = before[common(before, silent) :]
    return space if space.isspace() else ""


def _rendered(template: ChatTemplate, messages: Sequence[Any], tools: list[Any] | None) -> str | None:
    try:
        return template.render(messages, tools=tools)
    except ValueError:
        return None


def _calls(content: str, count: int) -> dict[str, Any]:
    calls = [
        {"id": f"callid00{i}", "type": "function", "function": {"name": "fn_beta", "arguments": {"key_q": f"value_{i}"}}}
        for i in range(1, count + 1)
    ]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def _result(i: int) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"callid00{i}", "name": "fn_beta", "content": f"result_{i}"}
