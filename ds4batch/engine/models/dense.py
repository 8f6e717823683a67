"""The llama line: llama, qwen2 and qwen3, dense.

RMSNorm, rotary attention with grouped keys, gated SiLU feed-forward. Residual stream, norms, rotations and attention are fp32;
linear layers run in the weights' type and accumulate in fp32; logits are fp32. State: keys and values, append-only.

Promise: every row's logits depend on that row's tokens alone. Each operation treats rows one by one, except the matrix
products, whose row-invariance ds4batch.engine.exact tests at start for the row counts that occur.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F

from ds4batch.engine.attention import attend, query_space
from ds4batch.engine.linear import Linear
from ds4batch.engine.pages import PagePool
from ds4batch.engine.rope import rotations
from ds4batch.engine.rows import Rows
from ds4batch.engine.weights.config import ModelConfig


class Source(Protocol):
    """Where the weights come from; see ds4batch.engine.weights.source."""

    @property
    def config(self) -> ModelConfig: ...

    def names(self) -> list[str]: ...

    def load(self, name: str) -> torch.Tensor: ...


class Layer(NamedTuple):
    """One block. q, k and v are one product, gate and up another; heads' dimensions are stored pair by pair (see _paired)."""

    attn_norm: torch.Tensor
    qkv: Linear  # [(heads + 2 * kv_heads) * head_dim, hidden]
    qk_norm: torch.Tensor | None  # [heads + kv_heads, head_dim]
    out: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear  # [2 * ffn, hidden]
    down: Linear


class Output(NamedTuple):
    """What a forward returns. logits: fp32 [wanted rows, vocab]; finite: bool [R], whether a row's last hidden state is."""

    logits: torch.Tensor
    finite: torch.Tensor


