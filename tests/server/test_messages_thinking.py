from __future__ import annotations

from typing import Any

import pytest

from ds4batch.chat.conversation import Thinking
from ds4batch.server.apis import chat_input, messages
from ds4batch.server.apis.served import Served
from ds4batch.server.apis.thinking import MAX_EFFORT_CTX, resolve
from ds4batch.server.errors import ApiError

USER = {"role": "user", "content": "hi"}
OFF = Thinking(enabled=False, explicit=True)


def served(*, levels: bool = False, ctx: int = MAX_EFFORT_CTX) -> Served:
    return Served(model="loaded", max_tokens=16, ctx=ctx, vocab_size=256, levels=levels)


def of_messages(where: Served | None = None, **body: Any) -> Thinking:
    return messages.read_request({"messages": [USER], **body}, where or served()).conversation.thinking


def of_chat(where: Served | None = None, **body: Any) -> Thinking:
    return chat_input.read_request({"messages": [USER], **body}, where or served()).conversation.thinking


BOTH = pytest.mark.parametrize("thinking_of", [of_messages, of_chat], ids=["messages", "chat"])


@BOTH
@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, Thinking()),
        ({"thinking": None, "reasoning_effort": None}, Thinking()),
        ({"thinking": True}, Thinking(explicit=True)),
        ({"thinking": False}, OFF),
        ({"thinking": {"type": "enabled", "budget_tokens": 2048}}, Thinking(explicit=True)),
        ({"thinking": {"type": "disabled"}}, OFF),
        ({"thinking": {"type": "adaptive"}}, Thinking()),
        ({"thinking": {}}, Thinking()),
        ({"reasoning_effort": "max"}, Thinking(effort="max", explicit=True)),
        ({"reasoning_effort": "xhigh"}, Thinking(effort="high", explicit=True)),
        ({"reasoning_effort": "medium"}, Thinking(effort="medium", explicit=True)),
        ({"reasoning_effort": "minimal"}, Thinking(effort="low", explicit=True)),
        ({"reasoning_effort": "none"}, OFF),
        ({"reasoning_effort": "none", "thinking": True}, OFF),
        ({"reasoning_effort": "max", "thinking": False}, OFF),
    ],
)
def test_the_fields_that_both_apis_have(thinking_of: Any, body: dict[str, Any], expected: Thinking) -> None:
    assert thinking_of(**body) == expected


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}}, Thinking(effort="low", explicit=True)),
        ({"output_config": {"effort": "none"}}, OFF),
        ({"output_config": {"effort": None}, "reasoning_effort": "low"}, Thinking(effort="low", explicit=True)),
        ({"output_config": {"effort": "medium"}, "reasoning_effort": "low"}, Thinking(effort="medium", explicit=True)),
    ],
)
def test_messages_have_an_effort_of_their_own_that_goes_first(body: dict[str, Any], expected: Thinking) -> None:
    assert of_messages(**body) == expected


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"think": False}, OFF),
        ({"think": True}, Thinking(explicit=True)),
        ({"chat_template_kwargs": None}, Thinking()),
        ({"chat_template_kwargs": {"enable_thinking": False}, "thinking": True}, OFF),
        ({"chat_template_kwargs": {"enable_thinking": True, "other": 3}, "think": False}, Thinking(explicit=True)),
        ({"chat_template_kwargs": {"reasoning_effort": "low"}}, Thinking(effort="low", explicit=True)),
        ({"chat_template_kwargs": {"reasoning_effort": "low"}, "reasoning_effort": "max"}, Thinking(effort="max", explicit=True)),
        ({"thinking": {"type": "adaptive"}, "think": False}, OFF),
    ],
)
def test_chat_has_further_switches(body: dict[str, Any], expected: Thinking) -> None:
    assert of_chat(**body) == expected


