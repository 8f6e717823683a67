"""Small model files for the tests of ds4batch.engine.weights, with tensors whose values are known."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from ds4batch.engine.weights.config import ModelConfig, Rope
from ds4batch.engine.weights.gguf_weights import gguf_name
from ds4batch.engine.weights.layout import tensor_shapes

Tensors = dict[str, np.ndarray]

TINY = ModelConfig(
    family="llama",
    name="tiny",
    layers=2,
    hidden=64,
    heads=4,
    kv_heads=2,
    head_dim=16,
    ffn=96,
    vocab=40,
    context=128,
    norm_eps=1e-5,
    rope=Rope(theta=5000.0),
    tied=False,
)


def random_tensors(config: ModelConfig) -> Tensors:
    """Canonical name -> float32 values, the same for the same configuration."""
    source = np.random.default_rng(1)
    return {name: source.standard_normal(shape).astype(np.float32) for name, shape in tensor_shapes(config).items()}


def pairwise(rows: np.ndarray, heads: int) -> np.ndarray:
    """q or k rows as llama.cpp's converter stores them, written out row by row."""
    half = rows.shape[0] // heads // 2
    out = np.empty_like(rows)
    for head in range(heads):
        base = head * 2 * half
        for j in range(half):
            out[base + 2 * j] = rows[base + j]
            out[base + 2 * j + 1] = rows[base + j + half]
    return out


def llama_keys(config: ModelConfig) -> dict[str, Any]:
    """The metadata that describes `config`, by full key."""
    arch = config.family
    return {
        f"{arch}.block_count": config.layers,
        f"{arch}.context_length": config.context,
        f"{arch}.embedding_length": config.hidden,
        f"{arch}.feed_forward_length": config.ffn,
        f"{arch}.attention.head_count": config.heads,
        f"{arch}.attention.head_count_kv": config.kv_heads,
        f"{arch}.attention.key_length": config.head_dim,
        f"{arch}.attention.value_length": config.head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": config.norm_eps,
        f"{arch}.rope.freq_base": config.rope.theta,
        f"{arch}.rope.dimension_count": config.head_dim,
        f"{arch}.vocab_size": config.vocab,
    }


def tokenizer_keys(vocab: int) -> dict[str, Any]:
    """A byte-level vocabulary of `vocab` tokens, with two special ones and a merge."""
    letters = [chr(ord("a") + i) for i in range(vocab - 3)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["<s>", "<|im_end|>", *letters, "ab"],
        "tokenizer.ggml.token_type": [3, 3] + [1] * (vocab - 2),
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }


def write_gguf(path: Path, keys: Mapping[str, Any], tensors: Mapping[str, Any], arch: str = "llama") -> Path:
    """Write a GGUF through the gguf package. A tensor is an array, or (bytes array, GGML type)."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in keys.items():
        add_value(writer, key, value)
    for name, value in tensors.items():
        if isinstance(value, tuple):
            writer.add_tensor(name, value[0], raw_dtype=value[1])
        else:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def gguf_tensors(config: ModelConfig, tensors: Tensors) -> Tensors:
    """The tensors under GGUF names, q and k in the order of the architecture."""
    out = {}
    for name, values in tensors.items():
        kind = name.split(".")[-2]
        if config.family == "llama" and kind in ("q", "k"):
            values = pairwise(values, config.heads if kind == "q" else config.kv_heads)
        out[gguf_name(name)] = values
    return out


def tiny_gguf(path: Path, config: ModelConfig = TINY, **changes: Any) -> Path:
    """A whole small model. `changes`: metadata without the architecture's prefix, None removes a key."""
    keys = llama_keys(config) | tokenizer_keys(config.vocab)
    for name, value in changes.items():
        keys[f"{config.family}.{name.replace('__', '.')}"] = value
    keys = {key: value for key, value in keys.items() if value is not None}
    return write_gguf(path, keys, gguf_tensors(config, random_tensors(config)), config.family)