class DenseModel:
    """Weights on a device, and the one forward."""

    def __init__(
        self,
        source: Source,
        device: torch.device,
        dtype: torch.dtype,
        ctx: int,
        progress: Callable[[str], None] = lambda name: None,
    ) -> None:
        """Load every tensor once, converting as it comes; `progress` is called with each name."""
        self.config = config = source.config
        self.device = device
        self.dtype = dtype
        self.scale = config.head_dim**-0.5
        load = _Loader(source, device, dtype, progress)
        self.embed = load.weight("embed.weight")
        self.layers = [load.layer(i) for i in range(config.layers)]
        self.norm = load.norm("norm.weight")
        self.head = Linear(self.embed if config.tied else load.weight("head.weight"))
        self.rotations = rotations(config.rope, config.head_dim, ctx).to(device)[:, None]  # [ctx, 1, head_dim / 2]

    @property
    def linears(self) -> list[Linear]:
        """One matrix product of each kind a layer holds; the head is apart."""
        layer = self.layers[0]
        return [layer.qkv, layer.out, layer.gate_up, layer.down]

    @property
    def bytes(self) -> int:
        """Bytes the weights take on the device."""
        total = self.embed.nbytes + self.norm.nbytes + self.head.bytes
        for layer in self.layers:
            total += sum(part.bytes if isinstance(part, Linear) else part.nbytes for part in layer if part is not None)
        return total

    @torch.inference_mode()
    def forward(self, rows: Rows, pool: PagePool) -> Output:
        """Evaluate all rows: write their keys and values into the pool, return the logits that were asked for."""
        config = self.config
        hidden = F.embedding(rows.tokens, self.embed).float()  # [R, hidden]
        turns = self.rotations[rows.positions]  # [R, 1, head_dim / 2]
        attended = hidden.new_zeros(len(hidden), config.heads * config.head_dim, dtype=self.dtype)
        spaces = [query_space(tile, config.kv_heads, config.head_dim, self.device) for tile in rows.tiles]
        for index, layer in enumerate(self.layers):
            qkv = layer.qkv(self._normed(hidden, layer.attn_norm))
            q = self._write(qkv, layer, turns, rows, pool, index)
            for tile, space in zip(rows.tiles, spaces, strict=True):
                attend(q, pool.k[index], pool.v[index], tile, self.scale, attended, space)
            hidden.add_(layer.out(attended))
            gate, up = layer.gate_up(self._normed(hidden, layer.mlp_norm)).chunk(2, dim=-1)
            hidden.add_(layer.down(F.silu(gate).mul_(up)))
        normed = F.rms_norm(hidden, (config.hidden,), self.norm, config.norm_eps)
        logits = self.head.precise(normed[rows.logit_rows].to(self.dtype))
        return Output(logits[: rows.logits], normed.sum(-1).isfinite())

    def _normed(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(hidden, (self.config.hidden,), weight, self.config.norm_eps).to(self.dtype)

    def _write(
        self, qkv: torch.Tensor, layer: Layer, turns: torch.Tensor, rows: Rows, pool: PagePool, index: int
    ) -> torch.Tensor:
        """Rotate q and k, store k and v, return q: fp32 [R, heads, head_dim]."""
        config = self.config
        heads, kv_heads = config.heads, config.kv_heads
        split = qkv.view(len(qkv), heads + 2 * kv_heads, config.head_dim).float()
        qk = split[:, : heads + kv_heads]
        if layer.qk_norm is not None:
            qk.copy_(F.rms_norm(qk, (config.head_dim,), None, config.norm_eps).mul_(layer.qk_norm))
        torch.view_as_complex(qk.view(*qk.shape[:2], -1, 2)).mul_(turns)
        stored = split[rows.real]
        keys, values = stored[:, heads : heads + kv_heads].to(pool.k.dtype), stored[:, heads + kv_heads :].to(pool.v.dtype)
        if rows.run is not None:
            page, start, end = rows.run
            pool.k[index, page, :, start:end] = keys.transpose(0, 1)
            pool.v[index, page, :, start:end] = values.transpose(0, 1)
        else:
            pool.k[index][rows.pages, :, rows.offsets] = keys
            pool.v[index][rows.pages, :, rows.offsets] = values
        return split[:, :heads]


class _Loader:
    """Turns a source's tensors into the layers' packed form."""

    def __init__(self, source: Source, device: torch.device, dtype: torch.dtype, progress: Callable[[str], None]) -> None:
        self._source = source
        self._config = source.config
        self._names = set(source.names())
        self._device = device
        self._dtype = dtype
        self._progress = progress

    def norm(self, name: str) -> torch.Tensor:
        self._progress(name)
        return self._source.load(name).to(self._device, torch.float32)

    def weight(self, *names: str, paired: int = 0) -> torch.Tensor:
        """The named matrices one below the other; the first `paired` of them with their heads' dimensions in pairs."""
        parts = []
        for i, name in enumerate(names):
            self._progress(name)
            part = self._source.load(name)
            parts.append((_paired(part, self._config.head_dim) if i < paired else part).to(self._device, self._dtype))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def linear(self, layer: int, *names: str, paired: int = 0) -> Linear:
        full = [f"layers.{layer}.{name}" for name in names]
        bias = None
        if f"{full[0]}.bias" in self._names:
            bias = self.weight(*(f"{name}.bias" for name in full), paired=paired)
        return Linear(self.weight(*(f"{name}.weight" for name in full), paired=paired), bias)

    def layer(self, i: int) -> Layer:
        config = self._config
        qk_norm = None
        if config.qk_norm:
            q = _paired(self.norm(f"layers.{i}.q_norm.weight"), config.head_dim)
            k = _paired(self.norm(f"layers.{i}.k_norm.weight"), config.head_dim)
            qk_norm = torch.cat([q.expand(config.heads, -1), k.expand(config.kv_heads, -1)])
        return Layer(
            attn_norm=self.norm(f"layers.{i}.attn_norm.weight"),
            qkv=self.linear(i, "q", "k", "v", paired=2),
            qk_norm=qk_norm,
            out=self.linear(i, "o"),
            mlp_norm=self.norm(f"layers.{i}.mlp_norm.weight"),
            gate_up=self.linear(i, "gate", "up"),
            down=self.linear(i, "down"),
        )


def _paired(tensor: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Reorder each head's dimensions from halves (i, i + d/2) to neighbours (2i, 2i + 1).

    q and k change alike, so their products do not change, and a rotation becomes one complex multiplication.
    """
    heads = tensor.reshape(-1, 2, head_dim // 2, *tensor.shape[1:])
    return heads.transpose(1, 2).reshape(tensor.shape)
