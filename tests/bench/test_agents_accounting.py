"""Which tokens of a prompt are new to the box."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.agent_accounting import Box, Rendered, Renderer, common_bytes

DEMO = Path(__file__).parents[2] / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"


def prompt(*tokens: str) -> Rendered:
    pieces = [token.encode() for token in tokens]
    return Rendered(b"".join(pieces), list(accumulate(map(len, pieces))))


def test_everything_is_new_at_first() -> None:
    assert Box().new_tokens(prompt("a", "b", "c")) == 3


def test_a_repeated_prompt_has_one_new_token() -> None:
    box = Box()
    box.evaluated(prompt("a", "b", "c"), b"")
    assert box.new_tokens(prompt("a", "b", "c")) == 1


def test_an_answer_is_known_however_its_tokens_are_cut() -> None:
    box = Box()
    box.evaluated(prompt("a", "b"), b"hello world")
    assert box.new_tokens(prompt("a", "b", "hell", "o wor", "ld", "next")) == 1


def test_a_token_that_only_begins_alike_is_new() -> None:
    box = Box()
    box.evaluated(prompt("a", "bcd"), b"")
    assert box.new_tokens(prompt("a", "bcx", "e")) == 2


def test_the_best_of_all_texts_counts_and_only_a_beginning() -> None:
    box = Box()
    box.evaluated(prompt("s", "x", "y", "z"), b"")
    box.evaluated(prompt("s", "t"), b"u")
    assert box.new_tokens(prompt("s", "t", "u", "v")) == 1
    assert box.new_tokens(prompt("x", "y", "z")) == 3


@given(st.lists(st.text("ab", max_size=12), max_size=5), st.text("ab", min_size=1, max_size=12))
def test_new_tokens_are_what_no_earlier_text_begins_with(earlier: list[str], text: str) -> None:
    box = Box()
    for other in earlier:
        box.evaluated(prompt(*other), b"")
    known = max((n for n in range(len(text) + 1) if any(other.startswith(text[:n]) for other in earlier)), default=0)
    assert box.new_tokens(prompt(*text)) == max(1, len(text) - known)


@given(st.binary(max_size=40), st.binary(max_size=20), st.binary(max_size=20))
def test_common_bytes(start: bytes, a: bytes, b: bytes) -> None:
    n = common_bytes(start + a, start + b)
    assert n >= len(start)
    assert (start + a)[:n] == (start + b)[:n]
    assert (start + a)[n : n + 1] != (start + b)[n : n + 1] or n == min(len(start + a), len(start + b))


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    if not DEMO.exists():
        pytest.skip("the demo model is not there")
    return Renderer(str(DEMO))


def test_a_prompt_is_rendered_and_cut_as_the_model_reads_it(renderer: Renderer) -> None:
    body = {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "caf\u00e9?"}]},
        ]
    }
    rendered = renderer.rendered(body)
    expected = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\ncaf\u00e9?<|im_end|>\n<|im_start|>assistant\n"
    assert rendered.text.decode() == expected
    assert rendered.ends[-1] == len(rendered.text)
    assert 10 < rendered.tokens < len(expected)


def test_tools_and_calls_are_part_of_the_prompt(renderer: Renderer) -> None:
    call = {"id": "c", "function": {"name": "look", "arguments": '{"at": "rivers"}'}}
    asked: list[dict[str, object]] = [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [call]}]
    tool = {"type": "function", "function": {"name": "look", "description": "Looks around."}}
    text = renderer.rendered({"messages": asked, "tools": [tool]}).text
    assert b"Looks around." in text
    assert b"rivers" in text


def test_the_token_that_met_a_limit_was_not_fed_back(renderer: Renderer) -> None:
    assert renderer.fed_back("Here is", stopped=True) == b"Here is"
    assert renderer.fed_back("Here is", stopped=False) == b"Here"
    assert renderer.fed_back("", stopped=False) == b""


def test_the_next_turn_of_a_greedy_answer_has_only_its_own_tokens_new(renderer: Renderer) -> None:
    box = Box()
    messages = [{"role": "user", "content": "Hello there."}]
    box.evaluated(renderer.rendered({"messages": messages}), renderer.fed_back("Good day to you.", stopped=True))
    longer = [*messages, {"role": "assistant", "content": "Good day to you."}, {"role": "user", "content": "More."}]
    rendered = renderer.rendered({"messages": longer})
    tail = "<|im_end|>\n<|im_start|>user\nMore.<|im_end|>\n<|im_start|>assistant\n"
    assert rendered.text.endswith(tail.encode())
    assert box.new_tokens(rendered) == sum(end > len(rendered.text) - len(tail) for end in rendered.ends)
