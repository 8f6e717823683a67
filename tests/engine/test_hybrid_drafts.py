"""States that cannot be shortened go back to where a draft was wrong, bit for bit; and nowhere else."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from ds4batch.engine.engine import Engine
from ds4batch.engine.models.hybrid import HybridModel
from ds4batch.engine.sampler import Draw
from ds4batch.engine.state import StatePool, StateShape
from ds4batch.messages import Sampling
from scheduler.backend import Pick, Work
from tests.engine.hybrid_models import DENSE, NEXT, load, save
from tests.engine.models import CPU, NATIVE, ORDERED, engine_of, feed
from tests.engine.speculating import Decoded, Forced, assert_same, drafting, plainly, speculatively

pytestmark = pytest.mark.usefixtures("one_thread")

CTX = 256
GREEDY = Draw(Sampling(temperature=0.0), [0], ())
PROMPTS = {0: [3, 1, 4, 1, 5], 1: [9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3], 2: [2, 7, 1, 8, 2, 8]}


@cache
def model(kind: str) -> HybridModel:
    with TemporaryDirectory() as directory:
        family, changes = DENSE if kind == "dense" else NEXT
        save(family, changes, Path(directory))
        return load(Path(directory), ctx=CTX)




@cache
def alone(kind: str, slot: int, seed: int | None) -> Decoded:
    draw = GREEDY if seed is None else Draw(Sampling(temperature=0.9, seed=seed), [0], ())
    return plainly(model(kind), PROMPTS[slot], draw, 36, CTX)


def expected(one: Decoded, prompt: list[int], count: int) -> Decoded:
    return Decoded(one.tokens[: len(prompt) + count], one.logits[:count])


@pytest.mark.parametrize("path", [NATIVE, ORDERED], ids=["native", "ordered"])
@pytest.mark.parametrize(("drafts", "right"), [(k, j) for k in (1, 2, 3) for j in range(k + 1)])
def test_drafts_that_are_right_up_to_any_place(path: object, drafts: int, right: int) -> None:
    """Every row count lies at every place of a tile, and the conv's inputs are fewer and more than the rows."""
    drafter = Forced(lambda slot, at: [i < right for i in range(drafts)])
    engine = drafting(model("dense"), 3, CTX, drafter, drafts, path=path)
    drafter.answers = {slot: alone("dense", slot, None).tokens for slot in PROMPTS}
    found = speculatively(engine, PROMPTS, dict.fromkeys(PROMPTS, GREEDY), dict.fromkeys(PROMPTS, 16), drafts, random.Random(1))
    for slot, prompt in PROMPTS.items():
        assert_same(found[slot], expected(alone("dense", slot, None), prompt, 16))


@pytest.mark.parametrize("kind", ["dense", "experts"])
@pytest.mark.parametrize("seed", range(3))
def test_mixes_of_plain_and_speculative_cycles(kind: str, seed: int) -> None:
    rnd = random.Random(seed)
    lots = {(slot, at): [rnd.random() < 0.7 for _ in range(rnd.randrange(4))] for slot in PROMPTS for at in range(300)}
    drafter = Forced(lambda slot, at: lots[slot, at])
    engine = drafting(model(kind), 3, CTX, drafter, 3, page_tokens=16)
    drafter.answers = {slot: alone(kind, slot, slot).tokens for slot in PROMPTS}
    draws = {slot: Draw(Sampling(temperature=0.9, seed=slot), [0], ()) for slot in PROMPTS}
    found = speculatively(engine, PROMPTS, draws, {0: 30, 1: 22, 2: 33}, 3, rnd, plain=0.3)
    for slot, prompt in PROMPTS.items():
        assert_same(found[slot], expected(alone(kind, slot, slot), prompt, len(found[slot].logits)))


def checked(accepted: int, path: object = NATIVE) -> tuple[Engine, list[int]]:
    """Slot 0 with a mark at 5 tokens and three drafts behind its sixth, of which some are accepted; the answer it follows."""
    drafter = Forced(lambda slot, at: [True, True, True])
    engine = drafting(model("dense"), 2, CTX, drafter, 3, path=path)
    answer = alone("dense", 0, None).tokens
    drafter.answers = {0: answer}
    engine.launch([Work(0, PROMPTS[0], True)])
    engine.mark(0)
    engine.propose([(0, answer[5])], 3)
    engine.launch([Work(0, [answer[5]], True, 3)])
    engine.sample([Pick(0, GREEDY, row) for row in range(4)]).wait()
    engine.accept(0, accepted)
    return engine, answer