@BOTH
@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("0", OFF),
        ("1", Thinking(effort="low", level=1, explicit=True)),
        ("59", Thinking(effort="low", level=59, explicit=True)),
        ("60", Thinking(effort="high", level=60, explicit=True)),
        ("89", Thinking(effort="high", level=89, explicit=True)),
        ("90", Thinking(effort="max", level=90, explicit=True)),
        ("100", Thinking(effort="max", level=100, explicit=True)),
        ("low", Thinking(effort="low", explicit=True)),
    ],
)
def test_a_model_with_levels_takes_a_number(thinking_of: Any, value: str, expected: Thinking) -> None:
    assert thinking_of(served(levels=True), reasoning_effort=value) == expected


@BOTH
@pytest.mark.parametrize("value", ["-1", "101", "1.5", "50x", "", "007", " 5", "٥", "5\n", "High"])
def test_what_is_neither_a_name_nor_a_level_is_refused(thinking_of: Any, value: str) -> None:
    with pytest.raises(ApiError, match=r"reasoning_effort: expected one of .*, or a number from 0 to 100 in a string, got"):
        thinking_of(served(levels=True), reasoning_effort=value)


@BOTH
@pytest.mark.parametrize("value", ["0", "50", "100"])
def test_a_model_without_levels_takes_names_only(thinking_of: Any, value: str) -> None:
    with pytest.raises(ApiError, match="reasoning_effort: expected one of max, high, xhigh, medium, low, minimal, none, got"):
        thinking_of(reasoning_effort=value)


@BOTH
def test_the_highest_effort_wants_a_large_context(thinking_of: Any) -> None:
    small = served(ctx=MAX_EFFORT_CTX - 1, levels=True)
    assert thinking_of(small, reasoning_effort="max").effort == "high"
    assert thinking_of(small, reasoning_effort="95") == Thinking(effort="high", level=95, explicit=True)


@BOTH
@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("deepseek-chat", OFF),
        ("deepseek-reasoner", Thinking(explicit=True)),
        ("glm-5.2-chat", OFF),
        ("glm-5.3-flash-no-think", OFF),
        ("qwen3.8-flash-next-nothink", OFF),
        ("qwen/qwen3.8-flash-next-chat", OFF),
        ("zai/glm-5.2-reasoner", Thinking(explicit=True)),
        ("glm-5.2", Thinking()),
        ("Deepseek-chat", Thinking()),
        ("gpt-5-chat", Thinking()),
    ],
)
def test_a_models_name_may_say_whether_to_think(thinking_of: Any, model: str, expected: Thinking) -> None:
    assert thinking_of(model=model) == expected


@BOTH
def test_what_the_request_says_beats_the_models_name(thinking_of: Any) -> None:
    assert thinking_of(model="deepseek-chat", thinking=True).enabled
    assert not thinking_of(model="deepseek-reasoner", reasoning_effort="none").enabled
    assert not thinking_of(model="deepseek-chat", reasoning_effort="high").enabled  # how hard is not whether


def by_name(model: str, enabled: bool | None = None) -> Thinking:
    return resolve(Served("m", 100, 1 << 20, 100, False), model, enabled, None)


@pytest.mark.parametrize(
    "model", ["deepseek-chat", "glm-5.2-chat", "glm-5.3-flash-nothink", "qwen3.8-flash-next-no-think", "zai/glm-5.2-chat"]
)
def test_some_model_names_switch_thinking_off(model: str) -> None:
    assert not by_name(model).enabled
    assert by_name(model, True).enabled, "what the request says itself comes first"


@pytest.mark.parametrize("model", ["deepseek-reasoner", "glm-5.2-reasoner", "qwen/qwen3.8-flash-next-reasoner"])
def test_some_model_names_switch_thinking_on(model: str) -> None:
    assert by_name(model) == Thinking(True, explicit=True)
    assert not by_name(model, False).enabled


@pytest.mark.parametrize(
    "model", ["", "glm-5.2", "GLM-5.2-chat", "glm-5.2-chat ", "deepseek/deepseek-chat", "zai/glm-5.2-nothink"]
)
def test_other_model_names_switch_nothing(model: str) -> None:
    assert by_name(model) == Thinking(True, explicit=False)
