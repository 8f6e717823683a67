"""What a template tells of a conversation's next request, on templates as models ship them."""

from __future__ import annotations

import pytest

from ds4batch.chat.template import ChatTemplate
from ds4batch.messages import Continues, Visible
from ds4batch.server.places import Places, find_places

# Each message in its tags; an answer's reasoning is kept only behind the last user message, as Qwen's templates do it.
KEEPS_LAST = (
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
ASK = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "why?"}]


def places(source: str, messages, ends=(b"<|im_end|>",)) -> tuple[str, Places]:
    template = ChatTemplate(source, "", "")
    text = template.render(messages)
    return text, find_places(
        text, messages, lambda some: template.render(some, add_generation_prompt=False), template.thinks, ends
    )


def test_the_next_request_begins_as_this_one_where_only_the_reasoning_goes() -> None:
    text, found = places(KEEPS_LAST, ASK)
    assert found.visible == Visible(len(text), "")
    assert text[found.generation_from :] == "<|im_start|>assistant\n"
    assert found.continues is None


def test_what_opened_the_reasoning_is_not_in_the_next_request() -> None:
    text, found = places(OPENS, ASK)
    assert found.visible is not None
    assert text[: found.visible.shared] + found.visible.head == "<system>be brief<user>why?<assistant>"
    assert text[found.generation_from :] == "<assistant><think>\n"


def test_a_template_that_knows_of_no_reasoning_costs_nothing() -> None:
    def never(messages):
        raise AssertionError("rendered")

    assert find_places("text", ASK, never, False, ()) == Places()


def answered(*results: dict) -> list[dict]:
    calls = [{"id": f"call_{i}", "type": "function", "function": {"name": "f", "arguments": {"i": i}}} for i in (1, 2)]
    return [*ASK, {"role": "assistant", "content": "let me see", "reasoning_content": "hm", "tool_calls": calls}, *results]


def test_results_begin_where_the_answer_with_their_calls_was_ended() -> None:
    given = [{"role": "tool", "content": f"result {i}", "tool_call_id": f"call_{i}"} for i in (2, 1)]
    text, found = places(KEEPS_LAST, answered(*given))
    assert found.continues is not None
    assert found.continues.calls == ["call_1", "call_2"]
    rest = text[found.continues.suffix_from :]
    assert rest.startswith("<|im_end|>\n<|im_start|>tool\nresult 2<|im_end|>\n")
    assert text[: found.continues.suffix_from].endswith("</call>")


@pytest.mark.parametrize(
    "messages",
    [
        answered({"role": "tool", "content": "r", "tool_call_id": "call_1"}, {"role": "tool", "content": "r"}),
        answered({"role": "tool", "content": "r", "tool_call_id": "call_1"}, {"role": "user", "content": "and?"}),
        [*ASK, {"role": "tool", "content": "r", "tool_call_id": "call_1"}],
    ],
)
def test_nothing_is_continued_unless_only_named_results_follow_the_calls(messages) -> None:
    assert places(KEEPS_LAST, messages)[1].continues is None


def test_a_template_that_refuses_the_questions_gives_no_answers() -> None:
    _, found = places("{% if messages | length != 2 %}{{ raise_exception('no') }}{% endif %}think" + OPENS, ASK)
    assert found.visible is None


def test_places_move_with_what_is_put_before_the_text() -> None:
    where = Places(5, Visible(7, "x"), Continues(["c"], 3))
    assert where.shifted(2) == Places(7, Visible(9, "x"), Continues(["c"], 5))
    assert where.shifted(0) == where
    assert Places().shifted(2) == Places()
