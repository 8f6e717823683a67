"""However an answer is cut and whatever it says: the same turn, nothing held for long, and arguments that are JSON."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4batch.chat.events import CallDelta, Content, Reasoning
from ds4batch.chat.grammars import GRAMMARS
from ds4batch.chat.grammars.base import MAX_NAME
from tests.chat.reading import Answer, check_same, feed, tracker

COMMON = [" ", "\n", "a", "é😀", "<", ">", "&", '"', "<think>", "</think>", "</thi", "sh", "add", "1", "&lt;", "amp;", "nk>"]
XML = ["<tool_call>", "</tool_call>", "<tool_", "call>"]
FRAGMENTS = {
    "dsml": [
        *("<tool_calls>", "</tool_calls>", '<invoke name="sh">', "</invoke>", "<｜DSML｜tool_calls>", "<｜DSML｜ calls>"),
        *('<parameter name="cmd" string="true">', '<parameter name="n" string="false">', '<parameter name="x">', "</parameter>"),
        *('{"a": [1, ', "2]}", "true", "/parameter>", "</par", '<invoke name="', '">', "\\"),
    ],
    "glm": [
        *XML,
        "<arg_key>",
        "cmd",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
        "</arg_key><arg_value>",
        "<tool_call>sh",
        "[1]",
    ],
    "qwen": [
        *XML,
        "<function=",
        "<function=sh>",
        "</function>",
        "<parameter=cmd>",
        "<parameter=n>",
        "</parameter>",
        "/parameter>",
    ],
    "hermes": [*XML, '{"name": "sh", "arguments": ', '{"name": ', '"arguments": {', "}", "{", ",", '"sh"', '"a": 1'],
    "llama3": [
        "<|python_tag|>",
        '{"name": "sh", "parameters": ',
        '{"name": ',
        '"parameters": {',
        "}",
        "{",
        ";",
        '"sh"',
        '"a": 1',
    ],
}


WRITTEN = {
    "dsml": [
        '<tool_calls>\n<invoke name="sh">\n<parameter name="cmd" string="true">ls <b></parameter>\n'
        '<parameter name="n" string="false">{"a": [1, "x"]}</parameter>\n</invoke>\n<invoke name="add">\n</invoke>\n</tool_calls>',
        '<tool_calls><invoke name="edit"><parameter name="c"><parameter name="f">x</parameter></parameter></invoke></tool_calls>',
    ],
    "glm": [
        "<tool_call>sh<arg_key>cmd</arg_key><arg_value>ls <b></arg_value><arg_key>n</arg_key><arg_value>[1, 2]</arg_value></tool_call>",
        "<tool_call>add</tool_call>\n<tool_call>sh</tool_call>",
    ],
    "qwen": [
        "<tool_call>\n<function=sh>\n<parameter=cmd>\nls <b>\n</parameter>\n<parameter=n>\n1\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<function=add>\n</function>\n</tool_call>\n<tool_call>\n<function=sh>\n</function>\n</tool_call>",
    ],
    "hermes": [
        '<tool_call>\n{"name": "sh", "arguments": {"cmd": "ls <b>", "n": [1]}}\n</tool_call>',
        '<tool_call>{"name": "add"}</tool_call>',
    ],
    "llama3": [
        '<|python_tag|>{"name": "sh", "parameters": {"cmd": "ls"}}',
        '{"name": "sh", "parameters": {}};{"name": "add", "parameters": {}}',
    ],
}


@st.composite
def fragments(draw: st.DrawFn, grammar: str) -> str:
    """Pieces of markup in any order."""
    fragment = st.sampled_from(FRAGMENTS[grammar] * 2 + COMMON)
    return "".join(draw(st.lists(fragment, max_size=25)))


@st.composite
def damaged(draw: st.DrawFn, grammar: str) -> str:
    """Valid calls in which something is missing, doubled or put in."""
    text = draw(st.sampled_from(["", "Hm.\n\n", "hm</think>", "a</think>b</think>"])) + draw(st.sampled_from(WRITTEN[grammar]))
    for _ in range(draw(st.integers(0, 3))):
        start = draw(st.integers(0, len(text)))
        end = min(len(text), start + draw(st.integers(0, 30)))
        put = draw(st.sampled_from(["", text[start:end] * 2, *FRAGMENTS[grammar], *COMMON]))
        text = text[:start] + put + text[end:]
    return text


@st.composite
def answers(draw: st.DrawFn) -> tuple[Answer, set[int]]:
    """An answer, and where it is cut."""
    grammar = draw(st.sampled_from(sorted(FRAGMENTS)))
    text = draw(fragments(grammar) | damaged(grammar))
    reason = draw(st.sampled_from(["stop", "length", "cut", "error"]))
    cuts = draw(st.sets(st.integers(1, max(1, len(text) - 1))))
    return Answer(text, grammar, draw(st.booleans()), reason), cuts


@given(answers())
@settings(max_examples=1000, deadline=None)
def test_any_cut_of_any_answer_gives_the_same_turn(drawn: tuple[Answer, set[int]]) -> None:
    answer, cuts = drawn
    whole = feed(answer)
    check_same(answer, whole, cuts)
    check_same(answer, whole, range(1, len(answer.text)))
    check_nothing_lost(answer)


def check_nothing_lost(answer: Answer) -> None:
    """What was no call is text: without tags, the reported text is what was sampled, up to the calls' text."""
    read = feed(answer)
    if "<think>" in answer.text or "</think>" in answer.text or GRAMMARS[answer.grammar].trims_newlines:
        return
    shown = "".join(read.reasoning) + read.content
    if read.end.raw is not None:
        assert answer.text.startswith(shown + read.end.raw)
    elif not read.calls:
        assert shown == answer.text


