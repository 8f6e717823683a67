"""A fork holds what its donor evaluated, whole pages of it once, and both go on with the bits of a cold run."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ds4batch.engine.engine import Engine
from ds4batch.engine.exact import ExactPath, decide
from ds4batch.engine.models.dense import DenseModel
from ds4batch.engine.models.model import Output
from scheduler.backend import BackendError, Pick, Work
from tests.engine.hybrid_models import DENSE, VOCAB, load, one_thread, save
from tests.engine.models import engine_of, feed, tiny_model

MODEL = tiny_model()
PAGES = [16, 48, 256, 0]


def tokens_of(count: int, vocab: int = 199, seed: int = 5) -> list[int]:
    rnd = random.Random(seed)
    return [rnd.randrange(vocab) for _ in range(count)]


def cold(model: DenseModel, tokens: Sequence[int], path: ExactPath | None = None) -> torch.Tensor:
    """The logits after `tokens` in a session of their own."""
    engine = engine_of(model, 1, 1024, **({} if path is None else {"path": path}))  # type: ignore[arg-type]
    return feed(engine, 0, list(tokens), 64)


def references(engine: Engine) -> None:
    """Every reference is a session's, and every other page is free."""
    held = [page for session in engine.sessions for page in session.resident]
    assert [engine.pool.references(page) for page in range(engine.pool.pages)] == [
        held.count(page) for page in range(engine.pool.pages)
    ]
    assert engine.pool.free == engine.pool.pages - len(set(held))


