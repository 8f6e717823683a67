"""Tokenizers built from GGUF metadata: the same ids as the reference, the exact bytes, and refusals by key."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

from ds4batch.engine.weights.config import ModelError
from ds4batch.tokenizer import ModelTokenizer, load_tokenizer
from ds4batch.tokenizer.pretokenizers import PRE_TYPES, pre_tokenizer
from ds4batch.tokenizer.token_bytes import byte_level
from tests.engine.weights_files import write_gguf

DEMO = Path(__file__).parents[2] / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
CORPUS = [
    "",
    " ",
    "\n",
    "a",
    "Hello, world!",
    "  two  spaces   three",
    "tabs\tand\r\nlines\n\n\n",
    "It's we'll THEY'RE don't",
    "1234567890 3.14159 0x1F 1,000,000 ٣٤٥ ½ Ⅷ ²",
    "def f(x: int) -> str:\n    return f'{x!r}'  # café\n",
    "😀👩‍👩‍👧‍👦🇩🇪🏳️‍🌈",
    "漢字かな交じり文。日本語と中文和한국어",
    "e\u0301 n\u0303 a\u0323\u0307 \u1e9b\u0323",
    "a\0b\0\0c",
    "\ufeffBOM first",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "< |im_start|>",
    "<|im_start|<|im_end|><|endoftext|>x<repo_name>",
    "Ünïcödé ÀÉÎ ß ſ K Å",
    "\u200b\u200e\u00a0\u3000\u2028x",
    "שלום عربى हिन्दी ไทย",
    "a" * 3000,
    " " * 500,
    "ab " * 300,
    "\U0010ffff\U000e0001 \ue000",
    "https://x.y/z?a=b&c=%20#d",
    '{"k": [1, null, "\\u00e9"]}',
    "\x01\x02\x7f\x80\x9f\xad",
]
# No lone surrogates: they have no UTF-8.
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=200)
ALPHABET = ByteLevel.alphabet()


@pytest.fixture(scope="session")
def demo() -> ModelTokenizer:
    if not DEMO.exists():
        pytest.fail(f"{DEMO} is missing: run `make setup`")
    return load_tokenizer(str(DEMO))


@pytest.fixture(scope="session")
def reference() -> Any:
    from transformers import AutoTokenizer

    if not DEMO.exists():
        pytest.fail(f"{DEMO} is missing: run `make setup`")
    return AutoTokenizer.from_pretrained(str(DEMO.parent), gguf_file=DEMO.name)


@pytest.fixture(scope="session")
def published(reference: Any) -> Any:
    """The reference with the model's own cut (each digit first) and no unknown token, which its GGUF path loses."""
    from copy import deepcopy

    tokenizer = deepcopy(reference.backend_tokenizer)
    tokenizer.pre_tokenizer = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    tokenizer.model.unk_token = None
    tokenizer.model.byte_fallback = False
    return tokenizer


def spelled(tokenizer: ModelTokenizer, text: str) -> bytes:
    """The bytes of `text` for which the vocabulary has a token."""
    known = {token[0] for token in tokenizer.bytes_by_id if len(token) == 1}
    return bytes(byte for byte in text.encode() if byte in known)


def check_bytes(tokenizer: ModelTokenizer, text: str) -> list[int]:
    ids = tokenizer.encode(text)
    assert b"".join(map(tokenizer.token_bytes, ids)) == spelled(tokenizer, text)
    assert tokenizer.decode(ids) == spelled(tokenizer, text).decode("utf-8", "replace")
    return ids


@pytest.mark.parametrize("text", CORPUS)
def test_demo_tokens_are_those_of_transformers(demo: ModelTokenizer, reference: Any, published: Any, text: str) -> None:
    ids = check_bytes(demo, text)
    assert ids == published.encode(text, add_special_tokens=False).ids
    if not regex.search(r"\p{N}", text) and spelled(demo, text) == text.encode():
        assert ids == reference.encode(text, add_special_tokens=False)


@settings(max_examples=200, deadline=None)
@given(text=TEXTS)
def test_any_text_round_trips_and_agrees_with_transformers(demo: ModelTokenizer, published: Any, text: str) -> None:
    assert check_bytes(demo, text) == published.encode(text, add_special_tokens=False).ids


