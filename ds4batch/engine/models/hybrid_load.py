"""From a hybrid model's tensors to the form its forward wants: what shares an input is one product, rows in the order it reads them."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from ds4batch.engine.linear import Linear, reorders
from ds4batch.engine.models.gated_delta import DeltaNet
from ds4batch.engine.models.moe import FeedForward, Mixture
from ds4batch.engine.weights.hybrid_layout import HybridConfig
from ds4batch.engine.weights.source import WeightSource


def loaded_bytes(source: WeightSource, config: HybridConfig, device: torch.device, dtype: torch.dtype) -> int:
    """Bytes of the weights once loaded: HybridModel.bytes of the same source, without loading it."""
    total = 0
    for name in source.names():
        shape = source.shape(name)
        matrix = len(shape) == 2 or ".experts." in name or name.endswith(".bias")
        copies = {"q_norm": config.heads, "k_norm": config.kv_heads}.get(name.split(".")[-2], 1)  # repeated for every head
        total += math.prod(shape) * (dtype.itemsize if matrix else copies * torch.float32.itemsize)
    if config.tied and reorders(device, dtype):
        total += config.vocab * config.hidden * dtype.itemsize  # the head's form of the embedding lies beside it
    return total


class HybridLoader:
    """Loads one tensor after another, each converted as it comes."""

    def __init__(
        self,
        source: WeightSource,
        config: HybridConfig,
        device: torch.device,
        dtype: torch.dtype,
        progress: Callable[[str], None],
    ) -> None:
        self._source = source
        self._config = config
        self._device = device
        self._dtype = dtype
        self._progress = progress

    def plain(self, name: str) -> torch.Tensor:
        """fp32, as stored."""
        return self._load(name).to(self._device, torch.float32)

    def norm(self, name: str) -> torch.Tensor:
        """fp32. The file keeps how far a weight is from 1."""
        return self.plain(name).add_(1)

    def weight(self, name: str) -> torch.Tensor:
        """In the weights' type."""
        return self._load(name).to(self._device, self._dtype)

    def linear(self, *names: str) -> Linear:
        """The named matrices one below the other."""
        return Linear(torch.cat([self.weight(f"{name}.weight") for name in names]))

    def queries_and_more(self, prefix: str) -> Linear:
        """q, k, v and the gate of a full attention layer, with q and k in pairs. A head's gate follows its q in the file."""
        config = self._config

        def parts(kind: str) -> torch.Tensor:
            heads = torch.unflatten(self.weight(f"{prefix}q.{kind}"), 0, (config.heads, 2, config.head_dim))
            q, gate = heads[:, 0].flatten(0, 1), heads[:, 1].flatten(0, 1)
            k, v = self.weight(f"{prefix}k.{kind}"), self.weight(f"{prefix}v.{kind}")
            return torch.cat([self._paired(q), self._paired(k), v, gate])

        return Linear(parts("weight"), parts("bias") if config.qkv_bias else None)

    def output(self, prefix: str) -> Linear:
        """The output projection of a full attention layer."""
        return Linear(self.weight(f"{prefix}o.weight"), self.weight(f"{prefix}o.bias") if self._config.out_bias else None)

    def qk_norm(self, prefix: str) -> torch.Tensor:
        """fp32 [heads + kv_heads, head_dim], in pairs."""
        config = self._config
        q, k = self._paired(self.norm(f"{prefix}q_norm.weight")), self._paired(self.norm(f"{prefix}k_norm.weight"))
        return torch.cat([q.expand(config.heads, -1), k.expand(config.kv_heads, -1)])

    def delta_net(self, prefix: str) -> DeltaNet:
        """A gated delta net layer."""
        return DeltaNet(
            qkvz=Linear(self._projection(prefix, "qkvz", ("qkv", "z"))),
            ba=Linear(self._projection(prefix, "ba", ("b", "a"))),
            conv=self.plain(f"{prefix}conv.weight").squeeze(1).t().contiguous(),
            decay=self.plain(f"{prefix}decay").exp_().neg_(),
            dt_bias=self.plain(f"{prefix}dt_bias"),
            norm=self.plain(f"{prefix}delta_norm.weight"),
            out=self.linear(f"{prefix}delta_out"),
        )

    def feed_forward(self, prefix: str) -> FeedForward:
        """A gated feed-forward layer, or one expert."""
        return FeedForward(self.linear(f"{prefix}gate", f"{prefix}up"), self.linear(f"{prefix}down"))

    def mixture(self, prefix: str) -> Mixture:
        """The experts of a layer."""
        return Mixture(
            router=self.linear(f"{prefix}router", f"{prefix}shared_scale"),
            experts=self._experts(f"{prefix}experts."),
            shared=self.feed_forward(f"{prefix}shared."),
        )

    def _experts(self, prefix: str) -> list[FeedForward]:
        if not self._config.stacked_experts:
            return [self.feed_forward(f"{prefix}{e}.") for e in range(self._config.experts)]
        # Copies, each aligned as a tensor of its own is: products may depend on where a matrix begins.
        up, down = self.weight(f"{prefix}gate_up"), self.weight(f"{prefix}down")
        return [FeedForward(Linear(a.clone()), Linear(b.clone())) for a, b in zip(up, down, strict=True)]

    def _projection(self, prefix: str, grouped: str, apart: tuple[str, ...]) -> torch.Tensor:
        """A projection of the delta net with its parts one below the other, whole heads each."""
        config = self._config
        if not config.grouped_projections:
            return torch.cat([self.weight(f"{prefix}{name}.weight") for name in apart])
        group = config.value_heads // config.key_heads
        values = group * config.value_dim
        sizes = [config.key_dim, config.key_dim, values, values] if grouped == "qkvz" else [group, group]
        heads = torch.unflatten(self.weight(f"{prefix}{grouped}.weight"), 0, (config.key_heads, sum(sizes)))
        return torch.cat([part.flatten(0, 1) for part in torch.split(heads, sizes, dim=1)])

    def _paired(self, tensor: torch.Tensor) -> torch.Tensor:
        """Reorder the rotated dimensions of each head from halves (i, i + r/2) to neighbours (2i, 2i + 1)."""
        config = self._config
        rotated = torch.arange(config.rotary_dim).view(2, -1).t().flatten()
        order = torch.cat([rotated, torch.arange(config.rotary_dim, config.head_dim)]).to(tensor.device)
        return torch.unflatten(tensor, 0, (-1, config.head_dim))[:, order].flatten(0, 1)

    def _load(self, name: str) -> torch.Tensor:
        self._progress(name)
        return self._source.load(name)
