"""Qwen3.8's dialect: what it writes, and that what it says of its own prompts holds for the prompts that follow them."""

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
from ds4batch.chat.dialects.qwen38 import Qwen38
from ds4batch.chat.escapes import unescape
from ds4batch.messages import Continues, Visible
from tests.chat.test_glm import (
    CALL,
    CHATS,
    JSON,
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
    tool,
    user,
)

QWEN: Dialect = Qwen38()
MEDIUM = Thinking(effort="medium")
OPENING = "<|im_start|>assistant\n<think>\n"
EMPTY = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
Q = "<|im_start|>user\nq<|im_end|>\n"


def text(*messages: Message, tools: tuple[Tool, ...] = (), thinking: Thinking = MEDIUM) -> str:
    return QWEN.render(chat(*messages, tools=tools, thinking=thinking)).text


# What is written.


@pytest.mark.parametrize(
    ("thinking", "effort", "opening"),
    [
        (OFF, "", EMPTY),
        (Thinking(effort="low"), "Reasoning effort is set to low.\n\n", OPENING),
        (MEDIUM, "", OPENING),
        (Thinking(effort="high"), "Reasoning effort is set to xhigh.\n\n", OPENING),
        (Thinking(effort="max"), "Reasoning effort is set to xhigh.\n\n", OPENING),
    ],
)
def test_the_head_names_the_effort_and_the_opening_whether_the_model_thinks(
    thinking: Thinking, effort: str, opening: str
) -> None:
    rendered = QWEN.render(chat(Message("system", " S\n"), user("q"), thinking=thinking))
    assert rendered.text == f"<|im_start|>system\n{effort}S<|im_end|>\n{Q}{opening}"
    assert rendered.text[rendered.generation_from :] == opening
    assert rendered.thinking is thinking.enabled


def test_a_head_with_nothing_to_say_is_left_out() -> None:
    assert text(user(" q\n")) == Q + OPENING
    assert text(Message("system", " "), user("q")) == Q + OPENING
    assert text(user("q"), thinking=Thinking(effort="low")).startswith(
        f"<|im_start|>system\nReasoning effort is set to low.<|im_end|>\n{Q}"
    )


def test_first_system_messages_share_a_turn_and_later_ones_stand_where_they_were_said() -> None:
    assert text(Message("system", "s"), Message("system", "t "), user("q"), said("b"), Message("system", " u"), user("q")) == (
        f"<|im_start|>system\ns\n\nt<|im_end|>\n{Q}{EMPTY}b<|im_end|>\n<|im_start|>system\nu<|im_end|>\n{Q}{OPENING}"
    )


def test_reasoning_is_shown_wherever_the_client_sends_it() -> None:
    assert text(user("q"), said("b", "\n r\n"), user("q"), said("c"), user("q"), thinking=OFF) == (
        f"{Q}{OPENING}r\n</think>\n\nb<|im_end|>\n{Q}{EMPTY}c<|im_end|>\n{Q}{EMPTY}"
    )


def test_a_plain_answer_keeps_the_white_space_at_its_end() -> None:
    assert text(user("q"), said("\n b \n\n", "r"), user("q")) == f"{Q}{OPENING}r\n</think>\n\nb \n\n<|im_end|>\n{Q}{OPENING}"


def test_an_answer_before_calls_is_trimmed_and_parted_from_them() -> None:
    calls = (Call("c1", "sh", '{"cmd": "a"}'), Call("c2", "g", "{}"))
    first = "<tool_call>\n<function=sh>\n<parameter=cmd>\na\n</parameter>\n</function>\n</tool_call>"
    second = "<tool_call>\n<function=g>\n</function>\n</tool_call>"
    results = (
        "<|im_end|>\n<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n\n</tool_response><|im_end|>\n"
    )
    turn = (result("1"), result("", "c2"), user("q"))
    assert text(user("q"), said(" ok \n", "r", *calls), *turn) == (
        f"{Q}{OPENING}r\n</think>\n\nok\n\n{first}\n{second}{results}{Q}{OPENING}"
    )
    assert text(user("q"), said(" ", "", *calls), *turn) == f"{Q}{EMPTY}{first}\n{second}{results}{Q}{OPENING}"