@settings(max_examples=200, deadline=None)
@given(text=TEXTS)
def test_decoding_by_tokenizers_agrees_with_the_bytes(demo: ModelTokenizer, text: str) -> None:
    ids = demo.encode(text)
    assert demo.tokenizer.decode(ids, skip_special_tokens=False) == demo.decode(ids)


def test_demo_facts(demo: ModelTokenizer) -> None:
    assert (demo.vocab_size, demo.context, demo.add_bos) == (49152, 8192, False)
    assert (demo.bos_token, demo.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert demo.stop_ids == {0, 2}  # <|endoftext|>, <|im_end|>
    assert demo.special_ids == set(range(17))
    assert "<|im_start|>" in (demo.chat_template or "")
    assert demo.encode("<|im_end|>") == [2]
    assert demo.with_bos([5]) == [5]


def test_every_token_has_bytes_and_ids_past_the_vocabulary_have_none(demo: ModelTokenizer) -> None:
    assert all(demo.token_bytes(i) for i in range(demo.vocab_size))
    single = {token[0] for token in demo.bytes_by_id if len(token) == 1}
    assert set(range(256)) - single == {4, 6, 0x13, 0x14, 0x16, 0x1D, 0xC0, 0xC1, 0xF1, 0xF2, *range(0xF5, 0x100)}
    assert demo.token_bytes(demo.vocab_size) == demo.token_bytes(-1) == b""


def test_lone_surrogate_is_named(demo: ModelTokenizer) -> None:
    with pytest.raises(ValueError, match="lone surrogate at character 2"):
        demo.encode("ab\ud800c")


def test_long_prompt_costs_little_more_than_its_share(demo: ModelTokenizer) -> None:
    text = "".join(f"Line {i}: the quick brown fox jumps over the lazy dog; x = {i * 37 % 1000}\n" for i in range(1200))
    assert len(demo.encode(text * 8)) == 8 * len(demo.encode(text))

    def seconds(prompt: str) -> float:
        begin = time.perf_counter()
        demo.encode(prompt)
        return time.perf_counter() - begin

    short = min(seconds(text) for _ in range(5))
    assert min(seconds(text * 8) for _ in range(5)) < 8 * 4 * short  # linear, with room for a busy machine


def small(
    path: Path,
    pre: str,
    *,
    arch: str = "llama",
    words: tuple[str, ...] = (),
    pairs: tuple[str, ...] = (),
    controls: tuple[str, ...] = ("<|begin|>", "<|im_end|>"),
    units: tuple[str, ...] = (),
    **changes: Any,
) -> Path:
    """A GGUF with the 256 bytes, then `words`, `controls` and user-defined `units`. A change of None removes a key."""
    plain = [*sorted(ALPHABET), *words] if pairs else [*sorted(ALPHABET), *words, "ab"]
    keys: dict[str, Any] = {
        f"{arch}.context_length": 64,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*plain, *controls, *units],
        "tokenizer.ggml.token_type": [1] * len(plain) + [3] * len(controls) + [4] * len(units),
        "tokenizer.ggml.merges": list(pairs) or ["a b"],
        "tokenizer.ggml.bos_token_id": len(plain),
        "tokenizer.ggml.eos_token_id": len(plain) + 1,
    }
    for name, value in changes.items():
        keys["tokenizer.ggml." + name] = value
    return write_gguf(path, {key: value for key, value in keys.items() if value is not None}, {}, arch)


