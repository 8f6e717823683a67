"""The tracker's own rules: where reasoning ends, what is eaten, what is held, and what an answer's end makes of it."""

from __future__ import annotations

import itertools

import pytest

from ds4batch.chat.events import Content, Reasoning, ReasoningEnd
from ds4batch.chat.grammars import GRAMMARS
from ds4batch.chat.tracker import THINK, THINK_END, Tracker
from tests.chat.reading import Answer, feed, in_every_cut, sampled_characters, tracker

GUARDED = [name for name, grammar in GRAMMARS.items() if grammar.guard]
CALLS = {
    "dsml": '<tool_calls><invoke name="sh"><parameter name="cmd" string="true">ls</parameter></invoke></tool_calls>',
    "glm": "<tool_call>sh<arg_key>cmd</arg_key><arg_value>ls</arg_value></tool_call>",
    "qwen": "<tool_call>\n<function=sh>\n<parameter=cmd>\nls\n</parameter>\n</function>\n</tool_call>",
    "hermes": '<tool_call>\n{"name": "sh", "arguments": {"cmd": "ls"}}\n</tool_call>',
    "llama3": '<|python_tag|>{"name": "sh", "parameters": {"cmd": "ls"}}',
}
CALLS["dsml-v41"] = CALLS["dsml"]

every_grammar = pytest.mark.parametrize("grammar", ["", *GRAMMARS])
every_calling_grammar = pytest.mark.parametrize("grammar", list(GRAMMARS))


# What an answer begins with, and the reasoning and content it gives: thinking on.
THOUGHT = {
    "closed": (f"look{THINK_END}Hi.", ["look"], "Hi."),
    "open": ("look", ["look"], ""),
    "empty": ("", [], ""),
    "nothing thought": (f"{THINK_END}Hi.", [], "Hi."),
    "opening tag is eaten": (f"{THINK}look{THINK_END}Hi.", ["look"], "Hi."),
    "opening tag behind white space is eaten": (f" \n{THINK}look{THINK_END}Hi.", ["look"], "Hi."),
    "opening tag alone": (THINK, [], ""),
    "half an opening tag is reasoning": ("<thi", ["<thi"], ""),
    "another opening tag is reasoning": (f"{THINK}a{THINK}b{THINK_END}c", [f"a{THINK}b"], "c"),
    "almost a closing tag": (f"a</thin k></think{THINK_END}Hi.", ["a</thin k></think"], "Hi."),
    "half a closing tag": ("look</thi", ["look</thi"], ""),
    "white space inside": (f"a \n b{THINK_END}c \n d", ["a \n b"], "c \n d"),
    "white space at the end": ("a \n", ["a \n"], ""),
    "unicode": (f"é😀{THINK_END}née", ["é😀"], "née"),
}

# Thinking off.
PLAIN = {
    "content": ("Hi.", "Hi."),
    "empty": ("", ""),
    "white space": (" \n a \n", " \n a \n"),
    "closing tag at the start is eaten": (f"{THINK_END}Hi.", "Hi."),
    "closing tag behind white space is eaten": (f"\n{THINK_END}Hi.", "Hi."),
    "closing tag later is text": (f"Hi.{THINK_END}b", f"Hi.{THINK_END}b"),
    "two closing tags": (f"{THINK_END}{THINK_END}", THINK_END),
    "half a tag": ("</thi", "</thi"),
    "opening tag later is text": (f"a{THINK}b", f"a{THINK}b"),
    "tags of no grammar": ("<b>a</b> <", "<b>a</b> <"),
}


@every_grammar
@pytest.mark.parametrize("tools", [None, {}])
@pytest.mark.parametrize(("sampled", "reasoning", "content"), THOUGHT.values(), ids=THOUGHT)
def test_reasoning_is_split_from_content(
    sampled: str, reasoning: list[str], content: str, grammar: str, tools: dict[str, frozenset[str]] | None
) -> None:
    read = in_every_cut(Answer(sampled, grammar, thinking=True, tools=tools))
    assert read.reasoning == reasoning
    assert read.content == content
    assert read.end.reason == "stop"
    assert read.end.malformed == ""


@every_grammar
@pytest.mark.parametrize("tools", [None, {}])
@pytest.mark.parametrize(("sampled", "content"), PLAIN.values(), ids=PLAIN)
def test_without_thinking_all_is_content(
    sampled: str, content: str, grammar: str, tools: dict[str, frozenset[str]] | None
) -> None:
    read = in_every_cut(Answer(sampled, grammar, tools=tools))
    assert read.reasoning == []
    assert read.content == content


@every_grammar
def test_model_that_opens_reasoning_unasked_reasons(grammar: str) -> None:
    read = in_every_cut(Answer(f"{THINK}look{THINK_END}Hi.", grammar))
    assert read.reasoning == ["look"]
    assert read.content == "Hi."


@every_grammar
def test_reasoning_cut_by_the_length_stays_reasoning_and_open(grammar: str) -> None:
    read = in_every_cut(Answer("look at", grammar, thinking=True, reason="length"))
    assert read.turn.reasoning_open
    assert read.reasoning == ["look at"]
    assert read.content == ""
    assert read.end.reason == "length"


@every_calling_grammar
def test_without_tools_markup_is_content(grammar: str) -> None:
    sampled = f"r{THINK_END}a {CALLS[grammar]} b{THINK_END}"
    read = in_every_cut(Answer(sampled, grammar, thinking=True, tools=None))
    assert read.reasoning == ["r"]
    assert read.content == f"a {CALLS[grammar]} b{THINK_END}"
    assert read.turn.calls == []
    assert sampled_characters(Answer(sampled, grammar, thinking=True, tools=None)) == sampled


