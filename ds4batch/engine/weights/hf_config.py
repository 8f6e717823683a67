"""config.json of a Hugging Face directory -> ModelConfig.

Owns the table of keys and the defaults that transformers gives to absent ones. Keys that would change the results and
are not supported are refused by name and value.

Reference: the configuration classes of transformers 5.17 for llama, qwen2 and qwen3, and its modeling_rope_utils.
"""

from __future__ import annotations

import math
from typing import Any, NoReturn, get_args

from ds4batch.engine.weights.config import Family, ModelConfig, ModelError, Rope
from ds4batch.engine.weights.layout import check_config

FAMILIES: tuple[str, ...] = get_args(Family)


def config_from_hf(raw: dict[str, Any], where: str, name: str, tensors: int) -> ModelConfig:
    """The model's shape from a parsed config.json.

    `where` is the file's path for messages, `name` what to call the model, `tensors` how many tensors its files hold.
    Raises ModelError naming the key and the value.
    """
    from ds4batch.engine.weights.hybrid_config import HYBRID_TYPES, hybrid_from_hf  # which reads its keys with this module

    keys = Keys(raw, where)
    family = raw.get("model_type")
    if family in HYBRID_TYPES:
        return hybrid_from_hf(raw, where, name, tensors)
    if family not in FAMILIES:
        raise ModelError(f"{where}: model_type is {family!r}; supported: {', '.join((*FAMILIES, *HYBRID_TYPES))}")
    heads = keys.integer("num_attention_heads")
    hidden = keys.integer("hidden_size")
    biased = keys.boolean("attention_bias", False)
    config = ModelConfig(
        family=family,
        name=name,
        layers=keys.integer("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=keys.integer("num_key_value_heads", heads if family == "llama" else 32),
        head_dim=keys.integer("head_dim", 128 if family == "qwen3" else hidden // max(heads, 1)),
        ffn=keys.integer("intermediate_size"),
        vocab=keys.integer("vocab_size"),
        context=keys.integer("max_position_embeddings", 2048 if family == "llama" else 32768),
        norm_eps=keys.number("rms_norm_eps", 1e-6),
        rope=rope_of(keys),
        tied=keys.boolean("tie_word_embeddings", False),
        qkv_bias=biased or family == "qwen2",
        out_bias=biased and family != "qwen2",
        mlp_bias=keys.boolean("mlp_bias", False) and family == "llama",
        qk_norm=family == "qwen3",
    )
    _refuse_unsupported(keys, config)
    check_config(config, where, tensors)
    return config


def _refuse_unsupported(keys: Keys, config: ModelConfig) -> None:
    if keys.raw.get("hidden_act", "silu") not in ("silu", "swish"):  # two names of one function
        keys.refuse("hidden_act", "only silu is supported")
    if keys.raw.get("quantization_config") is not None:
        _check_quantisation(keys)
    layer_types = keys.raw.get("layer_types")
    if layer_types is not None:
        if layer_types != ["full_attention"] * config.layers:
            keys.refuse("layer_types", f"only full_attention, {config.layers} times, is supported")
    elif (
        keys.boolean("use_sliding_window", False)
        and keys.raw.get("sliding_window", 4096) is not None
        and keys.integer("max_window_layers", 28) < config.layers
    ):
        keys.refuse("use_sliding_window", "sliding-window attention is not supported")
    if config.family == "llama" and keys.raw.get("sliding_window") is not None:
        keys.refuse("sliding_window", "sliding-window attention is not supported")


def _check_quantisation(keys: Keys) -> None:
    """Only FP8 with a scale a square, as DeepSeek's and Qwen's FP8 checkpoints have it. Which matrices it is shows in their type."""
    table = keys.raw["quantization_config"]
    if not isinstance(table, dict) or table.get("quant_method") != "fp8":
        keys.refuse("quantization_config", "the only quantised safetensors supported are fp8 in blocks of 128 x 128")
    inner = Keys(table, keys.where, "quantization_config.")
    if table.get("weight_block_size") != [128, 128]:
        inner.refuse("weight_block_size", "only [128, 128] is supported")
    if table.get("fmt", "e4m3") != "e4m3":
        inner.refuse("fmt", "only e4m3 is supported")
    if table.get("activation_scheme", "dynamic") != "dynamic":
        inner.refuse("activation_scheme", "only dynamic is supported")


def rope_of(keys: Keys) -> Rope:
    # transformers lets rope_scaling, the older name, win over rope_parameters, and both win over the keys beside them.
    source = "rope_scaling" if keys.raw.get("rope_scaling") else "rope_parameters"
    table = keys.raw.get(source) or {}
    if not isinstance(table, dict):
        keys.refuse(source, "a table is expected")
    rope = Keys(
        {
            "rope_theta": keys.raw.get("rope_theta"),
            "partial_rotary_factor": keys.raw.get("partial_rotary_factor"),
            **{key: value for key, value in table.items() if value is not None},
        },
        keys.where,
        source + ".",
    )
    if any(isinstance(value, dict) for value in table.values()):
        keys.refuse(source, "one rotary embedding for all layers is expected")
    if rope.number("partial_rotary_factor", 1.0) != 1.0:
        rope.refuse("partial_rotary_factor", "partial rotary embedding is not supported")
    theta = rope.number("rope_theta", 10000.0)
    kind = rope.raw.get("rope_type", rope.raw.get("type", "default"))
    context = keys.integer("max_position_embeddings", 2048 if keys.raw.get("model_type") == "llama" else 32768)
    if kind == "default":
        return Rope(theta=theta)
    if kind == "linear":
        return Rope(theta=theta, kind="linear", factor=rope.number("factor"))
    if kind == "dynamic":  # measured against the length that the configuration names, not the one in the table
        return Rope(theta=theta, kind="dynamic", factor=rope.number("factor"), original_context=context)
    original = keys.integer("original_max_position_embeddings", rope.integer("original_max_position_embeddings", context))
    if kind == "llama3":
        return Rope(
            theta=theta,
            kind="llama3",
            factor=rope.number("factor"),
            original_context=original,
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
        )
    if kind != "yarn":
        rope.refuse("rope_type", "supported: default, linear, dynamic, llama3, yarn")
    if not rope.boolean("truncate", True):
        rope.refuse("truncate", "only the truncated correction range is supported")
    factor = rope.number("factor", context / max(original, 1))
    return Rope(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_context=original,
        attention_factor=_yarn_attention(rope, factor),
        beta_fast=rope.number("beta_fast", 32.0) or 32.0,
        beta_slow=rope.number("beta_slow", 1.0) or 1.0,
    )


def _yarn_attention(rope: Keys, factor: float) -> float | None:
    """The scale of cos and sin where the file says more than the formula: given, or a ratio of two mscale values."""
    if rope.raw.get("attention_factor") is not None:
        return rope.number("attention_factor")
    upper, lower = rope.number("mscale", 0.0), rope.number("mscale_all_dim", 0.0)
    if not (upper and lower):
        return None
    grown = 0.1 * math.log(factor) if factor > 1 else 0.0
    return (upper * grown + 1.0) / (lower * grown + 1.0)


class Keys:
    """Typed access to one table of the file; an absent key and null are the same, as in transformers."""

    def __init__(self, raw: dict[str, Any], where: str, prefix: str = "") -> None:
        self.raw = raw
        self.where = where
        self.prefix = prefix

    def refuse(self, name: str, why: str) -> NoReturn:
        shown = repr(self.raw.get(name))
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        raise ModelError(f"{self.where}: {self.prefix}{name} is {shown}: {why}")

    def integer(self, name: str, default: int | None = None) -> int:
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            self.refuse(name, "a whole number is expected")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or abs(value) > 1e300:
            self.refuse(name, "a number is expected")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            self.refuse(name, "true or false is expected")
        return value

    def _get(self, name: str, default: Any) -> Any:
        value = self.raw.get(name)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"{self.where}: {self.prefix}{name} is missing")
        return value
