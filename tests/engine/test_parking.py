"""A parked session comes back bit for bit, wherever its pages come to lie, and nothing of it is evaluated again."""

from __future__ import annotations

import pytest
import torch

from ds4batch.engine.exact import decide
from ds4batch.engine.models.dense import DenseModel
from scheduler.backend import Work
from tests.engine.models import engine_of, feed, tiny_model
from tests.engine.test_fork import MODEL, cold, references, tokens_of


@pytest.mark.parametrize("page_tokens", [16, 48, 256, 0])
def test_a_resumed_session_has_other_pages_and_the_same_bits(page_tokens: int) -> None:
    engine = engine_of(MODEL, 3, 1024, page_tokens)
    mine, other = tokens_of(150), tokens_of(90, seed=6)
    feed(engine, 0, mine, 64)
    kept, before = engine.logits(0).clone(), list(engine.sessions[0].pages)
    k, v = (part[:, before].clone() for part in (engine.pool.k, engine.pool.v))
    engine.park(0)
    assert list(engine.tokens(0)) == mine
    assert torch.equal(engine.logits(0), kept)  # a token can still be drawn
    assert engine.held(0) == (0, 0, len(before))
    assert engine.room().free == engine.room().pages
    feed(engine, 1, other, 64)  # takes the lowest pages, and writes them
    assert engine.resume(0)
    after = engine.sessions[0].pages
    assert after != before
    assert torch.equal(engine.pool.k[:, after], k)
    assert torch.equal(engine.pool.v[:, after], v)
    engine.launch([Work(1, [3], True), Work(0, [7], True)])
    assert torch.equal(engine.logits(0), cold(MODEL, [*mine, 7]))
    assert torch.equal(engine.logits(1), cold(MODEL, [*other, 3]))
    references(engine)


@pytest.mark.parametrize("page_tokens", [16, 256])
def test_the_demo_model_parks_and_resumes_exactly(demo: DenseModel, page_tokens: int) -> None:
    path = decide(demo, 2, 512)
    mine, other = tokens_of(270, demo.config.vocab), tokens_of(300, demo.config.vocab, seed=9)
    engine = engine_of(demo, 2, 512, page_tokens, path)
    feed(engine, 0, mine, 512)
    engine.park(0)
    feed(engine, 1, other, 512)
    assert engine.resume(0)
    assert torch.equal(feed(engine, 0, [1, 2], 1), cold(demo, [*mine, 1, 2], path))


def test_what_a_session_on_the_device_holds_whole_stays_and_follows_when_that_goes() -> None:
    engine = engine_of(MODEL, 3, 512, 16)
    mine = tokens_of(100)
    feed(engine, 0, mine, 64)
    assert engine.fork(0, 1, 70)
    feed(engine, 1, [5] * 30, 30)
    engine.park(1)
    assert engine.held(1) == (4, 0, 3)  # the four whole pages of the fork
    assert engine.fork_point(1, 50) == 0
    engine.truncate(0, 40)  # two and a half pages: the third is going to be written
    engine.park(1)
    assert engine.held(1) == (2, 0, 5)
    feed(engine, 0, [8] * 30, 30)  # needs no copy
    engine.truncate(0, 0)
    engine.park(1)
    assert engine.held(1) == (0, 0, 7)
    assert engine.room().free == engine.room().pages
    assert engine.resume(1)
    assert torch.equal(feed(engine, 1, [1], 1), cold(MODEL, [*mine[:70], *[5] * 30, 1]))
    references(engine)


def test_pages_that_only_parked_sessions_share_are_free() -> None:
    engine = engine_of(MODEL, 3, 512, 16)
    mine = tokens_of(64)
    feed(engine, 0, mine, 64)
    for slot in (1, 2):
        assert engine.fork(0, slot, 64)
    engine.truncate(0, 0)
    for slot in (1, 2, 1):
        engine.park(slot)
    assert engine.room().free == engine.room().pages
    for slot in (2, 1):
        assert engine.resume(slot)
        assert torch.equal(feed(engine, slot, [slot], 1), cold(MODEL, [*mine, slot]))
    references(engine)


def test_a_session_that_finds_no_room_stays_parked_whole() -> None:
    engine = engine_of(MODEL, 2, 64, 16)
    mine = tokens_of(60)
    feed(engine, 0, mine, 60)
    engine.park(0)
    taken = engine.pool.take(5)
    assert not engine.resume(0)
    assert engine.held(0) == (0, 0, 4)
    assert engine.room().free == 3
    engine.pool.release(taken)
    assert engine.resume(0)
    assert torch.equal(feed(engine, 0, [1], 1), cold(MODEL, [*mine, 1]))


def test_a_parked_session_can_be_emptied_and_nothing_else() -> None:
    engine = engine_of(MODEL, 2, 64, 16)
    feed(engine, 0, tokens_of(40), 40)
    engine.park(0)
    with pytest.raises(ValueError, match="slot 0 is parked"):
        engine.launch([Work(0, [1], True)])
    assert not engine.truncate(0, 20)
    assert not engine.fork(0, 1, 20)
    assert engine.truncate(0, 0)
    assert engine.held(0) == (0, 0, 0)
    assert torch.equal(feed(engine, 0, [1, 2], 2), cold(MODEL, [1, 2]))
    references(engine)


def test_a_shortage_is_told_before_anything_is_launched() -> None:
    engine = engine_of(tiny_model(), 2, 64, 16)
    feed(engine, 0, tokens_of(40), 40)
    engine.pool.take(4)
    assert engine.shortage([Work(0, [1] * 8, True)]) == 0
    assert engine.shortage([Work(0, [1] * 9, True), Work(1, [1] * 17, True)]) == 2
    assert engine.fork(0, 1, 32)
    assert engine.truncate(1, 20)  # inside a page that the other holds: to be copied
    engine.pool.take(engine.pool.free)
    assert engine.shortage([Work(1, [1], True)]) == 1
