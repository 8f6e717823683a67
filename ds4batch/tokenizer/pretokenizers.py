"""How byte-level BPE cuts text into words before merging: an entry for each `tokenizer.ggml.pre` that is known exactly.

Owns the table; an absent name is refused by the loader, because a wrong cut gives other tokens than the model was
trained on and nothing else would show it.

The patterns are those of the models' own tokenizer.json files, which `tokenizers` runs as they stand; the names are
those of llama.cpp's converter.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
# Words that may change case once: upper-case letters, then lower-case ones, marks and caseless letters in both.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"

_LLAMA3 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_SIGNS}|{_TAIL}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_SIGNS}|{_TAIL}"
_GPT4O = (
    rf"{_LEAD}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_LEAD}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}|"
    rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"
)
_TEKKEN = (
    rf"{_LEAD}{_UPPER}*{_LOWER}+|{_LEAD}{_UPPER}+{_LOWER}*|\p{{N}}|"
    rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"
)
_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
    rf" ?[\p{{P}}\p{{S}}]+[\r\n]*|{_TAIL}"
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}")


class PreType(NamedTuple):
    """One way of cutting."""

    patterns: tuple[str, ...]  # applied in turn; a match becomes a word of its own
    digits: bool = False  # each digit is cut off first
    gpt2: bool = False  # then GPT-2's own pattern, which ByteLevel has built in
    whole_words: bool = False  # a word that is in the vocabulary is that token, whatever the merges would give
    add_bos: bool = False  # the default where the file does not say


_PLAIN = PreType((), gpt2=True)
_DIGITS = PreType((), digits=True, gpt2=True)

PRE_TYPES: dict[str, PreType] = {
    "gpt-2": _PLAIN,
    "phi-2": _PLAIN,
    "mpt": _PLAIN,
    "olmo": _PLAIN,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "qwen2": PreType((_QWEN2,)),
    "deepseek-r1-qwen": PreType((_QWEN2,)),
    "llama-bpe": PreType((_LLAMA3,), whole_words=True, add_bos=True),
    "llama3": PreType((_LLAMA3,), whole_words=True, add_bos=True),
    "llama-v3": PreType((_LLAMA3,), whole_words=True, add_bos=True),
    "glm4": PreType((_LLAMA3,)),
    "chatglm-bpe": PreType((_LLAMA3,)),
    "gpt-4o": PreType((_GPT4O,)),
    "tekken": PreType((_TEKKEN,), whole_words=True, add_bos=True),
    "deepseek-v3": PreType((r"\p{N}{1,3}", _CJK, _DEEPSEEK3)),
    "deepseek-coder": PreType(_DEEPSEEK_CODER),
    # What llama.cpp does with a file whose converter did not know the tokenizer.
    "default": PreType(
        (
            r"[\p{P}\$\+<=>\^~\|]+",
            r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
            r"\p{N}+",
            "[0-9][0-9][0-9]",
        )
    ),
}


def pre_tokenizer(kind: PreType) -> Any:
    """The `tokenizers` object that cuts as `kind` says and then spells words in the byte alphabet."""
    steps: list[Any] = []
    if kind.digits:
        steps.append(Digits(individual_digits=True))
    steps += [Split(Regex(pattern), behavior="isolated", invert=False) for pattern in kind.patterns]
    steps.append(ByteLevel(add_prefix_space=False, use_regex=kind.gpt2))
    return Sequence(steps)
