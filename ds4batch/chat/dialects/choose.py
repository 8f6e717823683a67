"""Which dialect a model speaks, from what its file says: the architecture, the chat template, the vocabulary.

Families whose dialect is written out here are known by their architecture; their template is not needed. Any other model speaks by
its own template, and its answers are read with the grammar whose marks the template shows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ds4batch.chat.dialects.base import Dialect
from ds4batch.chat.dialects.deepseek_v4 import DeepSeekV4
from ds4batch.chat.dialects.deepseek_v41 import DeepSeekV41
from ds4batch.chat.dialects.glm import Glm
from ds4batch.chat.dialects.jinja import JinjaDialect
from ds4batch.chat.dialects.qwen38 import Qwen38
from ds4batch.chat.template import ChatTemplate
from ds4batch.tokenizer.model_tokenizer import ModelTokenizer


class Family(NamedTuple):
    """A dialect that is not a template's."""

    architectures: frozenset[str]  # as GGUF files and config.json name them
    markers: tuple[str, ...]  # without which a vocabulary is not this family's
    make: Callable[[], Dialect]


FAMILIES = {
    "deepseek-v4": Family(frozenset({"deepseek4", "deepseek_v4"}), ("<｜User｜>", "<｜Assistant｜>"), DeepSeekV4),
    "deepseek-v4.1": Family(frozenset({"deepseek41", "deepseek_v41"}), ("<｜User｜>", "<｜Assistant｜>"), DeepSeekV41),
    "glm": Family(
        frozenset({"glm-dsa", "glm_moe_dsa", "glm5-next", "glm5next", "glm5_next", "glm5_next_text"}),
        ("<|user|>", "<|assistant|>"),
        Glm,
    ),
    "qwen3.8": Family(frozenset({"qwen4exp", "qwen4_exp", "qwen4_exp_text"}), ("<|im_start|>", "<|im_end|>"), Qwen38),
}
NAMES = ("auto", *FAMILIES, JinjaDialect.name)
"""What may be wanted."""

# The grammar by what a template writes around calls; the first that is found counts, as some write the marks of two.
_MARKS = (
    ("<｜DSML｜ ", "dsml-v41"),
    ("｜DSML｜", "dsml"),
    ("<arg_key>", "glm"),
    ("<function=", "qwen"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama3"),
    ("<|start_header_id|>", "llama3"),
)
_TOKENS = frozenset({"<tool_call>", "<|python_tag|>", *(marker for family in FAMILIES.values() for marker in family.markers)})


class Facts(NamedTuple):
    """What is looked at of a model's tokenizer."""

    template: ChatTemplate
    stops: tuple[str, ...] = ()  # texts of the tokens that end an answer
    tokens: frozenset[str] = frozenset()  # those of the texts in question that are a token


def facts_of(tokenizer: ModelTokenizer, template: ChatTemplate) -> Facts:
    """The facts of a loaded model; `template` is its own or what stands in for it."""
    return Facts(
        template,
        tuple(tokenizer.decode([token]) for token in sorted(tokenizer.stop_ids)),
        frozenset(text for text in _TOKENS if tokenizer.tokenizer.token_to_id(text) is not None),
    )


def choose(architecture: str, facts: Facts, wanted: str = "auto") -> Dialect:
    """The dialect of a model: the one `wanted`, or by `architecture`, general.architecture of a GGUF file or model_type of a config.json.

    Raises ValueError for a name that is not in NAMES.
    """
    if wanted not in NAMES:
        raise ValueError(f"the dialect {wanted!r} is unknown; there are {', '.join(NAMES)}")
    for name, family in FAMILIES.items():
        if wanted == name or (
            wanted == "auto" and architecture in family.architectures and facts.tokens.issuperset(family.markers)
        ):
            return family.make()
    return JinjaDialect(facts.template, facts.stops, grammar_of(facts.template.source, facts.tokens))


def grammar_of(source: str, tokens: frozenset[str] = frozenset()) -> str:
    """The grammar of the calls that a template with this source shows, "" for one that nothing here reads.

    Where the template shows no marks, the tokens that the vocabulary has for them tell.
    """
    found = (grammar for mark, grammar in _MARKS if mark in source)
    return next(found, "") or next((grammar for mark, grammar in _MARKS if mark in tokens), "")
