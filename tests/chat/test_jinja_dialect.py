"""Any model by its own template: golden renderings, what stands in for what a template cannot show, and the places for the engine."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4batch.chat import places
from ds4batch.chat.conversation import Call, Conversation, Message, Thinking, Tool
from ds4batch.chat.dialects.base import Dialect
from ds4batch.chat.dialects.jinja import JinjaDialect
from ds4batch.chat.schemas import canonical
from ds4batch.chat.template import CHATML, TRANSCRIPT, ChatTemplate, template_for
from ds4batch.messages import Visible
from ds4batch.tokenizer import load_tokenizer
from tests.chat.jinja_templates import GEMMA, LLAMA3, MISTRAL, QWEN3
from tests.chat.reading import Answer, feed

DEMO = Path(__file__).parents[2] / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
DEMO_SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"


def tool(name: str = "sh") -> Tool:
    parameters = {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]}
    return Tool(name, canonical(json.dumps({"name": name, "description": "café", "parameters": parameters})), parameters)


TOOL = tool()
ASK = Message("user", "list")
CALL = Message("assistant", "ok", reasoning="hm", calls=(Call("call_1", "sh", '{"cmd":"ls -l","n":2}'),))
RESULT = Message("tool", "a b", call_id="call_1")
PAIR = Message("assistant", calls=(Call("call_1", "sh", '{"cmd":"a"}'), Call("call_2", "sh", '{"cmd":"b"}')))
ANSWERED = [ASK, CALL, RESULT, Message("assistant", "done", reasoning="so")]


def qwen(stops: tuple[str, ...] = ("<|im_end|>",)) -> JinjaDialect:
    return JinjaDialect(ChatTemplate(QWEN3, "", "<|im_end|>"), stops, "hermes")


def llama() -> JinjaDialect:
    return JinjaDialect(ChatTemplate(LLAMA3, "<|begin_of_text|>", "<|eot_id|>"), ("<|eot_id|>",), "llama3")


def mistral() -> JinjaDialect:
    return JinjaDialect(ChatTemplate(MISTRAL, "<s>", "</s>"), ("</s>",))


def gemma() -> JinjaDialect:
    return JinjaDialect(ChatTemplate(GEMMA, "<bos>", "<eos>"), ("<end_of_turn>",))


def chatml() -> JinjaDialect:
    return JinjaDialect(ChatTemplate(CHATML, "", ""), ("<|im_end|>",))


def transcript() -> JinjaDialect:
    return JinjaDialect(ChatTemplate(TRANSCRIPT, "", ""))


ALL = (qwen, llama, mistral, gemma, chatml, transcript)


@pytest.fixture(scope="module")
def demo() -> JinjaDialect:
    if not DEMO.exists():
        pytest.fail(f"{DEMO} is missing: run `make setup`")
    tokenizer = load_tokenizer(str(DEMO))
    return JinjaDialect(template_for(tokenizer), ("<|im_end|>", "<|endoftext|>"))


def prompt(dialect: Dialect, *messages: Message, tools: tuple[Tool, ...] = (), thinking: Thinking | None = None) -> str:
    return dialect.render(Conversation(messages, tools, thinking or Thinking())).text


def reference(source: str, messages: list[dict[str, Any]], tools: Any = None, **names: Any) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered, _ = render_jinja_template([messages], tools=tools, chat_template=source, add_generation_prompt=True, **names)
    return str(rendered[0])


CALLED = [{"id": "call_1", "type": "function", "function": {"name": "sh", "arguments": {"cmd": "ls -l", "n": 2}}}]
HISTORY = [
    {"role": "user", "content": "list"},
    {"role": "assistant", "content": "ok", "reasoning_content": "hm", "tool_calls": CALLED},
    {"role": "tool", "tool_call_id": "call_1", "name": "sh", "content": "a b"},
    {"role": "assistant", "content": "done", "reasoning_content": "so"},
    {"role": "user", "content": "thanks 漢字 😀"},
]


# Renderings.


def test_the_demo_model_is_shown_what_it_was_trained_on(demo: JinjaDialect) -> None:
    assert prompt(demo, Message("user", "Hi")) == (DEMO_SYSTEM + "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    said = [Message("system", "Be brief."), Message("user", "a"), Message("assistant", "漢字 😀"), Message("user", " <b>\n")]
    assert prompt(demo, *said) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n漢字 😀<|im_end|>\n"
        "<|im_start|>user\n <b>\n<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_demo_model_gets_tools_in_a_form_of_our_own(demo: JinjaDialect) -> None:
    text = prompt(demo, Message("system", "Be brief."), ASK, CALL, RESULT, tools=(TOOL,))
    system, _, rest = text.partition("<|im_end|>\n")
    assert system.startswith("<|im_start|>system\n# Tools\n")
    assert system.endswith(f'<tools>\n{{"type": "function", "function": {TOOL.schema}}}\n</tools>\n\nBe brief.')
    assert rest == (
        "<|im_start|>user\nlist<|im_end|>\n"
        '<|im_start|>assistant\nok\n<tool_call>\n{"name": "sh", "arguments": {"cmd": "ls -l", "n": 2}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\na b\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert demo.grammar == "hermes"


@pytest.mark.parametrize(
    ("make", "source", "bos", "eos"), [(qwen, QWEN3, "", "<|im_end|>"), (llama, LLAMA3, "<|begin_of_text|>", "<|eot_id|>")]
)
def test_a_template_that_shows_tools_reads_what_transformers_gives_it(make: Any, source: str, bos: str, eos: str) -> None:
    dialect = make()
    assert not dialect.own_form
    tools = [{"type": "function", "function": json.loads(TOOL.schema)}]
    for end in (1, 3, 5):
        messages = (*ANSWERED, Message("user", "thanks 漢字 😀"))[:end]
        assert prompt(dialect, *messages, tools=(TOOL,)) == reference(source, HISTORY[:end], tools, bos_token=bos, eos_token=eos)


def test_qwen_shows_reasoning_behind_the_last_question_only() -> None:
    call = '<tool_call>\n{"name": "sh", "arguments": {"cmd": "ls -l", "n": 2}}\n</tool_call><|im_end|>\n'
    shown = prompt(qwen(), ASK, CALL, RESULT)
    assert shown == (
        f"<|im_start|>user\nlist<|im_end|>\n<|im_start|>assistant\n<think>\nhm\n</think>\n\nok\n{call}"
        "<|im_start|>user\n<tool_response>\na b\n</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n"
    )
    dropped = prompt(qwen(), *ANSWERED, Message("user", "more"))
    assert "hm" not in dropped
    assert f"<|im_start|>assistant\nok\n{call}" in dropped


@pytest.mark.parametrize(
    ("thinking", "opening"),
    [
        (Thinking(), "<think>\n"),
        (Thinking(enabled=False), "<think>\n"),  # by a default of the model: the template's own holds
        (Thinking(enabled=True, explicit=True), "<think>\n"),
        (Thinking(enabled=False, explicit=True), "<think>\n\n</think>\n\n"),
    ],
)
def test_only_the_request_itself_switches_a_templates_thinking(thinking: Thinking, opening: str) -> None:
    rendered = qwen().render(Conversation([ASK], thinking=thinking))
    assert rendered.text[rendered.generation_from :] == "<|im_start|>assistant\n" + opening
    assert rendered.thinking is (opening == "<think>\n")


def test_effort_reaches_the_template_where_the_request_set_it() -> None:
    dialect = JinjaDialect(ChatTemplate(CHATML + "{{ reasoning_effort }},{{ enable_thinking }}", "", ""))
    assert prompt(dialect, ASK).endswith("assistant\n,")
    assert prompt(dialect, ASK, thinking=Thinking(effort="low", explicit=True)).endswith("assistant\nlow,True")
    assert prompt(dialect, ASK, thinking=Thinking(enabled=False, explicit=True)).endswith("assistant\n,False")


def test_arguments_that_are_no_object_are_shown_and_refuse_nothing() -> None:
    for arguments in ('{"cmd": "l', "", "[1]", "NaN", "[" * 9999):
        call = Message("assistant", calls=(Call("call_1", "sh", arguments),))
        for dialect in (qwen(), chatml()):
            assert json.dumps(arguments)[1:-1][:9] in prompt(dialect, ASK, call, RESULT, tools=(TOOL,))


def test_a_number_too_long_to_be_read_is_shown_as_it_is() -> None:
    call = Message("assistant", calls=(Call("call_1", "sh", '{"a": 1' + "0" * 9999 + "}"),))
    for dialect in (qwen(), chatml()):
        assert "0" * 9999 in prompt(dialect, ASK, call, RESULT)


def test_lone_surrogates_of_a_call_become_a_replacement() -> None:
    call = Message("assistant", calls=(Call("call_1", "sh", r'{"cmd": ["\ud83d"]}'),))
    for dialect in (qwen(), chatml()):
        assert '["\ufffd"]' in prompt(dialect, ASK, call, RESULT)


def test_llama_gets_several_calls_as_the_text_it_writes_them_in() -> None:
    text = prompt(llama(), ASK, PAIR, RESULT, Message("tool", "c", call_id="call_2"), tools=(TOOL,))
    assert (
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
        '{"name": "sh", "parameters": {"cmd": "a"}}; {"name": "sh", "parameters": {"cmd": "b"}}<|eot_id|>'
        "<|start_header_id|>ipython<|end_header_id|>\n\na b<|eot_id|>"
    ) in text


def test_a_result_cannot_close_its_own_tag_in_our_form() -> None:
    text = prompt(chatml(), ASK, CALL, Message("tool", "x</tool_response>y & <b>", call_id="call_1"))
    assert "<tool_response>\nx&lt;/tool_response>y & <b>\n</tool_response><|im_end|>" in text


def test_a_run_of_results_is_one_message_in_our_form() -> None:
    text = prompt(chatml(), ASK, PAIR, RESULT, Message("tool", "c", call_id="call_2"))
    assert "user\n<tool_response>\na b\n</tool_response>\n<tool_response>\nc\n</tool_response><|im_end|>" in text


# What templates refuse.


def test_turns_are_merged_where_they_must_alternate() -> None:
    assert prompt(mistral(), Message("user", "a"), Message("user", "b")) == "<s>[INST] a\n\nb [/INST]"
    text = prompt(mistral(), ASK, Message("assistant", "x"), Message("assistant", "y"), Message("user", "b"))
    assert text == "<s>[INST] list [/INST] x\n\ny</s>[INST] b [/INST]"


def test_a_late_system_message_stays_in_its_place() -> None:
    late = [Message("user", "a"), Message("assistant", "b"), Message("system", "be kind"), Message("user", "c")]
    assert prompt(mistral(), *late) == "<s>[INST] a [/INST] b</s>[INST] <system>\nbe kind\n</system>\n\nc [/INST]"
    assert "b<|im_end|>\n<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\nc" in prompt(qwen(), *late)


def test_a_template_without_a_system_role_gets_it_with_the_first_question() -> None:
    said = [Message("system", "s1"), Message("system", "s2"), Message("user", "a")]
    assert prompt(gemma(), *said) == "<bos><start_of_turn>user\ns1\n\ns2\n\na<end_of_turn>\n<start_of_turn>model\n"


def test_several_system_messages_at_the_beginning_are_one() -> None:
    assert prompt(llama(), Message("system", "s1"), Message("system", "s2"), ASK).startswith(
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\ns1\n\ns2<|eot_id|>"
    )


@pytest.mark.parametrize("make", [mistral, gemma])
def test_tool_loops_work_where_turns_must_alternate(make: Any) -> None:
    more = Message("user", "and now?")
    text = prompt(make(), Message("system", "s"), ASK, PAIR, RESULT, more, CALL, RESULT, tools=(TOOL,))
    assert text.index("# Tools") < text.index("list") < text.index("</tool_call>\n<tool_call>") < text.index("and now?")
    assert text.count("<tool_response>\na b\n</tool_response>") == 2


def test_what_no_rule_can_mend_is_refused_by_the_number_of_the_message() -> None:
    said = [ASK, Message("assistant", "x"), ASK]
    with pytest.raises(ValueError, match=r"message 1 of 3 \(assistant\).*must alternate"):
        prompt(mistral(), *said[1:], Message("assistant", "y"))
    picky = JinjaDialect(
        ChatTemplate("{% for m in messages %}{{ raise_exception('no') if m.content == 'x' }}{% endfor %}", "", "")
    )
    with pytest.raises(ValueError, match=r"message 2 of 3 \(assistant\).*: no"):
        prompt(picky, *said)


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
