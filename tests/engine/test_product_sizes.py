"""Products run on few numbers of rows, and on no number that the start has not tried: a library keeps what it makes for each."""

from __future__ import annotations

import random

import pytest
import torch

from ds4batch.engine.draft.mtp_window import MOST_ROWS, PAGE, SEEN
from ds4batch.engine.engine import Engine
from ds4batch.engine.exact import MULTIPLES, decide
from ds4batch.engine.linear import Linear
from ds4batch.engine.rows import product_rows, product_sizes
from scheduler.backend import Work
from tests.engine.draft.test_mtp import Rig
from tests.engine.models import engine_of, tiny_model

Asked = set[tuple[tuple[int, int], int, bool]]
"""Shape of the weights, rows, and whether the product was a precise one."""

SLOTS, DRAFTS, LARGEST = 6, 3, 150


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """What products were asked for; to be cleared between one phase and the next."""
    found: Asked = set()
    plain, precise = Linear.__call__, Linear.precise

    def note_plain(self: Linear, x: torch.Tensor) -> torch.Tensor:
        found.add((self.shape, len(x), False))
        return plain(self, x)

    def note_precise(self: Linear, x: torch.Tensor) -> torch.Tensor:
        found.add((self.shape, len(x), True))
        return precise(self, x)

    monkeypatch.setattr(Linear, "__call__", note_plain)
    monkeypatch.setattr(Linear, "precise", note_precise)
    return found


def test_the_probes_try_every_product_that_a_forward_asks_for(asked: Asked) -> None:
    model = tiny_model()
    path = decide(model, SLOTS * (1 + DRAFTS), LARGEST)
    assert path.native, path.reason
    tried = asked.copy()
    asked.clear()
    engine = engine_of(model, SLOTS, 512, path=path)
    for rows in range(1, LARGEST + 1):
        _empty(engine)
        engine.launch([Work(0, [1] * rows, True)])
    rnd = random.Random(1)
    for _ in range(40):  # decoding sessions beside chunks, with logits of any number of them
        _empty(engine)
        slots = rnd.sample(range(SLOTS), rnd.randint(1, SLOTS))
        counts = [rnd.choice((1, 1, 1, 4, 20, 24)) for _ in slots]
        engine.launch([Work(slot, [2] * count, rnd.random() < 0.8) for slot, count in zip(slots, counts, strict=True)])
    assert len({rows for _, rows, _ in asked}) > 20
    assert {one for one in asked if one[1]} <= tried  # no rows are no product


def test_an_mtp_module_tries_its_products_when_it_is_made(asked: Asked) -> None:
    rig, rnd = Rig(5), random.Random(2)
    made = asked.copy()
    asked.clear()
    for cycle in range(30):
        slots = rnd.sample(range(5), rnd.randint(1, 5))
        work = [(slot, [rnd.randrange(199) for _ in range(rnd.choice((1, 2, 20, 90)))]) for slot in slots]
        work = [(slot, tokens) for slot, tokens in work if len(rig.tokens[slot]) + len(tokens) < 1000]
        if work:
            rig.forward(work)
            rig.propose([(slot, cycle) for slot, _ in work], 3)
    assert len({rows for _, rows, _ in asked}) > 5
    assert asked <= made


def test_an_mtp_module_evaluates_no_more_rows_at_once_than_it_has_room_for(asked: Asked) -> None:
    rig, rnd = Rig(4), random.Random(3)
    lengths = [PAGE * (SEEN - 1) + slot for slot in range(4)]  # all of it is seen
    rig.forward([(slot, [rnd.randrange(199) for _ in range(length)]) for slot, length in enumerate(lengths)])
    assert sum(lengths) == 2 * MOST_ROWS + 6  # the last piece holds the last row of one session alone
    wants = [(2, 7), (0, 8), (1, 9), (3, 5)]
    found = rig.propose(wants, 2)
    assert found == {slot: rig.oracle(slot, token, 2) for slot, token in wants}
    module = rig.drafter._weights
    assert max(rows for shape, rows, _ in asked if shape == module.proj.shape) == MOST_ROWS


@pytest.mark.parametrize("multiple", MULTIPLES)
def test_sizes_are_few_and_little_larger_than_what_they_hold(multiple: int) -> None:
    most = 5000
    sizes = product_sizes(most, multiple)
    assert len(sizes) <= 64 // multiple + 8 * 7
    for count in range(1, most + 1):
        rows = product_rows(count, multiple)
        assert rows in sizes
        assert rows % multiple == 0
        assert count <= rows < count * 9 / 8 + multiple
        assert product_rows(rows, multiple) == rows


def _empty(engine: Engine) -> None:
    for slot in range(len(engine.sessions)):
        engine.truncate(slot, 0)
