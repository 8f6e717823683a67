"""Tokenizers of Hugging Face directories: byte-level and SentencePiece, their companions' settings, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, WordLevel
from tokenizers.processors import TemplateProcessing

from ds4batch.engine.weights.config import ModelError
from ds4batch.tokenizer import load_tokenizer

TEXT = "Hi\tcafé 漢字 😀\0 <|im_end|> x"
CONFIG = {"max_position_embeddings": 64, "eos_token_id": 257}


def byte_level() -> Tokenizer:
    """256 bytes, two specials, one added word."""
    tokenizer = Tokenizer(
        BPE(vocab={letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("<|im_end|>", special=True)])
    tokenizer.add_tokens([AddedToken("é漢", normalized=False)])
    return tokenizer


def sentence_piece() -> Tokenizer:
    """What llama 2's tokenizer.json looks like, in small."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "\u2581", "H", "i", "Hi", "\u2581Hi", "é"]
    merges = [("H", "i"), ("\u2581", "Hi")]
    tokenizer = Tokenizer(
        BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def write(folder: Path, built: Tokenizer, **files: Any) -> str:
    """A directory with tokenizer.json, config.json and the given JSON files."""
    built.save(str(folder / "tokenizer.json"))
    for name, content in {"config": CONFIG, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return str(folder)


def test_byte_level_directory_round_trips_bytes(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write(tmp_path, byte_level()))
    ids = tokenizer.encode(TEXT)
    assert b"".join(map(tokenizer.token_bytes, ids)) == TEXT.encode()
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.encode("<|im_end|>") == [257]
    assert tokenizer.encode("xé漢") == [*tokenizer.encode("x"), 258]
    assert tokenizer.token_bytes(258) == "é漢".encode()
    assert (tokenizer.vocab_size, tokenizer.context, tokenizer.model_name) == (259, 64, tmp_path.name)
    assert tokenizer.special_ids == {256, 257}


def test_ids_are_those_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    path = write(tmp_path, byte_level(), tokenizer_config={"tokenizer_class": "PreTrainedTokenizerFast"})
    theirs = AutoTokenizer.from_pretrained(path)
    assert load_tokenizer(path).encode(TEXT) == theirs.encode(TEXT, add_special_tokens=False)


def test_sentence_piece_tokens_give_their_exact_bytes(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write(tmp_path, sentence_piece(), tokenizer_config={"bos_token": "<s>", "eos_token": "</s>"}))
    ids = tokenizer.encode("Hi é 漢\0\n")
    assert b"".join(map(tokenizer.token_bytes, ids)) == " Hi é 漢\0\n".encode()  # the space is the tokenizer's own
    assert tokenizer.token_bytes(ids[0]) == b" Hi"
    assert tokenizer.token_bytes(3 + 0xE6) == b"\xe6"
    assert tokenizer.bos_token == "<s>"
    assert tokenizer.stop_ids == {2, 257}


def test_truncation_and_padding_of_somebodys_training_are_off(tmp_path: Path) -> None:
    limited = byte_level()
    limited.enable_truncation(4)
    limited.enable_padding(length=50)
    tokenizer = load_tokenizer(write(tmp_path, limited))
    assert len(tokenizer.encode("abcdefgh")) == 8


def test_stop_ids_come_from_every_companion(tmp_path: Path) -> None:
    path = write(
        tmp_path, byte_level(), tokenizer_config={"eos_token": {"content": "<s>"}}, generation_config={"eos_token_id": [5, 6]}
    )
    tokenizer = load_tokenizer(path)
    assert tokenizer.stop_ids == {256, 257, 5, 6}
    assert tokenizer.eos_token == "<s>"


@pytest.mark.parametrize(("stated", "adds"), [(None, True), (True, True), (False, False)])
def test_bos_rule_is_the_post_processors_unless_stated(tmp_path: Path, stated: bool | None, adds: bool) -> None:
    processed = byte_level()
    processed.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    settings = {"bos_token": "<s>"} | ({} if stated is None else {"add_bos_token": stated})
    tokenizer = load_tokenizer(write(tmp_path, processed, tokenizer_config=settings))
    assert tokenizer.add_bos is adds
    assert tokenizer.encode("a") == tokenizer.encode("a")[-1:]  # encode itself adds none
    assert tokenizer.with_bos([1]) == ([256, 1] if adds else [1])


def test_tokenizer_without_bos_in_its_settings_has_none(tmp_path: Path) -> None:
    path = write(tmp_path, byte_level(), config={**CONFIG, "bos_token_id": 256}, tokenizer_config={"bos_token": None})
    assert load_tokenizer(path).bos_id is None


def test_chat_template_file_wins_over_the_settings(tmp_path: Path) -> None:
    path = write(tmp_path, byte_level(), tokenizer_config={"chat_template": "from settings"})
    assert load_tokenizer(path).chat_template == "from settings"
    (tmp_path / "chat_template.jinja").write_text("from file ü", encoding="utf-8")
    assert load_tokenizer(path).chat_template == "from file ü"


def test_default_is_taken_of_several_templates(tmp_path: Path) -> None:
    several = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    assert load_tokenizer(write(tmp_path, byte_level(), tokenizer_config={"chat_template": several})).chat_template == "d"


def test_model_without_template_has_none(tmp_path: Path) -> None:
    assert load_tokenizer(write(tmp_path, byte_level())).chat_template is None


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"config": {}}, "config.json: max_position_embeddings is None"),
        ({"tokenizer_config": {"bos_token": "<nope>"}}, "has no token '<nope>', which tokenizer_config.json calls bos_token"),
        ({"generation_config": {"eos_token_id": "2"}}, "generation_config.json: eos_token_id is '2'"),
        ({"config": {**CONFIG, "bos_token_id": 9999}}, "has no token 9999, which config.json calls bos_token_id"),
        ({"tokenizer_config": {"chat_template": 7}}, "tokenizer_config.json: chat_template is not a string"),
        ({"tokenizer": {"model": 1}}, "tokenizer.json: cannot be read as a tokenizer"),
    ],
)
def test_broken_directory_is_refused_by_file_and_key(tmp_path: Path, files: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError) as caught:
        load_tokenizer(write(tmp_path, byte_level(), **files))
    assert words in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_decoder_that_is_not_understood_is_refused_by_name(tmp_path: Path) -> None:
    words = Tokenizer(WordLevel(vocab={"a": 0, "b": 1}, unk_token="a"))
    words.decoder = decoders.WordPiece()
    with pytest.raises(ModelError, match="decoder is WordPiece"):
        load_tokenizer(write(tmp_path, words, config={"max_position_embeddings": 64}))


def test_missing_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json: cannot open"):
        load_tokenizer(str(tmp_path))


def test_one_huge_id_does_not_size_a_table(tmp_path: Path) -> None:
    path = write(tmp_path, byte_level())
    raw = json.loads((tmp_path / "tokenizer.json").read_text())
    raw["model"]["vocab"]["huge"] = 2**31
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    with pytest.raises(ModelError, match=f"token id {2**31} is far beyond"):
        load_tokenizer(path)
