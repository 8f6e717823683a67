"""Calls as bare JSON: what is a call, what is an answer in JSON, and that no cut makes a difference."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4batch.chat.events import CallDelta, CallEnd, CallStart, Content
from tests.chat.reading import Answer, check_same, feed, in_every_cut, tracker
from tests.chat.test_hermes import CALLED_ADD, CALLED_LS, JSON, Case

TAG = "<|python_tag|>"
LS = '{"name": "sh", "parameters": {"cmd": "ls -l"}}'
ADD = '{"name": "add", "parameters": {"a": 1, "b": [2.50, {"c": null}]}}'
CALLS = {
    "plain": Case(LS, [CALLED_LS]),
    "marked": Case(TAG + LS, [CALLED_LS]),
    "marked, space between": Case(TAG + "\n " + LS, [CALLED_LS]),
    "marked, behind content": Case("Let me see.\n" + TAG + LS, [CALLED_LS], "Let me see.", raw="\n" + TAG + LS),
    "spread out": Case('{\n  "name" : "sh",\n  "parameters" : {\n    "cmd" : "ls -l"\n  }\n}', [CALLED_LS]),
    "minified": Case('{"name":"sh","parameters":{"cmd":"ls -l"}}', [CALLED_LS]),
    "several": Case(f"{LS}; {ADD}", [CALLED_LS, CALLED_ADD]),
    "several, glued": Case(f"{LS};{ADD};{LS}", [CALLED_LS, CALLED_ADD, CALLED_LS]),
    "several, on lines": Case(f"{LS}\n{ADD}", [CALLED_LS, CALLED_ADD]),
    "several, marked": Case(f"{TAG}{LS}; {ADD}", [CALLED_LS, CALLED_ADD]),
    "several, each marked": Case(f"{TAG}{LS}{TAG}{ADD}", [CALLED_LS, CALLED_ADD]),
    "a semicolon too many": Case(f"{LS};", [CALLED_LS], raw=LS),
    "a semicolon and a word": Case(f"{LS}; done", [CALLED_LS], raw=LS),
    "space before it": Case("\n\n" + LS, [CALLED_LS]),
    "text behind it": Case(LS + "\nDone.", [CALLED_LS], raw=LS),
    "parameters first": Case('{"parameters": {"cmd": "ls -l"}, "name": "sh"}', [CALLED_LS]),
    "arguments for parameters": Case('{"name": "sh", "arguments": {"cmd": "ls -l"}}', [CALLED_LS]),
    "a type": Case('{"type": "function", "name": "sh", "parameters": {"cmd": "ls -l"}}', [CALLED_LS]),
    "no parameters": Case('{"name": "add", "parameters": {}}', [("add", {})]),
    "marked, none at all": Case(TAG + '{"name": "add"}', [("add", {})]),
    "marked, a tool nobody offered": Case(TAG + '{"name": "rm", "parameters": {"a": 1}}', [("rm", {"a": 1})]),
    "nested": Case(
        '{"name": "add", "parameters": {"a": {"name": "sh", "parameters": {}}}}',
        [("add", {"a": {"name": "sh", "parameters": {}}})],
    ),
    "separators in data": Case(
        '{"name": "sh", "parameters": {"cmd": "a; {b}}; <|python_tag|>"}}', [("sh", {"cmd": "a; {b}}; <|python_tag|>"})]
    ),
    "escapes in data": Case(r'{"name": "sh", "parameters": {"cmd": "\"\\\u00e9"}}', [("sh", {"cmd": '"\\é'})]),
    "letters of all kinds": Case('{"name": "sh", "parameters": {"cmd": "漢字 😀"}}', [("sh", {"cmd": "漢字 😀"})]),
    "complete at the limit": Case(LS, [CALLED_LS], given="length"),
    "complete, the next one cut": Case(f"{LS}; ", [CALLED_LS], raw=LS),
    "thought": Case("hm</think>" + LS, [CALLED_LS], reasoning=["hm"], thinking=True, raw=LS),
    "marked, in open reasoning": Case("I call " + TAG + LS, [CALLED_LS], reasoning=["I call"], thinking=True, raw=" " + TAG + LS),
}
TEXTS = [
    "Just an answer.",
    "{",
    "{}",
    '{"age": 3}',
    '{"name": "Bob", "age": 3}',
    '{"name": "sh", "age": 3}',
    '{"name": "sh"}',
    '{"name": "sh", "parameters": ["ls"]}',
    '{"name": "sh", "parameters": "{}"}',
    '{"name": "sh", "parameters": null}',
    '{"parameters": {"a": 1}}',
    '{"parameters": {"a": 1}, "name": "Bob"}',
    '{"type": "object", "properties": {}}',
    '{"name": ["sh"]}',
    "{'name': 'sh'}",
    "{name: sh}",
    '{"name"',
    '{"name": "sh", "par',
    "{ x } is a set",
    f"Like this: {LS}",
    f"```\n{LS}\n```",
    f"[{LS}]",
    "a <|python_ta b",
    TAG + "print(1)",
    TAG + 'search.call(query="x")',
    TAG + '{"parameters": {}}',
    TAG + "{}",
    TAG + '{"name": "sh", "parameters": {"cmd": ',
    '{"name": "sh", "parameters": {"cmd": "l',
    '{"name": "sh", "parameters": {"cmd": "ls"}, "age": 3}',
    '{"name": "sh", "parameters": {"cmd": "ls",}}',
]


def answer(case: Case) -> Answer:
    return Answer(case.text, "llama3", case.thinking, case.given)


@pytest.mark.parametrize("name", CALLS)
def test_what_is_called_does_not_depend_on_the_cuts(name: str) -> None:
    case = CALLS[name]
    read = in_every_cut(answer(case))
    assert read.calls == list(case.calls)
    assert read.content == case.content
    assert read.reasoning == list(case.reasoning)
    assert read.end.reason == "tool_calls"
    assert read.end.raw == (case.text if case.raw is None else case.raw)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("reason", ["stop", "length"])
def test_what_is_no_call_is_text_to_the_last_character(text: str, reason: str) -> None:
    read = in_every_cut(Answer(text, "llama3", reason=reason))
    assert read.calls == []
    assert read.content == text
    assert (read.end.reason, read.end.raw) == (reason, None)


@given(text=st.sampled_from([*TEXTS, *(case.text for case in CALLS.values() if not case.thinking)]), data=st.data())
def test_random_cuts_change_nothing(text: str, data: st.DataObject) -> None:
    borders = data.draw(st.lists(st.integers(1, max(1, len(text) - 1)), max_size=20))
    check_same(Answer(text, "llama3"), feed(Answer(text, "llama3")), borders)


def test_an_answer_in_json_is_no_failed_call() -> None:
    assert feed(Answer('{"name": "Bob", "age": 3}', "llama3")).end.malformed == ""
    assert "JSON" in feed(Answer(TAG + "print(1)", "llama3")).end.malformed


def test_an_answer_in_json_flows_as_soon_as_it_can_be_no_call() -> None:
    reader = tracker(Answer("", "llama3"))
    assert reader.push('{"na') == []
    assert reader.push('me": "Bob"') == [Content('{"name": "Bob"')]
    assert not reader.greedy
    assert reader.push(", ") == [Content(",")]


def test_a_call_starts_once_it_is_sure_and_its_parameters_follow_as_they_come() -> None:
    reader = tracker(Answer("", "llama3"))
    assert reader.push('{"name": "sh", "parameters": ') == []
    assert reader.push('{"cmd": "l') == [CallStart(0, "call_0", "sh"), CallDelta(0, '{"cmd":"l')]
    assert reader.push('s"}') == [CallDelta(0, 's"}')]
    assert reader.push("}") == [CallEnd(0)]
    assert not reader.done  # another may follow
    assert reader.push("; ") == []
    assert reader.push('{"name": "add", "parameters": {') == [CallStart(1, "call_1", "add"), CallDelta(1, "{")]


def test_markup_is_text_where_no_tools_are_offered() -> None:
    for text in (LS, TAG + LS):
        read = in_every_cut(Answer(text, "llama3", tools=None))
        assert (read.calls, read.content, read.end.reason) == ([], text, "stop")


@given(
    arguments=st.dictionaries(st.text(max_size=4), JSON, max_size=3),
    tag=st.booleans(),
    ascii=st.booleans(),
    size=st.integers(1, 9),
)
def test_any_parameters_come_back_as_they_were_meant(arguments: dict[str, Any], tag: bool, ascii: bool, size: int) -> None:
    text = TAG * tag + json.dumps({"name": "sh", "parameters": arguments}, ensure_ascii=ascii)
    read = feed(Answer(text, "llama3"), [text[i : i + size] for i in range(0, len(text), size)])
    assert read.calls == [("sh", arguments)]
    assert read.end.raw == text
