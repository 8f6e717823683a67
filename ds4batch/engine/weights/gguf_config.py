"""GGUF metadata -> ModelConfig.

Owns the table of metadata keys. A key of the architecture that is neither read nor known to leave the results alone is
refused: an option that is silently dropped gives wrong answers that look right.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and the names in `gguf.constants.Keys`.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NoReturn, get_args

import numpy as np

from ds4batch.engine.weights.config import Family, ModelConfig, ModelError, Rope
from ds4batch.engine.weights.gguf_file import GGUFFile, Value
from ds4batch.engine.weights.layout import check_config

FAMILIES: tuple[str, ...] = get_args(Family)
ROPE_FREQS = "rope_freqs.weight"

# Read by this module.
_READ = frozenset(
    {
        "vocab_size",
        "context_length",
        "embedding_length",
        "block_count",
        "feed_forward_length",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.layer_norm_rms_epsilon",
        "attention.sliding_window",
        "attention.causal",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scaling.type",
        "rope.scaling.factor",
        "rope.scale_linear",
        "rope.scaling.original_context_length",
        "rope.scaling.attn_factor",
        "rope.scaling.yarn_ext_factor",
        "rope.scaling.yarn_attn_factor",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
        "expert_count",
    }
)
# Known to change nothing: how the file was made, or what an embedding server does with it.
_HARMLESS = frozenset({"rope.scaling.finetuned", "tensor_data_layout", "pooling_type"})


def config_from_gguf(file: GGUFFile) -> ModelConfig:
    """The model's shape from its metadata and tensor table. Raises ModelError naming the key and the value."""
    family = file.architecture
    if family not in FAMILIES:
        raise ModelError(f"{file.path}: key general.architecture is {family!r}; supported: {', '.join(FAMILIES)}")
    keys = _Keys(file, family)
    keys.refuse_unknown()
    heads = keys.integer("attention.head_count")
    hidden = keys.integer("embedding_length")
    head_dim = keys.integer("attention.key_length", hidden // max(heads, 1))
    config = ModelConfig(
        family=family,  # type: ignore[arg-type]  # checked against FAMILIES above
        name=_name(file),
        layers=keys.integer("block_count"),
        hidden=hidden,
        heads=heads,
        kv_heads=keys.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        ffn=keys.integer("feed_forward_length"),
        vocab=keys.integer("vocab_size", _embedding_rows(file)),
        context=keys.integer("context_length"),
        norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
        rope=_rope(keys, head_dim),
        tied="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        out_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        qk_norm=family == "qwen3",
    )
    _refuse_unsupported(keys, config)
    check_config(config, file.path, len(file.tensors))
    return config


def _name(file: GGUFFile) -> str:
    name = file.metadata.get("general.name")
    return name if isinstance(name, str) and name else Path(file.path).stem


def _embedding_rows(file: GGUFFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{file.path}: tensor token_embd.weight is missing")
    return embedding.shape[0]


def _refuse_unsupported(keys: _Keys, config: ModelConfig) -> None:
    pieces = keys.file.metadata.get("split.count", 1)
    if not isinstance(pieces, int) or pieces > 1:
        raise ModelError(
            f"{keys.file.path}: key split.count is {_shown(pieces)}: the model is cut into several files; join them first"
        )
    if keys.integer("expert_count", 0):
        keys.refuse("expert_count", "mixtures of experts are not supported")
    window = keys.integer("attention.sliding_window", 0)
    if 0 < window < config.context:
        keys.refuse("attention.sliding_window", "sliding-window attention is not supported")
    if not keys.boolean("attention.causal", True):
        keys.refuse("attention.causal", "only causal attention is supported")
    if keys.integer("attention.value_length", config.head_dim) != config.head_dim:
        keys.refuse("attention.value_length", f"it must be the key length, {config.head_dim}")
    if keys.integer("rope.dimension_count", config.head_dim) != config.head_dim:
        keys.refuse("rope.dimension_count", f"partial rotary embedding is not supported (head size {config.head_dim})")


def _rope(keys: _Keys, head_dim: int) -> Rope:
    theta = keys.number("rope.freq_base", 10000.0)
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0))
    # A factor without a type is linear scaling, as in the format's reference implementation.
    kind = keys.text("rope.scaling.type", "linear" if factor not in (0.0, 1.0) else "none")
    factors = _factors(keys.file, head_dim)
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return Rope(theta=theta, factors=factors)
    if kind == "linear":
        return Rope(theta=theta, kind="linear", factor=factor, factors=factors)
    if kind != "yarn":
        keys.refuse("rope.scaling.type", "supported: none, linear, yarn")
    return _yarn(keys, theta, factor, factors)