def words_of(pre: str, text: str) -> list[str]:
    """The words into which `text` is cut, as text."""
    cut = pre_tokenizer(PRE_TYPES[pre]).pre_tokenize_str(text)
    return [raw.decode() for raw in byte_level(word for word, _ in cut)]


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("qwen2", "Don't pay 1234€ now\n\n  x", ["Don", "'t", " pay", " ", "1", "2", "3", "4", "€", " now", "\n\n", " ", " x"]),
        ("llama-bpe", "Don't pay 12345€ now\n\n  x", ["Don", "'t", " pay", " ", "123", "45", "€", " now", "\n\n", " ", " x"]),
        ("gpt-2", "Don't pay 12345€ now\n\n  x", ["Don", "'t", " pay", " 12345", "€", " now", "\n\n ", " x"]),
        ("smollm", "pay 123€", ["pay", " ", "1", "2", "3", "€"]),
        ("llama-bpe", "WE'LL go.\r\n(a+b)", ["WE", "'LL", " go", ".\r\n", "(a", "+b", ")"]),
        ("gpt-2", "WE'LL", ["WE", "'", "LL"]),
        ("gpt-4o", "helloWorld HTMLParser's a/b//\nc", ["hello", "World", " HTMLParser's", " a", "/b", "//\n", "c"]),
        ("tekken", "helloWorld 42's", ["hello", "World", " ", "4", "2", "'s"]),
        ("deepseek-v3", "x=12345 漢字kana ab", ["x", "=", "123", "45", " ", "漢字", "kana", " ab"]),
        ("deepseek-coder", "a 12\n漢字x", ["a", " ", "1", "2", "\n", "漢字", "x"]),
        ("default", "a+b 12345", ["a", "+", "b", " ", "123", "45"]),
    ],
)
def test_words_are_cut_as_the_models_tokenizer_cuts_them(pre: str, text: str, words: list[str]) -> None:
    assert words_of(pre, text) == words


PATTERNS = {
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "llama-bpe": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+",
    "gpt-2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
}
# Characters on which every Unicode version agrees.
PLAIN_TEXTS = st.text(st.sampled_from("aZéßЖ漢 \t\n\r'’.,+-_/€1²٣\u00a0\u3000😀stl"), max_size=60)


@pytest.mark.parametrize("pre", list(PATTERNS))
@settings(max_examples=300, deadline=None)
@given(text=PLAIN_TEXTS)
def test_cut_equals_the_published_pattern_in_another_regex_engine(pre: str, text: str) -> None:
    assert words_of(pre, text) == regex.findall(PATTERNS[pre], text)


@pytest.mark.parametrize("pre", list(PRE_TYPES))
@settings(max_examples=40, deadline=None)
@given(text=TEXTS)
def test_no_pre_type_loses_a_byte(pre: str, text: str) -> None:
    assert "".join(words_of(pre, text)) == text


def test_merges_stop_at_the_cut(tmp_path: Path) -> None:
    three = small(tmp_path / "a.gguf", "llama-bpe", words=("11", "111", "1111"), pairs=("1 1", "11 1", "11 11"))
    tokenizer = load_tokenizer(str(three))
    assert [tokenizer.token_bytes(i) for i in tokenizer.encode("1111")] == [b"111", b"1"]
    one = load_tokenizer(str(small(tmp_path / "b.gguf", "qwen2", words=("11",), pairs=("1 1",))))
    assert [one.token_bytes(i) for i in one.encode("1111")] == [b"1"] * 4


def test_whole_words_win_over_merges_in_llama3_only(tmp_path: Path) -> None:
    words = ("ab", "abcd")  # no merge leads to abcd
    for pre, expected in (("llama-bpe", [b"abcd"]), ("qwen2", [b"ab", b"c", b"d"])):
        tokenizer = load_tokenizer(str(small(tmp_path / f"{pre}.gguf", pre, words=words, pairs=("a b",))))
        assert [tokenizer.token_bytes(i) for i in tokenizer.encode("abcd")] == expected


def test_llama3_adds_bos_once_unless_the_file_says_otherwise(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(small(tmp_path / "a.gguf", "llama-bpe")))
    bos = tokenizer.bos_id
    assert bos is not None
    assert tokenizer.bos_token == "<|begin|>"
    ids = tokenizer.encode("hi")
    assert bos not in ids
    assert tokenizer.with_bos(ids) == [bos, *ids]
    assert tokenizer.with_bos(tokenizer.encode("<|begin|>hi")) == [bos, *ids]
    assert tokenizer.with_bos([]) == [bos]
    assert not load_tokenizer(str(small(tmp_path / "b.gguf", "llama-bpe", add_bos_token=False))).add_bos
    assert load_tokenizer(str(small(tmp_path / "c.gguf", "qwen2", add_bos_token=True))).add_bos


def test_user_defined_tokens_are_units_but_not_special(tmp_path: Path) -> None:
    path = small(tmp_path / "a.gguf", "qwen2", units=("<tool_call>", "é漢"))
    tokenizer = load_tokenizer(str(path))
    for unit in ("<tool_call>", "é漢"):
        ids = tokenizer.encode(f"x{unit}y")
        assert len(ids) == 3
        assert ids[1] not in tokenizer.special_ids
        assert tokenizer.token_bytes(ids[1]) == unit.encode()
    assert tokenizer.stop_ids == {tokenizer.eos_id}


