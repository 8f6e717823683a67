"""Tokenizer from GGUF metadata.

Owns the `tokenizer.*` keys. Builds byte-level BPE (`tokenizer.ggml.model` gpt2). SentencePiece vocabularies (llama) are
refused: they merge by the score of the result, leftmost first, and a table of ranked pairs cannot say "leftmost" where two
pairs give the same piece.

Text is never normalised, so that the bytes of the tokens are the bytes of the text: the file says nothing of a normaliser, and
a file name in a decomposed spelling must come back as it was.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, section "Tokenizer".
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import TokenType
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import BPE

from ds4batch.engine.weights.config import ModelError
from ds4batch.engine.weights.gguf_file import GGUFFile, open_gguf
from ds4batch.tokenizer.model_tokenizer import END_OF_TURN, REMEMBERED_WORDS, ModelTokenizer
from ds4batch.tokenizer.pretokenizers import PRE_TYPES, PreType, pre_tokenizer
from ds4batch.tokenizer.token_bytes import byte_level

_PREFIX = "tokenizer.ggml."
_CONTROL = frozenset({int(TokenType.CONTROL), int(TokenType.UNKNOWN)})
_UNITS = _CONTROL | {int(TokenType.USER_DEFINED)}  # found in text before it is cut into words
_SINGLE_IDS = ("bos", "eos", "eot", "eom", "unknown", "padding", "seperator")  # the format's own spelling


def tokenizer_from_gguf(path: str) -> ModelTokenizer:
    """Build the tokenizer that the GGUF at `path` describes. Raises ModelError."""
    file = open_gguf(path)
    model = file.metadata.get(_PREFIX + "model")
    if model != "gpt2":
        raise ModelError(
            f"{path}: key {_PREFIX}model is {model!r}; only gpt2 (byte-level BPE) can be rebuilt exactly. The "
            "model's Hugging Face directory, with its tokenizer.json, can be served instead"
        )
    pre = file.metadata.get(_PREFIX + "pre")
    if not isinstance(pre, str) or pre not in PRE_TYPES:
        raise ModelError(f"{path}: key {_PREFIX}pre is {pre!r}; known: {', '.join(PRE_TYPES)}")
    tokens = _tokens(file)
    ids = {name: _token_id(file, name, len(tokens)) for name in _SINGLE_IDS}
    types = _types(file, ids, len(tokens))
    units = [i for i, kind in enumerate(types) if kind in _UNITS]
    stops = {i for i in units if tokens[i] in END_OF_TURN}
    stops.update(i for i in (ids["eos"], ids["eot"], ids["eom"]) if i is not None)
    table = byte_level(tokens)
    for i in units:
        table[i] = tokens[i].encode()
    return ModelTokenizer(
        tokenizer=_bpe(file, tokens, types, PRE_TYPES[pre]),
        bytes_by_id=table,
        bos_id=ids["bos"],
        eos_id=ids["eos"],
        add_bos=_flag(file, "add_bos_token", PRE_TYPES[pre].add_bos),
        stop_ids=frozenset(stops),
        special_ids=frozenset(i for i in units if types[i] in _CONTROL),
        chat_template=_template(file),
        model_name=_name(file),
        context=_context(file),
        architecture=file.architecture,
    )


def _bpe(file: GGUFFile, tokens: list[str], types: list[int], pre: PreType) -> Any:
    vocabulary = {token: i for i, token in enumerate(tokens)}
    try:
        model = BPE(vocab=vocabulary, merges=_merges(file), ignore_merges=pre.whole_words, cache_capacity=REMEMBERED_WORDS)
    except ModelError:
        raise
    except Exception as error:  # the package raises no narrower type
        raise ModelError(f"{file.path}: key {_PREFIX}merges does not fit the vocabulary: {error}") from error
    built = Tokenizer(model)
    built.pre_tokenizer = pre_tokenizer(pre)
    built.decoder = ByteLevel()
    built.add_special_tokens(
        [AddedToken(tokens[i], special=True, normalized=False) for i, kind in enumerate(types) if kind in _CONTROL]
    )
    built.add_tokens(
        [
            AddedToken(tokens[i], special=False, normalized=False)
            for i, kind in enumerate(types)
            if kind in _UNITS and kind not in _CONTROL
        ]
    )
    return built


def _tokens(file: GGUFFile) -> list[str]:
    tokens = file.metadata.get(_PREFIX + "tokens")
    if not isinstance(tokens, list) or not tokens:
        raise ModelError(f"{file.path}: key {_PREFIX}tokens is missing, empty or not an array of strings")
    seen: dict[str, int] = {}
    out = []
    for i, token in enumerate(tokens):
        text = token or f"[EMPTY_{i}]"  # a hole in the vocabulary; the reference implementation names it so
        if seen.setdefault(text, i) != i:
            raise ModelError(f"{file.path}: key {_PREFIX}tokens has {text!r} twice, as {seen[text]} and {i}")
        out.append(text)
    return out


def _types(file: GGUFFile, ids: dict[str, int | None], count: int) -> list[int]:
    types = file.metadata.get(_PREFIX + "token_type")
    if types is None:  # then only the tokens that the file names are known to be special
        named = {i for i in ids.values() if i is not None}
        return [int(TokenType.CONTROL if i in named else TokenType.NORMAL) for i in range(count)]
    if not isinstance(types, np.ndarray) or types.dtype.kind not in "iu" or len(types) != count:
        raise ModelError(f"{file.path}: key {_PREFIX}token_type is not an array of {count} whole numbers")
    out: list[int] = types.tolist()
    return out


def _merges(file: GGUFFile) -> list[tuple[str, str]]:
    merges = file.metadata.get(_PREFIX + "merges")
    if not isinstance(merges, list):
        raise ModelError(f"{file.path}: key {_PREFIX}merges is missing or not an array of strings")
    out = []
    for i, merge in enumerate(merges):
        left, space, right = merge.partition(" ")
        if not (left and space and right) or " " in right:
            raise ModelError(f"{file.path}: key {_PREFIX}merges, item {i}, is {merge!r}, not two tokens")
        out.append((left, right))
    return out


def _token_id(file: GGUFFile, name: str, count: int) -> int | None:
    key = f"{_PREFIX}{name}_token_id"
    value = file.metadata.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < count:
        raise ModelError(f"{file.path}: key {key} is {value!r}, not one of the {count} tokens")
    return value


def _flag(file: GGUFFile, name: str, default: bool) -> bool:
    value = file.metadata.get(_PREFIX + name, default)
    if not isinstance(value, bool):
        raise ModelError(f"{file.path}: key {_PREFIX}{name} is {value!r}, not true or false")
    return value


def _template(file: GGUFFile) -> str | None:
    value = file.metadata.get("tokenizer.chat_template")
    if value is not None and not isinstance(value, str):
        raise ModelError(f"{file.path}: key tokenizer.chat_template is not a string")
    return value or None


def _name(file: GGUFFile) -> str:
    value = file.metadata.get("general.name")
    return value if isinstance(value, str) and value else Path(file.path).stem


def _context(file: GGUFFile) -> int:
    key = f"{file.architecture}.context_length"
    value = file.metadata.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ModelError(f"{file.path}: key {key} is {value!r}, not a positive number")
    return value
