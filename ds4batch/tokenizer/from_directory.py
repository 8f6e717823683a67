"""Tokenizer from a Hugging Face directory.

Owns the reading of tokenizer.json, tokenizer_config.json, generation_config.json, config.json and
chat_template.jinja, as far as tokens are concerned. tokenizer.json is used as it stands, with its normaliser; only
truncation and padding, which are settings of somebody's training run, are switched off.
"""

from __future__ import annotations

import os
from typing import Any

from tokenizers import Tokenizer

from ds4batch.engine.weights.config import ModelError
from ds4batch.engine.weights.hf_dir import MAX_JSON_BYTES, read_json
from ds4batch.tokenizer.model_tokenizer import END_OF_TURN, REMEMBERED_WORDS, ModelTokenizer
from ds4batch.tokenizer.token_bytes import byte_level, sentence_piece

TOKENIZER = "tokenizer.json"
# Decoder steps of SentencePiece vocabularies. Strip, which takes the space off the start of a whole text, is not part
# of a token's bytes: a generated token follows other text.
_SENTENCE_PIECE = frozenset({"Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"})


def tokenizer_from_directory(path: str) -> ModelTokenizer:
    """Build the tokenizer of the directory at `path`. Raises ModelError."""
    where = os.path.join(path, TOKENIZER)
    raw = read_json(where)
    _check_ids(where, raw)
    built = _build(where)
    settings = _optional(path, "tokenizer_config.json")
    model = read_json(os.path.join(path, "config.json"))
    bos = _named(built, where, settings, "bos_token", model)
    eos = _named(built, where, settings, "eos_token", model)
    added: dict[int, Any] = built.get_added_tokens_decoder()
    stops = {i for i, token in added.items() if token.content in END_OF_TURN}
    generation = _optional(path, "generation_config.json")
    stops.update(_ids(path, "config.json", model), _ids(path, "generation_config.json", generation))
    if eos is not None:
        stops.add(eos)
    return ModelTokenizer(
        tokenizer=built,
        bytes_by_id=_table(where, raw, built, added),
        bos_id=bos,
        eos_id=eos,
        add_bos=_adds_bos(built, settings, bos),
        stop_ids=frozenset(stops),
        special_ids=frozenset(i for i, token in added.items() if token.special),
        chat_template=_template(path, settings),
        model_name=os.path.basename(os.path.abspath(path)),
        context=_context(path, model),
        architecture=str(model.get("model_type") or ""),
    )


def _check_ids(where: str, raw: dict[str, Any]) -> None:
    """One huge id must not size a table, neither here nor in the package."""
    model, added = raw.get("model"), raw.get("added_tokens") or []
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else []  # a Unigram list is numbered by place
    ids += [token.get("id") for token in added if isinstance(token, dict)]
    top = max((i for i in ids if isinstance(i, int)), default=0)
    if top > 2 * (len(vocabulary or ()) + len(added)) + 1024:
        raise ModelError(f"{where}: token id {top} is far beyond the {len(ids)} tokens of the vocabulary")


def _build(where: str) -> Any:
    try:
        built = Tokenizer.from_file(where)
    except Exception as error:  # the package raises no narrower type
        raise ModelError(f"{where}: cannot be read as a tokenizer: {error}") from error
    resize = getattr(built.model, "_resize_cache", None)  # the one way for a file's; models without merges remember nothing
    if resize is not None:
        resize(REMEMBERED_WORDS)
    built.no_truncation()
    built.no_padding()
    return built


def _table(where: str, raw: dict[str, Any], built: Any, added: dict[int, Any]) -> list[bytes]:
    vocabulary: dict[str, int] = built.get_vocab(with_added_tokens=True)
    tokens = [""] * (max(vocabulary.values(), default=-1) + 1)
    for token, i in vocabulary.items():
        tokens[i] = token
    steps = _steps(raw.get("decoder"))
    if "ByteLevel" in steps or (not steps and "ByteLevel" in _steps(raw.get("pre_tokenizer"))):
        table = byte_level(tokens)
    elif steps and steps <= _SENTENCE_PIECE:
        table = sentence_piece(tokens)
    else:
        raise ModelError(
            f"{where}: decoder is {', '.join(sorted(steps)) or 'missing'}; supported: ByteLevel, or "
            f"SentencePiece's {', '.join(sorted(_SENTENCE_PIECE))}"
        )
    for i, token in added.items():
        table[i] = token.content.encode()
    return table


def _steps(node: Any) -> set[str]:
    """The types in a decoder or pre-tokenizer, sequences opened up."""
    if not isinstance(node, dict):
        return set()
    if node.get("type") == "Sequence":
        inner = node.get("decoders") or node.get("pretokenizers") or []
        return {step for item in inner for step in _steps(item)}
    return {str(node.get("type"))}


def _named(built: Any, where: str, settings: dict[str, Any], key: str, model: dict[str, Any]) -> int | None:
    """The id of bos_token or eos_token. config.json decides only where there is no tokenizer_config.json."""
    token = settings.get(key)
    if isinstance(token, dict):
        token = token.get("content")
    if token is None:
        ident = None if settings else model.get(key + "_id")
        ident = ident[0] if isinstance(ident, list) and ident else ident
        if ident is not None and (not isinstance(ident, int) or built.id_to_token(ident) is None):
            raise ModelError(f"{where}: has no token {ident!r}, which config.json calls {key}_id")
        return ident
    found: int | None = built.token_to_id(token) if isinstance(token, str) else None
    if found is None:
        raise ModelError(f"{where}: has no token {token!r}, which tokenizer_config.json calls {key}")
    return found


def _ids(path: str, name: str, table: dict[str, Any]) -> list[int]:
    value = table.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise ModelError(f"{os.path.join(path, name)}: eos_token_id is {value!r}, not token ids")
    return ids


def _adds_bos(built: Any, settings: dict[str, Any], bos: int | None) -> bool:
    """What the tokenizer's own post-processor does to an empty text, unless the settings say otherwise."""
    if bos is None:
        return False
    stated = settings.get("add_bos_token")
    if isinstance(stated, bool):
        return stated
    return bool(built.encode("", add_special_tokens=True).ids[:1] == [bos])


def _template(path: str, settings: dict[str, Any]) -> str | None:
    where = os.path.join(path, "chat_template.jinja")
    if os.path.exists(where):
        try:
            with open(where, "rb") as file:
                return file.read(MAX_JSON_BYTES).decode() or None
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"{where}: cannot be read: {error}") from error
    value = settings.get("chat_template")
    if isinstance(value, list):  # several, by name
        value = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}.get("default")
    if value is not None and not isinstance(value, str):
        raise ModelError(f"{os.path.join(path, 'tokenizer_config.json')}: chat_template is not a string")
    return value or None


def _context(path: str, model: dict[str, Any]) -> int:
    value = model.get("max_position_embeddings")
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        where = os.path.join(path, "config.json")
        raise ModelError(f"{where}: max_position_embeddings is {value!r}, not a positive number")
    return value


def _optional(path: str, name: str) -> dict[str, Any]:
    where = os.path.join(path, name)
    return read_json(where) if os.path.exists(where) else {}
