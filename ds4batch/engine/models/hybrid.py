"""The hybrid line: Qwen3-Next and the text part of Qwen3.5.

Gated delta net layers with full attention layers among them, each followed by a dense or a mixture-of-experts feed-forward.
Attention has normed and partly rotated heads and a gate on its output. Residual stream, norms, rotations, gates, attention,
recurrence and routing are fp32; linear layers run in the weights' type and accumulate in fp32; logits are fp32. State: keys and
values of the attention layers, append-only; and of the delta nets one matrix a head and the convolution's last inputs, which cannot
be shortened.

Promise: as the dense line's, every row's logits depend on that row's tokens alone. The recurrence is evaluated in its sequential form,
so no position is the border of anything, and a session may be cut into chunks anywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ds4batch.engine.attention import attend, query_space, store
from ds4batch.engine.linear import Linear
from ds4batch.engine.memory import Extra
from ds4batch.engine.models.gated_delta import BLOCK, DeltaNet, Run, delta_net, runs_of
from ds4batch.engine.models.gates import sigmoid
from ds4batch.engine.models.hybrid_load import HybridLoader
from ds4batch.engine.models.model import Output
from ds4batch.engine.models.moe import FeedForward, Mixture, mixture
from ds4batch.engine.pages import PagePool
from ds4batch.engine.rope import rotations
from ds4batch.engine.rows import Rows
from ds4batch.engine.state import StatePool, StateShape
from ds4batch.engine.weights.hybrid_layout import HybridConfig
from ds4batch.engine.weights.source import WeightSource


class Attention(NamedTuple):
    """Full attention. Rows of `qkv`: q, k, v and the output's gate; the rotated dimensions of a head are stored in pairs."""

    qkv: Linear  # [(2 * heads + 2 * kv_heads) * head_dim, hidden]
    qk_norm: torch.Tensor  # [heads + kv_heads, head_dim]
    out: Linear


class Layer(NamedTuple):
    """One block. `place` is its place among the layers of its kind, in the page pool or in the state."""

    norm: torch.Tensor
    mixer: Attention | DeltaNet
    place: int
    mlp_norm: torch.Tensor
    mlp: FeedForward | Mixture


class _Pass(NamedTuple):
    """What the attention layers of one forward share."""

    rows: Rows
    turns: torch.Tensor  # [R, 1, rotary_dim / 2]
    attended: torch.Tensor  # fp32 [R, heads * head_dim]
    spaces: list[torch.Tensor]  # one a tile
    runs: list[Run]


