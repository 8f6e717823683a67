"""Feed-forward layers: gated SiLU, dense or as a mixture of experts beside one that all tokens share.

Routing and combination are fp32 and row by row: the softmax over all experts, the best k by probability (ties go to the lower
expert), then each expert's rows in one product, and the sum over a token's experts from its first choice to its last. An expert's
product runs on its rows padded to a multiple of the forward's, or on all rows in their places where that is no more: where products
have one fixed shape, a token keeps its row of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ds4batch.engine.linear import Linear
from ds4batch.engine.models.gates import sigmoid, silu
from ds4batch.engine.rows import Rows
from ds4batch.engine.weights.hybrid_layout import HybridConfig


class FeedForward(NamedTuple):
    """down(silu(gate x) * (up x))."""

    gate_up: Linear  # [2 * width, hidden]
    down: Linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x, and the result: [rows, hidden] in the weights' type."""
        gate, up = self.gate_up(x).float().chunk(2, dim=-1)
        return self.down(silu(gate).mul_(up).to(x.dtype))


class Mixture(NamedTuple):
    """One layer's experts."""

    router: Linear  # [experts + 1, hidden]; the last row is the shared expert's gate
    experts: Sequence[FeedForward]
    shared: FeedForward


def mixture(x: torch.Tensor, layer: Mixture, config: HybridConfig, rows: Rows) -> torch.Tensor:
    """x: [R, hidden] normed, in the weights' type. fp32 [R, hidden]; rows that are padding get the shared expert alone."""
    scores = layer.router.precise(x)
    chances = torch.softmax(scores[:, : config.experts], dim=-1)
    best, chosen = torch.sort(chances, dim=-1, descending=True, stable=True)
    best, chosen = best[:, : config.top_k], chosen[:, : config.top_k]
    if config.normalise_top_k:
        best = best / best.sum(-1, keepdim=True)
    parts = x.new_zeros(len(x), config.top_k, x.shape[1], dtype=torch.float32)
    for expert, row, choice in _by_expert(chosen[rows.real], rows.real.start):
        parts[row, choice] = _of_rows(layer.experts[expert], x, row, rows.multiple).float()
    total = layer.shared(x).float().mul_(sigmoid(scores[:, config.experts :]))
    # A product and a sum each rounded by itself: fused, they would round once, and not everywhere alike.
    combined = torch.zeros_like(total)
    for rank in range(config.top_k):
        combined.add_(parts[:, rank] * best[:, rank, None])
    return combined.add_(total)


def _by_expert(chosen: torch.Tensor, first: int) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
    """Each expert that was chosen, with the rows that chose it, from `first` on, and which choice of theirs it was."""
    ordered, place = torch.sort(chosen.flatten(), stable=True)
    experts, counts = torch.unique_consecutive(ordered, return_counts=True)
    top_k = chosen.shape[1]
    pieces = torch.split(place, counts.tolist())
    return [(e, first + p // top_k, p % top_k) for e, p in zip(experts.tolist(), pieces, strict=True)]


def _of_rows(expert: FeedForward, x: torch.Tensor, row: torch.Tensor, multiple: int) -> torch.Tensor:
    count = len(row)
    padded = -(-count // multiple) * multiple
    if padded >= len(x):
        return expert(x)[row]
    index = torch.cat([row, row[:1].expand(padded - count)])
    return expert(x[index])[:count]
