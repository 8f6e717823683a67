"""Pages in host memory: what a running session leaves the device with, and comes back from bit for bit.

Owns the copies, not the decision who is parked. A page is copied as it lies, so what it holds behind the session's last
position is kept too and stays finite. State of fixed size stays on the device: it belongs to the slot, and nobody else could use
its room.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ds4batch.engine.pages import PagePool


class HostPage(NamedTuple):
    """One page's keys and values, each [layers, kv_heads, page_tokens, words]; pinned where the pool is on a card."""

    k: torch.Tensor
    v: torch.Tensor


def to_host(pool: PagePool, page: int) -> HostPage:
    """A copy of `page`. Waits for every forward that was launched before."""
    pinned = pool.k.device.type == "cuda"

    def copy(words: torch.Tensor) -> torch.Tensor:
        target = torch.empty(words.shape, dtype=words.dtype, pin_memory=pinned)
        return target.copy_(words)

    return HostPage(*(copy(words[:, page]) for words in pool.words))


def to_device(pool: PagePool, copy: HostPage, page: int) -> None:
    """Write a copy into `page`, of whatever number. Waits until it is there: the copy may be dropped afterwards."""
    for words, part in zip(pool.words, copy, strict=True):
        words[:, page].copy_(part)
