"""GLM answers: calls, typing by schema, failing, in every cut."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4batch.chat.escapes import escape
from ds4batch.chat.events import Content
from ds4batch.chat.tracker import THINK_END
from tests.chat.reading import Answer, check_same, feed, in_every_cut, sampled_characters, tracker

START, STOP = "<tool_call>", "</tool_call>"
V_END = "</arg_value>"


def call(name: str, **arguments: str) -> str:
    return f"{START}{name}{''.join(argument(key, value) for key, value in arguments.items())}{STOP}"


def argument(key: str, value: str) -> str:
    return f"<arg_key>{key}</arg_key><arg_value>{value}{V_END}"


LS, LS_CALL = call("sh", cmd="ls"), ("sh", {"cmd": "ls"})


def answer(text: str, thinking: bool = False, reason: str = "stop") -> Answer:
    return Answer(text, "glm", thinking, reason)


READABLE = {
    "one argument": (LS, [LS_CALL], ""),
    "content before": (f"Listing.{LS}", [LS_CALL], "Listing."),
    "white space before": (f"Listing. \n\n{LS}", [LS_CALL], "Listing."),
    "blank lines in content": (f"a\n\nb{LS}", [LS_CALL], "a\n\nb"),
    "several glued": (LS + call("add", a="1") + LS, [LS_CALL, ("add", {"a": 1}), LS_CALL], ""),
    "several on lines": (f"{LS}\n{LS}\n\n", [LS_CALL, LS_CALL], ""),
    "no arguments": (call("add"), [("add", {})], ""),
    "name on a line": (f"{START}\n sh \n{argument('cmd', 'ls')}\n{STOP}", [LS_CALL], ""),
    "white space between tags": (LS.replace("><", ">\n<").replace("h<", "h\n<"), [LS_CALL], ""),
    "text after is ignored": (f"{LS} Done", [LS_CALL], ""),
    "text after ends the list": (f"{LS}\nDone {LS}", [LS_CALL], ""),
    "a tag after is ignored": (f"{LS}<tool_", [LS_CALL], ""),
    "an end after is ignored": (LS + STOP, [LS_CALL], ""),
    "value is verbatim": (call("sh", cmd="\n ls \n"), [("sh", {"cmd": "\n ls \n"})], ""),
    "empty string": (call("sh", cmd=""), [("sh", {"cmd": ""})], ""),
    "empty untyped": (call("add", a=""), [("add", {"a": ""})], ""),
    "declared string stays one": (call("sh", cmd="42", cwd='{"a":1}'), [("sh", {"cmd": "42", "cwd": '{"a":1}'})], ""),
    "declared string null": (call("sh", cmd="null"), [("sh", {"cmd": "null"})], ""),
    "number": (call("add", a=" 42 ", b="-1.5e3"), [("add", {"a": 42, "b": -1500.0})], ""),
    "literals": (call("add", a="true", b="null"), [("add", {"a": True, "b": None})], ""),
    "object": (call("add", a='{ "x" : [1, {"y": "z z"}] }'), [("add", {"a": {"x": [1, {"y": "z z"}]}})], ""),
    "quoted text keeps its quotes": (call("add", a='"x"'), [("add", {"a": '"x"'})], ""),
    "no JSON is text": (
        call("add", a="[1,", b="01", c="NaN", d="True"),
        [("add", {"a": "[1,", "b": "01", "c": "NaN", "d": "True"})],
        "",
    ),
    "too deep JSON is text or JSON": (call("add", a="[" * 100000), [("add", {"a": "[" * 100000})], ""),
    "an unknown tool is untyped": (call("other", a="1", b="x"), [("other", {"a": 1, "b": "x"})], ""),
    "an undeclared argument is untyped": (call("sh", timeout="5"), [("sh", {"timeout": 5})], ""),
    "quotes and backslashes": (call("sh", cmd='a "b" \\n\t'), [("sh", {"cmd": 'a "b" \\n\t'})], ""),
    "unicode": (call("sh", cmd="né 😀"), [("sh", {"cmd": "né 😀"})], ""),
    "literal tags": (
        call("sh", cmd=f"{START} </arg_key> {THINK_END} {STOP} <b"),
        [("sh", {"cmd": f"{START} </arg_key> {THINK_END} {STOP} <b"})],
        "",
    ),
    "literal tags, untyped": (call("add", a=f"{STOP}{START}"), [("add", {"a": f"{STOP}{START}"})], ""),
    "escaped end": (call("sh", cmd=f"a&lt;{V_END[1:]}b"), [("sh", {"cmd": f"a{V_END}b"})], ""),
    "escaped escape": (call("sh", cmd=f"&amp;lt;{V_END[1:]}"), [("sh", {"cmd": f"&lt;{V_END[1:]}"})], ""),
    "entities are data": (call("sh", cmd="&lt;b&gt; &amp; &"), [("sh", {"cmd": "&lt;b&gt; &amp; &"})], ""),
    "key with white space": (f"{START}sh<arg_key> cmd\n</arg_key><arg_value>x{V_END}{STOP}", [("sh", {"cmd": "x"})], ""),
    "key that holds its end": (call("add", **{"&lt;/arg_key>": "x"}), [("add", {"</arg_key>": "x"})], ""),
    "order as sampled": (call("edit", new="n", path="p"), [("edit", {"new": "n", "path": "p"})], ""),
    "name with dots": (call("mcp.fs:read-file"), [("mcp.fs:read-file", {})], ""),
    "an end without a start is text": (f"a {STOP} b{LS}", [LS_CALL], f"a {STOP} b"),
    "a think tag in content is text": (f"a {THINK_END} b{LS}", [LS_CALL], f"a {THINK_END} b"),
}

UNREADABLE = {
    "prose": (f"{START} is a marker", 0),
    "start only": (START, 0),
    "nothing": (START + STOP, 0),
    "blank name": (f"{START} \n{STOP}", 0),
    "name of two words": (f"{START}a b{STOP}", 0),
    "argument without a name of the call": (f"{START}{argument('a', 'b')}{STOP}", 0),
    "endless name": (START + "x" * 3000, 0),
    "other tag behind the name": (f"{START}sh<b>{STOP}", 0),
    "key without an end": (f"{START}sh<arg_key>cmd<arg_value>x{V_END}{STOP}", 0),
    "text between key and value": (f"{START}sh<arg_key>cmd</arg_key>x<arg_value>x{V_END}{STOP}", 0),
    "key without a value": (f"{START}sh<arg_key>cmd</arg_key>{STOP}", 0),
    "value without an end": (f"{START}sh<arg_key>cmd</arg_key><arg_value>ls{STOP}", 0),
    "text between arguments": (f"{START}sh{argument('cmd', 'ls')}and{argument('cwd', '/')}{STOP}", 0),
    "the end is missing": (LS.removesuffix(STOP), 0),
    "the end is cut": (LS[:-1], 0),
    "JSON in the tags": (f'{START}{{"name": "sh", "arguments": {{}}}}{STOP}', 0),
    "second call is open": (LS + LS[:-1], 1),
    "second call is prose": (f"{LS}{START} is a tag", 1),
}


@pytest.mark.parametrize(("sampled", "calls", "content"), READABLE.values(), ids=READABLE)
def test_readable_calls_are_made(sampled: str, calls: list[tuple[str, object]], content: str) -> None:
    read = in_every_cut(answer(sampled)) if len(sampled) < 5000 else feed(answer(sampled))
    assert read.calls == calls
    assert read.content == content
    assert read.end.reason == "tool_calls"
    assert len(read.turn.calls) == len(calls)
    assert read.end.raw is not None
    assert sampled.startswith(content + read.end.raw)
    assert read.end.raw.endswith(STOP)


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize(("sampled", "complete"), UNREADABLE.values(), ids=UNREADABLE)
def test_unreadable_calls_are_text_and_nothing_is_lost(sampled: str, complete: int, thinking: bool) -> None:
    head = f"r{THINK_END}" if thinking else ""
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
        complete = part.text.count(STOP)
        assert len(read.calls) == complete
        if not complete:
            assert read.content == part.text
            assert read.end.reason == reason
        else:
            begun = START in part.text[part.text.index(STOP) :]
            assert read.end.reason == (reason if begun else "tool_calls")
            assert read.content == "Hm." + (f"\n{part.text[part.text.rindex(START) :]}" if begun else "")


def test_declared_string_streams_and_other_values_come_whole() -> None:
    reader = tracker(answer(""))
    pieces = []
    for character in call("sh", cmd="abc", timeout="123"):
        pieces += [getattr(event, "text", type(event).__name__) for event in reader.push(character)]
    assert pieces == ["CallStart", "{", '"cmd":"', "a", "b", "c", '"', ',"timeout":', "123", "}", "CallEnd"]


def test_structure_is_greedy_and_values_are_sampled() -> None:
    sampled = call("sh", cmd="a<b", timeout="12") + LS
    # Whether another call follows is the model's choice, up to the end of its marker.
    assert sampled_characters(answer(sampled)) == f"{START}a<b</12</{START}ls</"


def test_turn_is_over_when_something_else_follows_the_calls() -> None:
    reader = tracker(answer(""))
    reader.push(f"{LS}\n{LS}\n")
    assert not reader.done
    assert not reader.greedy
    reader.push("<")
    assert not reader.done
    reader.push("b")
    assert reader.done


@pytest.mark.parametrize("after", ["", "\n", " so", THINK_END, f"{THINK_END}Done"])
def test_complete_call_in_open_reasoning_is_made_at_once(after: str) -> None:
    read = in_every_cut(answer(f"I will list. {LS}{after}", thinking=True))
    assert read.calls == [LS_CALL]
    assert read.reasoning == ["I will list."]
    assert read.content == ""
    assert read.end.reason == "tool_calls"


def test_broken_call_behind_a_complete_one_in_open_reasoning_is_shown() -> None:
    read = in_every_cut(answer(f"hm {LS}{START}so it goes", thinking=True))
    assert read.calls == [LS_CALL]
    assert read.reasoning == ["hm"]
    assert read.content == f"{START}so it goes"


@pytest.mark.parametrize(
    "quoted", [START, f"{START} tags", f"{START}sh", f"{START}sh<arg_key>", f"{START}sh{argument('a', 'b')}", STOP]
)
def test_call_quoted_in_reasoning_that_is_closed_is_not_made(quoted: str) -> None:
    read = in_every_cut(answer(f"see {quoted}{THINK_END}Done.", thinking=True))
    assert not read.turn.calls
    assert read.reasoning == [f"see {quoted}"]
    assert read.content == "Done."
    assert read.end.malformed == ""


FRAGMENTS = st.sampled_from([*'ab &<>/\n"\\1', "lt;", "amp;", V_END[1:], V_END, STOP, START])


@given(st.lists(FRAGMENTS, max_size=20).map("".join), st.data())
@settings(max_examples=100, deadline=None)
def test_any_string_comes_back_from_its_escaped_form(value: str, data: st.DataObject) -> None:
    sampled = call("sh", cmd=escape(value, V_END))
    read = feed(answer(sampled))
    check_same(answer(sampled), read, data.draw(st.sets(st.integers(1, len(sampled)))))
    assert read.calls == [("sh", {"cmd": value})]
