"""config.json of a Qwen3-Next or Qwen3.5 directory -> HybridConfig.

Owns the keys and the defaults that transformers gives to absent ones. Keys that would change the results and are not supported are
refused by name and value.

Reference: the configuration classes of transformers 5.17 for qwen3_next, qwen3_5 and qwen3_5_moe.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ds4batch.engine.weights.config import HybridFamily, ModelError
from ds4batch.engine.weights.hf_config import Keys, rope_of
from ds4batch.engine.weights.hybrid_layout import HybridConfig
from ds4batch.engine.weights.layout import check_config

_FAMILIES: dict[str, HybridFamily] = {
    "qwen3_next": "qwen3_next",
    "qwen3_5": "qwen3_5",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe": "qwen3_5",
    "qwen3_5_moe_text": "qwen3_5",
}
HYBRID_TYPES = tuple(_FAMILIES)


def hybrid_from_hf(raw: dict[str, Any], where: str, name: str, tensors: int) -> HybridConfig:
    """The model's shape from a parsed config.json whose model_type is one of HYBRID_TYPES; arguments as in config_from_hf.

    A configuration with a vision tower holds the text model's keys in `text_config`. Raises ModelError naming the key and the value.
    """
    kind = raw["model_type"]
    family, moe = _FAMILIES[kind], kind == "qwen3_next" or "moe" in kind
    keys = Keys(raw, where)
    if "text_config" in raw:
        if not isinstance(raw["text_config"], dict):
            keys.refuse("text_config", "a table is expected")
        inner = {"tie_word_embeddings": raw.get("tie_word_embeddings"), **raw["text_config"], "model_type": kind}
        keys = Keys(inner, where, "text_config.")
    layers = keys.integer("num_hidden_layers")
    if not 0 < layers <= tensors:
        raise ModelError(f"{where}: {layers} layers cannot come from {tensors} tensors")
    head_dim = keys.integer("head_dim", 256)
    biased = keys.boolean("attention_bias", False)
    config = HybridConfig(
        family=family,
        name=name,
        layers=layers,
        hidden=keys.integer("hidden_size"),
        heads=keys.integer("num_attention_heads"),
        kv_heads=keys.integer("num_key_value_heads"),
        head_dim=head_dim,
        ffn=0,
        vocab=keys.integer("vocab_size"),
        context=keys.integer("max_position_embeddings", 32768),
        norm_eps=keys.number("rms_norm_eps", 1e-6),
        rope=rope_of(_without_sections(keys)),
        tied=keys.boolean("tie_word_embeddings", False),
        qkv_bias=biased,
        out_bias=biased,
        qk_norm=True,
        rotary_dim=int(head_dim * _rotary_share(keys)),
        full_attention=_layer_types(keys, layers),
        sparse=_sparse(keys, layers) if moe else (False,) * layers,
        conv_width=keys.integer("linear_conv_kernel_dim", 4),
        key_heads=keys.integer("linear_num_key_heads", 16),
        value_heads=keys.integer("linear_num_value_heads", 32),
        key_dim=keys.integer("linear_key_head_dim", 128),
        value_dim=keys.integer("linear_value_head_dim", 128),
        grouped_projections=family == "qwen3_next",
    )
    if not all(config.sparse):
        config = replace(config, ffn=keys.integer("intermediate_size"))
    if any(config.sparse):
        config = replace(
            config,
            experts=keys.integer("num_experts"),
            top_k=keys.integer("num_experts_per_tok"),
            expert_ffn=keys.integer("moe_intermediate_size"),
            shared_ffn=keys.integer("shared_expert_intermediate_size"),
            normalise_top_k=keys.boolean("norm_topk_prob", True) or family == "qwen3_5",
        )
    if keys.raw.get("hidden_act", "silu") not in ("silu", "swish"):
        keys.refuse("hidden_act", "only silu is supported")
    if raw.get("quantization_config") is not None:
        raise ModelError(f"{where}: quantization_config: quantised weights of this family are not supported")
    _check(config, where, tensors)
    return config


def _layer_types(keys: Keys, layers: int) -> tuple[bool, ...]:
    """Which layers have full attention: as listed, else every fourth."""
    listed = keys.raw.get("layer_types")
    if listed is None:
        every = keys.integer("full_attention_interval", 4)
        return tuple((i + 1) % max(every, 1) == 0 for i in range(layers))
    if not isinstance(listed, list) or len(listed) != layers or not set(listed) <= {"linear_attention", "full_attention"}:
        keys.refuse("layer_types", f"linear_attention or full_attention is expected, {layers} times")
    return tuple(kind == "full_attention" for kind in listed)


def _sparse(keys: Keys, layers: int) -> tuple[bool, ...]:
    if keys.raw.get("model_type") != "qwen3_next":
        return (True,) * layers
    dense = keys.raw.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        keys.refuse("mlp_only_layers", "a list is expected")
    step = max(keys.integer("decoder_sparse_step", 1), 1)
    some = keys.integer("num_experts", 512) > 0
    return tuple(some and i not in dense and (i + 1) % step == 0 for i in range(layers))


def _rotary_share(keys: Keys) -> float:
    """The part of a head that is rotated; the rope's own table wins over the key beside it."""
    for table in (keys.raw.get("rope_scaling"), keys.raw.get("rope_parameters")):
        if isinstance(table, dict) and table.get("partial_rotary_factor") is not None:
            return Keys(table, keys.where, keys.prefix + "rope_parameters.").number("partial_rotary_factor")
    return keys.number("partial_rotary_factor", 0.25)


def _without_sections(keys: Keys) -> Keys:
    """The keys without what the rope's reader need not know: the rotated part, and the sections by which positions of images differ
    from those of text, where all sections of a token have one position."""
    dropped = {"partial_rotary_factor", "mrope_section", "mrope_interleaved"}
    raw = {name: value for name, value in keys.raw.items() if name not in dropped}
    for source in ("rope_scaling", "rope_parameters"):
        if isinstance(raw.get(source), dict):
            raw[source] = {name: value for name, value in raw[source].items() if name not in dropped}
    return Keys(raw, keys.where, keys.prefix)


def _check(config: HybridConfig, where: str, tensors: int) -> None:
    check_config(replace(config, ffn=config.ffn or 1) if all(config.sparse) else config, where, tensors)
    for name in ("conv_width", "key_heads", "value_heads", "key_dim", "value_dim"):
        if not 0 < getattr(config, name) < 1 << 20:
            raise ModelError(f"{where}: {name} of the delta net is {getattr(config, name)}, not a positive 20-bit number")
    if config.value_heads % config.key_heads:
        raise ModelError(f"{where}: {config.value_heads} value heads are not a multiple of {config.key_heads} key heads")
    if not 0 < config.rotary_dim <= config.head_dim or config.rotary_dim % 2:
        raise ModelError(f"{where}: {config.rotary_dim} rotated values are no even part of a head of {config.head_dim}")
    if config.conv_width < 2:
        raise ModelError(f"{where}: linear_conv_kernel_dim is {config.conv_width}; at least 2 is expected")
    if not any(config.full_attention) or all(config.full_attention):
        raise ModelError(f"{where}: layer_types must hold linear_attention and full_attention")
    if not any(config.sparse):
        return
    for name in ("experts", "top_k", "expert_ffn", "shared_ffn"):
        if not 0 < getattr(config, name) < 1 << 20:
            raise ModelError(f"{where}: {name} is {getattr(config, name)}, not a positive 20-bit number")
    if config.top_k > config.experts or config.experts > max(tensors, 1024):
        raise ModelError(f"{where}: {config.top_k} of {config.experts} experts cannot be, with {tensors} tensors")
