"""Calls as JSON between tags: what is read, what is refused, and that no cut makes a difference."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4batch.chat.events import CallDelta, CallEnd, CallStart
from tests.chat.reading import Answer, check_same, feed, in_every_cut, tracker

LS = '<tool_call>\n{"name": "sh", "arguments": {"cmd": "ls -l"}}\n</tool_call>'
ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2.50, {"c": null}]}}\n</tool_call>'
CALLED_LS, CALLED_ADD = ("sh", {"cmd": "ls -l"}), ("add", {"a": 1, "b": [2.5, {"c": None}]})


def call(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


class Case(NamedTuple):
    """A sampled text, and what it is."""

    text: str
    calls: Sequence[tuple[str, Any]] = ()
    content: str = ""
    reasoning: Sequence[str] = ()
    thinking: bool = False
    given: str = "stop"  # how generation ended
    reason: str = ""  # what is reported; "tool_calls" where there are calls, else as given
    raw: str | None = None  # of the calls; the whole text where there are calls and no content


CALLS = {
    "plain": Case(LS, [CALLED_LS]),
    "on one line": Case('<tool_call>{"name":"sh","arguments":{"cmd":"ls -l"}}</tool_call>', [CALLED_LS]),
    "spread out": Case('<tool_call> {\n "name" : "sh" ,\n "arguments" : { "cmd" : "ls -l" }\n}\n\n</tool_call>', [CALLED_LS]),
    "several": Case(LS + "\n" + ADD, [CALLED_LS, CALLED_ADD]),
    "several, glued": Case(LS + ADD + LS, [CALLED_LS, CALLED_ADD, CALLED_LS]),
    "behind content": Case("Let me see.\n\n" + LS, [CALLED_LS], "Let me see.", raw="\n\n" + LS),
    "text behind it": Case(LS + "\nDone, I think.", [CALLED_LS], raw=LS),
    "blank line behind it": Case(LS + "\n\n", [CALLED_LS], raw=LS),
    "arguments first": Case(call('{"arguments": {"cmd": "ls -l"}, "name": "sh"}'), [CALLED_LS]),
    "parameters for arguments": Case(call('{"name": "sh", "parameters": {"cmd": "ls -l"}}'), [CALLED_LS]),
    "more members": Case(
        call('{"type": "function", "name": "sh", "id": [1, {"x": 2}], "arguments": {"cmd": "ls -l"}}'), [CALLED_LS]
    ),
    "no arguments": Case(call('{"name": "add", "arguments": {}}'), [("add", {})]),
    "none at all": Case(call('{"name": "add"}'), [("add", {})]),
    "null": Case(call('{"name": "add", "arguments": null}'), [("add", {})]),
    "null, early": Case(call('{"arguments": null, "name": "add"}'), [("add", {})]),
    "a string of JSON": Case(call('{"name": "sh", "arguments": "{\\"cmd\\": \\"ls -l\\"}"}'), [CALLED_LS]),
    "an empty string": Case(call('{"name": "sh", "arguments": ""}'), [("sh", {})]),
    "a tool nobody offered": Case(call('{"name": "rm", "arguments": {"a": 1}}'), [("rm", {"a": 1})]),
    "nested": Case(
        call('{"name": "add", "arguments": {"a": {"name": "x", "arguments": {"y": []}}}}'),
        [("add", {"a": {"name": "x", "arguments": {"y": []}}})],
    ),
    "tags in data": Case(
        call('{"name": "sh", "arguments": {"cmd": "</tool_call><tool_call>{}</think>"}}'),
        [("sh", {"cmd": "</tool_call><tool_call>{}</think>"})],
    ),
    "braces and quotes in data": Case(
        call(r'{"name": "sh", "arguments": {"cmd": "echo \"}}\" \\ \u00e9 {"}}'), [("sh", {"cmd": 'echo "}}" \\ é {'})]
    ),
    "letters of all kinds": Case(call('{"name": "sh", "arguments": {"cmd": "漢字 😀 é"}}'), [("sh", {"cmd": "漢字 😀 é"})]),
    "a line break in data": Case(call('{"name": "sh", "arguments": {"cmd": "a\n\tb"}}'), [("sh", {"cmd": "a\n\tb"})]),
    "a name with escapes": Case(call(r'{"name": "s\u0068", "arguments": {"cmd": "ls -l"}}'), [CALLED_LS]),
    "numbers as they are spelt": Case(
        call('{"name": "add", "arguments": {"a": -1.50e3, "b": 0}}'), [("add", {"a": -1500.0, "b": 0})]
    ),
    "no end, stopped": Case(LS.removesuffix("\n</tool_call>"), [CALLED_LS]),
    "half an end, stopped": Case(LS.removesuffix("_call>"), [CALLED_LS]),
    "second without end, stopped": Case(LS + "\n" + ADD.removesuffix("</tool_call>"), [CALLED_LS, CALLED_ADD]),
    "complete at the limit": Case(LS, [CALLED_LS], given="length"),
    "thought": Case("hm\n</think>\n\n" + LS, [CALLED_LS], reasoning=["hm"], thinking=True, raw="\n\n" + LS),
    "thought, said": Case("hm\n</think>\n\nSo:\n" + LS, [CALLED_LS], "So:", ["hm"], thinking=True, raw="\n" + LS),
    "thought, opened by the model": Case("<think>\nhm\n</think>\n\n" + LS, [CALLED_LS], reasoning=["hm"], raw="\n\n" + LS),
    "in open reasoning": Case("I call\n" + LS, [CALLED_LS], reasoning=["I call"], thinking=True, raw="\n" + LS),
}
UNREAD = {  # text to the last character
    "a start that is none": "a <tool_cal b",
    "an end without a start": "a </tool_call> b",
    "no JSON": call("ls -l"),
    "no object": call('["sh"]'),
    "empty": call(""),
    "empty object": call("{}"),
    "no name": call('{"arguments": {"a": 1}}'),
    "an empty name": call('{"name": " ", "arguments": {}}'),
    "a name that is no string": call('{"name": 1}'),
    "two names": call('{"name": "sh", "name": "add"}'),
    "arguments twice": call('{"name": "sh", "arguments": {}, "parameters": {}}'),
    "a list": call('{"name": "sh", "arguments": ["ls"]}'),
    "a string that is no JSON": call('{"name": "sh", "arguments": "ls"}'),
    "single quotes": call("{'name': 'sh'}"),
    "a comma too many": call('{"name": "sh", "arguments": {"cmd": "a",}}'),
    "cut in the name": '<tool_call>\n{"name": "s',
    "cut in the arguments": 'So.\n<tool_call>\n{"name": "sh", "arguments": {"cmd": "l',
    "cut behind the arguments": '<tool_call>\n{"name": "sh", "arguments": {"cmd": "ls"}',
}
CUT = '<tool_call>\n{"name": "sh", "arguments": {"cmd": "l'
TEXTS = {name: Case(text, content=text) for name, text in UNREAD.items()} | {
    "no call": Case("Just an answer.", content="Just an answer."),
    "a start quoted in reasoning": Case("<tool_call> it is</think>\nyes", [], "yes", ["<tool_call> it is"], thinking=True),
    "cut by the limit": Case(CUT, content=CUT, given="length"),
    "cut in reasoning": Case("I call " + CUT, reasoning=["I call " + CUT], thinking=True, given="length"),
}
CASES = CALLS | TEXTS


def answer(case: Case) -> Answer:
    return Answer(case.text, "hermes", case.thinking, case.given)


@pytest.mark.parametrize("name", CASES)
def test_what_an_answer_is_does_not_depend_on_its_cuts(name: str) -> None:
    case = CASES[name]
    read = in_every_cut(answer(case))
    assert read.calls == list(case.calls)
    assert read.content == case.content
    assert read.reasoning == list(case.reasoning)
    assert read.end.reason == (case.reason or ("tool_calls" if case.calls else case.given))
    raw = case.raw if case.raw is not None or not case.calls else case.text
    assert read.end.raw == raw


@given(name=st.sampled_from(sorted(CASES)), data=st.data())
def test_random_cuts_change_nothing(name: str, data: st.DataObject) -> None:
    whole = feed(answer(CASES[name]))
    borders = data.draw(st.lists(st.integers(1, max(1, len(CASES[name].text) - 1)), max_size=20))
    check_same(answer(CASES[name]), whole, borders)


def test_a_call_starts_with_its_name_and_its_arguments_follow_as_they_come() -> None:
    reader = tracker(Answer("", "hermes"))
    assert reader.push('<tool_call>\n{"name": "sh"') == [CallStart(0, "call_0", "sh")]
    assert reader.push(', "arguments": {"cmd": "l') == [CallDelta(0, '{"cmd":"l')]
    assert reader.push("s </tool") == [CallDelta(0, "s </tool")]
    assert reader.push('"') == [CallDelta(0, '"')]
    assert reader.push("}") == [CallDelta(0, "}")]
    assert reader.push("}") == [CallEnd(0)]


def test_arguments_before_the_name_wait_for_it() -> None:
    reader = tracker(Answer("", "hermes"))
    assert reader.push('<tool_call>{"arguments": {"cmd": "ls"}, "name": ') == []
    assert reader.push('"sh"') == [CallStart(0, "call_0", "sh"), CallDelta(0, '{"cmd":"ls"}')]


def test_only_structure_is_greedy() -> None:
    text = '<tool_call>{"name": "sh", "arguments": {"cmd": "ls"}}</tool_call>'
    reader = tracker(Answer("", "hermes"))
    greedy = ""
    for char in text:
        reader.push(char)
        greedy += "!" if reader.greedy else "."
    start = text.index("l>") + 1  # the last character of the first tag: from here on it is a call
    assert set(greedy[:start]) == {"."}
    strings = [text.index('cmd"'), text.index('ls"')]
    for at in strings:
        assert greedy[at] == "."
    for at in (start, text.index("name"), text.index('sh"'), text.index("arguments"), text.index("}}"), text.index("</") + 3):
        assert greedy[at] == "!", text[at:]
    assert not reader.greedy


def test_why_a_call_could_not_be_read_is_told_once_nothing_of_it_was_reported() -> None:
    assert "no name" in feed(Answer(call('{"arguments": {}}'), "hermes")).end.malformed
    assert "JSON object" in feed(Answer(call("ls"), "hermes")).end.malformed
    assert feed(Answer(LS, "hermes")).end.malformed == ""


def test_markup_is_text_where_no_tools_are_offered() -> None:
    read = in_every_cut(Answer(LS, "hermes", tools=None))
    assert (read.calls, read.content, read.end.reason) == ([], LS, "stop")


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(["</tool_call>", "<think>"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(
    arguments=st.dictionaries(st.text(max_size=4), JSON, max_size=3),
    first=st.booleans(),
    ascii=st.booleans(),
    size=st.integers(1, 9),
)
def test_any_arguments_come_back_as_they_were_meant(arguments: dict[str, Any], first: bool, ascii: bool, size: int) -> None:
    members = {"name": "sh", "arguments": arguments} if first else {"arguments": arguments, "name": "sh"}
    text = call(json.dumps(members, ensure_ascii=ascii))
    read = feed(Answer(text, "hermes"), [text[i : i + size] for i in range(0, len(text), size)])
    assert read.calls == [("sh", arguments)]
    assert read.end.raw == text
