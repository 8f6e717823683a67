"""What a model with N sessions needs, in two figures, and whether the device has it. Nothing is allocated here."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch

from ds4batch.engine.linear import reorders
from ds4batch.engine.pages import PageShape
from ds4batch.engine.rows import QUERY_TILE
from ds4batch.engine.weights.config import ModelConfig
from ds4batch.engine.weights.layout import PRODUCTS
from ds4batch.engine.weights.raw import kept_formats, packed_bytes
from ds4batch.engine.weights.source import WeightSource
from triton_kernels.quant_formats import Format

SHARE = 0.92
"""Part of the available memory that may be planned for."""

_LIBRARIES = 600 << 20
"""Bytes that torch and its libraries take for themselves in the engine process."""


class DoesNotFit(ValueError):
    """The sessions do not fit. The message has the numbers."""


class Need(NamedTuple):
    """Bytes by kind."""

    weights: int
    kv_per_session: int
    scratch: int  # transients of one forward, shared by all sessions
    sessions: int
    pool: int | None = None  # of the pages that are allocated; None is a whole context for every session

    @property
    def kv_total(self) -> int:
        """All sessions' pages, were each to have a whole context."""
        return self.kv_per_session * self.sessions

    @property
    def kv_pool(self) -> int:
        """The pages that there are."""
        return self.kv_total if self.pool is None else self.pool

    @property
    def shared_total(self) -> int:
        """What this server takes: one scratch for all sessions."""
        return self.weights + self.kv_pool + self.scratch

    @property
    def naive_total(self) -> int:
        """What N separate servers' sessions would take beside one set of weights: a scratch each."""
        return self.weights + (self.kv_per_session + self.scratch) * self.sessions

    def as_dict(self) -> dict[str, int]:
        """Bytes by kind, as the metrics name them."""
        return {
            "weights": self.weights,
            "kv_per_session": self.kv_per_session,
            "kv_total": self.kv_total,
            "kv_pool": self.kv_pool,
            "scratch": self.scratch,
            "naive_total": self.naive_total,
            "shared_total": self.shared_total,
        }

    def _pool_figures(self) -> str:
        if self.pool is None:
            return f"{gib(self.kv_total)} in all"
        return f"a pool of {gib(self.pool)} where all together would be {gib(self.kv_total)}"

    def describe(self) -> str:
        """The two start-up figures, one line."""
        return (
            f"{self.sessions} sessions take {gib(self.shared_total)} (weights {gib(self.weights)}, KV "
            f"{gib(self.kv_per_session)} a session, {self._pool_figures()}, scratch {gib(self.scratch)} shared); "
            f"with a scratch each it would be {gib(self.naive_total)}"
        )


class Extra(NamedTuple):
    """Bytes that a family takes beside keys, values and the transients of the dense line."""

    session: int = 0  # state of fixed size, with its saved point
    row: int = 0
    session_scratch: int = 0  # transients of a session in a forward
    scratch: int = 0  # transients of a forward, whatever it holds


NO_EXTRA = Extra()


def estimate(
    config: ModelConfig,
    page: PageShape,
    pages_per_session: int,
    sessions: int,
    weight_bytes: int,
    largest_forward: int,
    extra: Extra = NO_EXTRA,
) -> Need:
    """The need of `sessions` sessions of `pages_per_session` pages whose forwards hold at most `largest_forward` rows."""
    row = 4 * (2 * config.hidden + 2 * (config.heads + 2 * config.kv_heads) * config.head_dim) + 2 * 4 * config.ffn + extra.row
    keys = pages_per_session * page.page_tokens
    scores = 3 * 4 * config.heads * QUERY_TILE * keys  # on a card the workspaces of attention, which are smaller
    logits = 3 * 4 * config.vocab * (sessions + 1)
    scratch = largest_forward * row + scores + logits + sessions * extra.session_scratch + extra.scratch
    return Need(weight_bytes, pages_per_session * page.bytes + extra.session, scratch, sessions)


