"""DSML answers: every spelling, typing, nesting, mending and failing, in every cut."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4batch.chat.escapes import attribute, escape
from ds4batch.chat.events import Content, Reasoning
from ds4batch.chat.tracker import THINK_END
from tests.chat.reading import Answer, check_same, feed, in_every_cut, sampled_characters, tracker

BAR = "｜"
V4, SHORT, PLAIN, V41 = f"{BAR}DSML{BAR}", f"DSML{BAR}", "", f"{BAR}DSML{BAR} "
START, STOP = f"<{V4}tool_calls>", f"</{V4}tool_calls>"
P, P_END, I_END = f"<{V4}parameter", f"</{V4}parameter>", f"</{V4}invoke>"


def text(key: str, value: str) -> str:
    return f'{P} name="{key}" string="true">{value}{P_END}\n'


def value(key: str, json_text: str) -> str:
    return f'{P} name="{key}" string="false">{json_text}{P_END}\n'


def call(name: str, *parameters: str) -> str:
    return f'<{V4}invoke name="{name}">\n{"".join(parameters)}{I_END}\n'


def block(*calls: str) -> str:
    return f"{START}\n{''.join(calls)}{STOP}"


LS = call("sh", text("cmd", "ls"))
LS_CALL = ("sh", {"cmd": "ls"})


def answer(text: str, thinking: bool = False, reason: str = "stop") -> Answer:
    return Answer(text, "dsml", thinking, reason)


# An answer, the calls it makes, and the content before them.
READABLE = {
    "one text parameter": (block(LS), [LS_CALL], ""),
    "content before": (f"Listing.\n\n{block(LS)}", [LS_CALL], "Listing."),
    "content with blank lines": (f"a\n\nb \n{block(LS)}", [LS_CALL], "a\n\nb"),
    "glued to content": (f"a{block(LS)}", [LS_CALL], "a"),
    "text after is ignored": (f"{block(LS)}\nDone! <think>", [LS_CALL], ""),
    "a second block is ignored": (block(LS) + block(call("add")), [LS_CALL], ""),
    "two calls": (block(LS, call("add", value("a", "1"))), [LS_CALL, ("add", {"a": 1})], ""),
    "three equal calls": (block(LS, LS, LS), [LS_CALL] * 3, ""),
    "no arguments": (block(call("add")), [("add", {})], ""),
    "no white space": (block(LS).replace("\n", ""), [LS_CALL], ""),
    "much white space": (block(LS).replace(">\n", "> \t\n\n"), [LS_CALL], ""),
    "empty text": (block(call("sh", text("cmd", ""))), [("sh", {"cmd": ""})], ""),
    "white space is data": (block(call("sh", text("cmd", "\n ls \n"))), [("sh", {"cmd": "\n ls \n"})], ""),
    "quotes and backslashes": (block(call("sh", text("cmd", 'a "b" \\n\t\x01'))), [("sh", {"cmd": 'a "b" \\n\t\x01'})], ""),
    "unicode": (block(call("sh", text("cmd", "né 😀 \u2028"))), [("sh", {"cmd": "né 😀 \u2028"})], ""),
    "literal tags": (
        block(call("sh", text("cmd", f"<b> </think> {STOP} {I_END} {START} {P}"))),
        [("sh", {"cmd": f"<b> </think> {STOP} {I_END} {START} {P}"})],
        "",
    ),
    "escaped end": (block(call("sh", text("cmd", f"a&lt;{P_END[1:]}b"))), [("sh", {"cmd": f"a{P_END}b"})], ""),
    "escaped escape": (block(call("sh", text("cmd", f"&amp;amp;lt;{P_END[1:]}"))), [("sh", {"cmd": f"&amp;lt;{P_END[1:]}"})], ""),
    "entities are data": (
        block(call("sh", text("cmd", "&lt; &amp; &amp;lt; &"))),
        [("sh", {"cmd": "&lt; &amp; &amp;lt; &"})],
        "",
    ),
    "almost an end": (block(call("sh", text("cmd", f"<{P_END[:-1]} <</"))), [("sh", {"cmd": f"<{P_END[:-1]} <</"})], ""),
    "number": (block(call("add", value("a", "-1.50e+3"))), [("add", {"a": -1500.0})], ""),
    "literals": (block(call("add", value("a", "true"), value("b", " null "))), [("add", {"a": True, "b": None})], ""),
    "empty JSON is null": (block(call("add", value("a", " \n"))), [("add", {"a": None})], ""),
    "JSON string": (block(call("add", value("a", r'"x\u00e9\"y"'))), [("add", {"a": 'xé"y'})], ""),
    "deep JSON": (
        block(call("add", value("a", '{ "b" : [ 1 , {"c":[]} , {} ] }'))),
        [("add", {"a": {"b": [1, {"c": []}, {}]}})],
        "",
    ),
    "end inside a JSON string": (block(call("add", value("a", f'["{P_END}"]'))), [("add", {"a": [P_END]})], ""),
    "newline inside a JSON string": (block(call("add", value("a", '"a\nb"'))), [("add", {"a": "a\nb"})], ""),
    "order as sampled": (
        block(call("edit", text("old", "o"), text("path", "p"))),
        [("edit", {"old": "o", "path": "p"})],
        "",
    ),
    "entities in names": (
        block(call("a&amp;b&lt;&gt;&quot;&apos;", text("k&quot;", "v"))),
        [("a&b<>\"'", {'k"': "v"})],
        "",
    ),
    "a raw > in a name": (block(f'<{V4}invoke name="a>b">{I_END}'), [("a>b", {})], ""),
    "attributes in either order": (
        block(call("sh", f'{P}  string = "true"\n name = "cmd" >x{P_END}')),
        [("sh", {"cmd": "x"})],
        "",
    ),
    "nested": (
        block(call("edit", f'{P} name="changes">{text("f", "x")}{value("n", "1")}{P_END}\n')),
        [("edit", {"changes": {"f": "x", "n": 1}})],
        "",
    ),
    "nested without its end": (
        block(call("edit", f'{P} name="changes">\n{text("f", "x")}{value("n", "1")}')),
        [("edit", {"changes": {"f": "x", "n": 1}})],
        "",
    ),
    "nested leaf without a type is text": (
        block(call("edit", f'{P} name="c">{P} name="f">{P} x{P_END}{P_END}')),
        [("edit", {"c": {"f": f"{P} x"}})],
        "",
    ),
    "nested, then a sibling": (
        block(call("edit", f'{P} name="c">{text("f", "x")}{P_END}', text("path", "p"))),
        [("edit", {"c": {"f": "x"}, "path": "p"})],
        "",
    ),
    "no type is text": (block(call("sh", f'{P} name="cmd"> ls{P_END}')), [("sh", {"cmd": " ls"})], ""),
    "no type, a tag that is none": (block(call("sh", f'{P} name="cmd">\n<b>{P_END}')), [("sh", {"cmd": "\n<b>"})], ""),
    "no type, nothing": (block(call("sh", f'{P} name="cmd">{P_END}')), [("sh", {"cmd": ""})], ""),
    "short spelling": (f"ok\n\n{block(LS)}".replace(V4, SHORT), [LS_CALL], "ok"),
    "plain spelling": (f"ok\n\n{block(LS)}".replace(V4, PLAIN), [LS_CALL], "ok"),
    "V4.1 spelling": (f"ok\n\n{block(LS)}".replace(V4, V41).replace("tool_calls", "calls"), [LS_CALL], "ok"),
    "V4.1 spelling with spaces at the ends": (
        block(LS).replace(V4, V41).replace("tool_calls>", "calls >").replace("invoke>", "invoke >").replace("eter>", "eter >"),
        [LS_CALL],
        "",
    ),
    "ends of another spelling are data": (
        block(call("sh", text("cmd", "</parameter></invoke>"))),
        [("sh", {"cmd": "</parameter></invoke>"})],
        "",
    ),
    "an unknown tool": (block(call("other", text("x", "1"))), [("other", {"x": "1"})], ""),
    "only the outermost end is missing": (block(LS).removesuffix(STOP), [LS_CALL], ""),
    "the outermost end is cut": (block(LS)[:-3], [LS_CALL], ""),
    "the spaced outermost end is cut": (block(LS).replace(V4, V41).replace("tool_calls", "calls")[:-1] + " ", [LS_CALL], ""),
    "an end without a start is text": (f"a {STOP} b\n{block(LS)}", [LS_CALL], f"a {STOP} b"),
}

# A block that cannot be read, and whether calls of it were complete before that.
UNREADABLE = {
    "prose": (f"{START} is a marker", 0),
    "nothing": (f"{START}\n{STOP}", 0),
    "start only": (START, 0),
    "call without a name": (block(f"<{V4}invoke>{I_END}"), 0),
    "call with an empty name": (block(call("")), 0),
    "bad tag": (block(f"<{V4}invoke sh>{I_END}"), 0),
    "endless tag": (f'{START}<{V4}invoke name="{"x" * 3000}', 0),
    "many attributes": (f"{START}<{V4}invoke " + 'a="b" ' * 1000, 0),
    "another spelling inside": (START + block(LS).replace(V4, "").removeprefix("<tool_calls>"), 0),
    "text between parameters": (block(call("sh", text("cmd", "x"), "and")), 0),
    "parameter without a name": (block(call("sh", f'{P} string="true">x{P_END}')), 0),
    "parameter of another type": (block(call("sh", f'{P} name="a" string="maybe">x{P_END}')), 0),
    "not JSON": (block(call("add", value("a", "hello"))), 0),
    "JSON and more": (block(call("add", value("a", "1 2"))), 0),
    "JSON with a comma too many": (block(call("add", value("a", "[1,]"))), 0),
    "JSON with a bad escape": (block(call("add", value("a", r'"\x"'))), 0),
    "JSON with a number that is none": (block(call("add", value("a", "01"))), 0),
    "JSON that is too deep": (block(call("add", value("a", "[" * 300 + "]" * 300))), 0),
    "open parameter": (f"{START}\n{LS[: LS.index(P_END)]}", 0),
    "the end of a parameter is missing": (block(LS.replace(P_END, "")), 0),
    "the end of a call is missing": (block(LS.replace(I_END, "")), 0),
    "an end too many": (block(LS.replace(I_END, P_END + I_END)), 0),
    "second call is open": (f"{START}\n{LS}{LS[:40]}", 1),
    "text behind a call": (block(LS, "done"), 1),
    "bad second call": (block(LS, call("add", value("a", "x"))), 1),
    "start inside": (f"{START}\n{LS}{block(LS)}", 1),
    "malformed leaf": (block(call("edit", f'{P} name="c">{P} string="true">x{P_END}{P_END}')), 0),
}


@pytest.mark.parametrize(("sampled", "calls", "content"), READABLE.values(), ids=READABLE)
def test_readable_block_gives_its_calls(sampled: str, calls: list[tuple[str, object]], content: str) -> None:
    read = in_every_cut(answer(sampled))
    assert read.calls == calls
    assert read.content == content
    assert read.end.reason == "tool_calls"
    assert read.end.malformed == ""
    assert len(read.turn.calls) == len(calls)


@pytest.mark.parametrize(("sampled", "calls", "content"), READABLE.values(), ids=READABLE)
def test_content_and_raw_are_the_sampled_text(sampled: str, calls: list[tuple[str, object]], content: str) -> None:
    read = feed(answer(sampled))
    assert read.end.raw is not None
    assert sampled.startswith(read.content + read.end.raw)
    assert read.end.raw.strip().startswith("<")


@pytest.mark.parametrize(("sampled", "complete"), UNREADABLE.values(), ids=UNREADABLE)
def test_unreadable_block_is_text_and_nothing_is_lost(sampled: str, complete: int) -> None:
    read = in_every_cut(answer(f"Hm.\n{sampled}"))
    assert len(read.calls) == complete
    assert read.end.reason == "stop"
    assert read.end.raw is None
    if not complete:
        assert read.content == f"Hm.\n{sampled}"
    else:
        assert read.content == "Hm." + sampled[sampled.index(I_END) + len(I_END) :]


@pytest.mark.parametrize(("sampled", "complete"), UNREADABLE.values(), ids=UNREADABLE)
def test_unreadable_block_is_malformed_only_if_nothing_of_it_was_reported(sampled: str, complete: int) -> None:
    read = feed(answer(f"Hm.\n{sampled}"))
    assert bool(read.end.malformed) == (not read.turn.calls)
    if read.end.malformed:
        assert read.early == [Content("Hm.")]
        assert read.end.events == [Content(f"\n{sampled}")]


@pytest.mark.parametrize("reason", ["length", "cut", "error"])
@pytest.mark.parametrize(("sampled", "complete"), UNREADABLE.values(), ids=UNREADABLE)
def test_only_an_answer_that_stopped_by_itself_is_malformed(sampled: str, complete: int, reason: str) -> None:
    read = in_every_cut(answer(sampled, reason=reason))
    assert read.end.malformed == ""
    assert read.end.reason == {"cut": "stop"}.get(reason, reason)
    assert len(read.calls) == complete


@pytest.mark.parametrize(
    "sampled", [f"Hm.\n\n{block(LS, call('add', value('a', '[1, null]')))}", READABLE["nested"][0], READABLE["V4.1 spelling"][0]]
)
@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("reason", ["length", "stop"])
def test_block_cut_anywhere_keeps_complete_calls_and_shows_the_rest(sampled: str, thinking: bool, reason: str) -> None:
    head = f"r{THINK_END}" if thinking else ""
    for length in range(len(sampled)):
        part = answer(head + sampled[:length], thinking, reason)
        read = feed(part)
        check_same(part, read, range(1, len(part.text)))
        expected = _complete(sampled[:length])
        assert len(read.calls) == expected
        if expected == 0:
            assert read.content == sampled[:length]
            assert read.end.reason == reason
        elif reason == "length":
            assert read.end.reason == "length"
        assert read.end.raw is None or read.end.reason == "tool_calls"


def _complete(sampled: str) -> int:
    return sum(sampled.count(f"</{prefix}invoke>") for prefix in (V4, V41))


def test_cut_block_is_mended_only_between_its_calls() -> None:
    sampled = block(LS, LS)
    mended = [length for length in range(len(sampled)) if feed(answer(sampled[:length])).end.reason == "tool_calls"]
    first, last = sampled.index(I_END) + len(I_END), sampled.rindex(I_END) + len(I_END)
    # Behind a call up to what can only be another one, where "<" is taken for the end's.
    assert mended == [*range(first, first + 3), *range(last, len(sampled))]


def test_arguments_flow_while_they_are_sampled() -> None:
    reader = tracker(answer(""))
    pieces = []
    for character in block(call("sh", text("cmd", "echo hello"), value("n", '{"a": "bcd"}'))):
        pieces += [type(event).__name__ + getattr(event, "text", "") for event in reader.push(character)]
    assert pieces[:4] == ["CallStart", "CallDelta{", 'CallDelta"cmd":"', "CallDeltae"]
    assert pieces[-5:] == ["CallDeltad", 'CallDelta"', "CallDelta}", "CallDelta}", "CallEnd"]
    assert "".join(piece.removeprefix("CallDelta") for piece in pieces[1:-1]) == '{"cmd":"echo hello","n":{"a":"bcd"}}'


def test_structure_is_greedy_and_payload_is_sampled() -> None:
    sampled = block(call("sh", text("cmd", "a<b</x"), value("n", '{"k": "v w", "m": 12}')))
    # A lone "<" may be data, so what follows it is sampled; behind "</" the end is likelier.
    assert sampled_characters(answer(sampled)).removeprefix(START) == 'a<b</</k"v w"m"'


def test_no_token_is_greedy_outside_a_block() -> None:
    sampled = f"a < b {STOP} <tool_call"
    assert sampled_characters(answer(sampled)) == sampled


def test_nothing_is_greedy_inside_reasoning() -> None:
    sampled = f"hm {block(LS)}"
    assert sampled_characters(answer(sampled, thinking=True)) == sampled


@pytest.mark.parametrize("sampled", [block(LS), block(LS, LS)])
def test_turn_is_done_at_the_end_of_the_block_and_not_before(sampled: str) -> None:
    reader = tracker(answer(""))
    for character in sampled:
        assert not reader.done
        reader.push(character)
    assert reader.done
    assert reader.push("more") == []
    assert not reader.greedy


def test_complete_block_in_open_reasoning_is_called_at_once() -> None:
    read = in_every_cut(answer(f"I will list.\n\n{block(LS)} and then", thinking=True))
    assert read.calls == [LS_CALL]
    assert read.reasoning == ["I will list."]
    assert read.turn.reasoning_open
    assert read.content == ""
    assert read.end.raw == f"\n\n{block(LS)}"


@pytest.mark.parametrize(
    "quoted", [START, f"{START}\n", block(LS)[:-1], f"{START} is how", block("x"), f"{START}\n{LS}", block(LS, "x"), STOP]
)
def test_block_quoted_in_reasoning_that_is_closed_is_not_called(quoted: str) -> None:
    read = in_every_cut(answer(f"see {quoted}{THINK_END}Done.", thinking=True))
    assert not read.turn.calls
    assert read.reasoning == [f"see {quoted}"]
    assert read.content == "Done."
    assert read.end.reason == "stop"
    assert read.end.malformed == ""


def test_block_behind_a_quoted_one_is_called() -> None:
    read = in_every_cut(answer(f"see {START}x{THINK_END}Go.\n\n{block(LS)}", thinking=True))
    assert read.reasoning == [f"see {START}x"]
    assert read.content == "Go."
    assert read.calls == [LS_CALL]


def test_block_that_lacks_its_end_in_open_reasoning_is_mended() -> None:
    read = in_every_cut(answer(f"hm\n{START}{LS}", thinking=True))
    assert read.reasoning == ["hm"]
    assert read.calls == [LS_CALL]
    assert read.end.reason == "tool_calls"


def test_unfinished_block_in_open_reasoning_is_reasoning_and_malformed() -> None:
    sampled = block(LS)[:50]
    read = in_every_cut(answer(f"hm\n{sampled}", thinking=True))
    assert read.reasoning == [f"hm\n{sampled}"]
    assert read.end.malformed
    assert read.end.events == [Reasoning(f"\n{sampled}")]
    assert not in_every_cut(answer(f"hm\n{sampled}", thinking=True, reason="length")).end.malformed


FRAGMENTS = st.sampled_from([*'ab &<>/\n"\\', "lt;", "amp;", P_END[1:], P_END, STOP])


@given(st.lists(FRAGMENTS, max_size=20).map("".join), st.data())
@settings(max_examples=100, deadline=None)
def test_any_text_comes_back_from_its_escaped_form(value: str, data: st.DataObject) -> None:
    sampled = block(call("sh", text("cmd", escape(value, P_END)), f'{P} name="{attribute(value)}x" string="true">{P_END}'))
    read = feed(answer(sampled))
    check_same(answer(sampled), read, data.draw(st.sets(st.integers(1, len(sampled)))))
    assert read.calls == [("sh", {"cmd": value, f"{value}x": ""})]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(JSON, st.sampled_from([None, 1]), st.booleans(), st.data())
@settings(max_examples=100, deadline=None)
def test_any_json_comes_back(value_: object, indent: int | None, ascii_: bool, data: st.DataObject) -> None:
    sampled = block(call("add", value("a", json.dumps(value_, indent=indent, ensure_ascii=ascii_).replace(P_END, ""))))
    read = feed(answer(sampled))
    check_same(answer(sampled), read, data.draw(st.sets(st.integers(1, len(sampled)))))
    assert read.calls == [("add", {"a": value_})]
    minified = json.dumps({"a": value_}, ensure_ascii=ascii_, separators=(",", ":"))
    assert read.turn.calls[0].arguments == minified
