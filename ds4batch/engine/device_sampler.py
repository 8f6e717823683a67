"""Draws tokens where the logits are: the whole batch together, one copy back.

Requests whose draw needs more than a row's logits and knobs (penalties, biases, bans, log-probabilities) are left to the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ds4batch.engine.sampler import Draw
from triton_kernels.sampling import Request, pack, sample, workspace


class DeviceSampler:
    """The sampler of one device, for up to `rows` rows of `vocab` logits."""

    def __init__(self, rows: int, vocab: int, device: torch.device) -> None:
        self._space = workspace(rows, vocab, device)
        self._out = torch.empty(rows, dtype=torch.int64, device=device)
        self._device = device

    def launch(self, logits: torch.Tensor, draws: Sequence[Draw], positions: Sequence[int]) -> torch.Tensor:
        """int64 [R] on the device: the token of each row of fp32 [R, vocab]. Waits for nothing."""
        requests = [
            Request(d.sampling.temperature, d.sampling.top_k, d.sampling.top_p, d.sampling.min_p, d.sampling.seed, position)
            for d, position in zip(draws, positions, strict=True)
        ]
        knobs, needs = pack(requests)
        placed = knobs.to(self._device, non_blocking=True) if needs.sampled else None
        return sample(logits, placed, needs, self._out[: len(requests)], self._space)