class HybridModel:
    """Weights on a device, and the one forward."""

    def __init__(
        self,
        source: WeightSource,
        device: torch.device,
        dtype: torch.dtype,
        ctx: int,
        progress: Callable[[str], None] = lambda name: None,
    ) -> None:
        """Load every tensor once; `progress` is called with each name. The source's config is a HybridConfig, else TypeError."""
        if not isinstance(source.config, HybridConfig):
            raise TypeError(f"{source.config.family} is no hybrid family")
        self.config: HybridConfig = source.config
        self.device = device
        self.dtype = dtype
        self.scale = self.config.head_dim**-0.5
        load = HybridLoader(source, self.config, device, dtype, progress)
        self.embed = load.weight("embed.weight")
        self.layers = [self._layer(i, load) for i in range(self.config.layers)]
        self.norm = load.norm("norm.weight")
        self.head = Linear(self.embed if self.config.tied else load.weight("head.weight"))
        self.rotations = rotations(self.config.rope, self.config.rotary_dim, ctx).to(device)[:, None]  # [ctx, 1, rotary_dim / 2]

    def _layer(self, i: int, load: HybridLoader) -> Layer:
        prefix, full = f"layers.{i}.", self.config.full_attention
        mixer: Attention | DeltaNet
        mixer = self._attention(prefix, load) if full[i] else load.delta_net(prefix)
        norm, mlp_norm = load.norm(f"{prefix}attn_norm.weight"), load.norm(f"{prefix}mlp_norm.weight")
        mlp = load.mixture(prefix) if self.config.sparse[i] else load.feed_forward(prefix)
        return Layer(norm, mixer, full[:i].count(full[i]), mlp_norm, mlp)

    def _attention(self, prefix: str, load: HybridLoader) -> Attention:
        return Attention(load.queries_and_more(prefix), load.qk_norm(prefix), load.output(prefix))

    @property
    def linears(self) -> list[Linear]:
        """One matrix product of each shape a layer holds; the head is apart."""
        return list({linear.shape: linear for linear in self._products()}.values())

    @property
    def bytes(self) -> int:
        """Bytes the weights take on the device."""
        total = self.embed.nbytes + self.norm.nbytes + (0 if self.head.holds(self.embed) else self.head.bytes)
        for layer in self.layers:
            small = [layer.norm, layer.mlp_norm, *(part for part in layer.mixer if isinstance(part, torch.Tensor))]
            total += sum(part.nbytes for part in small)
        return total + sum(linear.bytes for linear in self._products())

    def _products(self) -> list[Linear]:
        found: list[Linear] = []
        for layer in self.layers:
            found += [part for part in layer.mixer if isinstance(part, Linear)]
            parts = [layer.mlp] if isinstance(layer.mlp, FeedForward) else [*layer.mlp.experts, layer.mlp.shared]
            found += [linear for part in parts for linear in part]
            if isinstance(layer.mlp, Mixture):
                found.append(layer.mlp.router)
        return found

    def new_state(self, slots: int, drafts: int = 0) -> StatePool:
        """What `slots` sessions keep beside keys and values."""
        return StatePool(state_shape(self.config), slots, self.device, drafts)

    @torch.inference_mode()
    def forward(self, rows: Rows, pool: PagePool) -> Output:
        """Evaluate all rows: advance the sessions' keys, values and states in the pool, return the logits that were asked for."""
        config, state = self.config, pool.state
        if state is None:
            raise ValueError("a hybrid model needs a pool with states")
        for span in rows.spans:
            if span.start == 0:
                state.begin(span.slot)
        hidden = F.embedding(rows.tokens, self.embed).float()  # [R, hidden]
        shared = _Pass(
            rows,
            self.rotations[rows.positions],
            hidden.new_zeros(len(hidden), config.heads * config.head_dim),
            [query_space(tile, config.kv_heads, config.head_dim, self.device) for tile in rows.tiles],
            runs_of(rows.spans, self.device),
        )
        for layer in self.layers:
            x = self._normed(hidden, layer.norm).to(self.dtype)
            if isinstance(layer.mixer, Attention):
                hidden.add_(self._attend(x, layer.mixer, layer.place, shared, pool))
            else:
                hidden.add_(delta_net(x, layer.mixer, config, shared.runs, state, layer.place))
            x = self._normed(hidden, layer.mlp_norm).to(self.dtype)
            hidden.add_(layer.mlp(x) if isinstance(layer.mlp, FeedForward) else mixture(x, layer.mlp, config, rows))
        for span in rows.spans:
            state.advanced(span.slot, span.start + span.rows, span.drafts)
        normed = self._normed(hidden, self.norm)
        logits = self.head.precise(normed[rows.logit_rows].to(self.dtype))
        return Output(logits[: rows.logits], normed.sum(-1).isfinite(), hidden, rows.spans)

    def _normed(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(hidden, (self.config.hidden,), weight, self.config.norm_eps)

    def _attend(self, x: torch.Tensor, layer: Attention, place: int, shared: _Pass, pool: PagePool) -> torch.Tensor:
        """x: [R, hidden] normed, in the weights' type; the result [R, hidden] too."""
        config, rows, attended = self.config, shared.rows, shared.attended
        heads, kv_heads = config.heads, config.kv_heads
        split = layer.qkv(x).float().view(len(x), 2 * heads + 2 * kv_heads, config.head_dim)
        qk = split[:, : heads + kv_heads]
        qk.copy_(F.rms_norm(qk, (config.head_dim,), None, config.norm_eps).mul_(layer.qk_norm))
        torch.view_as_complex(torch.unflatten(qk[..., : config.rotary_dim], -1, (-1, 2))).mul_(shared.turns)
        kv = split[rows.real, heads : heads + 2 * kv_heads]
        store(kv[:, :kv_heads], kv[:, kv_heads:], rows, pool, place)
        for tile, space in zip(rows.tiles, shared.spaces, strict=True):
            attend(split[:, :heads], pool.k[place], pool.v[place], tile, self.scale, attended, space)
        gate = sigmoid(split[:, heads + 2 * kv_heads :].reshape(attended.shape))
        return layer.out((attended * gate).to(x.dtype))


def state_shape(config: HybridConfig) -> StateShape:
    """What a session of the model keeps beside keys and values."""
    return StateShape(
        layers=config.state_layers,
        conv_rows=config.conv_width - 1,
        channels=config.conv_channels,
        heads=config.value_heads,
        key_dim=config.key_dim,
        value_dim=config.value_dim,
    )


def extra_need(config: HybridConfig, drafts: int = 0) -> Extra:
    """What a session and a row of the model take beside what the dense line's do; `drafts` are checked for a session at most."""
    heads = config.value_heads * (2 * config.key_dim + 3 * config.value_dim)  # of one position, laid out for the recurrence
    mixed = 4 * (3 * config.conv_channels + 4 * config.value_heads * config.value_dim)
    experts = 4 * config.hidden * (config.top_k + 2) + 16 * max(config.expert_ffn, config.shared_ffn)
    gates = 4 * 3 * config.heads * config.head_dim
    return Extra((2 + drafts) * state_shape(config).bytes, mixed + experts + gates, 4 * 2 * BLOCK * heads)
