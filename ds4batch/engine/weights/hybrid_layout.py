"""The hybrid family's shape, the tensors it has, and what Hugging Face files call them.

Gated delta net layers among full attention layers, each followed by a dense or a mixture-of-experts feed-forward: Qwen3-Next, and the
text part of Qwen3.5. Knows no file format.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from ds4batch.engine.weights.config import ModelConfig

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class HybridConfig(ModelConfig):
    """`ffn` is the width of the dense feed-forward layers, 0 where there are none."""

    rotary_dim: int  # the first values of each head that are rotated
    full_attention: tuple[bool, ...]  # a layer: full attention, or gated delta net
    sparse: tuple[bool, ...]  # a layer: mixture of experts, or dense
    conv_width: int
    key_heads: int  # of the delta net, as the next three
    value_heads: int
    key_dim: int  # of one head
    value_dim: int
    grouped_projections: bool  # q, k, v and z of a key head lie together, and so do b and a
    experts: int = 0
    top_k: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    normalise_top_k: bool = True
    stacked_experts: bool = False  # the file has the matrices of all experts of a layer in one tensor

    @property
    def kv_layers(self) -> int:
        """Layers that keep keys and values."""
        return sum(self.full_attention)

    @property
    def state_layers(self) -> int:
        """Layers that keep a recurrent state."""
        return self.layers - self.kv_layers

    @property
    def conv_channels(self) -> int:
        """q, k and v of a delta net layer."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


def hybrid_shapes(config: HybridConfig) -> dict[str, tuple[int, ...]]:
    """Canonical name -> shape of every tensor, in the order in which a forward meets them. Matrices are [out, in]."""
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (config.vocab, config.hidden)}
    for i in range(config.layers):
        block: dict[str, tuple[int, ...]] = {"attn_norm.weight": (config.hidden,)}
        block |= _attention(config) if config.full_attention[i] else _delta_net(config)
        block["mlp_norm.weight"] = (config.hidden,)
        block |= _experts(config) if config.sparse[i] else _feed_forward("", config.hidden, config.ffn)
        shapes |= {f"layers.{i}.{name}": shape for name, shape in block.items()}
    shapes["norm.weight"] = (config.hidden,)
    if not config.tied:
        shapes["head.weight"] = (config.vocab, config.hidden)
    return shapes


def _attention(config: HybridConfig) -> dict[str, tuple[int, ...]]:
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {}
    sizes = {"q": (2 * q, config.hidden), "k": (kv, config.hidden), "v": (kv, config.hidden), "o": (config.hidden, q)}
    for name, (out, inner) in sizes.items():
        shapes[f"{name}.weight"] = (out, inner)
        if config.qkv_bias:
            shapes[f"{name}.bias"] = (out,)
    return shapes | {"q_norm.weight": (config.head_dim,), "k_norm.weight": (config.head_dim,)}


def _delta_net(config: HybridConfig) -> dict[str, tuple[int, ...]]:
    hidden, channels, heads = config.hidden, config.conv_channels, config.value_heads
    values = heads * config.value_dim
    shapes: dict[str, tuple[int, ...]]
    if config.grouped_projections:
        shapes = {"qkvz.weight": (channels + values, hidden), "ba.weight": (2 * heads, hidden)}
    else:
        shapes = {"qkv.weight": (channels, hidden), "z.weight": (values, hidden)}
        shapes |= {"b.weight": (heads, hidden), "a.weight": (heads, hidden)}
    shapes |= {"conv.weight": (channels, 1, config.conv_width), "decay": (heads,), "dt_bias": (heads,)}
    return shapes | {"delta_norm.weight": (config.value_dim,), "delta_out.weight": (hidden, values)}


def _feed_forward(prefix: str, hidden: int, width: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}gate.weight": (width, hidden),
        f"{prefix}up.weight": (width, hidden),
        f"{prefix}down.weight": (hidden, width),
    }


def _experts(config: HybridConfig) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"router.weight": (config.experts, config.hidden)}
    shapes["shared_scale.weight"] = (1, config.hidden)
    if config.stacked_experts:
        shapes["experts.gate_up"] = (config.experts, 2 * config.expert_ffn, config.hidden)
        shapes["experts.down"] = (config.experts, config.hidden, config.expert_ffn)
    else:
        for e in range(config.experts):
            shapes |= _feed_forward(f"experts.{e}.", config.hidden, config.expert_ffn)
    return shapes | _feed_forward("shared.", config.hidden, config.shared_ffn)


_BLOCK = {
    "qkvz.weight": "linear_attn.in_proj_qkvz.weight",
    "ba.weight": "linear_attn.in_proj_ba.weight",
    "qkv.weight": "linear_attn.in_proj_qkv.weight",
    "z.weight": "linear_attn.in_proj_z.weight",
    "b.weight": "linear_attn.in_proj_b.weight",
    "a.weight": "linear_attn.in_proj_a.weight",
    "conv.weight": "linear_attn.conv1d.weight",
    "decay": "linear_attn.A_log",
    "dt_bias": "linear_attn.dt_bias",
    "delta_norm.weight": "linear_attn.norm.weight",
    "delta_out.weight": "linear_attn.out_proj.weight",
    "experts.gate_up": "mlp.experts.gate_up_proj",
    "experts.down": "mlp.experts.down_proj",
    "router.weight": "mlp.gate.weight",
    "shared_scale.weight": "mlp.shared_expert_gate.weight",
}


def hf_block_name(parts: Sequence[str]) -> str | None:
    """What a Hugging Face file calls a layer's tensor, from the parts of its canonical name after the layer's number.

    None for tensors that the dense families have too.
    """
    if parts[0] == "experts" and len(parts) == 4:
        return f"mlp.experts.{parts[1]}.{parts[2]}_proj.{parts[3]}"
    if parts[0] == "shared":
        return f"mlp.shared_expert.{parts[1]}_proj.{parts[2]}"
    return _BLOCK.get(".".join(parts))


def text_tensors(tensors: Mapping[str, T]) -> dict[str, T]:
    """The text model's tensors of a directory, named as if it held nothing else.

    Files with a vision tower put the text model under `model.language_model`; the tower and the draft layers (`mtp`) are left out.
    """
    kept = {}
    for name, tensor in tensors.items():
        if not name.startswith(("mtp.", "model.visual.", "model.mtp.")):
            kept[name.replace("model.language_model.", "model.", 1)] = tensor
    return kept


def as_stored(config: HybridConfig, tensors: Iterable[str]) -> HybridConfig:
    """The configuration with what only the tensors' Hugging Face names say."""
    stacked = f".{_BLOCK['experts.gate_up']}"
    return replace(config, stacked_experts=any(name.endswith(stacked) for name in tensors))
