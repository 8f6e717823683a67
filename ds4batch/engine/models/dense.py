"""The llama line: llama, qwen2 and qwen3, dense.

RMSNorm, rotary attention with grouped keys, gated SiLU feed-forward. Residual stream, norms, rotations and attention are fp32;
linear layers run in the weights' type and accumulate in fp32; logits are fp32. State: keys and values, append-only.

Promise: every row's logits depend on that row's tokens alone. Each operation treats rows one by one, except the matrix
products, whose row-invariance ds4batch.engine.exact tests at start for the row counts that occur.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ds4batch.engine.attention import attend, query_space, store
from ds4batch.engine.linear import Linear
from ds4batch.engine.models.model import Output
from ds4batch.engine.pages import PagePool
from ds4batch.engine.rope import rotations
from ds4batch.engine.rows import Rows
from ds4batch.engine.weights.layout import PRODUCTS
from ds4batch.engine.weights.raw import Raw, convert, joinable, kept_formats, of_values, on_device, pack, values
from ds4batch.engine.weights.source import WeightSource
from triton_kernels.quant_formats import Format


class Layer(NamedTuple):
    """One block. q, k and v are one product, gate and up another; heads' dimensions are stored pair by pair (see paired)."""

    attn_norm: torch.Tensor
    qkv: Linear  # [(heads + 2 * kv_heads) * head_dim, hidden]
    qk_norm: torch.Tensor | None  # [heads + kv_heads, head_dim]
    out: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear  # [2 * ffn, hidden]
    down: Linear


class DenseModel:
    """Weights on a device, and the one forward."""

    def __init__(
        self,
        source: WeightSource,
        device: torch.device,
        dtype: torch.dtype,
        ctx: int,
        progress: Callable[[str], None] = lambda name: None,
        keep: Collection[Format] = (),
    ) -> None:
        """Load every tensor once, converting as it comes; `progress` is called with each name.

        Matrices in a format of `keep` stay quantised.
        """
        self.config = config = source.config
        self.device = device
        self.dtype = dtype
        self.scale = config.head_dim**-0.5
        load = _Loader(source, device, dtype, progress, keep)
        self.embed, tied = load.embedding()
        self.layers = [load.layer(i) for i in range(config.layers)]
        self.norm = load.norm("norm.weight")
        self.head = tied or load.product("head.weight")
        self.rotations = rotations(config.rope, config.head_dim, ctx).to(device)[:, None]  # [ctx, 1, head_dim / 2]

    @property
    def linears(self) -> list[Linear]:
        """One matrix product of each kind a layer holds; the head is apart."""
        layer = self.layers[0]
        return [layer.qkv, layer.out, layer.gate_up, layer.down]

    @property
    def quantised(self) -> bool:
        """Whether any product's weights are."""
        return any(part.quantised for layer in self.layers for part in layer if isinstance(part, Linear)) or bool(
            self.head.quantised
        )

    @property
    def bytes(self) -> int:
        """Bytes the weights take on the device."""
        shared = self.config.tied and self.head.holds(self.embed)
        total = self.embed.nbytes + self.norm.nbytes + (0 if shared else self.head.bytes)
        for layer in self.layers:
            total += sum(part.bytes if isinstance(part, Linear) else part.nbytes for part in layer if part is not None)
        return total

    def new_state(self, slots: int, drafts: int = 0) -> None:
        """A session keeps nothing but keys and values."""

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
        return Output(logits[: rows.logits], normed.sum(-1).isfinite(), hidden, rows.spans)

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
        store(stored[:, heads : heads + kv_heads], stored[:, heads + kv_heads :], rows, pool, index)
        return split[:, :heads]


