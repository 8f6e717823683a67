"""Weights that stay quantised: the values are the file's, mixtures and ties work, and the memory is what was said."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from bench.shapes import RandomWeights, hf_config
from ds4batch.engine.linear import Linear
from ds4batch.engine.linear_cuda import Scratch
from ds4batch.engine.memory import expanded_bytes, weight_bytes
from ds4batch.engine.models.dense import DenseModel
from ds4batch.engine.weights.config import ModelConfig, ModelError, Rope
from ds4batch.engine.weights.hf_dir import hf_name, scale_name
from ds4batch.engine.weights.raw import kept_formats, values
from ds4batch.engine.weights.source import WeightSource, open_weights
from tests.engine.models import engine_of, feed
from tests.engine.weights_files import gguf_tensors, llama_keys, random_tensors, tokenizer_keys, write_gguf
from triton_kernels.quant_formats import Format

CPU = torch.device("cpu")
ALL = frozenset(Format)
TINY = ModelConfig(
    family="llama",
    name="tiny",
    layers=2,
    hidden=256,
    heads=4,
    kv_heads=2,
    head_dim=64,
    ffn=512,
    vocab=96,
    context=512,
    norm_eps=1e-6,
    rope=Rope(10000.0),
    tied=False,
)
TOKENS = [(7 * i) % 90 for i in range(21)]


def model_of(source: WeightSource, keep: Collection[Format] = (), dtype: torch.dtype = torch.float32) -> DenseModel:
    return DenseModel(source, CPU, dtype, 256, keep=keep)


def logits(model: DenseModel) -> torch.Tensor:
    return feed(engine_of(model, 1, 256), 0, TOKENS, 100)


def quantised_gguf(path: Path, config: ModelConfig, kinds: dict[str, str]) -> WeightSource:
    """A file whose matrices are Q8_0, but for those whose names end in a key of `kinds`."""
    tensors = {}
    for name, array in gguf_tensors(config, random_tensors(config)).items():
        kind = next((k for end, k in kinds.items() if name.endswith(end + ".weight")), "Q8_0") if array.ndim == 2 else "F32"
        scaled = array if array.ndim == 1 else array / np.sqrt(array.shape[1], dtype=np.float32)
        raw = gguf.quants.quantize(scaled, gguf.GGMLQuantizationType[kind])
        tensors[name] = raw if kind in ("F32", "F16") else (raw, gguf.GGMLQuantizationType[kind])
    return open_weights(str(write_gguf(path, llama_keys(config) | tokenizer_keys(50), tensors, config.family)))


def assert_same_model(source: WeightSource) -> DenseModel:
    """Kept as stored and converted at load compute the same, and both take the memory that was planned."""
    kept, converted = model_of(source, ALL), model_of(source)
    assert torch.equal(logits(kept), logits(converted))
    for keep, model in ((ALL, kept), (frozenset[Format](), converted)):
        assert weight_bytes(source, CPU, torch.float32, keep) == model.bytes
    assert kept.bytes < converted.bytes
    return kept


@pytest.mark.parametrize("fmt", [*Format, "Q4_K_M"])
@pytest.mark.parametrize("tied", [False, True])
def test_every_format_is_the_same_model_kept_and_converted(fmt: str, tied: bool) -> None:
    kept = assert_same_model(RandomWeights(replace(TINY, tied=tied), CPU, dtype=torch.float32, format=fmt))
    products = [part for layer in kept.layers for part in layer if isinstance(part, Linear)]
    formats = {part.format for product in products for part in product.quantised}
    assert formats == ({Format.Q4_K, Format.Q6_K} if fmt == "Q4_K_M" else {fmt})


def test_random_matrices_keep_the_size_of_what_they_multiply() -> None:
    for fmt in ("", *Format, "Q4_K_M"):
        source = RandomWeights(TINY, CPU, format=fmt)
        for name in ("layers.0.q.weight", "layers.1.down.weight"):
            x = torch.randn(64, source.shape(name)[1], generator=torch.Generator().manual_seed(1))
            grown = (x @ source.load(name).float().t()).std()
            assert 0.3 < grown < 3, (fmt, name)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_file_of_several_formats_is_the_same_model(tmp_path: Path, family: str) -> None:
    config = replace(TINY, family=family, tied=True, qkv_bias=family == "qwen2")
    kinds = {"attn_k": "Q4_0", "attn_v": "Q4_1", "ffn_up": "Q4_0"}
    kept = assert_same_model(quantised_gguf(tmp_path / "m.gguf", config, kinds))
    layer = kept.layers[0]
    assert [part.format for part in layer.qkv.quantised] == ["Q8_0", "Q4_0", "Q4_1"]
    assert [part.n for part in layer.qkv.quantised] == [256, 128, 128]
    assert [part.format for part in layer.gate_up.quantised] == ["Q8_0", "Q4_0"]
    assert kept.head.quantised
    assert kept.embed.shape == (96, 256)


def test_neighbours_of_one_format_are_one_weight(tmp_path: Path) -> None:
    source = quantised_gguf(tmp_path / "m.gguf", TINY, {"attn_v": "Q4_0"})
    layer = model_of(source, ALL).layers[0]
    assert [(part.format, part.n) for part in layer.qkv.quantised] == [("Q8_0", 384), ("Q4_0", 128)]
    assert [(part.format, part.n) for part in layer.gate_up.quantised] == [("Q8_0", 1024)]


def test_a_product_with_a_format_no_kernel_reads_is_converted_as_a_whole(tmp_path: Path) -> None:
    source = quantised_gguf(tmp_path / "m.gguf", TINY, {"attn_v": "Q5_0", "ffn_down": "F16"})
    kept, plain = model_of(source, ALL), model_of(source)
    layer = kept.layers[1]
    assert not layer.qkv.quantised
    assert not layer.down.quantised
    assert layer.out.quantised
    assert torch.equal(logits(kept), logits(plain))
    assert weight_bytes(source, CPU, torch.float32, ALL) == kept.bytes


def test_only_the_formats_asked_for_are_kept(tmp_path: Path) -> None:
    source = quantised_gguf(tmp_path / "m.gguf", TINY, {"attn_output": "Q4_0"})
    layer = model_of(source, {Format.Q4_0}).layers[0]
    assert layer.out.quantised
    assert not layer.gate_up.quantised


def test_fp8_heads_that_cross_a_square_of_scales_are_converted() -> None:
    wide = RandomWeights(replace(TINY, heads=2, kv_heads=1, head_dim=192), CPU, format=Format.FP8)
    names = [f"layers.0.{name}.weight" for name in "qkv"]
    assert not kept_formats(wide, names, ALL, rotated=True)
    assert kept_formats(wide, ["layers.0.o.weight"], ALL)
    assert model_of(wide, ALL).bytes == weight_bytes(wide, CPU, torch.float32, ALL)


def test_planned_bytes_are_those_of_the_loaded_model_in_bf16() -> None:
    for tied in (False, True):
        for fmt in ("", Format.Q4_0):
            changed = replace(TINY, tied=tied, family="qwen3", qk_norm=True, qkv_bias=True, head_dim=16)
            source = RandomWeights(changed, CPU, format=fmt)
            for keep in (ALL, frozenset[Format]()):
                assert model_of(source, keep, torch.bfloat16).bytes == weight_bytes(source, CPU, torch.bfloat16, keep)


def test_planned_scratch_is_the_one_a_forward_takes() -> None:
    source = RandomWeights(TINY, CPU, format="Q4_K_M")
    for dtype in (torch.float32, torch.bfloat16):
        values = Scratch(model_of(source, ALL, dtype).linears).values
        assert values.nbytes == expanded_bytes(source, dtype, ALL) == 256 * 2 * 512 * dtype.itemsize
    assert expanded_bytes(source, torch.bfloat16, ()) == 0
    assert expanded_bytes(source, torch.bfloat16, {Format.Q6_K}) > 0


@pytest.fixture
def fp8(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A directory as FP8 checkpoints are, and the matrices' values worked out square by square."""
    config = replace(TINY, hidden=192, ffn=320, heads=4, head_dim=64)
    source = RandomWeights(config, CPU, format=Format.FP8)
    tensors: dict[str, torch.Tensor] = {}
    expected: dict[str, torch.Tensor] = {}
    for name in source.names():
        raw = source.raw(name, CPU)
        if raw.scales is None:
            tensors[hf_name(name)] = expected[name] = raw.data
            continue
        codes = raw.data.view(torch.float8_e4m3fn)
        tensors[hf_name(name)], tensors[scale_name(hf_name(name))] = codes, raw.scales
        out = codes.float()
        for i in range(raw.scales.shape[0]):
            for j in range(raw.scales.shape[1]):
                out[128 * i : 128 * i + 128, 128 * j : 128 * j + 128] *= raw.scales[i, j]
        expected[name] = out
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(hf_config(config, fp8=True)))
    return tmp_path, expected


