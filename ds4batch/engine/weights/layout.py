"""Which tensors a model has, under the engine's own names, and what shape each must have.

The one place that spells the canonical names. Knows no file format.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from ds4batch.engine.weights.config import ModelConfig, ModelError
from ds4batch.engine.weights.hybrid_layout import HybridConfig, hybrid_shapes

Shape = tuple[int, ...]

PRODUCTS = (("q", "k", "v"), ("o",), ("gate", "up"), ("down",))
"""The matrices of a layer; those that share their input are one product."""


class Extent(NamedTuple):
    """Where a tensor is stored."""

    file: str
    nbytes: int


def tensor_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Canonical name -> shape of every tensor of the model, in the order in which a forward meets them.

    Matrices are [out, in]. `head.weight` is absent when the head is the embedding.
    """
    if isinstance(config, HybridConfig):
        return hybrid_shapes(config)
    shapes: dict[str, Shape] = {"embed.weight": (config.vocab, config.hidden)}
    block = _block_shapes(config)
    for i in range(config.layers):
        shapes.update((f"layers.{i}.{name}", shape) for name, shape in block.items())
    shapes["norm.weight"] = (config.hidden,)
    if not config.tied:
        shapes["head.weight"] = (config.vocab, config.hidden)
    return shapes


def _block_shapes(config: ModelConfig) -> dict[str, Shape]:
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes: dict[str, Shape] = {"attn_norm.weight": (config.hidden,)}
    _linear(shapes, "q", q, config.hidden, config.qkv_bias)
    _linear(shapes, "k", kv, config.hidden, config.qkv_bias)
    _linear(shapes, "v", kv, config.hidden, config.qkv_bias)
    _linear(shapes, "o", config.hidden, q, config.out_bias)
    if config.qk_norm:
        shapes["q_norm.weight"] = shapes["k_norm.weight"] = (config.head_dim,)
    shapes["mlp_norm.weight"] = (config.hidden,)
    _linear(shapes, "gate", config.ffn, config.hidden, config.mlp_bias)
    _linear(shapes, "up", config.ffn, config.hidden, config.mlp_bias)
    _linear(shapes, "down", config.hidden, config.ffn, config.mlp_bias)
    return shapes


def _linear(shapes: dict[str, Shape], name: str, out: int, inner: int, bias: bool) -> None:
    shapes[f"{name}.weight"] = (out, inner)
    if bias:
        shapes[f"{name}.bias"] = (out,)


def check_config(config: ModelConfig, where: str, tensors: int) -> None:
    """Refuse a shape that no file with `tensors` tensors can have, before anything is sized by it.

    Raises ModelError.
    """
    for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "context"):
        value = getattr(config, name)
        if not 0 < value < 1 << 31:
            raise ModelError(f"{where}: {name} is {value}, not a positive 31-bit number")
    if config.layers > tensors:
        raise ModelError(f"{where}: {config.layers} layers cannot come from {tensors} tensors")
    if config.heads % config.kv_heads:
        raise ModelError(f"{where}: {config.heads} attention heads are not a multiple of {config.kv_heads} key heads")
    if config.head_dim % 2:
        raise ModelError(f"{where}: head size {config.head_dim} is odd, rotary embedding needs pairs")
    if not (math.isfinite(config.norm_eps) and config.norm_eps > 0):
        raise ModelError(f"{where}: RMSNorm epsilon is {config.norm_eps}, not a positive number")
    rope = config.rope
    for label, number in (
        ("theta", rope.theta),
        ("factor", rope.factor),
        ("beta_fast", rope.beta_fast),
        ("beta_slow", rope.beta_slow),
        ("attention_factor", rope.attention_factor),
    ):
        if number is not None and not (math.isfinite(number) and number > 0):
            raise ModelError(f"{where}: rope {label} is {number}, not a positive number")
    if rope.kind in ("llama3", "yarn", "dynamic") and rope.original_context <= 0:
        raise ModelError(f"{where}: rope type {rope.kind} needs the original context length")
    if rope.kind == "llama3" and not rope.high_freq_factor > rope.low_freq_factor > 0:
        raise ModelError(
            f"{where}: rope low_freq_factor {rope.low_freq_factor} and high_freq_factor {rope.high_freq_factor} are not in order"
        )


def check_tensors(
    where: str, wanted: dict[str, Shape], found: dict[str, tuple[str, Shape]], readable: frozenset[str], leftovers: Iterable[str]
) -> None:
    """Every tensor of the model is there, in its shape and in a type that can be read, and nothing else is.

    `wanted`: the file's name -> shape; `found`: the file's name -> (stored type, shape); `leftovers`: names in the file
    that nobody asked for and that are not known to be harmless. Raises ModelError listing up to five of a kind.
    """
    missing = [name for name in wanted if name not in found]
    if missing:
        raise ModelError(f"{where}: {len(missing)} of {len(wanted)} tensors are missing: {_some(missing)}")
    for name, shape in wanted.items():
        kind, actual = found[name]
        if actual != shape:
            raise ModelError(f"{where}: tensor {name} has shape {list(actual)}, but the configuration asks for {list(shape)}")
        if kind not in readable:
            raise ModelError(f"{where}: tensor {name} is stored as {kind}; supported: {', '.join(sorted(readable))}")
    extra = list(leftovers)
    if extra:
        raise ModelError(f"{where}: {len(extra)} tensors belong to no part of the model: {_some(extra)}")


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