@pytest.mark.parametrize("page_tokens", PAGES)
@pytest.mark.parametrize("length", [1, 15, 16, 47, 48, 200, 256, 300])
def test_a_fork_and_its_donor_both_continue_with_the_bits_of_a_cold_run(page_tokens: int, length: int) -> None:
    engine = engine_of(MODEL, 3, 1024, page_tokens)
    donor, other = tokens_of(300), tokens_of(40, seed=6)
    feed(engine, 0, donor, 64)
    feed(engine, 2, other, 40)  # what the fork replaces
    before = engine.room().free
    assert engine.can_fork(0, length)
    assert engine.fork(0, 2, length)
    assert list(engine.tokens(2)) == donor[:length]
    size = engine.pool.shape.page_tokens
    assert engine.sessions[2].pages[: length // size] == engine.sessions[0].pages[: length // size]
    assert engine.room().free == before + -(-40 // size) - (length % size > 0)
    engine.launch([Work(2, other, True), Work(0, [7], True)])
    assert torch.equal(engine.logits(2), cold(MODEL, donor[:length] + other))
    assert torch.equal(engine.logits(0), cold(MODEL, [*donor, 7]))
    references(engine)


@pytest.mark.parametrize("page_tokens", [16, 256, 0])
def test_the_demo_model_forks_exactly(demo: DenseModel, page_tokens: int) -> None:
    path = decide(demo, 4, 512)
    vocab = demo.config.vocab
    system, tails = tokens_of(270, vocab), [tokens_of(20, vocab, seed) for seed in range(3)]
    engine = engine_of(demo, 4, 1024, page_tokens, path)
    feed(engine, 0, system + tails[0], 512)
    for slot in (1, 2):
        assert engine.fork(0, slot, len(system))
    engine.launch([Work(1, tails[1], True), Work(0, [3], True), Work(2, tails[2], True)])
    for slot in (1, 2):
        assert torch.equal(engine.logits(slot), cold(demo, system + tails[slot], path))
    assert torch.equal(engine.logits(0), cold(demo, [*system, *tails[0], 3], path))


def test_a_fork_outlives_its_donor_and_a_page_is_free_when_nobody_holds_it() -> None:
    engine = engine_of(MODEL, 3, 512, 16)
    donor = tokens_of(100)
    feed(engine, 0, donor, 64)
    assert engine.fork(0, 1, 64)
    assert engine.fork(1, 2, 50)
    assert engine.truncate(0, 0)
    assert torch.equal(feed(engine, 1, donor[64:], 9), cold(MODEL, donor))
    assert torch.equal(feed(engine, 2, donor[50:], 9), cold(MODEL, donor))
    references(engine)
    assert engine.truncate(1, 20)  # inside a page that the other holds
    assert torch.equal(feed(engine, 1, [9] * 30, 30), cold(MODEL, donor[:20] + [9] * 30))
    assert torch.equal(feed(engine, 2, [1], 1), cold(MODEL, [*donor, 1]))
    for slot in (1, 2):
        assert engine.truncate(slot, 0)
    assert engine.room().free == engine.room().pages


def test_a_fork_that_cannot_be_made_changes_nothing() -> None:
    engine = engine_of(MODEL, 2, 64, 16)
    feed(engine, 0, tokens_of(40), 40)
    feed(engine, 1, [1] * 4, 4)
    before = [list(s.tokens) for s in engine.sessions], [list(s.pages) for s in engine.sessions], engine.logits(1).clone()
    taken = engine.pool.take(engine.pool.free)
    assert not engine.fork(0, 0, 10)
    assert not engine.fork(0, 1, 41)
    assert not engine.fork(0, 1, 0)
    assert engine.fork(0, 1, 39)  # into the page that the target gives up
    assert len(engine.tokens(1)) == 39
    engine.truncate(1, 0)
    feed(engine, 1, [1] * 4, 4)
    engine.pool.share(engine.sessions[1].pages)  # somebody holds what the target would give up
    before = [list(s.tokens) for s in engine.sessions], [list(s.pages) for s in engine.sessions], engine.logits(1).clone()
    engine.pool.take(engine.pool.free)
    assert not engine.fork(0, 1, 39)
    assert ([list(s.tokens) for s in engine.sessions], [list(s.pages) for s in engine.sessions]) == before[:2]
    assert torch.equal(engine.logits(1), before[2])
    assert engine.fork(0, 1, 32)  # whole pages need no copy
    assert taken


def test_the_shared_part_is_counted_once() -> None:
    engine = engine_of(MODEL, 4, 512, 16)
    feed(engine, 0, tokens_of(100), 100)
    for slot in (1, 2, 3):
        engine.fork(0, slot, 90)
        feed(engine, slot, [slot], 1)
    everybody = {slot: len(engine.tokens(slot)) for slot in range(4)}
    assert engine.distinct(everybody) == 7 + 3 == engine.room().pages - engine.room().free
    assert [engine.held(slot)[:2] for slot in range(4)] == [(7, 2), (6, 1), (6, 1), (6, 1)]
    assert engine.distinct({0: 80, 1: 80}) == 5
    assert engine.distinct({1: 91, 2: 91}) == 7


def test_what_a_broken_forward_wrote_is_lost_in_the_fork_too(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(MODEL, 3, 256, 16)
    feed(engine, 0, tokens_of(20), 20)
    real = type(MODEL).forward

    def poisoned(model: DenseModel, rows: object, pool: object) -> Output:
        output = real(MODEL, rows, engine.pool)  # type: ignore[arg-type]
        engine.pool.v[:, engine.sessions[0].pages[1:]] = float("nan")
        return Output(output.logits, torch.zeros_like(output.finite))

    engine._sampler = SimpleNamespace()  # type: ignore[assignment]  # values are asked for with the tokens
    with monkeypatch.context() as patch:
        patch.setattr(type(MODEL), "forward", poisoned)
        engine.launch([Work(0, tokens_of(30, seed=8), True)])
    assert engine.fork(0, 1, 48)
    engine._sampler = None
    with pytest.raises(BackendError, match="not finite"):
        engine.sample([Pick(0, SimpleNamespace(plain=True, penalised=False))])  # type: ignore[list-item]
    assert not engine.tokens(0)
    assert not engine.tokens(1)
    assert torch.isfinite(engine.pool.v).all()
    assert engine.room().free == engine.room().pages


def test_a_state_that_cannot_be_shortened_is_forked_where_it_is_held(tmp_path: Path) -> None:
    with one_thread():
        save(*DENSE, tmp_path)
        model = load(tmp_path, torch.bfloat16, 384)
        engine = engine_of(model, 4, 384, 16)
        donor = tokens_of(80, VOCAB)
        feed(engine, 0, donor[:50], 25)
        engine.mark(0)
        feed(engine, 0, donor[50:], 30)
        assert [engine.can_fork(0, n) for n in (49, 50, 51, 79, 80)] == [False, True, False, False, True]
        assert [engine.fork_point(0, n) for n in (40, 50, 79, 80, 200)] == [0, 50, 50, 80, 80]
        assert engine.fork(0, 1, 50)
        assert engine.fork(0, 2, 80)
        assert not engine.fork(0, 3, 60)
        assert not engine.tokens(3)
        fresh = engine_of(model, 1, 384)
        expected = feed(fresh, 0, [*donor, 1], 81)
        assert torch.equal(feed(engine, 1, [*donor[50:], 1], 31), expected)
        assert torch.equal(feed(engine, 2, [1], 1), expected)
        assert torch.equal(feed(engine, 0, [1], 1), expected)
        references(engine)