LONG = 3000
PADS = {
    "white space": " \n",
    "brackets": "<",
    "half tags": "</thin",
    "half markers": "<tool_call",
    "markers": "<tool_call>",
    "escapes": "&amp;",
    "amps": "amp;",
    "digits": "12345",
    "words": "so it goes ",
    "closers": "</tool_call></parameter></arg_value>",
}
OPENED = {
    "dsml": [
        "",
        '<tool_calls><invoke name="sh"><parameter name="cmd" string="true">',
        '<tool_calls><invoke name="sh"><parameter name="cmd" string="true">&',
        '<tool_calls><invoke name="sh"><parameter name="cmd">',
        '<tool_calls><invoke name="sh"><parameter name="n" string="false">',
        '<tool_calls><invoke name="sh"><parameter name="n" string="false">"',
        '<tool_calls><invoke name="sh"><parameter name="n" string="false">[',
        '<tool_calls><invoke name="',
        "<tool_calls>",
    ],
    "glm": ["", "<tool_call>", "<tool_call>sh<arg_key>cmd</arg_key><arg_value>", "<tool_call>sh<arg_key>n</arg_key><arg_value>&"],
    "qwen": ["", "<tool_call>", "<tool_call><function=", "<tool_call><function=sh><parameter=cmd>\n"],
    "hermes": ["", '<tool_call>{"name": "sh", "arguments": {"a":', '<tool_call>{"arguments": {"a": "', '<tool_call>{"name": "'],
    "llama3": ["", '{"name": "sh", "parameters": {"a": ', '{"name": "sh", "parameters": {"a": "', '<|python_tag|>{"name": "'],
}


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("pad", PADS.values(), ids=PADS)
@pytest.mark.parametrize(("grammar", "opened"), [(name, text) for name, texts in OPENED.items() for text in texts])
def test_no_text_makes_the_reader_look_at_it_again(grammar: str, opened: str, pad: str, thinking: bool) -> None:
    # What is unread is looked at again with the next character, so it must not grow with the answer.
    answer = Answer(opened + pad * (LONG // len(pad)), grammar, thinking)
    reader = tracker(answer)
    for character in answer.text:
        reader.push(character)
        unread = len(reader._source.text) - reader._source.pos
        assert unread < MAX_NAME / 10
    reader.finish("stop")


@pytest.mark.parametrize("grammar", sorted(FRAGMENTS))
def test_tags_that_are_cut_never_show(grammar: str) -> None:
    reader = tracker(Answer("", grammar, thinking=True))
    shown = ""
    for character in "abc</think>":
        shown += "".join(event.text for event in reader.push(character) if isinstance(event, Content | Reasoning))
    assert shown == "abc"


@pytest.mark.parametrize(("grammar", "opened"), [
    ("dsml", '<tool_calls><invoke name="sh"><parameter name="cmd" string="true">'),
    ("dsml", '<tool_calls><invoke name="sh"><parameter name="n" string="false">["'),
    ("glm", "<tool_call>sh<arg_key>cmd</arg_key><arg_value>"),
    ("qwen", "<tool_call>\n<function=sh>\n<parameter=cmd>\n"),
])  # fmt: skip
def test_long_argument_is_handed_on_with_every_token(grammar: str, opened: str) -> None:
    reader = tracker(Answer("", grammar))
    reader.push(opened)
    for number in range(1000):
        assert reader.push(f"w{number}") == [CallDelta(0, f"w{number}")]
        assert not reader.greedy
