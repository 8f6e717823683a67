"""A GGUF as the engine sees it: configuration, canonical names, rotary row order, and refusals by key."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from ds4batch.engine.weights.config import ModelConfig, ModelError, Rope
from ds4batch.engine.weights.gguf_weights import gguf_name, half_split
from ds4batch.engine.weights.layout import tensor_shapes
from ds4batch.engine.weights.source import open_weights
from tests.engine.weights_files import (
    TINY,
    gguf_tensors,
    llama_keys,
    pairwise,
    random_tensors,
    tiny_gguf,
    tokenizer_keys,
    write_gguf,
)

DEMO = Path(__file__).parents[2] / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
QWEN2 = replace(TINY, family="qwen2", qkv_bias=True, tied=True)
QWEN3 = replace(TINY, family="qwen3", qk_norm=True, head_dim=32)


def refused(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        open_weights(str(path))
    assert str(caught.value).startswith(str(path))
    return str(caught.value)


def config_of(path: Path) -> ModelConfig:
    return open_weights(str(path)).config


def test_demo_model_has_the_published_shape() -> None:
    if not DEMO.exists():
        pytest.fail(f"{DEMO} is missing: run `make setup`")
    source = open_weights(str(DEMO))
    config = source.config
    assert (config.family, config.layers, config.hidden, config.heads, config.kv_heads) == ("llama", 30, 576, 9, 3)
    assert (config.head_dim, config.ffn, config.vocab, config.context) == (64, 1536, 49152, 8192)
    assert config.rope == Rope(theta=100000.0)
    assert config.tied
    assert source.parameters == 134_515_008  # as the model card counts them
    assert source.bytes_on_disk == 98_362_432
    assert (source.stored_type("embed.weight"), source.stored_type("layers.0.q.weight")) == ("Q8_0", "Q4_1")


@pytest.mark.parametrize(
    "config",
    [TINY, replace(TINY, tied=True), replace(TINY, qkv_bias=True, out_bias=True, mlp_bias=True), QWEN2, QWEN3],
    ids=["llama", "tied", "biases", "qwen2", "qwen3"],
)
def test_every_tensor_comes_back_under_its_name_in_half_split_order(tmp_path: Path, config: ModelConfig) -> None:
    source = open_weights(str(tiny_gguf(tmp_path / "m.gguf", config)))
    assert source.config == replace(config, name="m", norm_eps=source.config.norm_eps)
    assert source.config.norm_eps == np.float32(config.norm_eps)
    expected = random_tensors(config)
    assert source.names() == list(expected)
    assert source.parameters == sum(values.size for values in expected.values())
    for name, values in expected.items():
        loaded = source.load(name)
        assert source.shape(name) == tuple(loaded.shape)
        assert loaded.is_contiguous()
        assert torch.equal(loaded, torch.from_numpy(values)), name


def test_row_order_matters_for_llama_and_is_left_alone_for_qwen(tmp_path: Path) -> None:
    values = random_tensors(TINY)["layers.0.q.weight"]
    assert not np.array_equal(pairwise(values, TINY.heads), values)
    assert np.array_equal(half_split(pairwise(values, TINY.heads), TINY.heads), values)


def test_attention_scores_do_not_depend_on_the_row_order_of_the_file(tmp_path: Path) -> None:
    """Pairwise rotation of the file's rows gives the scores that half-split rotation of the loaded rows gives."""
    source = np.random.default_rng(6)
    dim, x = 16, source.standard_normal((2, 24))
    half_rows = [source.standard_normal((dim, 24)) for _ in "qk"]
    angle = np.outer([3.0, 11.0], 100.0 ** -(np.arange(dim // 2) / (dim // 2)))
    cos, sin = np.cos(angle), np.sin(angle)

    def half(v: np.ndarray) -> np.ndarray:
        a, b = v[:, : dim // 2], v[:, dim // 2 :]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=1)

    def paired(v: np.ndarray) -> np.ndarray:
        a, b = v[:, ::2], v[:, 1::2]
        return np.stack([a * cos - b * sin, b * cos + a * sin], axis=2).reshape(v.shape)

    q, k = (half(x @ rows.T) for rows in half_rows)
    file_q, file_k = (paired(x @ pairwise(rows, 1).T) for rows in half_rows)
    np.testing.assert_allclose(q @ k.T, file_q @ file_k.T, rtol=1e-10)


@pytest.mark.parametrize(
    ("kind", "dtype"), [("F32", torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16), ("Q8_0", torch.float32)]
)
def test_dtype_is_the_stored_one_and_fp32_for_quantised_types(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    quantised = {}
    for name, values in gguf_tensors(TINY, random_tensors(TINY)).items():
        raw = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
        quantised[name] = raw if kind in ("F32", "F16") else (raw, gguf.GGMLQuantizationType[kind])
    path = write_gguf(tmp_path / "m.gguf", llama_keys(TINY) | tokenizer_keys(TINY.vocab), quantised)
    source = open_weights(str(path))
    for name, values in random_tensors(TINY).items():
        loaded = source.load(name)
        assert loaded.dtype == dtype
        assert source.stored_type(name) == kind
        assert (loaded.float() - torch.from_numpy(values)).abs().max() < 0.06


@pytest.mark.parametrize(
    ("changes", "rope"),
    [
        ({}, Rope(theta=5000.0)),
        ({"rope__scaling__type": "none", "rope__scaling__factor": 8.0}, Rope(theta=5000.0)),
        ({"rope__scaling__type": "linear", "rope__scaling__factor": 4.0}, Rope(theta=5000.0, kind="linear", factor=4.0)),
        ({"rope__scaling__factor": 4.0}, Rope(theta=5000.0, kind="linear", factor=4.0)),
        ({"rope__scale_linear": 2.0}, Rope(theta=5000.0, kind="linear", factor=2.0)),
        ({"rope__freq_base": None}, Rope(theta=10000.0)),
        (
            {
                "rope__scaling__type": "yarn",
                "rope__scaling__factor": 4.0,
                "rope__scaling__original_context_length": 32,
                "rope__scaling__finetuned": True,
            },
            Rope(theta=5000.0, kind="yarn", factor=4.0, original_context=32),
        ),
        (
            {
                "rope__scaling__type": "yarn",
                "rope__scaling__factor": 4.0,
                "rope__scaling__yarn_beta_fast": 16.0,
                "rope__scaling__yarn_beta_slow": 2.0,
            },
            Rope(theta=5000.0, kind="yarn", factor=4.0, original_context=128, beta_fast=16.0, beta_slow=2.0),
        ),
    ],
)
def test_rope_keys_are_mapped(tmp_path: Path, changes: dict[str, Any], rope: Rope) -> None:
    assert config_of(tiny_gguf(tmp_path / "m.gguf", **changes)).rope == rope


def test_yarn_attention_factor_multiplies_the_formula(tmp_path: Path) -> None:
    rope = config_of(
        tiny_gguf(tmp_path / "m.gguf", rope__scaling__type="yarn", rope__scaling__factor=4.0, rope__scaling__attn_factor=0.5)
    ).rope
    assert rope.attention_factor == pytest.approx(0.5 * (0.1 * np.log(4.0) + 1.0))


def test_rope_freqs_tensor_becomes_a_divisor_for_each_frequency(tmp_path: Path) -> None:
    factors = np.linspace(1, 8, TINY.head_dim // 2).astype(np.float32)
    tensors = gguf_tensors(TINY, random_tensors(TINY))
    keys = llama_keys(TINY)
    path = write_gguf(tmp_path / "m.gguf", keys, tensors | {"rope_freqs.weight": factors})
    assert config_of(path).rope == Rope(theta=5000.0, factors=tuple(map(float, factors)))
    wrong = write_gguf(tmp_path / "w.gguf", keys, tensors | {"rope_freqs.weight": factors[:3]})
    assert "rope_freqs.weight is F32 [3], not F32 [8]" in refused(wrong)
    negative = write_gguf(tmp_path / "n.gguf", keys, tensors | {"rope_freqs.weight": -factors})
    assert "rope_freqs.weight holds a divisor" in refused(negative)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attention__sliding_window": 64}, "llama.attention.sliding_window is 64"),
        ({"expert_count": 8}, "llama.expert_count is 8"),
        ({"attention__causal": False}, "llama.attention.causal is False"),
        ({"rope__dimension_count": 8}, "llama.rope.dimension_count is 8: partial rotary"),
        ({"attention__value_length": 8}, "llama.attention.value_length is 8"),
        ({"rope__scaling__type": "longrope"}, "llama.rope.scaling.type is 'longrope'"),
        ({"rope__scaling__type": "yarn", "rope__scaling__yarn_ext_factor": 0.5}, "yarn_ext_factor is 0.5"),
        ({"rope__scaling__type": "yarn", "rope__scaling__yarn_log_multiplier": 0.1}, "yarn_log_multiplier is 0.1"),
        ({"attn_logit_softcapping": 50.0}, "llama.attn_logit_softcapping is 50.0"),
        ({"embedding_scale": 12.0}, "llama.embedding_scale is 12.0"),
        ({"rope__dimension_sections": [4, 4, 8]}, "llama.rope.dimension_sections is array"),
        ({"block_count": None}, "key llama.block_count is missing"),
        ({"block_count": 2_000_000_000}, "2000000000 layers cannot come from"),
        ({"block_count": 1}, "9 tensors belong to no part of the model: blk.1."),
        ({"block_count": 3}, "tensors are missing: blk.2.attn_norm.weight"),
        ({"attention__head_count": 0}, "heads is 0"),
        ({"attention__head_count_kv": 3}, "4 attention heads are not a multiple of 3"),
        ({"attention__head_count_kv": [2, 1]}, "llama.attention.head_count_kv is array"),
        ({"embedding_length": 65}, "tensor token_embd.weight has shape [40, 64], but the configuration asks for [40, 65]"),
        ({"vocab_size": 41}, "tensor token_embd.weight has shape [40, 64], but the configuration asks for [41, 64]"),
        ({"feed_forward_length": "96"}, "llama.feed_forward_length is '96'"),
        ({"attention__layer_norm_rms_epsilon": float("nan")}, "RMSNorm epsilon is nan"),
        ({"rope__freq_base": -1.0}, "rope theta is -1.0"),
        ({"context_length": 0}, "context is 0"),
    ],
)
def test_what_would_change_the_answers_is_refused_by_key_and_value(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    assert words in refused(tiny_gguf(tmp_path / "m.gguf", **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"attention__sliding_window": 0},
        {"attention__sliding_window": 4096},
        {"expert_count": 0},
        {"expert_used_count": 0},
        {"attention__head_count_kv": [2, 2]},
        {"tensor_data_layout": "Meta AI original pth"},
        {"attention__causal": True},
        {"attention__key_length": None, "attention__value_length": None},
        {"vocab_size": None},
    ],
)
def test_what_changes_nothing_is_accepted(tmp_path: Path, changes: dict[str, Any]) -> None:
    config = config_of(tiny_gguf(tmp_path / "m.gguf", **changes))
    assert replace(config, name="", norm_eps=0) == replace(TINY, name="", norm_eps=0)


@pytest.mark.parametrize("arch", ["gemma3", "deepseek2", "qwen3moe", "no-such-architecture"])
def test_unknown_architecture_is_refused_by_name(tmp_path: Path, arch: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", {}, {"t": np.zeros(4, dtype=np.float32)}, arch)
    assert f"general.architecture is '{arch}'" in refused(path)


def test_split_file_is_refused(tmp_path: Path) -> None:
    keys = llama_keys(TINY) | {"split.count": 3}
    assert "split.count is 3" in refused(write_gguf(tmp_path / "m.gguf", keys, gguf_tensors(TINY, random_tensors(TINY))))


@pytest.mark.parametrize("name", list(tensor_shapes(replace(TINY, layers=1))))
def test_each_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    tensors = gguf_tensors(TINY, random_tensors(TINY))
    del tensors[gguf_name(name)]
    path = write_gguf(tmp_path / "m.gguf", llama_keys(TINY), tensors)
    if name == "head.weight":  # then the head is the embedding
        assert open_weights(str(path)).config.tied
        return
    assert gguf_name(name) in refused(path)


def test_tensor_of_no_part_is_named_and_rotary_tables_are_ignored(tmp_path: Path) -> None:
    tensors = gguf_tensors(TINY, random_tensors(TINY))
    extra = np.zeros(8, dtype=np.float32)
    path = write_gguf(tmp_path / "a.gguf", llama_keys(TINY), tensors | {"blk.0.attn_k.bias": extra})
    assert "belong to no part of the model: blk.0.attn_k.bias" in refused(path)
    open_weights(str(write_gguf(tmp_path / "b.gguf", llama_keys(TINY), tensors | {"blk.0.attn_rot_embd.weight": extra})))


def test_type_that_cannot_be_loaded_is_refused_at_opening(tmp_path: Path) -> None:
    tensors: dict[str, Any] = dict(gguf_tensors(TINY, random_tensors(TINY)))
    tensors["output_norm.weight"] = np.zeros(64, dtype=np.int8)
    assert "tensor output_norm.weight is stored as I8" in refused(write_gguf(tmp_path / "m.gguf", llama_keys(TINY), tensors))


def test_opening_a_model_imports_no_torch(tmp_path: Path) -> None:
    import subprocess
    import sys

    path = tiny_gguf(tmp_path / "m.gguf")
    code = (
        "import sys; from ds4batch.engine.weights.source import open_weights; from ds4batch.tokenizer import load_tokenizer;"
        "import ds4batch.chat.template; open_weights(sys.argv[1]); load_tokenizer(sys.argv[1]);"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(path)], cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
