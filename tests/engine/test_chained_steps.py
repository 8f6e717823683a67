"""A token that goes from its draw into the next forward before the host knows it: the same tokens, and sessions that tell the truth.

The device is a stand-in on the CPU: it evaluates with the model's own forward and keeps the drawn tokens where a card would.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from ds4batch.engine.engine import Engine
from ds4batch.engine.models.model import Output
from ds4batch.engine.rows import Layout, Segment, plan
from ds4batch.engine.sampler import Draw, draw
from ds4batch.messages import Sampling
from scheduler.backend import CHAINED, BackendError, Pick, Work
from tests.engine.models import CPU, NATIVE, engine_of, feed, tiny_model
from triton_kernels.embedding import named

MODEL = tiny_model()
GREEDY = Draw(Sampling(temperature=0.0), [0], ())
WARM = Draw(Sampling(temperature=1.0, seed=5), [0], ())


class Fetched:
    """Tokens and flags as a copy from the device brings them."""

    def __init__(self, tokens: list[int], finite: bool) -> None:
        self.result = tokens, finite

    def wait(self) -> tuple[list[int], bool]:
        return self.result


class Sampler:
    """Draws on the host, and leaves the tokens where forwards find them."""

    def __init__(self, drawn: torch.Tensor) -> None:
        self.drawn = drawn

    def launch(
        self, logits: torch.Tensor, draws: Sequence[Draw], positions: Sequence[int], flags: Sequence[torch.Tensor]
    ) -> Fetched:
        rows = zip(logits, draws, positions, strict=True)
        tokens = [draw(row.numpy(), state, position).token for row, state, position in rows]
        self.drawn[: len(tokens)] = torch.tensor(tokens)
        return Fetched(tokens, all(bool(flag) for flag in flags))


def chaining(slots: int = 3, ctx: int = 256) -> Engine:
    """An engine whose forward takes the tokens that rows name from the last draws."""
    plain = engine_of(MODEL, slots, ctx)
    drawn = torch.zeros(slots, dtype=torch.int64)
    layout = Layout(plain.pool.shape.page_tokens, 3, CPU, NATIVE.row_multiple)

    def forward(segments: Sequence[Segment]) -> tuple[Output, list[int]]:
        known = []
        for segment in segments:
            known.append(segment._replace(tokens=named(torch.tensor(segment.tokens), drawn).tolist()))
        owners = [i for i, segment in enumerate(known) if segment.wants_logits]
        return MODEL.forward(plan(known, layout), plain.pool), owners

    return Engine(MODEL, plain.pool, slots, ctx, NATIVE, forward, Sampler(drawn))  # type: ignore[arg-type]


PROMPTS = {0: [3, 1, 4, 1, 5], 1: [9, 2, 6], 2: [5, 3, 5, 8, 9, 7, 9]}


def begin(engine: Engine, slots: Sequence[int]) -> None:
    engine.launch([Work(slot, PROMPTS[slot], True) for slot in slots])


def one_by_one(slot: int, state: Draw, count: int) -> list[int]:
    """What the slot's prompt alone brings when every token is waited for."""
    engine = engine_of(MODEL, 1, 256)
    feed(engine, 0, PROMPTS[slot], 9)
    drawn: list[int] = []
    for _ in range(count):
        (one,) = engine.sample([Pick(0, state)]).wait()
        drawn.append(one.token)
        engine.launch([Work(0, [one.token], True)])
    return drawn


def test_chained_tokens_are_those_of_a_host_that_waits() -> None:
    engine = chaining()
    states = {0: GREEDY, 1: WARM, 2: GREEDY}
    begin(engine, [0, 1, 2])
    order = [2, 0, 1]
    earlier = engine.sample([Pick(slot, states[slot]) for slot in order])
    found: dict[int, list[int]] = {slot: [] for slot in order}
    for _ in range(20):
        engine.launch([Work(slot, CHAINED, True) for slot in order])
        later = engine.sample([Pick(slot, states[slot]) for slot in order])
        for slot, one in zip(order, earlier.wait(), strict=True):
            found[slot].append(one.token)
            assert list(engine.tokens(slot)) == PROMPTS[slot] + found[slot]
        earlier, order = later, order
    for slot in order:
        assert found[slot] == one_by_one(slot, states[slot], 20)