def test_fp8_directory_loads_as_its_squares_say(fp8: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, expected = fp8
    source = open_weights(str(path))
    assert source.stored_type("layers.0.q.weight") == "F8_E4M3"
    for name, tensor in expected.items():
        assert torch.equal(source.load(name), tensor), name
    kept = assert_same_model(source)
    assert [part.n for part in kept.layers[0].qkv.quantised] == [512]
    assert [part.n for part in kept.layers[0].gate_up.quantised] == [320, 320]  # 320 rows end inside a square


def test_fp8_without_its_scales_is_refused_by_name(fp8: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, _ = fp8
    tensors = load_file(path / "model.safetensors")
    lost = "model.layers.1.mlp.up_proj.weight_scale_inv"
    del tensors[lost]
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ModelError, match=f"1 of .* tensors are missing: {lost}"):
        open_weights(str(path))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quant_method": "awq"}, "only quantised safetensors supported are fp8"),
        ({"weight_block_size": [64, 128]}, "quantization_config.weight_block_size is"),
        ({"weight_block_size": None}, "quantization_config.weight_block_size is None"),
        ({"fmt": "e5m2"}, "quantization_config.fmt is 'e5m2'"),
        ({"activation_scheme": "static"}, "quantization_config.activation_scheme is 'static'"),
    ],
)
def test_other_quantised_directories_are_refused_by_key(
    fp8: tuple[Path, dict[str, torch.Tensor]], changes: dict[str, object], words: str
) -> None:
    path, _ = fp8
    table = json.loads((path / "config.json").read_text())
    table["quantization_config"] |= changes
    (path / "config.json").write_text(json.dumps(table))
    with pytest.raises(ModelError, match=words.replace("(", r"\(")):
        open_weights(str(path))


@pytest.mark.parametrize("kind", [f for f in Format if f != Format.FP8])
def test_values_in_pieces_are_those_of_the_whole(kind: Format) -> None:
    source = RandomWeights(replace(TINY, vocab=5000), CPU, format=kind)  # more rows than one piece
    raw = source.raw("embed.weight", CPU)
    expected = gguf.quants.dequantize(raw.data.numpy(), gguf.GGMLQuantizationType[kind])
    assert np.array_equal(values(raw, (5000, 256), torch.float32).numpy(), expected)
    assert torch.equal(values(raw, (5000, 256), torch.bfloat16), torch.from_numpy(expected).bfloat16())


def test_a_quantised_product_has_the_weight_it_was_made_of() -> None:
    source = RandomWeights(TINY, CPU, format="Q4_K_M")
    layer = model_of(source, ALL).layers[0]
    expected = [source.load(f"layers.0.{name}.weight") for name in ("gate", "up")]
    assert torch.equal(layer.gate_up.weight, torch.cat(expected))
