"""Qwen answers: calls, typing by schema, newlines, mending and failing, in every cut."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4batch.chat.escapes import escape
from ds4batch.chat.events import Content
from ds4batch.chat.tracker import THINK_END
from tests.chat.reading import Answer, check_same, feed, in_every_cut, sampled_characters, tracker

START, STOP = "<tool_call>", "</tool_call>"
F_END, P_END = "</function>", "</parameter>"


def parameter(key: str, value: str) -> str:
    return f"<parameter={key}>\n{value}\n{P_END}\n"


def call(name: str, **parameters: str) -> str:
    return f"{START}\n<function={name}>\n{''.join(parameter(k, v) for k, v in parameters.items())}{F_END}\n{STOP}"


LS, LS_CALL = call("sh", cmd="ls"), ("sh", {"cmd": "ls"})


def answer(text: str, thinking: bool = False, reason: str = "stop") -> Answer:
    return Answer(text, "qwen", thinking, reason)


READABLE = {
    "one parameter": (LS, [LS_CALL], ""),
    "content before": (f"Listing.\n\n{LS}", [LS_CALL], "Listing."),
    "blank lines in content": (f"a\n\nb\n{LS}", [LS_CALL], "a\n\nb"),
    "glued to content": (f"a{LS}", [LS_CALL], "a"),
    "several": (f"{LS}\n{call('add', a='1')}\n{LS}", [LS_CALL, ("add", {"a": 1}), LS_CALL], ""),
    "several glued": (LS + LS, [LS_CALL, LS_CALL], ""),
    "no parameters": (call("add"), [("add", {})], ""),
    "no white space": (LS.replace("\n", ""), [LS_CALL], ""),
    "text after is ignored": (f"{LS}\nDone", [LS_CALL], ""),
    "text after ends the list": (f"{LS}\nDone {LS}", [LS_CALL], ""),
    "an end after is ignored": (LS + STOP, [LS_CALL], ""),
    "one newline at each end is syntax": (call("sh", cmd="\n\nls\n\n"), [("sh", {"cmd": "\n\nls\n\n"})], ""),
    "empty string": (call("sh", cmd=""), [("sh", {"cmd": ""})], ""),
    "empty string, one newline": (call("sh", cmd="").replace("\n\n", "\n"), [("sh", {"cmd": ""})], ""),
    "empty string, no newline": (call("sh", cmd="").replace("\n\n", ""), [("sh", {"cmd": ""})], ""),
    "empty untyped": (call("add", a=""), [("add", {"a": ""})], ""),
    "white space is data": (call("sh", cmd="  ls \t"), [("sh", {"cmd": "  ls \t"})], ""),
    "several lines": (call("sh", cmd="a\nb\n\nc"), [("sh", {"cmd": "a\nb\n\nc"})], ""),
    "declared string stays one": (call("sh", cmd="42", cwd='{"a":1}'), [("sh", {"cmd": "42", "cwd": '{"a":1}'})], ""),
    "declared string null": (call("sh", cmd="null"), [("sh", {"cmd": "null"})], ""),
    "number": (call("add", a=" 42 ", b="-1.5e3"), [("add", {"a": 42, "b": -1500.0})], ""),
    "literals": (call("add", a="true", b="null"), [("add", {"a": True, "b": None})], ""),
    "object over lines": (call("add", a='{\n "x": [1,\n2]\n}'), [("add", {"a": {"x": [1, 2]}})], ""),
    "quoted text keeps its quotes": (call("add", a='"x"'), [("add", {"a": '"x"'})], ""),
    "no JSON is text": (
        call("add", a="[1,", b="ls -l", c="Infinity"),
        [("add", {"a": "[1,", "b": "ls -l", "c": "Infinity"})],
        "",
    ),
    "an unknown tool is untyped": (call("other", a="1", b="x"), [("other", {"a": 1, "b": "x"})], ""),
    "quotes and backslashes": (call("sh", cmd='a "b" \\n\t'), [("sh", {"cmd": 'a "b" \\n\t'})], ""),
    "unicode": (call("sh", cmd="né 😀"), [("sh", {"cmd": "né 😀"})], ""),
    "literal tags": (
        call("sh", cmd=f"{START} {THINK_END} {F_END} {STOP} <parameter=x> <b"),
        [("sh", {"cmd": f"{START} {THINK_END} {F_END} {STOP} <parameter=x> <b"})],
        "",
    ),
    "literal tags, untyped": (call("add", a=f"{STOP}{F_END}"), [("add", {"a": f"{STOP}{F_END}"})], ""),
    "escaped end": (call("sh", cmd=f"a&lt;{P_END[1:]}b"), [("sh", {"cmd": f"a{P_END}b"})], ""),
    "escaped escape": (call("sh", cmd=f"&amp;lt;{P_END[1:]}"), [("sh", {"cmd": f"&lt;{P_END[1:]}"})], ""),
    "entities are data": (call("sh", cmd="&lt;b&gt; &amp; &"), [("sh", {"cmd": "&lt;b&gt; &amp; &"})], ""),
    "order as sampled": (call("edit", new="n", path="p"), [("edit", {"new": "n", "path": "p"})], ""),
    "white space in tags": (LS.replace("=sh>", "= sh >").replace("=cmd>", "=cmd >"), [LS_CALL], ""),
    "only the outer end is missing": (LS.removesuffix(STOP), [LS_CALL], ""),
    "only the outer end of the second is missing": (f"{LS}\n{LS}".removesuffix(f"\n{STOP}"), [LS_CALL, LS_CALL], ""),
    "the outer end is cut": (LS[:-1], [LS_CALL], ""),
    "an end without a start is text": (f"a {STOP} b\n{LS}", [LS_CALL], f"a {STOP} b"),
    "a think tag in content is text": (f"a {THINK_END} b\n{LS}", [LS_CALL], f"a {THINK_END} b"),
    "a function without its wrapper is text": (f"<function=sh>\n{F_END}\n{LS}", [LS_CALL], f"<function=sh>\n{F_END}"),
}

UNREADABLE = {
    "prose": (f"{START} is a marker", 0),
    "start only": (START, 0),
    "nothing": (START + STOP, 0),
    "no function": (f"{START}\n{parameter('a', 'b')}{STOP}", 0),
    "JSON in the tags": (f'{START}\n{{"name": "sh", "arguments": {{}}}}\n{STOP}', 0),
    "blank name": (f"{START}<function= >{F_END}{STOP}", 0),
    "a tag in the name": (f"{START}<function=a<b>{F_END}{STOP}", 0),
    "name over lines": (f"{START}<function=a\n>{F_END}{STOP}", 0),
    "endless name": (f"{START}<function={'x' * 3000}", 0),
    "blank key": (LS.replace("=cmd", "="), 0),
    "a tag in the key": (LS.replace("=cmd", "=<b"), 0),
    "text between parameters": (LS.replace("<parameter", "and <parameter"), 0),
    "value without an end": (LS.replace(P_END, ""), 0),
    "function without an end": (LS.replace(F_END, ""), 0),
    "open value": (LS[: LS.index(P_END)], 0),
    "a key that is cut": (LS[: LS.index("md>")], 0),
    "second call is open": (f"{LS}\n{LS[:-25]}", 1),
    "second call is prose": (f"{LS}\n{START} is a tag", 1),
}


@pytest.mark.parametrize(("sampled", "calls", "content"), READABLE.values(), ids=READABLE)
def test_readable_calls_are_made(sampled: str, calls: list[tuple[str, object]], content: str) -> None:
    read = in_every_cut(answer(sampled))
    assert read.calls == calls
    assert read.content == content
    assert read.end.reason == "tool_calls"
    assert len(read.turn.calls) == len(calls)
    assert read.end.raw is not None
    assert sampled.startswith(content + read.end.raw)


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize(("sampled", "complete"), UNREADABLE.values(), ids=UNREADABLE)
def test_unreadable_calls_are_text_and_nothing_is_lost(sampled: str, complete: int, thinking: bool) -> None:
    head = f"r\n{THINK_END}\n\n" if thinking else ""
    read = in_every_cut(answer(f"{head}Hm.\n{sampled}", thinking))
    assert len(read.calls) == complete
    assert read.end.reason == "stop"
    assert read.end.raw is None
    assert read.content == (f"Hm.{sampled[len(LS) :]}" if complete else f"Hm.\n{sampled}")
    assert bool(read.end.malformed) == (not read.turn.calls)
    if read.end.malformed:
        assert read.end.events == [Content(f"\n{sampled}")]


@pytest.mark.parametrize(("sampled", "complete"), UNREADABLE.values(), ids=UNREADABLE)
def test_call_that_the_length_cut_is_truncated(sampled: str, complete: int) -> None:
    read = in_every_cut(answer(sampled, reason="length"))
    assert read.end.reason == "length"
    assert read.end.malformed == ""
    assert len(read.calls) == complete


@pytest.mark.parametrize("reason", ["length", "stop"])
def test_calls_cut_anywhere_keep_complete_ones_and_show_the_rest(reason: str) -> None:
    sampled = f"Hm.\n{LS}\n{call('add', a='[1, 2]', b='x')}"
    for length in range(len(sampled)):
        part = answer(sampled[:length], reason=reason)
        read = feed(part)
        check_same(part, read, range(1, length))
        complete = part.text.count(F_END)
        assert len(read.calls) == complete
        if not complete:
            assert read.content == part.text
            assert read.end.reason == reason
        else:
            tail = part.text[part.text.rindex(F_END) + len(F_END) :]
            finished = tail.lstrip().startswith(STOP)
            begun = START in tail
            assert (read.end.reason == "tool_calls") == ((finished or reason == "stop") and not begun)
            assert read.content == "Hm." + (f"\n{part.text[part.text.rindex(START) :]}" if begun else "")


def test_declared_string_streams_without_its_newlines() -> None:
    reader = tracker(answer(""))
    pieces = []
    for character in call("sh", cmd="ab\nc", timeout="123"):
        pieces += [getattr(event, "text", type(event).__name__) for event in reader.push(character)]
    assert pieces == ["CallStart", "{", '"cmd":"', "a", "b", "\\nc", '"', ',"timeout":', "123", "}", "CallEnd"]


def test_structure_is_greedy_and_values_are_sampled() -> None:
    sampled = call("sh", cmd="a<b", timeout="12")
    assert sampled_characters(answer(sampled)) == f"{START}\na<b\n</\n12\n</"


@pytest.mark.parametrize(("sampled", "reasoning", "content"), [
    (f"r\n{THINK_END}\n\nHi", ["r"], "Hi"),
    (f"r{THINK_END}Hi", ["r"], "Hi"),
    (f"r \n\n{THINK_END}\n\n\n  Hi\n", ["r "], "  Hi\n"),
    (f"\n{THINK_END}\n\nHi", [], "Hi"),
    (f"<think>\nr\n{THINK_END}\n\nHi", ["r"], "Hi"),
    (f"r\n{THINK_END}\n\n", ["r"], ""),
    (f"r\n\nq\n{THINK_END}\n\nHi\n\n", ["r\n\nq"], "Hi\n\n"),
])  # fmt: skip
def test_newlines_around_the_think_tag_are_syntax(sampled: str, reasoning: list[str], content: str) -> None:
    read = in_every_cut(answer(sampled, thinking=True))
    assert read.reasoning == reasoning
    assert read.content == content
    without_tools = in_every_cut(answer(sampled, thinking=True)._replace(tools=None))
    assert without_tools.turn == read.turn


def test_newlines_between_the_think_tag_and_a_call_are_part_of_the_calls_text() -> None:
    read = in_every_cut(answer(f"r\n{THINK_END}\n\n{LS}", thinking=True))
    assert read.content == ""
    assert read.end.raw == f"\n\n{LS}"


def test_answer_behind_reasoning_is_not_held() -> None:
    reader = tracker(answer("", thinking=True))
    reader.push(f"r\n{THINK_END}\n\n")
    assert reader.push("Hi") == [Content("Hi")]
    assert reader.push(f" b{THINK_END}") == [Content(f" b{THINK_END}")]


@pytest.mark.parametrize("after", ["", "\n", " so", THINK_END, f"{THINK_END}Done"])
def test_complete_call_in_open_reasoning_is_made_at_once(after: str) -> None:
    read = in_every_cut(answer(f"I will list.\n{LS}{after}", thinking=True))
    assert read.calls == [LS_CALL]
    assert read.reasoning == ["I will list."]
    assert read.content == ""
    assert read.end.reason == "tool_calls"


@pytest.mark.parametrize("quoted", [START, f"{START} tags", f"{START}\n<function=sh>", LS[: -len(STOP)], STOP, F_END])
def test_call_quoted_in_reasoning_that_is_closed_is_not_made(quoted: str) -> None:
    read = in_every_cut(answer(f"see {quoted}{THINK_END}Done.", thinking=True))
    assert not read.turn.calls
    assert read.reasoning == [f"see {quoted.rstrip()}"]
    assert read.content == "Done."
    assert read.end.malformed == ""


FRAGMENTS = st.sampled_from([*'ab &<>/\n"\\1', "lt;", "amp;", P_END[1:], P_END, STOP, START])


@given(st.lists(FRAGMENTS, max_size=20).map("".join), st.data())
@settings(max_examples=100, deadline=None)
def test_any_string_comes_back_from_its_escaped_form(value: str, data: st.DataObject) -> None:
    sampled = call("sh", cmd=escape(value, P_END))
    read = feed(answer(sampled))
    check_same(answer(sampled), read, data.draw(st.sets(st.integers(1, len(sampled)))))
    assert read.calls == [("sh", {"cmd": value})]
