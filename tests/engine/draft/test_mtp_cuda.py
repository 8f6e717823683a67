"""The card's checks of drafts and its MTP drafter, their kernels under the interpreter, beside plain torch.

Bits are the card's to show (tests/gpu).
"""

from __future__ import annotations

import random

import pytest
import torch

from ds4batch.engine.draft.drafter import Drafter, Expected
from ds4batch.engine.draft.mtp import MtpDrafter
from ds4batch.engine.draft.mtp_cuda import CudaMtpDrafter
from ds4batch.engine.draft.mtp_window import PAGE
from ds4batch.engine.engine import Engine
from ds4batch.engine.exact import ExactPath
from ds4batch.engine.models.dense_cuda import CudaForward
from ds4batch.engine.pages import PagePool, PageShape
from scheduler.backend import Work
from tests.engine.draft.test_mtp import random_head
from tests.engine.models import CPU, NATIVE, tiny_model

if torch.cuda.is_available():
    pytest.skip("on a card the kernels are compiled, and take no tensors of the host", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow", "ignore:divide by zero")

CTX, SLOTS = 512, 3
MODEL = tiny_model(ctx=CTX, head_dim=64)
HEAD = random_head(MODEL)


def engines(drafts: int, graphs: bool) -> tuple[Engine, Engine]:
    """On kernels, and in plain torch."""
    config = MODEL.config

    def pool() -> PagePool:
        return PagePool(PageShape(config.layers, config.kv_heads, 64, config.head_dim, torch.float32), SLOTS * CTX // 64, CPU)

    keeper = CudaMtpDrafter(MODEL, HEAD, SLOTS, drafts)
    ours = pool()
    forward = CudaForward(MODEL, ours, SLOTS, CTX, SLOTS * (1 + drafts) + 128, graphs, drafts, keeper)
    plain: Drafter = MtpDrafter(MODEL, HEAD, SLOTS)
    return (
        Engine(MODEL, ours, SLOTS, CTX, ExactPath(True, 1, ""), forward, drafter=keeper),
        Engine(MODEL, pool(), SLOTS, CTX, NATIVE, drafter=plain),
    )


@pytest.mark.parametrize(("drafts", "graphs"), [(1, True), (2, False), (3, True), (5, True)])
def test_checks_and_drafts_are_those_of_plain_torch(drafts: int, graphs: bool) -> None:
    rnd = random.Random(drafts)
    pair = engines(drafts, graphs)
    keeper, forward = pair[0]._drafts.drafter, pair[0].forward
    assert isinstance(keeper, CudaMtpDrafter)
    assert isinstance(forward, CudaForward)
    for engine in pair:
        engine.launch([Work(0, [5, 6, 7, 8], True), Work(1, list(range(3, 3 + PAGE)), True), Work(2, [9], True)])
    follow = {slot: rnd.randrange(199) for slot in range(SLOTS)}
    begun = 0
    for cycle in range(9):
        slots = [slot for slot in range(SLOTS) if rnd.random() < 0.8] or [1]
        wants = [(slot, follow[slot]) for slot in slots]
        before = keeper._expected
        counts = [list(engine.propose(wants, drafts)) for engine in pair]
        assert counts == [[drafts] * len(wants)] * 2
        begun += before is not None
        used = {slot: rnd.randrange(drafts + 1) for slot in slots}
        work = [Work(slot, [token], True, used[slot]) for slot, token in wants]
        if cycle == 3:  # the prompt of another rides along
            for engine in pair:
                engine.truncate(0, 0)
            work = [w for w in work if w.slot] + [Work(0, list(range(40, 90)), True)]
        for engine in pair:
            engine.launch(work)
        right, expected, row = {}, [], 0
        for item in work:
            ours, plain = (list(engine.drafts(item.slot)) for engine in pair)
            assert ours == plain
            assert len(ours) == item.drafts
            for i in range(item.drafts + 1):
                found = [engine._row(item.slot, i) for engine in pair]
                torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)
            right[item.slot] = rnd.randrange(item.drafts + 1)
            drawn = [*ours[: right[item.slot]], *[rnd.randrange(199) for _ in range(item.drafts + 1 - right[item.slot])]]
            if right[item.slot] < item.drafts and drawn[right[item.slot]] == ours[right[item.slot]]:
                drawn[right[item.slot]] ^= 1
            forward.drawn[row : row + len(drawn)] = torch.tensor(drawn)
            names = pair[0]._drafts._ahead[item.slot].proposal.tokens[item.slot][: item.drafts] if item.drafts else ()
            expected.append(Expected(item.slot, len(pair[0].tokens(item.slot)), row, names))
            follow[item.slot] = drawn[right[item.slot]]
            row += len(drawn)
        if cycle % 3:
            keeper.expect(expected, pair[0].tokens)
        for item in work:
            for engine in pair:
                if item.drafts:
                    engine.accept(item.slot, right[item.slot])
                engine.truncate(item.slot, len(engine.tokens(item.slot)))
        for _ in range(rnd.randrange(8) if cycle % 2 else 0):  # and steps without drafts
            step = [Work(slot, [follow[slot]], True) for slot in range(SLOTS)]
            follow = {slot: rnd.randrange(199) for slot in range(SLOTS)}
            for engine in pair:
                engine.launch(step)
    assert begun >= 2
    assert [list(pair[0].tokens(s)) for s in range(SLOTS)] == [list(pair[1].tokens(s)) for s in range(SLOTS)]