@every_calling_grammar
@pytest.mark.parametrize("thinking", [False, True])
def test_call_behind_content_is_made(grammar: str, thinking: bool) -> None:
    head = f"r{THINK_END}" if thinking else ""
    read = in_every_cut(Answer(f"{head}Hello.\n\n{CALLS[grammar]}", grammar, thinking))
    assert read.content == "Hello."
    assert read.calls == [("sh", {"cmd": "ls"})]
    assert read.end.reason == "tool_calls"
    assert read.end.raw == f"\n\n{CALLS[grammar]}"
    assert read.shape == [*(["Reasoning", "ReasoningEnd"] * thinking), "Content", "CallStart", "CallDelta", "CallEnd"]


@every_calling_grammar
def test_content_of_white_space_before_a_call_is_none(grammar: str) -> None:
    read = in_every_cut(Answer(f"r{THINK_END}\n \n{CALLS[grammar]}", grammar, thinking=True))
    assert read.content == ""
    assert read.end.raw == f"\n \n{CALLS[grammar]}"


@every_calling_grammar
def test_finished_calls_are_calls_even_where_the_length_ended_them(grammar: str) -> None:
    for reason in ("stop", "length", "cut"):
        assert feed(Answer(CALLS[grammar], grammar, reason=reason)).end.reason == "tool_calls"
    assert feed(Answer(CALLS[grammar], grammar, reason="error")).end.reason == "error"


@every_calling_grammar
def test_ids_are_asked_for_once_a_call(grammar: str) -> None:
    ids = itertools.count()
    reader = Tracker(grammar, thinking=False, tools={"sh": frozenset()}, new_id=lambda: f"id{next(ids)}")
    reader.push(CALLS[grammar])
    assert next(ids) == 1


@pytest.mark.parametrize("grammar", GUARDED)
@pytest.mark.parametrize(("sampled", "reasoning", "content"), [
    (f"a{THINK_END}b{THINK_END}c", ["a", "b"], "c"),
    (f"a{THINK_END}b{THINK_END}c{THINK_END}d", ["a", "b"], f"c{THINK_END}d"),
    (f"a{THINK_END}{THINK}b{THINK_END}c", ["a", "b"], "c"),
    (f"a{THINK_END}\n{THINK}b", ["a", "b"], ""),
    (f"a{THINK_END}x{THINK}b", ["a"], f"x{THINK}b"),
    (f"a{THINK_END}x{THINK}b{THINK_END}c", ["a", f"x{THINK}b"], "c"),
    (f"a{THINK_END}{THINK}b{THINK_END}c{THINK_END}", ["a", "b"], f"c{THINK_END}"),
    (f"a{THINK_END}\n{THINK_END}c", ["a"], "c"),
    (f"a{THINK_END}b</thi", ["a"], "b</thi"),
    (f"a{THINK_END}b \n", ["a"], "b \n"),
])  # fmt: skip
def test_second_reasoning_is_recognised_behind_the_first(grammar: str, sampled: str, reasoning: list[str], content: str) -> None:
    read = in_every_cut(Answer(sampled, grammar, thinking=True))
    assert read.reasoning == reasoning
    assert read.content == content


@pytest.mark.parametrize("grammar", GUARDED)
def test_answer_is_held_until_it_is_no_reasoning(grammar: str) -> None:
    reader = tracker(Answer("", grammar, thinking=True))
    assert reader.push(f"a{THINK_END}") == [Reasoning("a"), ReasoningEnd()]
    assert reader.push("b") == []
    assert reader.push(f" {CALLS[grammar][:1]}") == []
    assert reader.push(CALLS[grammar][1:])[0] == Content("b")


@pytest.mark.parametrize("grammar", GUARDED)
def test_answer_is_not_held_without_tools_or_thinking(grammar: str) -> None:
    without_tools = tracker(Answer("", grammar, thinking=True, tools=None))
    without_tools.push(f"a{THINK_END}")
    assert without_tools.push("b") == [Content("b")]
    assert tracker(Answer("", grammar)).push("b") == [Content("b")]


@every_grammar
def test_text_is_reported_at_once_and_white_space_with_what_follows(grammar: str) -> None:
    reader = tracker(Answer("", grammar))
    assert reader.push("Hi") == [Content("Hi")]
    events = [*reader.push(" "), *reader.push("there")]
    assert "".join(event.text for event in events if isinstance(event, Content)) == " there"


@every_grammar
@pytest.mark.parametrize("thinking", [False, True])
def test_answer_that_errs_keeps_its_text_and_reason(grammar: str, thinking: bool) -> None:
    read = in_every_cut(Answer("so far ", grammar, thinking, reason="error"))
    assert [*read.reasoning, read.content] == (["so far ", ""] if thinking else ["so far "])
    assert read.end.reason == "error"


def test_unknown_grammar_is_refused() -> None:
    with pytest.raises(KeyError):
        Tracker("yaml", thinking=False, tools={}, new_id=str)


@every_calling_grammar
def test_markers_begin_with_a_character_that_no_marker_holds_later(grammar: str) -> None:
    texts = [THINK, THINK_END, *GRAMMARS[grammar].starts]
    firsts = {text[0] for text in texts}
    assert not any(first in text[1:] for first in firsts for text in texts)
    assert not any(a != b and a.startswith(b) for a in texts for b in texts)
