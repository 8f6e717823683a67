"""Decides at start whether this machine's matrix products keep the promise, and on what row counts.

A row's logits must not depend on how many rows share its forward. Libraries choose their kernel, and with it the order of a sum,
by the row count; on the CPUs measured, bf16 products differ between one row and more, fp32 products below multiples of
four. So forwards are padded to a multiple of rows, and the smallest one that passes these probes is taken. If none passes, the
engine falls back to the ordered path, which gives every product one fixed shape.

The probes use sums that cancel: x = [a, a], W = [b, -b] with the columns shuffled. The exact result is 0, so what comes out is
the rounding of the sum's order and nothing else; ordinary data would hide it below the result's own rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ds4batch.engine.attention import attend, query_space
from ds4batch.engine.linear import Linear
from ds4batch.engine.models.model import Model
from ds4batch.engine.pages import PagePool, PageShape
from ds4batch.engine.rows import SPLIT, Layout, Rows, Segment, plan, plan_tile, product_sizes
from ds4batch.messages import ATTENTION_DIFFERS, FORWARD_DIFFERS, PRODUCTS_DIFFER

TILE = 16
"""Rows of an ordered forward."""

MULTIPLES = (2, 4, 8, 16)
"""Row counts are padded to one of these; 1 is left out because every library has a path of its own for one row."""

_OFFSETS_UP_TO = 64  # rows


class ExactPath(NamedTuple):
    """How forwards run. `native`: all rows of a step in one forward, padded to `row_multiple` rows."""

    native: bool
    row_multiple: int
    reason: str  # why it is not native; "" when it is


def decide(model: Model, logit_rows: int, largest_forward: int) -> ExactPath:
    """Probe this model's shapes on this device, for forwards of up to so many rows, and logits of so many.

    Every product that a forward can ask for has run when this returns: what a library keeps of each is there, and grows no more.
    """
    multiple = next((m for m in MULTIPLES if _products_hold(model, m, logit_rows, largest_forward)), None)
    if multiple is None:
        return ExactPath(False, TILE, PRODUCTS_DIFFER)
    if not attention_holds(model):
        return ExactPath(False, TILE, ATTENTION_DIFFERS)
    if not model_holds(model, multiple):
        return ExactPath(False, TILE, FORWARD_DIFFERS)
    return ExactPath(True, multiple, "")


def _products_hold(model: Model, multiple: int, logit_rows: int, largest_forward: int) -> bool:
    sizes = product_sizes(max(largest_forward, TILE), multiple)
    few = product_sizes(max(logit_rows, TILE), multiple)
    shapes = sorted({linear.shape for linear in model.linears})
    return all(_product_holds(shape, model, sizes, Linear.__call__) for shape in shapes) and _product_holds(
        model.head.shape, model, few, Linear.precise
    )


@torch.inference_mode()
def _product_holds(
    shape: tuple[int, int], model: Model, counts: list[int], product: Callable[[Linear, torch.Tensor], torch.Tensor]
) -> bool:
    """Whether a row of a product of this [out, in] has the same bits for each of these row counts, wherever the row lies.

    Small counts are tried at three offsets, larger ones, of which each costs more, at one.
    """
    x, weight = _cancelling(counts[-1], *shape)
    x = x.to(model.device, model.dtype)
    linear = Linear(weight.to(model.device, model.dtype))
    whole = product(linear, x)
    for count in counts:
        last = counts[-1] - count
        for at in {0, last, last // 2} if count <= _OFFSETS_UP_TO else {last}:
            part = slice(at, at + count)
            if not torch.equal(product(linear, x[part]), whole[part]):
                return False
    return True


def _cancelling(rows: int, out: int, inner: int) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(inner * 31 + out)
    half = inner // 2
    order = torch.randperm(half * 2, generator=source)
    a = torch.randn(rows, half, generator=source)
    b = torch.randn(out, half, generator=source)
    x, weight = torch.zeros(rows, inner), torch.zeros(out, inner)
    x[:, : half * 2] = torch.cat([a, a], 1)[:, order]
    weight[:, : half * 2] = torch.cat([b, -b], 1)[:, order]
    return x, weight


@torch.inference_mode()
def attention_holds(model: Model) -> bool:
    """Whether a query's result is the same bits alone, in a chunk, beside other sessions and under a longer context."""
    config = model.config
    source = torch.Generator().manual_seed(5)
    size, sessions = 3 * SPLIT, 3

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=source).to(model.device)

    k = random(sessions, config.kv_heads, size, config.head_dim)
    v = random(sessions, config.kv_heads, size, config.head_dim)
    q = random(sessions, size, config.heads, config.head_dim)
    layout = Layout(size, config.heads // config.kv_heads, model.device, 1)

    def run(rows: Rows, queries: torch.Tensor) -> torch.Tensor:
        out = queries.new_zeros(len(queries), config.heads * config.head_dim)
        for tile in rows.tiles:
            attend(queries, k, v, tile, model.scale, out, query_space(tile, config.kv_heads, config.head_dim, model.device))
        return out

    whole = [run(plan([Segment([s], 0, range(size), False)], layout), q[s]) for s in range(sessions)]
    for at in (0, 1, 5, SPLIT - 1, SPLIT, SPLIT + 1, size - 2):
        ends = (at, size - 1, at // 2)
        together = plan([Segment([s], ends[s], [0], False) for s in range(sessions)], layout)
        found = run(together, torch.stack([q[s, ends[s]] for s in range(sessions)]))
        alone = run(plan([Segment([0], at, [0], False)], layout), q[0, at : at + 1])
        expected = torch.stack([whole[s][ends[s]] for s in range(sessions)])
        chunk = run(plan([Segment([0], at, range(2), False)], layout), q[0, at : at + 2])
        if not (
            torch.equal(found, expected) and torch.equal(alone[0], expected[0]) and torch.equal(chunk, whole[0][at : at + 2])
        ):
            return False
    return True


@torch.inference_mode()
def model_holds(model: Model, multiple: int) -> bool:
    """Whether the real weights give one session's logits the same bits token by token, whole, and in company."""
    config = model.config
    length, sessions = 24, 3
    source = torch.Generator().manual_seed(7)
    tokens = torch.randint(config.vocab, (sessions, length), generator=source).tolist()
    shape = PageShape(config.kv_layers, config.kv_heads, SPLIT, config.head_dim, torch.float32)
    layout = Layout(SPLIT, config.heads // config.kv_heads, model.device, multiple)

    def fresh() -> PagePool:
        return PagePool(shape, sessions, model.device, model.new_state(sessions))

    pool = fresh()
    alone = [model.forward(plan([Segment([0], i, [t], True)], layout), pool).logits[0] for i, t in enumerate(tokens[0])]
    pool = fresh()
    whole = model.forward(plan([Segment([0], 0, tokens[0], True)], layout), pool).logits[0]
    pool = fresh()
    half = length // 2
    chunks = [Segment([s], 0, tokens[s][: half + s], True, s) for s in (1, 0, 2)]
    first = model.forward(plan(chunks, layout), pool).logits[1]
    steps = []
    for i in range(half, length):
        company = [Segment([0], i, [tokens[0][i]], True), Segment([1], i + 1, [tokens[1][i]], False, 1)]
        steps.append(model.forward(plan(company if i % 2 else company[::-1], layout), pool).logits[0])
    tiled = fresh()
    for at in range(0, length, TILE):
        tile = plan_tile(Segment([0], at, tokens[0][at : at + TILE], True), TILE, layout)
        last = model.forward(tile, tiled).logits[0]
    together = [first, *steps]
    return (
        torch.equal(whole, alone[-1])
        and torch.equal(last, alone[-1])
        and all(torch.equal(a, b) for a, b in zip(together, alone[half - 1 :], strict=True))
    )