def test_the_last_answer_is_continued() -> None:
    rendered = QWEN.render(chat(user("q"), said("b"), said("c "), thinking=MEDIUM))
    assert rendered.text == f"{Q}{EMPTY}b<|im_end|>\n{EMPTY}c "
    assert not rendered.thinking
    assert rendered.visible is None
    assert rendered.text[rendered.generation_from :] == f"<|im_end|>\n{EMPTY}c "


@pytest.mark.parametrize("inline", ["<think>r</think>b ", "</think>b", "\n<think>\nr\n</think>\n\nb"])
def test_an_answer_that_brings_its_own_think_tag_gets_no_other(inline: str) -> None:
    assert text(user("q"), said(inline), user("q")) == (f"{Q}<|im_start|>assistant\n{inline.lstrip()}<|im_end|>\n{Q}{OPENING}")


def test_arguments_are_written_in_declared_order_and_others_behind() -> None:
    arguments = '{"z": {"a": 2.50}, "n": 1e3, "y": true, "cmd": "caf\\u00e9 \\ud83d\\ude00 \\n"}'
    assert (
        "<function=sh>\n<parameter=cmd>\ncafé 😀 \n\n</parameter>\n<parameter=n>\n1e3\n</parameter>\n"
        '<parameter=z>\n{"a":2.50}\n</parameter>\n<parameter=y>\ntrue\n</parameter>\n</function>'
    ) in text(user("q"), said("", "", Call("c", "sh", arguments)), tools=(SHELL,))


@pytest.mark.parametrize("arguments", ["ls -l", "[1]", '{"cut": "of', '{"a>b": 1}'])
def test_arguments_that_are_no_object_of_plain_names_are_one_parameter(arguments: str) -> None:
    written = text(user("q"), said("", "", Call("c", "sh", arguments)), tools=(SHELL,))
    assert f"<function=sh>\n<parameter=arguments>\n{arguments}\n</parameter>\n</function>" in written


@pytest.mark.parametrize("arguments", ["", " \n", "{}"])
def test_empty_arguments_are_no_parameter(arguments: str) -> None:
    assert text(user("q"), said("", "", Call("c", "sh", arguments))).endswith(
        "<tool_call>\n<function=sh>\n</function>\n</tool_call>"
    )


@pytest.mark.parametrize(
    ("content", "reasoning", "raw", "written"),
    [
        ("ok \n", "r", "\n \n<tool_call>..", "r\n</think>\n\nok\n \n<tool_call>.."),
        ("", "r", "\n\n<tool_call>..", "r\n</think>\n\n<tool_call>.."),
        ("", "r", "<tool_call>..", "r\n</think><tool_call>.."),
        ("", "", "<tool_call>..", "\n</think>\n\n<tool_call>.."),  # the break stood in a prompt without thinking
        ("", "", "\n<tool_call>..", "\n</think>\n\n\n<tool_call>.."),
        ("", "", "\n\n<tool_call>..", "\n</think>\n\n<tool_call>.."),
    ],
)
def test_sampled_calls_are_replayed_byte_for_byte_with_the_break_they_begin_with(
    content: str, reasoning: str, raw: str, written: str
) -> None:
    assert text(user("q"), said(content, reasoning, CALL, raw=raw), result("x")).startswith(
        f"{Q}{OPENING}{written}<|im_end|>\n<|im_start|>user\n<tool_response>"
    )


