"""Shapes of models whose weights are not at hand, filled with random values: what a step costs does not depend on them."""

from __future__ import annotations

import math

import torch

from ds4batch.engine.weights.config import ModelConfig, Rope

QWEN3_8B = ModelConfig(
    family="qwen3", name="qwen3-8b-shape", layers=36, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=12288, vocab=151936,
    context=40960, norm_eps=1e-6, rope=Rope(1e6), tied=False, qk_norm=True,
)  # fmt: skip
LLAMA_31_8B = ModelConfig(
    family="llama", name="llama-3.1-8b-shape", layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336,
    vocab=128256, context=131072, norm_eps=1e-5, rope=Rope(5e5), tied=False,
)  # fmt: skip
SHAPES = {"qwen3-8b": QWEN3_8B, "llama-3.1-8b": LLAMA_31_8B}


class RandomWeights:
    """Weights of a shape, made on the device, the same for the same seed."""

    def __init__(self, config: ModelConfig, device: torch.device, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> None:
        self.config = config
        self._device = device
        self._dtype = dtype
        self._seed = seed
        q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self._shapes: dict[str, tuple[int, ...]] = {
            "embed.weight": (config.vocab, config.hidden),
            "norm.weight": (config.hidden,),
        }
        if not config.tied:
            self._shapes["head.weight"] = (config.vocab, config.hidden)
        layer = {"q": (q, config.hidden), "k": (kv, config.hidden), "v": (kv, config.hidden), "o": (config.hidden, q),
                 "gate": (config.ffn, config.hidden), "up": (config.ffn, config.hidden), "down": (config.hidden, config.ffn),
                 "attn_norm": (config.hidden,), "mlp_norm": (config.hidden,)}  # fmt: skip
        if config.qk_norm:
            layer |= {"q_norm": (config.head_dim,), "k_norm": (config.head_dim,)}
        for i in range(config.layers):
            self._shapes |= {f"layers.{i}.{name}.weight": shape for name, shape in layer.items()}
            if config.qkv_bias:
                self._shapes |= {f"layers.{i}.{name}.bias": layer[name][:1] for name in "qkv"}
        self._number = {name: i for i, name in enumerate(self._shapes)}

    def names(self) -> list[str]:
        """The tensors."""
        return list(self._shapes)

    def load(self, name: str) -> torch.Tensor:
        """One tensor: normal values over the root of its width, norms near 1."""
        shape = self._shapes[name]
        source = torch.Generator(self._device).manual_seed(self._seed * 1000003 + self._number[name])
        drawn = torch.randn(shape, generator=source, device=self._device, dtype=self._dtype)
        return 1 + 0.1 * drawn if len(shape) == 1 else drawn / math.sqrt(shape[-1])
