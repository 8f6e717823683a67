"""The dialects of DeepSeek V4 and V4.1: what they write, and that what they say of their prompts holds for those that follow."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4batch.chat.conversation import Call, Conversation, Message, Thinking, Tool
from ds4batch.chat.dialects.base import Dialect
from ds4batch.chat.dialects.deepseek_v4 import EFFORTS_0731, EFFORTS_PREVIEW, DeepSeekV4
from ds4batch.chat.dialects.deepseek_v41 import DeepSeekV41
from ds4batch.chat.escapes import unattribute, unescape
from ds4batch.messages import Continues, Visible
from tests.chat.test_glm import (
    CALL,
    CHATS,
    JSON,
    LOW,
    OFF,
    PLAIN,
    SHELL,
    TURNS,
    WORDS,
    chat,
    check_linear,
    check_places,
    check_read_back,
    check_visible,
    cut,
    firsts,
    grown,
    result,
    said,
    user,
)

V4, V41 = DeepSeekV4(), DeepSeekV41()
BOTH = pytest.mark.parametrize("dialect", [V4, V41], ids=["v4", "v41"])
B, E, S, U, A = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜System｜>", "<｜User｜>", "<｜Assistant｜>"
LEVEL = "Reasoning Effort: {} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"
B41 = B + S + LEVEL.format(50)  # of a low effort
ENDS = ["</tool_result>", "&lt;/tool_result>", "</｜DSML｜parameter>", "</｜DSML｜ parameter>"]
DATA = WORDS | st.lists(st.sampled_from([*ENDS, "&amp;lt;/｜DSML｜parameter>", "<", U, '"'])).map("".join)


def system(text: str) -> Message:
    return Message("system", text)


def v4(*messages: Message, tools: tuple[Tool, ...] = (), thinking: Thinking = LOW) -> str:
    return V4.render(chat(*messages, tools=tools, thinking=thinking)).text


def v41(*messages: Message, tools: tuple[Tool, ...] = (), thinking: Thinking = LOW) -> str:
    return V41.render(chat(*messages, tools=tools, thinking=thinking)).text


def results_of(*texts: str) -> str:
    return "".join(f"<tool_result>{text}</tool_result>" for text in texts)


# What both write.


@BOTH
def test_the_markers_that_end_an_answer(dialect: Dialect) -> None:
    assert dialect.stops == (E,)


def test_the_families_have_names_grammars_and_efforts_of_their_own() -> None:
    assert (V4.name, V4.grammar, V4.levels) == ("deepseek-v4", "dsml", False)
    assert (V41.name, V41.grammar, V41.levels) == ("deepseek-v4.1", "dsml-v41", True)


def test_a_first_turn() -> None:
    assert v4(system("S"), user("hi"), thinking=OFF) == f"{B}S{U}hi{A}</think>"
    assert v4(system("S"), user("hi")) == f"{B}S{U}hi{A}<think>"
    assert v4(user("hé 漢 😀\n")) == f"{B}{U}hé 漢 😀\n{A}<think>"
    assert v41(system("S"), user("hi"), thinking=OFF) == f"{B}{S}S{U}hi{A}</think>"
    assert v41(system("S"), user("hi")) == f"{B41}S{U}hi{A}<think>"
    assert v41(user("hé 漢 😀\n")) == f"{B41}{U}hé 漢 😀\n{A}<think>"
    assert v41(user("hi"), thinking=OFF) == f"{B}{U}hi{A}</think>"


@BOTH
def test_reasoning_of_earlier_turns_goes_where_no_tools_play_a_part(dialect: Dialect) -> None:
    head = dialect.render(chat(user("a"))).text.removesuffix(f"{U}a{A}<think>")
    rendered = dialect.render(chat(user("a"), said("b", "why"), user("c")))
    assert rendered.text == f"{head}{U}a{A}</think>b{E}{U}c{A}<think>"
    assert rendered.thinking
    off = dialect.render(chat(user("a"), said("b", "why"), user("c"), thinking=OFF))
    assert off.text == f"{B}{U}a{A}</think>b{E}{U}c{A}</think>"
    assert not off.thinking


@BOTH
@pytest.mark.parametrize("context", [(SHELL,), ()])
def test_reasoning_of_every_turn_stays_where_tools_play_a_part(dialect: Dialect, context: tuple[Tool, ...]) -> None:
    called = said("", "go", replace_id("c1"))
    messages = (user("a"), said("b", "why"), user("c"), called, result("1"), said("d"), user("e"))
    text = dialect.render(chat(*messages, tools=context)).text
    assert f"{U}a{A}<think>why</think>b{E}{U}c{A}<think>go</think>\n\n<" in text
    assert f"{results_of('1')}{A}<think></think>d{E}{U}e{A}<think>" in text
    off = dialect.render(chat(*messages, tools=context, thinking=OFF)).text
    assert f"{U}a{A}</think>b{E}{U}c{A}</think>\n\n<" in off
    assert off.endswith(f"{results_of('1')}{A}</think>d{E}{U}e{A}</think>")


def replace_id(id: str) -> Call:
    return CALL._replace(id=id)


@BOTH
def test_reasoning_behind_the_last_question_stays_and_its_answer_is_continued(dialect: Dialect) -> None:
    rendered = dialect.render(chat(user("a"), said("b", "r"), user("c"), said("d", "why")))
    assert rendered.text.endswith(f"{U}a{A}</think>b{E}{U}c{A}<think>why</think>d")
    assert rendered.text[rendered.generation_from :] == f"{A}<think>why</think>d"
    assert not rendered.thinking
    assert rendered.visible is None


@BOTH
def test_an_answer_behind_an_answer_or_at_the_beginning_has_no_opening(dialect: Dialect) -> None:
    text = dialect.render(chat(system("S"), said("hello", "r"), said("b", "r"), user("c"), thinking=OFF)).text
    assert text.endswith(f"Shello{E}b{E}{U}c{A}</think>")


def test_calls_in_their_canonical_form() -> None:
    turn = said("ok", "", Call("c1", "sh", '{"cmd":"ls -l", "n" : 2, "o": {"a": [1.0, " "]}}'), Call("c2", "a::b", "{}"))
    assert v4(user("q"), turn, result("x"), thinking=OFF) == (
        f"{B}{U}q{A}</think>ok\n\n<｜DSML｜tool_calls>\n"
        '<｜DSML｜invoke name="sh">\n'
        '<｜DSML｜parameter name="cmd" string="true">ls -l</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="n" string="false">2</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="o" string="false">{"a":[1.0," "]}</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n"
        '<｜DSML｜invoke name="a::b">\n</｜DSML｜invoke>\n'
        f"</｜DSML｜tool_calls>{E}{U}<tool_result>x</tool_result>{A}</think>"
    )
    assert v41(user("q"), turn, result("x"), thinking=OFF) == (
        f"{B}{U}q{A}</think>ok\n\n<｜DSML｜ calls>\n"
        '<｜DSML｜ invoke name="sh">\n'
        '<｜DSML｜ parameter name="cmd" string="true">ls -l</｜DSML｜ parameter>\n'
        '<｜DSML｜ parameter name="n" string="false">2</｜DSML｜ parameter>\n'
        '<｜DSML｜ parameter name="o" string="false">{"a":[1.0," "]}</｜DSML｜ parameter>\n'
        "</｜DSML｜ invoke>\n"
        '<｜DSML｜ invoke name="a::b">\n</｜DSML｜ invoke>\n'
        f"</｜DSML｜ calls>{E}{U}<tool_result>x</tool_result>{A}</think>"
    )


@BOTH
@pytest.mark.parametrize("arguments", ["", "not json", "[1]", '"text"', '{"a":', '{"a":NaN}'])
def test_arguments_that_are_no_object_are_one_parameter(dialect: DeepSeekV4, arguments: str) -> None:
    text = dialect.render(chat(user("q"), said("", "", Call("c", "f", arguments)))).text
    parameter = dialect.tags.parameter
    assert text.count(f"<{parameter} ") == 1
    assert f'\n<{parameter} name="arguments" string="true">{arguments}</{parameter}>\n' in text


@BOTH
def test_arguments_keep_the_order_of_the_call(dialect: Dialect) -> None:
    text = dialect.render(chat(user("q"), said("", "", Call("c", "sh", '{"n":1,"z":2,"cmd":"x"}')), tools=(SHELL,))).text
    assert re.findall(r'parameter name="(\w+)"', text.partition(f"{U}q")[2]) == ["n", "z", "cmd"]


@BOTH
def test_sampled_calls_are_replayed_byte_for_byte(dialect: Dialect) -> None:
    raw = "\n<tool_calls> <invoke name='sh'>&lt; </tool_result>"
    text = dialect.render(chat(user("q"), said("ok ", "", CALL, raw=raw), result("x"), thinking=OFF)).text
    assert text.endswith(f"</think>ok {raw}{E}{U}{results_of('x')}{A}</think>")


@BOTH
def test_data_cannot_close_what_holds_it_and_is_otherwise_untouched(dialect: DeepSeekV4) -> None:
    name = dialect.tags.parameter
    end = f"</{name}>"
    arguments = json.dumps({'a"<': f"x{end}&lt;/{name}> a < b && c </tool_result>", "n": [end, "<b>"]}, ensure_ascii=False)
    asked, called = user("<tool_result> & </tool_result>"), said("", "", Call("c", 'f"&', arguments))
    text = dialect.render(chat(asked, called, result("1 < 2 && </tool_result>&lt;/tool_result> &amp; "), thinking=OFF)).text
    assert f"{U}<tool_result> & </tool_result>{A}" in text
    assert f'<{dialect.tags.invoke} name="f&quot;&amp;">' in text
    assert f'name="a&quot;&lt;" string="true">x&lt;/{name}>&amp;lt;/{name}> a < b && c </tool_result>{end}' in text
    assert f'name="n" string="false">["\\u003c/{name}>","<b>"]{end}' in text
    assert text.endswith(f"{U}<tool_result>1 < 2 && &lt;/tool_result>&amp;lt;/tool_result> &amp; </tool_result>{A}</think>")


@BOTH
def test_tools_stand_before_the_system_text_whatever_it_is(dialect: DeepSeekV4) -> None:
    tools = (SHELL, replace(SHELL, name="g", schema='{"name": "g", "strict": true}', deferred=True))
    for thinking in (LOW, OFF):
        written = dialect.render(chat(system("S"), user("q"), tools=tools, thinking=thinking)).text
        head, found, rest = written.partition(
            "\n\n### Available Tool Schemas\n\n" + "\n".join(tool.schema for tool in tools) + "\n\n"
        )
        assert found
        before, found, prose = head.partition("## Tools\n\n")
        assert before == (B if dialect is V4 else B + S + (LEVEL.format(50) if thinking.enabled else ""))
        assert found
        tags = dialect.tags
        assert (
            f'<{tags.calls}>\n<{tags.invoke} name="$TOOL_NAME">\n<{tags.parameter} name="$PARAMETER_NAME" string="true|false">'
            in prose
        )
        assert re.fullmatch(rf"[^\n]+\n\nS{U}q{A}</?think>", rest)
        other = dialect.render(chat(system("other"), user("q"), tools=tools, thinking=thinking)).text
        assert other == written.replace(f"\n\nS{U}", f"\n\nother{U}")


@BOTH
def test_a_retry_ends_the_turn_with_an_error_and_opens_another(dialect: DeepSeekV4) -> None:
    asked = chat(system("S"), user("q"), tools=(SHELL,))
    retry = dialect.retry(asked, False, "no {name} </tool_result>")
    error = "Tool error: invalid DSML tool call: no {name} &lt;/tool_result>\n"
    assert retry.startswith(f"{E}{U}<tool_result>{error}")
    assert retry.endswith(f"{A}<think>")
    assert f"<{dialect.tags.calls}>" in retry
    assert retry.count("</tool_result>" + ("\n\n" if dialect is V4 else S)) == 1
    assert dialect.retry(asked, True, "no {name} </tool_result>") == f"</think>{retry}"
    assert dialect.retry(replace(asked, thinking=OFF), False, "x").endswith(f"{A}</think>")


# V4.


@pytest.mark.parametrize(
    ("efforts", "effort", "label"),
    [
        (EFFORTS_PREVIEW, "low", ""),
        (EFFORTS_PREVIEW, "medium", ""),
        (EFFORTS_PREVIEW, "high", ""),
        (EFFORTS_PREVIEW, "max", "Reasoning Effort: Absolute maximum"),
        (EFFORTS_0731, "low", ""),
        (EFFORTS_0731, "medium", "Reasoning Effort: Absolute maximum"),
        (EFFORTS_0731, "high", "Reasoning Effort: Absolute maximum"),
        (EFFORTS_0731, "max", "Reasoning Effort: Beyond maximum"),
    ],
)
def test_v4_is_told_its_effort_as_its_checkpoint_was(efforts: Any, effort: Any, label: str) -> None:
    dialect = DeepSeekV4(efforts)
    asked = chat(system("S"), user("hi"), thinking=Thinking(effort=effort))
    text = dialect.render(asked).text
    told = text.removeprefix(B).removesuffix(f"S{U}hi{A}<think>")
    assert text == f"{B}{told}S{U}hi{A}<think>"
    assert told.startswith(label)
    assert (told == "") == (label == "")
    assert told.endswith("\n\n") or not told
    assert dialect.render(replace(asked, thinking=Thinking(False, effort))).text == f"{B}S{U}hi{A}</think>"


def test_v4_joins_leading_system_messages_and_leaves_later_ones_in_place() -> None:
    assert v4(system("S"), system("T"), user("a"), thinking=OFF) == f"{B}S\n\nT{U}a{A}</think>"
    assert v4(user("a"), system("late"), thinking=OFF) == f"{B}{U}a\n\nlate{A}</think>"
    later = (user("a"), said("b"), system("late"), system("too"), user("c"))
    assert v4(*later, thinking=OFF) == f"{B}{U}a{A}</think>b{E}late\n\ntoo{U}c{A}</think>"
    assert v4(*later[:3], thinking=OFF) == f"{B}{U}a{A}</think>b{E}late{A}</think>"


def test_v4_glues_a_run_of_results_in_the_order_of_their_calls() -> None:
    turn = said("", "", replace_id("a"), replace_id("b"), raw="CALLS")
    head = f"{B}{U}q{A}</think>CALLS{E}"
    for run in ([result("1", "a"), result("2", "b")], [result("2", "b"), result("1", "a")]):
        assert v4(user("q"), turn, *run, thinking=OFF) == f"{head}{U}{results_of('1', '2')}{A}</think>"
    strange = (result("2", "b"), result("x", "?"), result("1", "a"), result("y", ""))
    assert v4(user("q"), turn, *strange, thinking=OFF) == f"{head}{U}{results_of('x', 'y', '1', '2')}{A}</think>"


def test_v4_opens_a_turn_for_each_users_message_and_each_run_of_results() -> None:
    turn = said("", "", CALL, raw="CALLS")
    assert v4(user("q"), turn, result("1"), user("t"), user("u"), result("2"), thinking=OFF) == (
        f"{B}{U}q{A}</think>CALLS{E}{U}{results_of('1')}{U}t{U}u{U}{results_of('2')}{A}</think>"
    )


# V4.1.


@pytest.mark.parametrize(
    ("thinking", "level"),
    [
        (Thinking(effort="low"), 50),
        (Thinking(effort="medium"), 75),
        (Thinking(), 75),
        (Thinking(effort="max"), 100),
        (Thinking(effort="low", level=1), 1),
        (Thinking(level=100), 100),
    ],
)
def test_v41_is_told_its_effort_as_a_number(thinking: Thinking, level: int) -> None:
    assert v41(system("S"), user("hi"), thinking=thinking) == f"{B}{S}{LEVEL.format(level)}S{U}hi{A}<think>"


def test_v41_gives_every_system_message_but_the_first_a_turn_in_its_place() -> None:
    assert v41(system("S"), system("T"), user("a"), thinking=OFF) == f"{B}{S}S{S}T{U}a{A}</think>"
    assert v41(user("a"), system("late"), user("b"), thinking=OFF) == f"{B}{U}a{S}late{U}b{A}</think>"
    later = (user("a"), said("b", "r"), system("late"))
    assert v41(*later, thinking=OFF) == f"{B}{U}a{A}</think>b{E}{S}late{A}</think>"
    assert v41(*later) == f"{B41}{U}a{A}</think>b{E}{S}late{A}<think>"
    assert v41(*later, said("c"), user("d"), thinking=OFF) == f"{B}{U}a{A}</think>b{E}{S}late{A}</think>c{E}{U}d{A}</think>"


def test_v41_welds_what_is_said_between_two_answers_into_one_turn() -> None:
    turn = said("", "", replace_id("a"), replace_id("b"), raw="CALLS")
    welded = (user("q"), user("p"), turn, result("2", "b"), user("t"), result("1", "a"))
    assert v41(*welded, thinking=OFF) == (
        f"{B}{U}q\n\np{A}</think>CALLS{E}{U}{results_of('1')}\n\nt\n\n{results_of('2')}{A}</think>"
    )
    strange = (result("2", "b"), user("<tool_result>t</tool_result>"), result("x", "?"), result("1", "a"))
    assert v41(user("q"), turn, *strange, thinking=OFF) == (
        f"{B}{U}q{A}</think>CALLS{E}{U}{results_of('x')}\n\n<tool_result>t</tool_result>\n\n"
        f"{results_of('1')}\n\n{results_of('2')}{A}</think>"
    )


def test_results_are_ordered_by_the_answer_before_them() -> None:
    first = said("", "", replace_id("a"), replace_id("b"), raw="ONE")
    second = said("", "", replace_id("b"), replace_id("a"), raw="TWO")
    run = (result("2", "b"), result("1", "a"))
    assert v41(user("q"), first, *run, second, *run, thinking=OFF) == (
        f"{B}{U}q{A}</think>ONE{E}{U}{results_of('1')}\n\n{results_of('2')}"
        f"{A}</think>TWO{E}{U}{results_of('2')}\n\n{results_of('1')}{A}</think>"
    )
    assert v41(user("q"), first, system("late"), *run, thinking=OFF).endswith(
        f"{U}{results_of('1')}\n\n{results_of('2')}{A}</think>"
    )


# What is said of the requests that follow.


@BOTH
@given(CHATS)
def test_tails_and_continuations_are_ends_of_the_prompt(dialect: Dialect, conversation: Conversation) -> None:
    check_places(dialect, conversation)


@BOTH
@given(CHATS, PLAIN, PLAIN)
def test_visible_is_how_the_next_request_begins(
    dialect: Dialect, conversation: Conversation, answer: str, reasoning: str
) -> None:
    check_visible(dialect, conversation, answer, [""] if conversation.tool_context else ["", reasoning])
    rendered = dialect.render(conversation)
    if rendered.thinking and rendered.visible is None and any(message.role != "system" for message in conversation.messages):
        after = dialect.render(grown(conversation, said(answer, reasoning), user("next"))).text
        assert after.startswith(f"{rendered.text}{reasoning}</think>{answer}{E}")


@BOTH
@given(CHATS, PLAIN)
def test_without_thinking_the_next_request_begins_with_the_prompt_and_the_answer(
    dialect: Dialect, conversation: Conversation, answer: str
) -> None:
    asked = replace(conversation, thinking=OFF, messages=(*conversation.messages, user("q")))
    rendered = dialect.render(asked)
    assert rendered.visible is None
    assert dialect.render(grown(asked, said(answer), user("next"))).text.startswith(f"{rendered.text}{answer}{E}")


@BOTH
@given(CHATS)
def test_a_history_that_grows_only_appends(dialect: Dialect, conversation: Conversation) -> None:
    """With tools; or without thinking, where nothing is taken back either. Results that come late may go before earlier ones."""
    asked = replace(conversation, tools=(SHELL,))
    for whole in (asked, replace(asked, thinking=OFF), replace(conversation, thinking=OFF)):
        text = dialect.render(whole).text
        for first in firsts(whole):
            if first and whole.messages[first - 1].role == "assistant":
                assert dialect.render(cut(whole, first)).text + dialect.tail(whole, first) == text
        for at in range(1, len(whole.messages)):
            before = dialect.render(cut(whole, at))
            if not (whole.messages[at - 1].user_like and whole.messages[at].user_like):
                assert text.startswith(before.text[: before.generation_from])


@BOTH
@given(CHATS, PLAIN)
def test_without_tools_a_history_that_users_go_on_with_only_appends(
    dialect: Dialect, conversation: Conversation, more: str
) -> None:
    before = dialect.render(grown(conversation, user("q")))
    after = dialect.render(grown(conversation, user("q"), said(more), user("next")))
    assert after.text.startswith(before.text[: before.generation_from])


@BOTH
@given(st.dictionaries(DATA, JSON | DATA | st.lists(DATA)), st.lists(DATA), st.booleans())
def test_arguments_and_results_can_be_read_back(
    dialect: DeepSeekV4, arguments: dict[str, Any], outputs: list[str], ascii_only: bool
) -> None:
    call = Call("c", "f", json.dumps(arguments, ensure_ascii=ascii_only))
    written = dialect.render(chat(user("q"), said("", "", call), *(result(output) for output in outputs), thinking=OFF)).text
    name = dialect.tags.parameter
    calls, _, rest = written.partition(f"</{dialect.tags.calls}>{E}" if outputs else f"</{dialect.tags.calls}>")
    pattern = f'<{name} name="([^"]*)" string="(true|false)">(.*?)</{name}>\n(?=</?{re.escape(dialect.tags.invoke[:6])})'
    found = re.findall(pattern, calls, re.DOTALL)
    read = {
        unattribute(key): unescape(value, f"</{name}>") if kind == "true" else json.loads(value) for key, kind, value in found
    }
    assert read == arguments
    bodies = re.findall("<tool_result>(.*?)</tool_result>", rest, re.DOTALL)
    assert [unescape(body, "</tool_result>") for body in bodies] == outputs


@BOTH
@given(PLAIN, TURNS, st.booleans())
def test_what_is_written_is_what_the_tracker_reads(
    dialect: Dialect, content: str, arguments: list[dict[str, Any]], thinking: bool
) -> None:
    check_read_back(dialect, content, arguments, thinking)


def test_the_results_of_calls_that_are_not_shown_end_the_turn_that_made_them() -> None:
    alone = chat(system("S"), result("1", "b"), result("2", "a"))
    for dialect, head, between in ((V4, f"{B}S", ""), (V41, f"{B41}S", "\n\n")):
        tail = f"{E}{U}{results_of('1')}{between}{results_of('2')}{A}<think>"
        rendered = dialect.render(alone)
        assert rendered.text == head + tail
        assert rendered.continues == Continues(["a", "b"], len(head))
        assert dialect.tail(alone, 1) == tail


@BOTH
def test_what_follows_results_belongs_to_their_continuation(dialect: Dialect) -> None:
    asked = chat(user("q"), said("", "r", CALL), result("1"), user("t"), system("late"))
    rendered = dialect.render(asked)
    assert rendered.continues is not None
    assert rendered.continues.calls == ["c1"]
    tail = rendered.text[rendered.continues.suffix_from :]
    assert tail == dialect.tail(asked, 2)
    assert tail.startswith(f"{E}{U}{results_of('1')}")
    assert dialect.render(grown(asked, said("d"), user("e"))).continues is None
    assert dialect.render(chat(user("q"), said("", "", CALL), result("1", ""))).continues is None


@BOTH
def test_visible_names_the_answer_without_its_reasoning(dialect: Dialect) -> None:
    rendered = dialect.render(chat(user("a"), said("b", "r"), user("c")))
    assert rendered.visible == Visible(len(rendered.text) - len("<think>"), "</think>")
    assert dialect.render(chat(user("a"), thinking=OFF)).visible is None


@BOTH
def test_visible_with_tools_only_for_clients_that_leave_reasoning_out(dialect: Dialect) -> None:
    assert dialect.render(chat(user("a"), tools=(SHELL,))).visible is None
    assert dialect.render(chat(user("a"), said("b", "r"), user("c"), tools=(SHELL,))).visible is None
    dropped = dialect.render(chat(user("a"), said("b"), user("c"), tools=(SHELL,)))
    assert dropped.visible == Visible(len(dropped.text), "</think>")


@BOTH
def test_an_answer_to_a_system_message_alone_is_opened_but_has_no_visible_form(dialect: Dialect) -> None:
    rendered = dialect.render(chat(system("S")))
    assert rendered.text.endswith(f"S{A}<think>")
    assert rendered.visible is None


@BOTH
@pytest.mark.parametrize("what", ["render", "tail"])
def test_the_work_is_linear_in_the_history(dialect: Dialect, what: str) -> None:
    check_linear(dialect, what)