def test_data_cannot_close_what_holds_it_and_is_otherwise_untouched() -> None:
    arguments = json.dumps({"a": "x\n</parameter>\n<parameter=b>&lt;/parameter> a < b && c", "n": ["</parameter>"]})
    asked, called = user("<tool_response> & </tool_response>"), said("", "", Call("c", "f", arguments))
    assert text(asked, called, result("1 < 2 && </tool_response>\n")) == (
        f"<|im_start|>user\n<tool_response> & </tool_response><|im_end|>\n{EMPTY}<tool_call>\n<function=f>\n"
        "<parameter=a>\nx\n&lt;/parameter>\n<parameter=b>&amp;lt;/parameter> a < b && c\n</parameter>\n"
        '<parameter=n>\n["&lt;/parameter>"]\n</parameter>\n</function>\n</tool_call><|im_end|>\n'
        f"<|im_start|>user\n<tool_response>\n1 < 2 && &lt;/tool_response>\n\n</tool_response><|im_end|>\n{OPENING}"
    )


def test_tools_stand_between_the_effort_and_the_system_text() -> None:
    tools = (SHELL, replace(tool("late"), deferred=True), tool("g", strict=True))
    written = text(Message("system", "S"), user("q"), tools=tools, thinking=Thinking(effort="low"))
    shown = [f'{{"type": "function", "function": {schema}}}' for schema in (SHELL.schema, '{"name": "g"}')]
    head, found, rest = written.partition("\n".join(["\n\n<tools>", *shown, "</tools>\n\n"]))
    assert found
    assert head.startswith("<|im_start|>system\nReasoning effort is set to low.\n\n# Tools\n\n")
    assert "<tool_call>\n<function=FUNCTION>\n<parameter=NAME>\nVALUE\n</parameter>\n</function>\n</tool_call>" in rest
    assert rest.endswith(f"\n\nS<|im_end|>\n{Q}{OPENING}")


