"""The card's forward, its kernels under the interpreter: where rows lie, what padding may not touch, and that frames are kept.

Bits are the card's to show (tests/gpu): the interpreter's products have an order of their own.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from ds4batch.engine.engine import Engine
from ds4batch.engine.exact import ExactPath
from ds4batch.engine.models.dense_cuda import ROWS, CudaForward
from ds4batch.engine.pages import PagePool, PageShape
from scheduler.backend import Work
from tests.engine.models import CPU, engine_of, tiny_model

if torch.cuda.is_available():
    pytest.skip("on a card the kernels are compiled, and take no tensors of the host", allow_module_level=True)

# Rows of padding are computed on whatever lies in the arena, which numpy remarks on.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow", "ignore:divide by zero")

CTX, SLOTS = 256, 3
MODEL = tiny_model(ctx=CTX, head_dim=64)


def on_kernels(graphs: bool, slots: int = SLOTS) -> tuple[Engine, CudaForward]:
    config = MODEL.config
    pool = PagePool(PageShape(config.layers, config.kv_heads, 64, config.head_dim, torch.float32), slots * CTX // 64, CPU)
    forward = CudaForward(MODEL, pool, slots, CTX, slots + 128, graphs)
    return Engine(MODEL, pool, slots, CTX, ExactPath(True, 1, ""), forward), forward


STEPS = [
    [Work(0, [5, 6, 7, 8, 9, 10, 11], True)],
    [Work(0, [12], True), Work(1, list(range(3, 40)), True)],
    [Work(2, [9, 8, 7], True), Work(1, [4], True), Work(0, [13], False)],
    [Work(1, [1], True), Work(2, [2], True), Work(0, [3], True)],
    [Work(2, list(range(50, 90)), False), Work(0, list(range(60, 90)), True), Work(1, [7], True)],
    [Work(2, [4], True)],
]


@pytest.mark.parametrize("graphs", [True, False])
def test_every_kind_of_step_gives_the_logits_of_plain_torch(graphs: bool) -> None:
    ours, _ = on_kernels(graphs)
    plain = engine_of(MODEL, SLOTS, CTX)
    for step, work in enumerate(STEPS):
        ours.launch(work)
        plain.launch(work)
        for item in work:
            if item.wants_logits:
                torch.testing.assert_close(
                    ours.logits(item.slot), plain.logits(item.slot), rtol=1e-4, atol=1e-4, msg=f"step {step}"
                )
    assert [list(ours.tokens(s)) for s in range(SLOTS)] == [list(plain.tokens(s)) for s in range(SLOTS)]


def test_recorded_forwards_are_kept_and_serve_all_that_they_hold() -> None:
    engine, forward = on_kernels(True)
    kept = forward._recorded
    assert kept is not None
    for work in STEPS:
        engine.launch(work)
    # 7 rows alone; 37 beside one; 3 beside two; three decode rows; 70 beside one; one decode row
    shapes = {(frame.decode, frame.rows) for frame in kept}
    assert shapes == {(0, 16), (4, 48), (4, 16), (4, 4), (4, 80), (1, 1)}
    before = len(kept)
    engine.launch([Work(0, [1], True), Work(1, list(range(3, 40)), True)])
    assert len(kept) == before


def test_what_no_frame_holds_runs_kernel_by_kernel() -> None:
    engine, forward = on_kernels(True, slots=12)
    assert forward._recorded is not None
    engine.launch([Work(slot, [slot, slot + 1], True) for slot in range(9)])  # more chunks than a frame has
    assert not forward._recorded
    with pytest.raises(ValueError, match="the largest is"):
        forward([engine._segment(Work(0, [1] * 200, True))])


def test_padding_of_a_recorded_forward_is_no_session_and_may_hold_anything() -> None:
    engine, forward = on_kernels(True)
    engine.launch([Work(0, [5, 6, 7], True)])
    expected = engine.logits(0).clone()
    pages = engine.pool.k.clone()
    engine.truncate(0, 0)
    forward._arena.attended.fill_(float("nan"))  # what the rows of an earlier forward left behind
    forward._arena.hidden.fill_(float("nan"))
    engine.launch([Work(0, [5, 6, 7], True)])
    assert torch.equal(engine.logits(0), expected)
    assert torch.equal(engine.pool.k, pages)


def test_the_row_counts_rise_to_the_largest_and_waste_a_quarter_at_most() -> None:
    assert list(ROWS) == sorted(set(ROWS))
    assert all(above <= 1.25 * (below + 1) + 16 for below, above in pairwise(ROWS))
