"""The GGUF container: a file that is cut, broken or lying is refused in words, before it costs anything."""

from __future__ import annotations

import random
import re
import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4batch.engine.weights.config import ModelError
from ds4batch.engine.weights.gguf_file import open_gguf
from ds4batch.engine.weights.source import open_weights
from ds4batch.tokenizer import load_tokenizer
from tests.engine.weights_files import TINY, random_tensors, tiny_gguf, tokenizer_keys, write_gguf

DEMO = Path(__file__).parents[2] / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
TYPES = gguf.GGMLQuantizationType


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="module")
def whole(tiny: Path) -> bytes:
    return tiny.read_bytes()


@pytest.fixture(scope="module")
def header_end(tiny: Path) -> int:
    return min(tensor.offset for tensor in open_gguf(str(tiny)).tensors.values())


@pytest.fixture(scope="module")
def demo() -> Path:
    if not DEMO.exists():
        pytest.fail(f"{DEMO} is missing: run `make setup`")
    return DEMO


def refused(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        open_weights(str(path))
    assert str(caught.value).startswith(str(path))
    return str(caught.value)


def survives(path: Path) -> bool:
    """Open as the engine and as the front would; nothing but ModelError may come out. True when both accept the file."""
    messages: list[str] = []
    for opener in (open_weights, load_tokenizer):
        try:
            opener(str(path))
        except ModelError as error:
            messages.append(str(error))
    assert all(message.startswith(str(path)) for message in messages)
    return not messages


def test_header_agrees_with_the_gguf_package(demo: Path, tiny: Path) -> None:
    for path in (demo, tiny):
        ours = open_gguf(str(path))
        theirs = gguf.GGUFReader(path)
        assert ours.tensors.keys() == {tensor.name for tensor in theirs.tensors}
        for tensor in theirs.tensors:
            mine = ours.tensors[tensor.name]
            assert (mine.type, list(mine.shape[::-1])) == (tensor.tensor_type.name, list(tensor.shape))
            assert (mine.offset, mine.nbytes) == (tensor.data_offset, tensor.n_bytes)
        stored = {key for key in theirs.fields if not key.startswith("GGUF.")}
        assert ours.metadata.keys() == stored
        for key in stored:
            if not key.startswith("tokenizer.ggml.") or path == tiny:
                value = ours.metadata[key]
                assert (value.tolist() if isinstance(value, np.ndarray) else value) == theirs.fields[key].contents()


def test_every_metadata_type_is_read(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "x")
    limits = {
        "uint8": 255,
        "int8": -128,
        "uint16": 65535,
        "int16": -32768,
        "uint32": 2**32 - 1,
        "int32": -(2**31),
        "uint64": 2**64 - 1,
        "int64": -(2**63),
        "float32": 0.5,
        "float64": 1e300,
        "bool": True,
        "string": "é\0漢",
    }
    for kind, value in limits.items():
        getattr(writer, f"add_{kind}")(f"k.{kind}", value)
    writer.add_array("k.floats", [0.5, -1.0])
    writer.add_array("k.strings", ["", "b", "漢字"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    metadata = open_gguf(str(tmp_path / "m.gguf")).metadata
    for kind, value in limits.items():
        assert metadata[f"k.{kind}"] == value
        assert type(metadata[f"k.{kind}"]) is type(value)
    assert metadata["k.strings"] == ["", "b", "漢字"]
    floats = metadata["k.floats"]
    assert isinstance(floats, np.ndarray)
    assert floats.tolist() == [0.5, -1.0]


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0", "MXFP4"])
def test_quantised_tensor_comes_back_as_the_gguf_package_dequantises_it(tmp_path: Path, kind: str) -> None:
    values = np.random.default_rng(2).standard_normal((37, 512)).astype(np.float32)
    raw = gguf.quants.quantize(values, TYPES[kind])
    path = write_gguf(tmp_path / "q.gguf", {}, {"t": raw if kind in ("F32", "F16") else (raw, TYPES[kind])})
    read = open_gguf(str(path)).read("t")
    if kind == "BF16":
        read = (read.astype(np.uint32) << 16).view(np.float32)
    assert read.shape == values.shape
    np.testing.assert_array_equal(read.astype(np.float32), gguf.quants.dequantize(raw, TYPES[kind]))
    likeness = np.corrcoef(read.astype(np.float32).ravel(), values.ravel())[0, 1]
    assert likeness > (0.3 if kind.startswith("TQ") else 0.98)  # ternary types keep the large values only


@pytest.mark.parametrize(
    "kind",
    [
        "Q2_K",
        "Q3_K",
        "Q4_K",
        "Q5_K",
        "Q6_K",
        "IQ4_NL",
        "IQ4_XS",
        "IQ2_XXS",
        "IQ2_XS",
        "IQ2_S",
        "IQ3_XXS",
        "IQ3_S",
        "IQ1_S",
        "IQ1_M",
    ],
)
def test_blocks_of_types_without_an_encoder_are_dequantised(tmp_path: Path, kind: str) -> None:
    block, block_bytes = gguf.GGML_QUANT_SIZES[TYPES[kind]]
    # Bytes below 0x3c: every pair of them is a finite float16, so that scales are numbers.
    raw = np.random.default_rng(3).integers(0, 0x3C, (33, 1024 // block * block_bytes), dtype=np.uint8)
    path = write_gguf(tmp_path / "q.gguf", {}, {"t": (raw, TYPES[kind])})
    read = open_gguf(str(path)).read("t")
    assert read.shape == (33, 1024)
    assert np.isfinite(read).all()
    assert np.unique(read).size > 10
    np.testing.assert_array_equal(read, gguf.quants.dequantize(raw, TYPES[kind]))


def test_type_that_cannot_be_dequantised_is_refused_by_name(tmp_path: Path) -> None:
    raw = np.zeros((4, 512 // 256 * 292), dtype=np.uint8)
    path = write_gguf(tmp_path / "q.gguf", {}, {"t": (raw, TYPES.Q8_K)})
    with pytest.raises(ModelError, match="tensor t has type Q8_K"):
        open_gguf(str(path)).read("t")


def test_demo_model_cut_in_half_is_refused_with_tensor_and_byte(demo: Path, tmp_path: Path) -> None:
    half = tmp_path / "half.gguf"
    size = demo.stat().st_size // 2
    with demo.open("rb") as file:
        half.write_bytes(file.read(size))
    message = refused(half)
    assert re.search(rf"tensor blk\.\d+\.\w+\.weight .* needs bytes \d+ to \d+, but the file ends at byte {size}", message)
    with pytest.raises(ModelError):
        load_tokenizer(str(half))


def test_truncation_anywhere_is_refused(whole: bytes, header_end: int, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    cuts = [*range(0, header_end, 7), *range(header_end, len(whole), 4999), len(whole) - 1]
    for size in cuts:
        path.write_bytes(whole[:size])
        assert not survives(path), size


def test_file_that_shrinks_after_opening_is_reported_on_load(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "shrinks.gguf"
    path.write_bytes(whole)
    source = open_weights(str(path))
    path.write_bytes(whole[: len(whole) // 2])
    last = source.names()[-1]
    with pytest.raises(ModelError, match=r"tensor \S+ ends at byte \d+, \d+ bytes short"):
        source.load(last)


def test_random_damage_to_the_header_never_crashes(whole: bytes, header_end: int, tmp_path: Path) -> None:
    path = tmp_path / "damaged.gguf"
    dice = random.Random(4)
    refusals = 0
    for position in range(header_end):
        damaged = bytearray(whole)
        width = dice.choice((1, 1, 4, 8))
        damaged[position : position + width] = dice.choice((dice.randbytes(width), b"\xff" * width, b"\0" * width))
        path.write_bytes(damaged)
        refusals += not survives(path)
    assert refusals > header_end // 3  # the damage did reach what is checked


@settings(max_examples=150, deadline=None)
@given(tail=st.binary(max_size=300))
def test_any_bytes_behind_a_magic_are_handled(tmp_path_factory: pytest.TempPathFactory, tail: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<I", 3) + tail)
    assert not survives(path)


HUGE = (2**64 - 1, 2**63, 2**40, 2**33)


def header(tensors: int, keys: int, body: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, keys) + body


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


@pytest.mark.parametrize("huge", HUGE)
@pytest.mark.parametrize(
    "lie", ["tensors", "keys", "key length", "string", "array", "string array", "item", "name", "dims", "offset", "rank"]
)
def test_lying_number_is_refused_without_memory_for_it(tmp_path: Path, huge: int, lie: str) -> None:
    big, small = struct.pack("<Q", huge), struct.pack("<I", huge & 0xFFFFFFFF or 0x80000000)
    key, u32 = text(b"k"), lambda n: struct.pack("<I", n)
    entry = text(b"t") + u32(2)
    body = {
        "tensors": b"GGUF" + u32(3) + big + struct.pack("<Q", 0),
        "keys": b"GGUF" + u32(3) + struct.pack("<Q", 0) + big,
        "key length": header(0, 1, big + b"key"),
        "string": header(0, 1, key + u32(8) + big),
        "array": header(0, 1, key + u32(9) + u32(4) + big),
        "string array": header(0, 1, key + u32(9) + u32(8) + big),
        "item": header(0, 1, key + u32(9) + u32(8) + struct.pack("<Q", 2) + text(b"a") + big),
        "name": header(1, 0, big + b"t"),
        "dims": header(1, 0, entry + big + struct.pack("<Q", 32) + u32(0) + struct.pack("<Q", 0)),
        "offset": header(1, 0, entry + struct.pack("<QQ", 4, 4) + u32(0) + struct.pack("<Q", huge // 32 * 32)),
        "rank": header(1, 0, text(b"t") + small),
    }[lie]
    path = tmp_path / "lie.gguf"
    path.write_bytes(body + b"\0" * 4096)
    tracemalloc.start()
    try:
        message = refused(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert "byte" in message
    assert peak < 1 << 20


def test_count_that_fits_a_sparse_file_is_still_bounded(tmp_path: Path) -> None:
    path = tmp_path / "sparse.gguf"
    count = 2**27  # empty strings: 1 GiB of zeros would hold them
    with path.open("wb") as file:
        file.write(header(0, 1, text(b"k") + struct.pack("<IIQ", 9, 8, count)))
        file.truncate(3 << 30)
    assert f"{count} items of key k" in refused(path)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("magic", lambda b: b"GGML" + b[4:], r"is no GGUF.*byte 0"),
        ("version 1", lambda b: b[:4] + struct.pack("<I", 1) + b[8:], r"version 1 is not supported.*byte 4"),
        ("version 4", lambda b: b[:4] + struct.pack("<I", 4) + b[8:], r"version 4 is not supported.*byte 4"),
        ("big endian", lambda b: b[:4] + struct.pack(">I", 3) + b[8:], r"big-endian"),
        ("empty", lambda b: b"", "0 bytes is too short"),
        ("text", lambda b: b"<html>not a model</html>" * 4, "is no GGUF"),
    ],
)
def test_what_is_no_gguf_is_refused(whole: bytes, tmp_path: Path, name: str, change: object, words: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(change(whole))  # type: ignore[operator]
    assert re.search(words, refused(path))


def test_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    assert "No such file" in refused(tmp_path / "absent.gguf")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (header(0, 2, (text(b"k") + struct.pack("<II", 4, 1)) * 2), "metadata key k appears twice"),
        (header(0, 1, text(b"k") + struct.pack("<I", 77) + b"\0" * 8), "key k has unknown value type 77"),
        (header(0, 1, text(b"k") + struct.pack("<IIQ", 9, 9, 1) + b"\0" * 8), "key k is an array of unknown item type 9"),
        (header(0, 1, text(b"k") + struct.pack("<I", 8) + text(b"\xff\xfe")), "key k is not UTF-8"),
        (header(1, 0, text(b"t") + struct.pack("<IQIQ", 1, 4, 999, 0)), "tensor t has unknown type 999"),
        (header(1, 0, text(b"t") + struct.pack("<IQIQ", 1, 0, 0, 0)), "tensor t has an empty dimension"),
        (header(1, 0, text(b"t") + struct.pack("<IQIQ", 1, 33, 2, 0)), "tensor t has rows of 33 values"),
        (header(1, 0, text(b"t") + struct.pack("<IQIQ", 1, 4, 0, 7)), "offset 7, not a multiple of the alignment 32"),
        (header(2, 0, (text(b"t") + struct.pack("<IQIQ", 1, 4, 0, 0)) * 2), "tensor t appears twice"),
        (
            header(2, 0, text(b"t") + struct.pack("<IQIQ", 1, 16, 0, 0) + text(b"u") + struct.pack("<IQIQ", 1, 4, 0, 32)),
            "tensors t and u overlap",
        ),
        (header(0, 1, text(b"general.alignment") + struct.pack("<II", 4, 3)), "general.alignment is 3"),
    ],
)
def test_inconsistent_header_is_refused_with_the_culprit(tmp_path: Path, body: bytes, words: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(body + b"\0" * 1024)
    assert words in refused(path)


def test_opening_reads_no_tensor(tmp_path: Path) -> None:
    tensors = {f"t{i}": np.zeros((512, 1024), dtype=np.float32) for i in range(8)}  # 16 MiB
    path = write_gguf(tmp_path / "big.gguf", tokenizer_keys(40), tensors)
    tracemalloc.start()
    try:
        file = open_gguf(str(path))
        _, opened = tracemalloc.get_traced_memory()
        for name in tensors:
            file.read(name)
        _, read = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert opened < 1 << 20
    assert read < 3 << 20  # one tensor at a time


def test_big_quantised_tensor_is_dequantised_in_pieces(tmp_path: Path) -> None:
    values = np.random.default_rng(5).standard_normal((12000, 512)).astype(np.float32)  # more than one piece
    raw = gguf.quants.quantize(values, TYPES.Q8_0)
    path = write_gguf(tmp_path / "big.gguf", {}, {"t": (raw, TYPES.Q8_0)})
    np.testing.assert_array_equal(open_gguf(str(path)).read("t"), gguf.quants.dequantize(raw, TYPES.Q8_0))


def test_values_survive_the_file(tiny: Path) -> None:
    expected = random_tensors(TINY)["layers.1.down.weight"]
    np.testing.assert_array_equal(open_gguf(str(tiny)).read("blk.1.ffn_down.weight"), expected)