def test_stop_ids_gather_every_end_of_turn(tmp_path: Path) -> None:
    controls = ("<|begin|>", "<|end_of_text|>", "<|eot_id|>", "<|other|>", "<|my_eot|>")
    path = small(tmp_path / "a.gguf", "llama-bpe", controls=controls, eot_token_id=261)
    tokenizer = load_tokenizer(str(path))
    assert {tokenizer.token_bytes(i).decode() for i in tokenizer.stop_ids} == {"<|end_of_text|>", "<|eot_id|>", "<|my_eot|>"}


def test_file_without_token_types_still_knows_its_named_tokens(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(small(tmp_path / "a.gguf", "qwen2", token_type=None)))
    assert tokenizer.encode("<|begin|>") == [tokenizer.bos_id]
    assert tokenizer.special_ids == {tokenizer.bos_id, tokenizer.eos_id}


def test_qwen2_gguf_agrees_with_transformers_on_normalised_text(tmp_path: Path) -> None:
    import unicodedata

    from transformers import AutoTokenizer

    # transformers reads <|endoftext|>, <|im_start|> and <|im_end|> as special in every qwen2 file.
    path = small(
        tmp_path / "q.gguf",
        "qwen2",
        arch="qwen2",
        words=("ab", "Ġab"),
        pairs=("a b", "Ġ ab"),
        controls=("<|endoftext|>", "<|im_end|>", "<|im_start|>"),
        unknown_token_id=258,
        padding_token_id=258,
    )
    ours = load_tokenizer(str(path))
    theirs = AutoTokenizer.from_pretrained(str(tmp_path), gguf_file="q.gguf")
    for text in CORPUS:
        if unicodedata.is_normalized("NFC", text) and "\0" not in text:
            assert check_bytes(ours, text) == theirs.encode(text, add_special_tokens=False), text


def test_decomposed_text_keeps_its_bytes(tmp_path: Path) -> None:
    check_bytes(load_tokenizer(str(small(tmp_path / "q.gguf", "qwen2"))), "cafe\u0301.txt")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "llama"}, "tokenizer.ggml.model is 'llama'"),
        ({"model": "bert"}, "tokenizer.ggml.model is 'bert'"),
        ({"model": None}, "tokenizer.ggml.model is None"),
        ({"pre": "no-such-pre"}, "tokenizer.ggml.pre is 'no-such-pre'; known: "),
        ({"pre": None}, "tokenizer.ggml.pre is None"),
        ({"tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"tokens": [1, 2]}, "tokenizer.ggml.tokens is missing, empty or not"),
        ({"tokens": ["a", "b", "a"]}, "tokenizer.ggml.tokens has 'a' twice, as 0 and 2"),
        ({"merges": None}, "tokenizer.ggml.merges is missing"),
        ({"merges": ["a b", "ab"]}, "tokenizer.ggml.merges, item 1, is 'ab', not two tokens"),
        ({"merges": ["zz qq"]}, "tokenizer.ggml.merges does not fit the vocabulary"),
        ({"token_type": [1, 2]}, "tokenizer.ggml.token_type is not an array of 259 whole numbers"),
        ({"bos_token_id": 259}, "tokenizer.ggml.bos_token_id is 259, not one of the 259 tokens"),
        ({"eos_token_id": "2"}, "tokenizer.ggml.eos_token_id is '2'"),
        ({"add_bos_token": 1}, "tokenizer.ggml.add_bos_token is 1"),
    ],
)
def test_tokenizer_that_cannot_be_exact_is_refused_by_key(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    path = small(tmp_path / "t.gguf", **{"pre": "qwen2", **changes}) if changes.get("pre", "x") else write_without_pre(tmp_path)
    with pytest.raises(ModelError) as caught:
        load_tokenizer(str(path))
    assert str(caught.value).startswith(f"{path}: key ")
    assert words in str(caught.value)


def write_without_pre(folder: Path) -> Path:
    return write_gguf(folder / "t.gguf", {"llama.context_length": 64, "tokenizer.ggml.model": "gpt2"}, {})
