"""Operations are transactions: they happen whole or change nothing."""

from __future__ import annotations

import pytest
import torch

from ds4batch.engine.build import warm_up
from ds4batch.engine.engine import Engine
from ds4batch.engine.models.model import Output
from ds4batch.engine.rows import Rows
from scheduler.backend import BackendError, Work
from tests.engine.models import NATIVE, ORDERED, engine_of, feed, tiny_model

MODEL = tiny_model()


def fresh(slots: int = 3, ctx: int = 256, page_tokens: int = 0) -> Engine:
    return engine_of(MODEL, slots, ctx, page_tokens)


@pytest.mark.parametrize(
    ("work", "message"),
    [
        ([], "at least one row"),
        ([Work(0, [1], True), Work(0, [2], True)], "slot 0 appears twice"),
        ([Work(0, [1], True), Work(1, [199], True)], "token 199 for slot 1 is outside the vocabulary of 199"),
        ([Work(0, [1], True), Work(1, [-1], True)], "token -1 for slot 1"),
        ([Work(0, [1], True), Work(1, [], True)], "slot 1 brings no tokens"),
        ([Work(0, [1], True), Work(7, [1], True)], "slot 7 does not exist"),
        ([Work(1, [1], True), Work(0, [1] * 250, True)], "slot 0 would hold 260 tokens; its context is 256"),
    ],
)
def test_a_refused_launch_changes_no_session(work: list[Work], message: str) -> None:
    engine = fresh()
    feed(engine, 0, list(range(10)), 10)
    before = [list(s.tokens) for s in engine.sessions], engine.pool.free, engine.logits(0).clone()
    with pytest.raises(ValueError, match=message):
        engine.launch(work)
    assert ([list(s.tokens) for s in engine.sessions], engine.pool.free) == before[:2]
    assert torch.equal(engine.logits(0), before[2])


def test_no_pages_left_changes_no_session() -> None:
    engine = fresh(slots=2, ctx=64, page_tokens=16)
    engine.pool.take(4)
    feed(engine, 0, list(range(20)), 20)
    with pytest.raises(ValueError, match="KV pages wanted"):
        engine.launch([Work(1, [1], True), Work(0, [2] * 40, True)])
    assert (len(engine.tokens(0)), len(engine.tokens(1)), engine.pool.free) == (20, 0, 2)


def test_a_failing_device_empties_the_members_and_spares_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = fresh()
    for slot in range(3):
        feed(engine, slot, [slot + 1] * 8, 8)
    with monkeypatch.context() as patch:
        patch.setattr(type(MODEL), "forward", lambda *_: (_ for _ in ()).throw(RuntimeError("device lost")))
        with pytest.raises(BackendError, match="device lost"):
            engine.launch([Work(0, [5], True), Work(2, [6], True)])
    assert [len(engine.tokens(s)) for s in range(3)] == [0, 8, 0]
    with pytest.raises(ValueError, match="holds no logits"):
        engine.logits(0)
    again = feed(engine, 0, [1] * 8, 8)
    assert torch.equal(again, feed(fresh(), 0, [1] * 8, 8))
    assert torch.equal(feed(engine, 1, [7], 1), feed(fresh(), 0, [2] * 8 + [7], 9))


def test_values_that_are_not_finite_are_an_error_and_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = fresh()
    feed(engine, 1, [3] * 8, 8)
    real = type(MODEL).forward

    def poisoned(model: object, rows: Rows, pool: object) -> Output:
        output = real(MODEL, rows, engine.pool)
        engine.pool.v[:, engine.sessions[0].pages] = float("nan")
        return Output(output.logits, torch.zeros_like(output.finite))

    with monkeypatch.context() as patch:
        patch.setattr(type(MODEL), "forward", poisoned)
        with pytest.raises(BackendError, match="not finite"):
            engine.launch([Work(0, [5] * 4, True)])
    assert not engine.tokens(0)
    assert torch.isfinite(engine.pool.v).all()
    assert torch.equal(feed(engine, 0, [9], 1), feed(fresh(), 0, [9], 1))


def test_extreme_neighbours_change_nothing() -> None:
    model = tiny_model()
    model.embed[100:] *= 1e15  # tokens from 100 on bring huge activations
    alone, together = engine_of(model, 1, 256), engine_of(model, 3, 256)
    expected = feed(alone, 0, list(range(60)), 60)
    together.launch([Work(1, [150] * 50, True), Work(0, list(range(60)), True), Work(2, [101, 199 - 1], True)])
    assert torch.equal(together.logits(0), expected)
    for token in (1, 2, 3):
        together.launch([Work(1, [198], True), Work(2, [150], True), Work(0, [token], True)])
        assert torch.equal(together.logits(0), feed(alone, 0, [token], 1))


def test_a_session_at_its_context_takes_the_last_token_and_no_more() -> None:
    engine = fresh(slots=1, ctx=64)
    feed(engine, 0, [1] * 64, 64)
    with pytest.raises(ValueError, match="65 tokens"):
        engine.launch([Work(0, [1], True)])


def test_truncate_decides_before_it_touches() -> None:
    engine = fresh()
    feed(engine, 0, [1] * 8, 8)
    assert not engine.can_truncate(0, 9)
    assert not engine.truncate(0, 9)
    assert engine.logits(0) is not None
    assert engine.truncate(0, 3)
    assert list(engine.tokens(0)) == [1] * 3


def test_a_shared_page_is_copied_before_it_is_written() -> None:
    engine = fresh(slots=2, ctx=64, page_tokens=16)
    feed(engine, 0, list(range(40)), 40)
    donor, fork = engine.sessions
    engine.pool.share(donor.pages)
    fork.pages, fork.tokens = list(donor.pages), list(donor.tokens)
    assert torch.equal(feed(engine, 1, [77], 1), feed(fresh(1), 0, [*range(40), 77], 41))
    assert fork.pages[:2] == donor.pages[:2]
    assert fork.pages[2] != donor.pages[2]
    assert torch.equal(feed(engine, 0, [78], 1), feed(fresh(1), 0, [*range(40), 78], 41))


@pytest.mark.parametrize("path", [NATIVE, ORDERED])
@pytest.mark.parametrize("page_tokens", [16, 32, 0])
def test_tiny_model_is_exact_on_both_paths_and_any_page_size(path: object, page_tokens: int) -> None:
    tokens = [(i * 7919) % 199 for i in range(300)]
    alone = engine_of(MODEL, 1, 512, path=ORDERED)
    expected = feed(alone, 0, tokens, 1)
    engine = engine_of(MODEL, 2, 512, page_tokens, path)  # type: ignore[arg-type]
    for at in range(0, 300, 37):
        engine.launch([Work(1, tokens[at : at + 5], False), Work(0, tokens[at : at + 37], True)])
    assert torch.equal(engine.logits(0), expected)


@pytest.mark.parametrize(("slots", "ctx"), [(1, 64), (5, 512)])
def test_warming_up_leaves_every_session_empty_and_changes_no_answer(slots: int, ctx: int) -> None:
    engine = engine_of(MODEL, slots, ctx)
    warm_up(engine, 2048)
    assert not any(session.tokens or session.pages for session in engine.sessions)
    assert (engine.native_forwards, engine.fallbacks) == (0, {})
    assert torch.equal(feed(engine, 0, [7, 8, 9], 3), feed(engine_of(MODEL, 1, ctx), 0, [7, 8, 9], 3))