class _Loader:
    """Turns a source's tensors into what the layers hold, one tensor at a time."""

    def __init__(
        self,
        source: WeightSource,
        device: torch.device,
        dtype: torch.dtype,
        progress: Callable[[str], None],
        keep: Collection[Format],
    ) -> None:
        self._source = source
        self._config = source.config
        self._names = set(source.names())
        self._device = device
        self._dtype = dtype
        self._progress = progress
        self._keep = keep

    def embedding(self) -> tuple[torch.Tensor, Linear | None]:
        """The table of values, and the head where it is the same tensor. A quantised head has its packed weights beside the table."""
        name, tied = "embed.weight", self._config.tied
        raw = self._raw(name)
        table = values(raw, self._source.shape(name), self._dtype)
        if not tied:
            return table, None
        if kept_formats(self._source, [name], self._keep):
            return table, Linear.of_quantised([pack([raw])], self._dtype)
        return table, Linear(table)

    def norm(self, name: str) -> torch.Tensor:
        return values(self._raw(name), self._source.shape(name), torch.float32)

    def product(self, *names: str, rotated: int = 0) -> Linear:
        """The matrices one below the other, with their biases; in the first `rotated` a head's dimensions go in pairs."""
        biases = [name.removesuffix("weight") + "bias" for name in names]
        bias = self._stacked(biases, rotated) if biases[0] in self._names else None
        if not kept_formats(self._source, names, self._keep, rotated > 0):
            return Linear(self._stacked(names, rotated), bias)
        raws = [self._raw(name, i < rotated) for i, name in enumerate(names)]
        runs = [list(run) for _, run in groupby(raws, key=lambda raw: raw.type)]
        parts = [pack(p) for run in runs for p in ([run] if joinable(run) else [[raw] for raw in run])]
        return Linear.of_quantised(parts, self._dtype, bias)

    def layer(self, i: int) -> Layer:
        config = self._config
        qk_norm = None
        if config.qk_norm:
            q = paired(self.norm(f"layers.{i}.q_norm.weight"), config.head_dim)
            k = paired(self.norm(f"layers.{i}.k_norm.weight"), config.head_dim)
            qk_norm = torch.cat([q.expand(config.heads, -1), k.expand(config.kv_heads, -1)])
        qkv, out, gate_up, down = ([f"layers.{i}.{name}.weight" for name in names] for names in PRODUCTS)
        return Layer(
            attn_norm=self.norm(f"layers.{i}.attn_norm.weight"),
            qkv=self.product(*qkv, rotated=2),
            qk_norm=qk_norm,
            out=self.product(*out),
            mlp_norm=self.norm(f"layers.{i}.mlp_norm.weight"),
            gate_up=self.product(*gate_up),
            down=self.product(*down),
        )

    def _stacked(self, names: Sequence[str], rotated: int) -> torch.Tensor:
        """The values of several tensors, one below the other: each is gone before the next is read."""
        shapes = [self._source.shape(name) for name in names]
        if len(names) == 1:
            return values(self._raw(names[0], rotated > 0), shapes[0], self._dtype)
        whole = torch.empty(sum(s[0] for s in shapes), *shapes[0][1:], dtype=self._dtype, device=self._device)
        at = 0
        for i, (name, shape) in enumerate(zip(names, shapes, strict=True)):
            convert(self._raw(name, i < rotated), whole[at : at + shape[0]])
            at += shape[0]
        return whole

    def _raw(self, name: str, rotated: bool = False) -> Raw:
        """The tensor on the device, as stored where it can be decoded there; with `rotated` its heads' dimensions in pairs."""
        stored = self._source.stored_type(name)
        if on_device(stored) and (self._device.type == "cuda" or kept_formats(self._source, [name], self._keep)):
            raw = self._source.raw(name, self._device)
        else:
            raw = of_values(self._source.load(name).to(self._device))
        self._progress(name)
        return raw._replace(data=paired(raw.data, self._config.head_dim)) if rotated and not raw.paired else raw


def paired(tensor: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Reorder each head's dimensions from halves (i, i + d/2) to neighbours (2i, 2i + 1).

    q and k change alike, so their products do not change, and a rotation becomes one complex multiplication.
    """
    heads = tensor.reshape(-1, 2, head_dim // 2, *tensor.shape[1:])
    return heads.transpose(1, 2).reshape(tensor.shape)