def weight_bytes(source: WeightSource, device: torch.device, dtype: torch.dtype, keep: Collection[Format] = ()) -> int:
    """Bytes of the weights once loaded: DenseModel.bytes of the same source, without loading it."""
    config = source.config
    total = 0
    for name in source.names():
        count = math.prod(source.shape(name))
        if name.endswith("norm.weight"):  # those of q and k are repeated for every head
            copies = {"q_norm": config.heads, "k_norm": config.kv_heads}.get(name.split(".")[-2], 1)
            total += copies * count * torch.float32.itemsize
        elif name.endswith(".bias") or name == "embed.weight":
            total += count * dtype.itemsize
    for i in range(config.layers):
        for part in PRODUCTS:
            total += _product(source, [f"layers.{i}.{name}.weight" for name in part], dtype, keep, part == PRODUCTS[0])
    if not config.tied:
        return total + _product(source, ["head.weight"], dtype, keep)
    if kept_formats(source, ["embed.weight"], keep) or reorders(device, dtype):
        total += _product(source, ["embed.weight"], dtype, keep)  # the head's form of it lies beside the table
    return total


def expanded_bytes(source: WeightSource, dtype: torch.dtype, keep: Collection[Format]) -> int:
    """Bytes of linear_cuda.Scratch for the products of a layer; 0 where nothing stays quantised."""
    config = source.config
    layers = [[[f"layers.{i}.{name}.weight" for name in part] for part in PRODUCTS] for i in range(config.layers)]
    head = ["embed.weight" if config.tied else "head.weight"]
    if not any(kept_formats(source, names, keep) for names in [*chain(*layers), head]):
        return 0
    return dtype.itemsize * max(sum(math.prod(source.shape(name)) for name in names) for names in layers[0])


def _product(
    source: WeightSource, names: Sequence[str], dtype: torch.dtype, keep: Collection[Format], rotated: bool = False
) -> int:
    formats = kept_formats(source, names, keep, rotated)
    if formats:
        sides = [source.shape(name) for name in names]
        return sum(packed_bytes(f, (out, inner)) for f, (out, inner) in zip(formats, sides, strict=True))
    return sum(math.prod(source.shape(name)) for name in names) * dtype.itemsize


def available(device: torch.device) -> int:
    """Bytes that can still be taken on the device: the card's free memory, or the host's, within the container's limit."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = _meminfo("MemAvailable")
    limit, used = _number("/sys/fs/cgroup/memory.max"), _number("/sys/fs/cgroup/memory.current")
    if limit is not None and used is not None:
        free = min(free, max(limit - used, 0))
    return max(free - _LIBRARIES, 0)


def require(need: Need, free: int) -> None:
    """Raise DoesNotFit when the need does not fit in `free` bytes."""
    budget = int(free * SHARE)
    if need.shared_total <= budget:
        return
    room = budget - need.weights - need.scratch
    if need.pool is not None:
        raise DoesNotFit(
            f"{need.describe()}, but {gib(budget)} can be planned for ({SHARE:.0%} of the {gib(free)} available): "
            f"{gib(max(room, 0))} are left for the pool; lower --kv-pool-tokens or --batched-session"
        )
    fit = max(room // need.kv_per_session, 0)
    raise DoesNotFit(
        f"{need.describe()}, but {gib(budget)} can be planned for ({SHARE:.0%} of the {gib(free)} available): "
        + (f"{fit} sessions of this --ctx would fit" if fit > 0 else "not one session of this --ctx fits")
        + "; lower --batched-session or --ctx, or let the sessions share a pool of --kv-pool-tokens"
    )


def gib(count: int) -> str:
    """Bytes for people."""
    return f"{count / 2**30:.2f} GiB"


def _meminfo(key: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/meminfo has no {key}")


def _number(path: str) -> int | None:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return None
