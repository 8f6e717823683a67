"""Any model by its own template: golden renderings, and what stands in for what a template cannot show or refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ds4batch.chat.conversation import Call, Conversation, Message, Thinking
from ds4batch.chat.dialects.jinja import JinjaDialect
from ds4batch.chat.template import CHATML, ChatTemplate, template_for
from ds4batch.tokenizer import load_tokenizer
from tests.chat.jinja_dialects import (
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
from tests.chat.jinja_templates import LLAMA3, QWEN3

DEMO = Path(__file__).parents[2] / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
DEMO_SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"


@pytest.fixture(scope="module")
def demo() -> JinjaDialect:
    if not DEMO.exists():
        pytest.fail(f"{DEMO} is missing: run `make setup`")
    tokenizer = load_tokenizer(str(DEMO))
    return JinjaDialect(template_for(tokenizer), ("<|im_end|>", "<|endoftext|>"))


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
