"""Any model by its own template: calls as they were sampled, the places for the engine, and what holds of any history."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4batch.chat import places
from ds4batch.chat.conversation import Call, Conversation, Message
from ds4batch.chat.dialects.jinja import JinjaDialect
from ds4batch.chat.template import CHATML, ChatTemplate
from ds4batch.messages import Visible
from tests.chat.jinja_dialects import (
    ALL,
    ANSWERED,
    ASK,
    CALL,
    PAIR,
    RESULT,
    TOOL,
    chatml,
    gemma,
    llama,
    mistral,
    prompt,
    qwen,
)
from tests.chat.jinja_templates import QWEN3
from tests.chat.reading import Answer, feed

# What was sampled.


RAW = '\n\n<tool_call>\n{"arguments":{"n":2, "cmd":"ls -l"},"name":"sh"}\n</tool_call>'


@pytest.mark.parametrize("make", ALL)
def test_a_sampled_call_is_replayed_byte_for_byte(make: Any) -> None:
    dialect = make()
    sampled = Message("assistant", "ok", calls=CALL.calls, raw=RAW)
    text = prompt(dialect, ASK, sampled, RESULT, Message("assistant", "fine"), ASK, tools=(TOOL,))
    assert text.count("ok" + RAW) == 1
    assert "\ue000" not in text
    # Around it, nothing changes.
    plain = prompt(dialect, ASK, CALL, RESULT, Message("assistant", "fine"), ASK, tools=(TOOL,))
    assert plain.startswith(text.split("ok" + RAW)[0])
    assert plain.endswith(text.split("ok" + RAW)[1])


def test_the_space_behind_sampled_reasoning_is_not_written_twice() -> None:
    sampled = Message("assistant", reasoning="hm", calls=CALL.calls, raw=RAW)
    assert "<think>\nhm\n</think>" + RAW + "<|im_end|>" in prompt(qwen(), ASK, sampled, RESULT)
    unthought = Message("assistant", calls=CALL.calls, raw=RAW.strip())
    assert "<|im_start|>assistant\n" + RAW.strip() + "<|im_end|>" in prompt(qwen(), ASK, unthought, RESULT)


BLOCK = '<tool_call>\n{"name":"sh",  "arguments": {"n": 2.0}}\n</tool_call>'


@pytest.mark.parametrize(
    ("make", "sampled"),
    [
        (qwen, "hm\n</think>\n\n" + BLOCK),
        (qwen, "hm\n</think>\n" + BLOCK),
        (qwen, "hm\n</think>\n\nSo:\n" + BLOCK + "\n" + BLOCK),
        (llama, '{"name": "sh",  "parameters": {"n": 2.0}}'),
        (llama, '{"name": "sh", "parameters": {}};{"name": "sh", "parameters": {}}'),
        (gemma, BLOCK),
        (chatml, BLOCK),
        (chatml, "\n" + BLOCK),
        (chatml, "So:\n\n" + BLOCK + BLOCK),
    ],
)
def test_the_turn_that_called_comes_back_as_it_was_sampled(make: Any, sampled: str) -> None:
    dialect = make()
    asked = dialect.render(Conversation([ASK], (TOOL,)))
    read = feed(Answer(sampled, dialect.grammar, asked.thinking))
    calls = tuple(Call(call.id, call.name, call.arguments) for call in read.turn.complete_calls)
    assert calls
    called = Message("assistant", read.content, "".join(read.reasoning), calls, raw=read.end.raw)
    results = [Message("tool", "r", call_id=call.id) for call in calls]
    rendered = dialect.render(Conversation([ASK, called, *results], (TOOL,)))
    assert rendered.continues is not None
    assert rendered.text[: rendered.continues.suffix_from] == asked.text + sampled


def test_white_space_that_belongs_to_the_content_is_not_written_without_one() -> None:
    source = (
        "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}<think></think>{% endif %}"
        "{{ '\n' + m.content if m.content else '' }}{% for c in m.tool_calls or [] %}{{ '\n<tool_call>' + c | string }}{% endfor %}"
        "{% endfor %}"
        "{% if tools %}{{ tools }}{% endif %}{% if add_generation_prompt %}<|assistant|><think></think>{% endif %}"
    )
    dialect = JinjaDialect(ChatTemplate(source, "", ""), (), "hermes")
    assert (dialect.own_form, dialect.abilities.lead) == (False, "\n")
    opening = dialect.render(Conversation([ASK])).text
    for text, sampled in (("", RAW), ("ok", "\nok" + RAW)):
        assert prompt(dialect, ASK, Message("assistant", text, calls=CALL.calls, raw=RAW), RESULT).startswith(
            opening + sampled + "<|tool|>"
        )


def test_calls_are_written_anew_where_text_cannot_stand_for_them() -> None:
    source = QWEN3.replace("{{- m.content.lstrip('\\n') }}", "{%- if m.tool_calls or loop.last or loop.nextitem.role != 'tool' %}"
                           "{{- m.content.lstrip('\\n') }}{%- else %}{{- raise_exception('results need calls') }}{%- endif %}")  # fmt: skip
    dialect = JinjaDialect(ChatTemplate(source, "", ""), ("<|im_end|>",), "hermes")
    sampled = Message("assistant", "ok", calls=CALL.calls, raw=RAW)
    assert prompt(dialect, ASK, sampled, RESULT) == prompt(dialect, ASK, Message("assistant", "ok", calls=CALL.calls), RESULT)
    assert dialect.tail(Conversation([ASK, sampled, RESULT]), 2).startswith("<|im_end|>\n<|im_start|>user\n<tool_response>")


def test_a_client_that_writes_our_marks_gets_an_answer() -> None:
    for mark in (places.MARK, "\ue000sampled 0\ue000"):
        sampled = Message("assistant", "ok", calls=CALL.calls, raw=RAW)
        text = prompt(qwen(), Message("user", mark), sampled, RESULT, tools=(TOOL,))
        assert mark in text
        assert text.endswith("<think>\n")


# Places for the engine.


def test_the_next_request_shows_a_template_without_this_answers_reasoning() -> None:
    rendered = qwen().render(Conversation([ASK]))
    assert rendered.visible is not None
    assert (
        rendered.text[: rendered.visible.shared] + rendered.visible.head
        == "<|im_start|>user\nlist<|im_end|>\n<|im_start|>assistant\n"
    )
    plain = chatml().render(Conversation([ASK]))
    assert plain.visible == Visible(len(plain.text), "")  # it never shows any


def test_a_template_that_opens_no_answer_has_its_opening_at_the_end() -> None:
    rendered = mistral().render(Conversation([Message("user", "say <think>")]))
    assert rendered.generation_from == len(rendered.text)
    assert not rendered.thinking


def test_a_template_that_refuses_the_questions_gives_no_places() -> None:
    source = "{# think #}{% if messages | length != 2 %}{{ raise_exception('no') }}{% endif %}" + CHATML
    rendered = JinjaDialect(ChatTemplate(source, "", "")).render(Conversation([Message("system", "s"), ASK]))
    assert rendered.text.endswith("list<|im_end|>\n<|im_start|>assistant\n")
    assert (rendered.visible, rendered.continues) == (None, None)
    with pytest.raises(ValueError, match="cannot show an error"):
        JinjaDialect(ChatTemplate(source, "", "")).retry(Conversation([Message("system", "s"), ASK]), False, "x")


@pytest.mark.parametrize("make", ALL)
def test_an_answer_that_was_begun_goes_on(make: Any) -> None:
    dialect = make()
    begun = Message("assistant", "It is ")
    later = Conversation([ASK, Message("assistant", "so"), ASK, begun])
    assert dialect.render(later).text.endswith(dialect.tail(later, 2))
    talk = Conversation([ASK, begun])
    rendered = dialect.render(talk)
    assert rendered.text.endswith("It is ")
    assert "list" not in rendered.text[rendered.generation_from :]
    assert (rendered.thinking, rendered.visible, rendered.continues) == (False, None, None)
    assert dialect.retry(talk, False, "x") == dialect.retry(Conversation([ASK]), False, "x")


def test_results_are_known_to_continue_the_calls() -> None:
    rendered = qwen().render(Conversation([ASK, PAIR, Message("tool", "c", call_id="call_2"), RESULT], (TOOL,)))
    assert rendered.continues is not None
    assert rendered.continues.calls == ["call_1", "call_2"]
    assert rendered.text[rendered.continues.suffix_from :].startswith("<|im_end|>\n<|im_start|>user\n<tool_response>\nc\n")


def test_nothing_is_continued_without_named_results_of_calls() -> None:
    for messages in (
        [ASK],
        ANSWERED,
        [*ANSWERED, ASK],
        [ASK, CALL, Message("tool", "r")],
        [ASK, Message("assistant", "x"), RESULT],
    ):
        assert qwen().render(Conversation(messages)).continues is None


@pytest.mark.parametrize("make", ALL)
def test_results_without_their_calls_are_shown_behind_some_calls(make: Any) -> None:
    dialect, talk = make(), Conversation([Message("system", "s"), RESULT, Message("tool", "c", call_id="call_2")], (TOOL,))
    rendered = dialect.render(talk)
    assert rendered.continues is not None
    assert rendered.continues.calls == ["call_1", "call_2"]
    assert rendered.text.endswith(dialect.tail(talk, 1))
    assert rendered.text[rendered.continues.suffix_from :] == dialect.tail(talk, 1)


def test_a_tail_needs_an_answer_before_it() -> None:
    for first in (0, 1, 3, 9, -1):
        with pytest.raises(ValueError, match="does not follow an answer"):
            qwen().tail(Conversation([ASK, CALL, RESULT]), first)


def test_places_move_with_what_is_put_before_the_text() -> None:
    rendered = qwen().render(Conversation([ASK, CALL, RESULT]))
    moved = places.shifted(rendered, "<s>")
    assert moved.text == "<s>" + rendered.text
    assert moved.text[moved.generation_from :] == rendered.text[rendered.generation_from :]
    assert rendered.visible is not None
    assert moved.visible == Visible(rendered.visible.shared + 3, rendered.visible.head)
    assert rendered.continues is not None
    assert moved.continues is not None
    assert moved.text[moved.continues.suffix_from :] == rendered.text[rendered.continues.suffix_from :]
    assert places.shifted(rendered, "") == rendered


@pytest.mark.parametrize("make", ALL)
@pytest.mark.parametrize("thinking", [False, True])
def test_a_call_that_could_not_be_read_is_told_so(make: Any, thinking: bool) -> None:
    dialect = make()
    text = dialect.retry(Conversation([ASK], (TOOL,)), thinking, "no </tool_call>")
    assert "Tool error: invalid tool call: no </tool_call>" in text
    assert text.startswith(
        "</think>" if thinking and make is not qwen else "\n</think>\n\n" if thinking else dialect.stops or "\n\n"
    )
    opening = dialect.render(Conversation([ASK], (TOOL,)))
    assert text.endswith(opening.text[opening.generation_from :])


# Properties.

TEXTS = st.sampled_from(
    ["x", "a\n", " b", "<|im_end|>", "</tool_response>", "<tool_call>", "{{ 7 }}", "</think>", "[INST]", "é😀"]
)
IDS = st.sampled_from(["call_1", "call_2"])


@st.composite
def talks(draw: st.DrawFn) -> list[Message]:
    """Questions, calls with their results, and answers; it ends where an answer is due."""
    messages = [Message("system", draw(TEXTS))] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 4))):
        messages.append(Message("user", draw(TEXTS)))
        for _ in range(draw(st.integers(0, 2))):
            arguments = json.dumps({"cmd": draw(TEXTS)}, ensure_ascii=False)
            raw = f'\n<tool_call>{{"name": "sh", "arguments": {arguments}}}</tool_call>' if draw(st.booleans()) else None
            text = draw(st.sampled_from(["", "ok"]))
            messages.append(
                Message("assistant", text, draw(st.sampled_from(["", "r"])), (Call("call_1", "sh", arguments),), raw=raw)
            )
            messages.append(Message("tool", draw(TEXTS), call_id="call_1"))
        messages.append(Message("assistant", draw(st.sampled_from(["fine", "so\nso"]))))
    while messages[-1].role == "assistant" or draw(st.booleans()):
        messages.pop()
        if not any(message.user_like for message in messages):
            return [Message("user", draw(TEXTS))]
    return messages[: 1 + max(i for i, message in enumerate(messages) if message.user_like)]


DIALECTS = {make.__name__: make() for make in ALL}


@given(name=st.sampled_from(sorted(DIALECTS)), messages=talks(), tools=st.booleans())
def test_the_tail_of_any_turn_is_the_end_of_the_prompt(name: str, messages: list[Message], tools: bool) -> None:
    dialect = DIALECTS[name]
    talk = Conversation(messages, (TOOL,) if tools else ())
    rendered = dialect.render(talk)
    for i, message in enumerate(messages):
        if message.role == "assistant":
            tail = dialect.tail(talk, i + 1)
            assert rendered.text.endswith(tail)
            if message.raw is not None and "</think>" not in tail:
                assert rendered.text[: -len(tail)].endswith(message.raw)
    if rendered.continues:
        assert messages[-1].role == "tool"
        last = max(i for i, message in enumerate(messages) if message.role == "assistant")
        assert rendered.text[rendered.continues.suffix_from :] == dialect.tail(talk, last + 1)


@given(name=st.sampled_from(sorted(set(DIALECTS) - {"qwen"})), messages=talks())
def test_a_history_that_only_grew_gives_a_prompt_that_only_grew(name: str, messages: list[Message]) -> None:
    dialect = DIALECTS[name]
    full = dialect.render(Conversation(messages, (TOOL,)))
    for end in range(1, len(messages)):
        if messages[end - 1].user_like and messages[end].role == "assistant":
            before = dialect.render(Conversation(messages[:end], (TOOL,)))
            assert full.text.startswith(before.text.rstrip())


@given(name=st.sampled_from(sorted(DIALECTS)), messages=talks())
def test_what_was_sampled_stands_in_the_prompt(name: str, messages: list[Message]) -> None:
    text = DIALECTS[name].render(Conversation(messages, (TOOL,))).text
    at = 0
    for message in messages:
        if message.raw is not None:
            at = text.index(message.raw, at) + len(message.raw)


def test_a_history_costs_in_proportion_to_its_length() -> None:
    def seconds(pairs: int) -> float:
        talk = [ASK]
        for i in range(pairs):
            call = Call(f"call_{i}", "sh", '{"cmd": "ls"}')
            talk += [Message("assistant", calls=(call,), raw=RAW), Message("tool", "r", call_id=f"call_{i}")]
        start = time.perf_counter()
        dialect.render(Conversation(talk, (TOOL,)))
        return time.perf_counter() - start

    dialect = qwen()
    seconds(100)
    assert min(seconds(2000) for _ in range(3)) < 30 * min(seconds(200) for _ in range(3))
