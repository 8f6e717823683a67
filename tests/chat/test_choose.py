"""Which dialect and grammar a model gets, and what a model's id says of its thinking."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds4batch.chat.conversation import Conversation, Message
from ds4batch.chat.dialects.choose import FAMILIES, NAMES, Facts, choose, facts_of, grammar_of
from ds4batch.chat.grammars import GRAMMARS
from ds4batch.chat.template import CHATML, TRANSCRIPT, ChatTemplate, template_for
from ds4batch.tokenizer import load_tokenizer
from tests.chat.jinja_templates import GEMMA, LLAMA3, MISTRAL, QWEN3

DEMO = Path(__file__).parents[2] / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
MARKERS = frozenset(marker for family in FAMILIES.values() for marker in family.markers)


def facts(source: str = CHATML, tokens: frozenset[str] = MARKERS) -> Facts:
    return Facts(ChatTemplate(source, "<s>", "</s>"), ("<|im_end|>",), tokens)


@pytest.mark.parametrize(
    ("architecture", "name", "grammar"),
    [
        ("deepseek4", "deepseek-v4", "dsml"),
        ("deepseek_v4", "deepseek-v4", "dsml"),
        ("deepseek41", "deepseek-v4.1", "dsml-v41"),
        ("deepseek_v41", "deepseek-v4.1", "dsml-v41"),
        ("glm-dsa", "glm", "glm"),
        ("glm_moe_dsa", "glm", "glm"),
        ("glm5_next", "glm", "glm"),
        ("qwen4exp", "qwen3.8", "qwen"),
        ("qwen4_exp_text", "qwen3.8", "qwen"),
        ("llama", "jinja", "hermes"),
        ("qwen3", "jinja", "hermes"),
        ("", "jinja", "hermes"),
    ],
)
def test_an_architecture_has_its_dialect(architecture: str, name: str, grammar: str) -> None:
    dialect = choose(architecture, facts())
    assert (dialect.name, dialect.grammar) == (name, grammar)


def test_a_model_without_its_familys_tokens_speaks_by_its_template() -> None:
    for architecture in ("deepseek4", "glm-dsa", "qwen4exp"):
        assert choose(architecture, facts(tokens=frozenset())).name == "jinja"


@pytest.mark.parametrize("wanted", NAMES[1:])
def test_what_is_wanted_is_not_doubted(wanted: str) -> None:
    dialect = choose("llama", facts(tokens=frozenset()), wanted)
    assert dialect.name == wanted
    assert dialect.grammar in GRAMMARS


def test_an_unknown_dialect_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"'gpt'.*auto, deepseek-v4, .*jinja"):
        choose("llama", facts(), "gpt")


@pytest.mark.parametrize(
    ("source", "grammar"),
    [
        (QWEN3, "hermes"),
        (LLAMA3, "llama3"),
        (MISTRAL, ""),
        (GEMMA, ""),
        (CHATML, ""),
        (TRANSCRIPT, ""),
        ("{{ '<tool_call>\n<function=' + name + '>' }}", "qwen"),
        ("{{ '<tool_call>' + name + '<arg_key>' }}", "glm"),
        ("{{ '<｜DSML｜tool_calls>' }}", "dsml"),
        ("{{ '<｜DSML｜ calls>' }}", "dsml-v41"),
        ("{{ '<|python_tag|>' + call }}", "llama3"),
        ("{{ '<|start_header_id|>' }}{{ '<tool_call>' }}", "hermes"),
        ("{{ '[TOOL_CALLS]' }}", ""),
    ],
)
def test_a_template_shows_the_marks_of_its_grammar(source: str, grammar: str) -> None:
    assert grammar_of(source) == grammar
    assert not grammar or grammar in GRAMMARS


def test_a_vocabulary_tells_where_the_template_shows_no_marks() -> None:
    assert grammar_of(CHATML, frozenset({"<tool_call>"})) == "hermes"
    assert grammar_of(CHATML, frozenset({"<|python_tag|>"})) == "llama3"
    assert grammar_of(LLAMA3, frozenset({"<tool_call>"})) == "llama3"


@pytest.mark.parametrize(("source", "grammar"), [(QWEN3, "hermes"), (LLAMA3, "llama3"), (MISTRAL, "hermes"), (GEMMA, "hermes")])
def test_calls_are_read_in_the_form_that_the_model_is_shown(source: str, grammar: str) -> None:
    assert choose("llama", facts(source)).grammar == grammar
    # Marks alone are not enough: this template shows no tools, so they are shown in another form.
    no_tools = "{# <arg_key> #}" + CHATML
    assert choose("llama", facts(no_tools)).grammar == "hermes"


def test_the_demo_model_speaks_by_its_template() -> None:
    if not DEMO.exists():
        pytest.fail(f"{DEMO} is missing: run `make setup`")
    tokenizer = load_tokenizer(str(DEMO))
    found = facts_of(tokenizer, template_for(tokenizer))
    assert found.stops == ("<|endoftext|>", "<|im_end|>")
    assert found.tokens == {"<|im_start|>", "<|im_end|>"}
    dialect = choose("llama", found)
    assert dialect.name == "jinja"
    talk = Conversation([Message("user", "a"), Message("assistant", "b"), Message("user", "c")])
    assert dialect.tail(talk, 2) == "<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"