def test_a_row_that_ended_is_cut_and_the_session_goes_on_as_if_it_had_not_been_longer() -> None:
    engine = chaining()
    begin(engine, [0, 1])
    earlier = engine.sample([Pick(0, GREEDY), Pick(1, GREEDY)])
    engine.launch([Work(0, CHAINED, True), Work(1, CHAINED, True)])
    later = engine.sample([Pick(0, GREEDY), Pick(1, GREEDY)])
    earlier.wait()
    assert engine.truncate(0, len(PROMPTS[0]))
    later.wait()
    assert list(engine.tokens(0)) == PROMPTS[0]
    assert torch.equal(feed(engine, 0, [42], 1), feed(engine_of(MODEL, 1, 256), 0, [*PROMPTS[0], 42], 9))
    assert len(engine.tokens(1)) == len(PROMPTS[1]) + 1


def test_prefill_beside_chained_rows_and_a_prompt_that_joins_them() -> None:
    engine = chaining()
    begin(engine, [0])
    drawing = engine.sample([Pick(0, GREEDY)])
    engine.launch([Work(0, CHAINED, True), Work(1, PROMPTS[1], True)])
    later = engine.sample([Pick(0, GREEDY), Pick(1, GREEDY)])
    drawing.wait()
    engine.launch([Work(1, CHAINED, True), Work(0, CHAINED, True)])
    later.wait()
    assert list(engine.tokens(0)) == PROMPTS[0] + one_by_one(0, GREEDY, 2)
    assert list(engine.tokens(1)) == PROMPTS[1] + one_by_one(1, GREEDY, 1)


def test_values_that_are_not_finite_show_when_the_draws_are_waited_for_and_empty_every_member(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = chaining()
    begin(engine, [0, 1, 2])
    drawing = engine.sample([Pick(0, GREEDY), Pick(1, GREEDY)])
    real = type(MODEL).forward
    with monkeypatch.context() as patch:
        patch.setattr(type(MODEL), "forward", lambda *args: (out := real(*args))._replace(finite=torch.zeros_like(out.finite)))
        engine.launch([Work(0, CHAINED, True), Work(1, [7] * 4, False)])
    bad = engine.sample([Pick(0, GREEDY)])
    drawing.wait()
    engine.launch([Work(0, CHAINED, True)])
    after = engine.sample([Pick(0, GREEDY)])
    with pytest.raises(BackendError, match=r"not finite \(slots \[0, 1\]\)"):
        bad.wait()
    assert [len(engine.tokens(slot)) for slot in range(3)] == [0, 0, len(PROMPTS[2])]
    after.wait()  # of a row that nobody owns any more
    assert not engine.tokens(0)
    assert torch.equal(feed(engine, 0, [9], 1), feed(engine_of(MODEL, 1, 256), 0, [9], 1))


def test_what_cannot_be_chained_is_refused_with_no_session_changed() -> None:
    engine = chaining()
    with pytest.raises(ValueError, match="slot 0 was not drawn for"):
        engine.launch([Work(0, CHAINED, True)])
    begin(engine, [0, 1])
    drawing = engine.sample([Pick(0, GREEDY)])
    with pytest.raises(ValueError, match="slot 1 was not drawn for"):
        engine.launch([Work(0, CHAINED, True), Work(1, CHAINED, True)])
    engine.launch([Work(0, CHAINED, True)])
    with pytest.raises(ValueError, match="slot 0 has a token that was not waited for"):
        engine.launch([Work(0, [1], True)])
    drawing.wait()
    assert list(engine.tokens(0)) == PROMPTS[0] + one_by_one(0, GREEDY, 1)
    engine.sample([Pick(0, GREEDY)]).wait()
    with pytest.raises(ValueError, match="slot 0 was not drawn for"):
        engine.launch([Work(0, CHAINED, True)])  # the host knows the token


def test_a_draw_that_needs_the_host_is_not_chained() -> None:
    counting = Draw(Sampling(temperature=0.0, repetition_penalty=1.3), PROMPTS[0], ())
    assert chaining().can_chain(0, GREEDY)
    assert not chaining().can_chain(0, counting)
    assert not engine_of(MODEL, 1, 64).can_chain(0, GREEDY)


def test_a_draw_on_the_host_may_follow_a_chained_row() -> None:
    counting = Draw(Sampling(temperature=0.0, repetition_penalty=1.3), PROMPTS[1], ())
    engine = chaining()
    begin(engine, [0])
    earlier = engine.sample([Pick(0, GREEDY)])
    engine.launch([Work(0, CHAINED, True), Work(1, PROMPTS[1], True)])
    later = engine.sample([Pick(0, GREEDY), Pick(1, counting)])
    tokens = [earlier.wait()[0].token, later.wait()[0].token]
    assert tokens == one_by_one(0, GREEDY, 2)
