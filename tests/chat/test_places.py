"""What a template tells of a conversation's next request, on templates as models ship them."""

from __future__ import annotations

import pytest

from ds4batch.chat.conversation import Call, Conversation, Message
from ds4batch.chat.dialects.base import Rendered
from ds4batch.chat.dialects.jinja import JinjaDialect
from ds4batch.chat.template import ChatTemplate
from ds4batch.messages import Visible

# Each message in its tags; an answer's reasoning is kept only behind the last user message, as Qwen's templates do it.
KEEPS_LAST = (
    "{{ tools | tojson if tools else '' }}"
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 > ns.last %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<call>{{ c.function.arguments | tojson }}</call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The reasoning is opened by the prompt and gone from the history.
OPENS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.role == 'assistant' %}<end>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant><think>\n{% endif %}"
)
ASK = [Message("system", "be brief"), Message("user", "why?")]


def rendered(source: str, messages: list[Message]) -> Rendered:
    return JinjaDialect(ChatTemplate(source, "", ""), ("<|im_end|>",), "hermes").render(Conversation(messages))


def test_the_next_request_begins_as_this_one_where_only_the_reasoning_goes() -> None:
    found = rendered(KEEPS_LAST, ASK)
    assert found.visible == Visible(len(found.text), "")
    assert found.text[found.generation_from :] == "<|im_start|>assistant\n"
    assert not found.thinking
    assert found.continues is None


def test_what_opened_the_reasoning_is_not_in_the_next_request() -> None:
    found = rendered(OPENS, ASK)
    assert found.visible is not None
    assert found.text[: found.visible.shared] + found.visible.head == "<system>be brief<user>why?<assistant>"
    assert found.text[found.generation_from :] == "<assistant><think>\n"
    assert found.thinking


def answered(*after: Message) -> list[Message]:
    calls = tuple(Call(f"call_{i}", "f", f'{{"i": {i}}}') for i in (1, 2))
    return [*ASK, Message("assistant", "let me see", "hm", calls), *after]


def test_results_begin_where_the_answer_with_their_calls_was_ended() -> None:
    found = rendered(KEEPS_LAST, answered(*(Message("tool", f"result {i}", call_id=f"call_{i}") for i in (2, 1))))
    assert found.continues is not None
    assert found.continues.calls == ["call_1", "call_2"]
    rest = found.text[found.continues.suffix_from :]
    assert rest.startswith("<|im_end|>\n<|im_start|>tool\nresult 2<|im_end|>\n")
    assert found.text[: found.continues.suffix_from].endswith("</call>")


RESULT = Message("tool", "r", call_id="call_1")


@pytest.mark.parametrize(
    "messages", [answered(RESULT, Message("tool", "r")), answered(), [*ASK, Message("assistant", "x"), RESULT]]
)
def test_nothing_is_continued_unless_named_results_follow_the_calls(messages: list[Message]) -> None:
    assert rendered(KEEPS_LAST, messages).continues is None


def test_what_the_user_adds_to_the_results_belongs_to_them() -> None:
    found = rendered(KEEPS_LAST, answered(RESULT, Message("user", "and?")))
    assert found.continues is not None
    assert found.text[found.continues.suffix_from :].endswith("user\nand?<|im_end|>\n<|im_start|>assistant\n")


def test_a_template_that_knows_of_no_reasoning_is_not_asked_for_it() -> None:
    plain = rendered(KEEPS_LAST.replace("think", "sink").replace("reasoning_content", "other"), ASK)
    assert plain.visible == Visible(len(plain.text), "")


def test_a_template_that_refuses_the_questions_gives_no_answers() -> None:
    assert rendered("{% if messages | length != 2 %}{{ raise_exception('no') }}{% endif %}think" + OPENS, ASK).visible is None