def cold(tokens: list[int]) -> torch.Tensor:
    return feed(engine_of(model("dense"), 1, CTX), 0, tokens, len(tokens))


@pytest.mark.parametrize("path", [NATIVE, ORDERED], ids=["native", "ordered"])
@pytest.mark.parametrize("accepted", range(4))
def test_every_length_with_a_draft_behind_it_can_be_returned_to_until_the_next_forward(path: object, accepted: int) -> None:
    for length in range(5, 7 + accepted):
        engine, answer = checked(accepted, path)
        assert engine.truncate(0, 6 + accepted)
        assert engine.can_truncate(0, length)
        assert engine.truncate(0, length)
        assert torch.equal(feed(engine, 0, [42], 1), cold([*answer[:length], 42]))
        assert [n for n in range(len(engine.tokens(0)) + 1) if engine.can_truncate(0, n)] == [0, 5, length + 1]
        assert engine.truncate(0, 5)  # the mark is what it was
        assert torch.equal(feed(engine, 0, [43], 1), cold([*answer[:5], 43]))


def test_a_cut_leaves_what_is_shorter_and_nothing_longer() -> None:
    engine, answer = checked(3)
    assert [n for n in range(10) if engine.can_truncate(0, n)] == [0, 5, 6, 7, 8, 9]
    engine.truncate(0, 7)
    assert [n for n in range(8) if engine.can_truncate(0, n)] == [0, 5, 6, 7]
    engine.truncate(0, 6)
    assert [n for n in range(8) if engine.can_truncate(0, n)] == [0, 5, 6]
    assert torch.equal(feed(engine, 0, [42], 1), cold([*answer[:6], 42]))


def test_a_mark_behind_drafts_is_void_when_the_session_is_cut_before_it() -> None:
    engine, _ = checked(3)
    engine.truncate(0, 9)
    engine.mark(0)
    engine.truncate(0, 7)
    assert [n for n in range(8) if engine.can_truncate(0, n)] == [0, 6, 7]
    feed(engine, 0, [42], 1)
    assert not engine.can_truncate(0, 7)
    with pytest.raises(ValueError, match="behind the point"):
        checked(1)[0].mark(0)


@pytest.mark.parametrize("length", [5, 6, 7])
def test_forks_and_snapshots_are_of_what_was_accepted(length: int) -> None:
    engine, answer = checked(1)
    assert engine.fork_point(0, 99) == 7
    assert engine.fork(0, 1, length)
    state = engine.pool.state
    assert state is not None
    expected = engine_of(model("dense"), 1, CTX)
    feed(expected, 0, answer[:length], length)
    assert expected.pool.state is not None
    assert state.snapshot(0, 9, length) == expected.pool.state.snapshot(0, length, length)
    assert torch.equal(feed(engine, 1, [42], 1), cold([*answer[:length], 42]))
    assert [n for n in range(length + 2) if engine.can_truncate(1, n)] == [0, length + 1]
    engine.truncate(0, 7)
    assert torch.equal(feed(engine, 0, [43], 1), cold([*answer[:7], 43]))


def test_a_state_without_room_for_drafts_takes_none() -> None:
    hybrid = model("dense")
    plain = engine_of(hybrid, 1, CTX)
    engine = Engine(hybrid, plain.pool, 1, CTX, NATIVE, drafter=Forced(lambda slot, at: [True]))
    assert not engine.can_draft(0)
    assert drafting(hybrid, 1, CTX, Forced(lambda slot, at: [True]), 1).can_draft(0)


def test_what_is_kept_before_drafts_is_counted() -> None:
    shape = StateShape(2, 3, 8, 2, 4, 4)
    assert StatePool(shape, 3, CPU, 2).nbytes == 4 * 3 * shape.bytes
    assert StatePool(shape, 3, CPU).nbytes == 2 * 3 * shape.bytes