def _yarn(keys: _Keys, theta: float, factor: float, factors: tuple[float, ...] | None) -> Rope:
    if keys.number("rope.scaling.yarn_ext_factor", 1.0) not in (1.0, -1.0):  # -1 is "the default", which is 1
        keys.refuse("rope.scaling.yarn_ext_factor", "only 1 is supported")
    if keys.number("rope.scaling.yarn_attn_factor", 1.0) != 1.0:
        keys.refuse("rope.scaling.yarn_attn_factor", "only 1 is supported")
    scale = keys.number("rope.scaling.attn_factor", 1.0)
    return Rope(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_context=keys.integer("rope.scaling.original_context_length", keys.integer("context_length")),
        # The file's factor multiplies the formula's value (YaRN paper, section 3.4); Rope holds the product.
        attention_factor=None if scale == 1.0 else scale * (0.1 * math.log(max(factor, 1.0)) + 1.0),
        beta_fast=keys.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=keys.number("rope.scaling.yarn_beta_slow", 1.0),
        factors=factors,
    )


def _factors(file: GGUFFile, head_dim: int) -> tuple[float, ...] | None:
    """The divisors in rope_freqs.weight: how converters write the llama3 scaling."""
    tensor = file.tensors.get(ROPE_FREQS)
    if tensor is None:
        return None
    if tensor.shape != (head_dim // 2,) or tensor.type != "F32":
        raise ModelError(f"{file.path}: tensor {ROPE_FREQS} is {tensor.type} {list(tensor.shape)}, not F32 [{head_dim // 2}]")
    values = file.read(ROPE_FREQS)
    if not (np.isfinite(values).all() and (values > 0).all()):
        raise ModelError(f"{file.path}: tensor {ROPE_FREQS} holds a divisor that is not a positive number")
    return tuple(float(value) for value in values)


class _Keys:
    """Typed access to `{architecture}.*`; every error names the full key and the value."""

    def __init__(self, file: GGUFFile, family: str) -> None:
        self.file = file
        self.prefix = family + "."

    def refuse_unknown(self) -> None:
        for key, value in self.file.metadata.items():
            name = key.removeprefix(self.prefix)
            if name == key or name in _READ or name in _HARMLESS:
                continue
            if isinstance(value, (bool, int, float)) and not value:  # an option that is off
                continue
            raise ModelError(f"{self.file.path}: key {key} is {_shown(value)}; what it asks for is not supported")

    def refuse(self, name: str, why: str) -> NoReturn:
        key = self.prefix + name
        raise ModelError(f"{self.file.path}: key {key} is {_shown(self.file.metadata.get(key))}: {why}")

    def integer(self, name: str, default: int | None = None) -> int:
        value = self._get(name, default)
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = value[0].item()  # one number a layer, all the same
        if isinstance(value, bool) or not isinstance(value, int):
            self.refuse(name, "one whole number is expected")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            self.refuse(name, "a number is expected")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            self.refuse(name, "true or false is expected")
        return value

    def text(self, name: str, default: str) -> str:
        value = self._get(name, default)
        if not isinstance(value, str):
            self.refuse(name, "a string is expected")
        return value

    def _get(self, name: str, default: Any) -> Any:
        value = self.file.metadata.get(self.prefix + name, default)
        if value is None:
            raise ModelError(f"{self.file.path}: key {self.prefix + name} is missing")
        return value


def _shown(value: Value | None) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