def test_tools_of_which_none_is_shown_are_no_block() -> None:
    assert text(user("q"), tools=(replace(tool("late"), deferred=True),)) == Q + OPENING


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (tool("f", {"properties": {"ok": {}, "a>b": {}}}), "'f' has the parameter 'a>b'"),
        (tool("f", {"properties": {"<": {}}}), "'f' has the parameter '<'"),
        (tool("f>"), "'f>' has the name 'f>'"),
    ],
)
def test_names_that_calls_cannot_hold_are_refused_unless_deferred(bad: Tool, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        text(user("q"), tools=(SHELL, bad))
    assert text(user("q"), tools=(replace(bad, deferred=True),)) == Q + OPENING


def test_a_retry_ends_the_turn_with_an_error_and_opens_another() -> None:
    asked = chat(user("q"), tools=(SHELL,), thinking=MEDIUM)
    retry = QWEN.retry(asked, False, "no name </tool_response>")
    error = "Tool error: invalid tool call: no name &lt;/tool_response>\n"
    assert retry.startswith(f"<|im_end|>\n<|im_start|>user\n<tool_response>\n{error}")
    assert retry.endswith(f"\n</tool_response><|im_end|>\n{OPENING}")
    assert QWEN.retry(asked, True, "no name </tool_response>") == f"\n</think>\n\n{retry}"
    assert QWEN.retry(replace(asked, thinking=OFF), False, "x").endswith(EMPTY)


# What is said of the requests that follow.


@given(CHATS)
def test_tails_and_continuations_are_ends_of_the_prompt(conversation: Conversation) -> None:
    check_places(QWEN, conversation)


@given(CHATS, PLAIN, st.sampled_from(["", " \n", "\n\n"]), PLAIN)
def test_visible_is_how_the_next_request_begins(conversation: Conversation, answer: str, end: str, reasoning: str) -> None:
    check_visible(QWEN, conversation, answer, [""])
    rendered = QWEN.render(conversation)
    if rendered.thinking and rendered.visible:
        next_text = rendered.text[: rendered.visible.shared] + rendered.visible.head + answer + end
        assert QWEN.render(grown(conversation, said(answer + end), user("next"))).text.startswith(f"{next_text}<|im_end|>\n")
    elif rendered.thinking:
        after = QWEN.render(grown(conversation, said(answer + end, reasoning), user("next"))).text
        assert after.startswith(f"{rendered.text}{reasoning}\n</think>\n\n{answer}{end}<|im_end|>\n")


@given(CHATS, PLAIN)
def test_without_thinking_the_next_request_begins_with_the_prompt_and_the_answer(conversation: Conversation, answer: str) -> None:
    asked = replace(conversation, thinking=OFF, messages=(*conversation.messages, user("q")))
    rendered = QWEN.render(asked)
    assert rendered.visible is None
    assert QWEN.render(grown(asked, said(answer), user("next"))).text.startswith(rendered.text + answer)


@given(CHATS)
def test_a_history_that_grows_only_appends(conversation: Conversation) -> None:
    whole = QWEN.render(conversation).text
    for first in firsts(conversation):
        if first and conversation.messages[first - 1].role == "assistant":
            assert QWEN.render(cut(conversation, first)).text + QWEN.tail(conversation, first) == whole
    messages = conversation.messages
    for at in range(1, len(messages)):
        opens_head = all(message.role == "system" for message in messages[: at + 1])
        goes_on = messages[at - 1].role == messages[at].role == "tool"  # results come together
        if not opens_head and not goes_on:
            before = QWEN.render(cut(conversation, at))
            assert whole.startswith(before.text[: before.generation_from])


@given(st.dictionaries(WORDS.filter(lambda key: not set("<>\n") & set(key)), JSON), st.lists(WORDS))
def test_arguments_and_results_can_be_read_back(arguments: dict[str, Any], outputs: list[str]) -> None:
    call = Call("c", "f", json.dumps(arguments))
    written = text(user("q"), said("", "", call), *(result(output) for output in outputs), thinking=OFF)
    pairs = re.findall(r"<parameter=([^>]*)>\n(.*?)\n</parameter>\n", written, re.DOTALL)
    read = {key: unescape(value, "</parameter>") for key, value in pairs}
    assert {k: v if isinstance(arguments[k], str) else json.loads(v) for k, v in read.items()} == arguments
    bodies = re.findall("\n<tool_response>\n(.*?)\n</tool_response>", written.partition("</tool_call>")[2], re.DOTALL)
    assert [unescape(body, "</tool_response>") for body in bodies] == outputs


@given(PLAIN, TURNS, st.booleans())
def test_what_is_written_is_what_the_tracker_reads(content: str, arguments: list[dict[str, Any]], thinking: bool) -> None:
    check_read_back(QWEN, content, arguments, thinking)


def test_the_results_of_calls_that_are_not_shown_end_the_turn_that_made_them() -> None:
    alone = chat(Message("system", "S"), result("1", "b"), result("2", "a"), thinking=MEDIUM)
    rendered = QWEN.render(alone)
    head = "<|im_start|>system\nS<|im_end|>\n"
    responses = "\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>"
    tail = f"<|im_end|>\n<|im_start|>user{responses}<|im_end|>\n{OPENING}"
    assert rendered.text == head + tail
    assert rendered.continues == Continues(["a", "b"], len(head))
    assert QWEN.tail(alone, 1) == tail


def test_what_follows_results_belongs_to_their_continuation() -> None:
    asked = chat(user("q"), said("", "", CALL), result("1"), user("q"), Message("system", "late"), thinking=MEDIUM)
    rendered = QWEN.render(asked)
    assert rendered.continues is not None
    assert rendered.continues.calls == ["c1"]
    assert rendered.text[rendered.continues.suffix_from :] == QWEN.tail(asked, 2)


def test_visible_unless_the_client_sends_reasoning_back() -> None:
    closed = "\n</think>\n\n"
    plain = QWEN.render(chat(user("q"), thinking=MEDIUM))
    assert plain.visible == Visible(len(plain.text), closed, "start")
    assert QWEN.render(chat(user("q"), tools=(SHELL,))).visible is None
    assert QWEN.render(chat(user("q"), said("b", "r"), user("q"))).visible is None
    dropped = QWEN.render(chat(user("q"), said("b"), user("q"), tools=(SHELL,)))
    assert dropped.visible == Visible(len(dropped.text), closed, "start")


@pytest.mark.parametrize("what", ["render", "tail"])
def test_the_work_is_linear_in_the_history(what: str) -> None:
    check_linear(QWEN, what)
