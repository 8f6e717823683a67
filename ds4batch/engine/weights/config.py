"""The shape of a dense model, whatever file it came from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Family = Literal["llama", "qwen2", "qwen3"]
HybridFamily = Literal["qwen3_next", "qwen3_5"]  # see hybrid_layout


class ModelError(ValueError):
    """A model file that cannot be served. The message names the file, what is wrong in it and where."""


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding and how its frequencies are scaled.

    `kind` follows transformers' `rope_type`. Sources: the papers' formulas as transformers' modeling_rope_utils states
    them.
    """

    theta: float = 10000.0
    kind: Literal["default", "linear", "dynamic", "llama3", "yarn"] = "default"
    factor: float = 1.0
    original_context: int = 0  # positions the model was trained on, where the kind needs it
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    attention_factor: float | None = None  # yarn; None is the formula's value
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    factors: tuple[float, ...] | None = None  # a divisor per frequency, when the file carries them (rope_freqs.weight)


@dataclass(frozen=True)
class ModelConfig:
    """A decoder of the llama line: RMSNorm, rotary attention with grouped keys, gated SiLU feed-forward."""

    family: Family | HybridFamily
    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    context: int  # positions the model was trained for
    norm_eps: float
    rope: Rope
    tied: bool  # the output head is the input embedding
    qkv_bias: bool = False
    out_bias: bool = False  # attention output projection
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm on each head of q and k before rope

    @property
    def kv_layers(self) -> int:
        """Layers that keep keys and values."""
        return self.layers
