"""The promise of the hybrid family, whose state cannot be shortened: a position's logits are the same bits however it was reached.

One oracle, the session alone and token by token; one comparison, torch.equal on full logits. The widths of the model are no multiples
of a vector register, so that what is left over at the ends of rows is compared too.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from ds4batch.engine.build import build
from ds4batch.engine.engine import Engine
from ds4batch.engine.exact import ExactPath, decide
from ds4batch.engine.models.gated_delta import BLOCK
from ds4batch.engine.models.hybrid import HybridModel, extra_need
from ds4batch.engine.models.hybrid_load import loaded_bytes
from ds4batch.engine.models.moe import Mixture, mixture
from ds4batch.engine.rows import Layout, Segment, plan
from ds4batch.engine.weights.config import ModelError
from ds4batch.engine.weights.source import open_weights
from ds4batch.settings import Settings
from scheduler.backend import BackendError, Work
from tests.engine.hybrid_models import DENSE, NEXT, SPARSE, VOCAB, load, one_thread, save
from tests.engine.models import CPU, NATIVE, ORDERED, engine_of, feed

CTX = 384
LENGTH = 200
SESSIONS = 4


class Family(NamedTuple):
    """A model, what the start-up self-test decides for it, sessions' tokens, and their logits alone and token by token."""

    model: HybridModel
    path: ExactPath
    directory: Path
    tokens: list[list[int]]
    logits: list[list[torch.Tensor]]


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(
    scope="module",
    params=[(*NEXT, torch.float32), (*NEXT, torch.bfloat16), (*DENSE, torch.bfloat16), (*SPARSE, torch.float32)],
    ids=["next-fp32", "next-bf16", "dense-bf16", "sparse-fp32"],
)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    name, changes, dtype = request.param
    directory = tmp_path_factory.mktemp("model")
    save(name, changes, directory)
    rnd = random.Random(11)
    with one_thread():
        model = load(directory, dtype, CTX)
        path = decide(model, SESSIONS, 256)
        lengths = [LENGTH] + [40] * (SESSIONS - 1)
        tokens = [[rnd.randrange(VOCAB) for _ in range(length)] for length in lengths]
        logits = []
        for own in tokens:
            engine = engine_of(model, 1, CTX, path=path)
            logits.append([feed(engine, 0, [token], 1) for token in own])
    return Family(model, path, directory, tokens, logits)


def engine_for(family: Family, slots: int = SESSIONS, path: ExactPath | None = None, page_tokens: int = 0) -> Engine:
    return engine_of(family.model, slots, CTX, page_tokens, path or family.path)


def same(engine: Engine, slot: int, expected: torch.Tensor) -> bool:
    return torch.equal(engine.logits(slot), expected)


def test_the_native_path_is_taken_on_this_machine(family: Family) -> None:
    assert family.path.native, family.path.reason


@pytest.mark.parametrize("chunk", [2, 3, 4, 5, 7, 16, 31, 64, BLOCK - 1, BLOCK, BLOCK + 1, LENGTH])
def test_chunks_of_any_size_equal_token_by_token(family: Family, chunk: int) -> None:
    engine = engine_for(family, 1)
    for at in range(0, LENGTH, chunk):
        piece = family.tokens[0][at : at + chunk]
        engine.launch([Work(0, piece, True)])
        assert same(engine, 0, family.logits[0][at + len(piece) - 1]), f"at {at}"


def test_company_that_comes_and_goes_changes_nothing(family: Family) -> None:
    engine = engine_for(family, page_tokens=16)
    rnd = random.Random(3)
    for _ in range(40):
        work = []
        for slot in rnd.sample(range(SESSIONS), rnd.randrange(1, SESSIONS + 1)):
            done, own = len(engine.tokens(slot)), family.tokens[slot]
            if done == len(own):
                assert engine.truncate(slot, 0)
                done = 0
            count = rnd.choice((1, 1, 1, 2, 5, 13))
            work.append(Work(slot, own[done : done + count], True))
        engine.launch(work)
        shown = [(w.slot, len(w.tokens)) for w in work]
        assert all(same(engine, w.slot, family.logits[w.slot][len(engine.tokens(w.slot)) - 1]) for w in work), shown


def test_neighbouring_sessions_that_decode_together_equal_each_alone(family: Family) -> None:
    engine = engine_for(family)
    order = list(range(SESSIONS))
    for step in range(12):
        order = order[1:] + order[:1]
        engine.launch([Work(s, [family.tokens[s][step]], True) for s in order])
        assert all(same(engine, s, family.logits[s][step]) for s in order), f"step {step}"


def test_a_marked_point_can_be_returned_to_again_and_again(family: Family) -> None:
    engine, own = engine_for(family, 2), family.tokens[0]
    engine.launch([Work(0, own[:90], False), Work(1, family.tokens[1][:5], False)])
    engine.mark(0)
    for other in (own[::-1][:33], own[:1], own[90:150]):
        engine.launch([Work(0, other, False)])
        assert engine.truncate(0, 90)
        assert engine.tokens(0) == own[:90]
    engine.launch([Work(0, own[90:], True), Work(1, family.tokens[1][5:6], True)])
    assert same(engine, 0, family.logits[0][-1])
    assert same(engine, 1, family.logits[1][5])
    assert engine.truncate(0, 90)
    for at in range(90, 95):
        engine.launch([Work(0, [own[at]], True)])
        assert same(engine, 0, family.logits[0][at])


def test_any_other_length_is_refused_and_nothing_changes(family: Family) -> None:
    engine, own = engine_for(family, 1), family.tokens[0]
    engine.launch([Work(0, own[:30], False)])
    engine.mark(0)
    engine.launch([Work(0, own[30:60], False)])
    allowed = {0, 30, 60}
    assert {n for n in range(-1, 70) if engine.can_truncate(0, n)} == allowed
    for length in set(range(-1, 70)) - allowed:
        assert not engine.truncate(0, length)
    assert engine.truncate(0, 60)
    engine.launch([Work(0, own[60:61], True)])
    assert same(engine, 0, family.logits[0][60])
    assert engine.truncate(0, 30)
    assert {n for n in range(70) if engine.can_truncate(0, n)} == {0, 30}
    assert engine.truncate(0, 0)
    assert {n for n in range(70) if engine.can_truncate(0, n)} == {0}
    engine.launch([Work(0, own[:70], True)])
    assert same(engine, 0, family.logits[0][69])
    assert not engine.can_truncate(0, 30), "a saved point outlived the tokens it was made of"


def test_a_slot_used_by_another_conversation_equals_a_fresh_one(family: Family) -> None:
    engine = engine_for(family, 1)
    for slot in (1, 0, 2):
        engine.truncate(0, 0)
        assert torch.equal(feed(engine, 0, family.tokens[slot], 64), family.logits[slot][-1])


def with_keys_of(engine: Engine, source: int, length: int, target: Engine, slot: int) -> None:
    """Give a slot of `target` copies of the keys, values and tokens that a slot of `engine` has; its state is the caller's."""
    session, given = engine.sessions[source], target.sessions[slot]
    given.pages += target.pool.take(given.pages_missing(length))
    for mine, theirs in zip(session.pages, given.pages, strict=False):
        target.pool.k[:, theirs] = engine.pool.k[:, mine]
        target.pool.v[:, theirs] = engine.pool.v[:, mine]
    given.tokens += session.tokens[:length]


@pytest.mark.parametrize("length", [70, 100])
def test_a_snapshot_restored_elsewhere_continues_with_the_same_bits(family: Family, length: int) -> None:
    engine, own = engine_for(family, 1), family.tokens[0]
    engine.launch([Work(0, own[:70], False)])
    engine.mark(0)
    engine.launch([Work(0, own[70:100], False)])
    assert engine.pool.state is not None
    data = engine.pool.state.snapshot(0, 100, length)
    other = engine_for(family)
    other.launch([Work(2, family.tokens[1], False)])
    other.mark(2)
    other.truncate(2, 0)
    assert other.pool.state is not None
    other.pool.state.restore(2, data)
    with_keys_of(engine, 0, length, other, 2)
    other.launch([Work(2, own[length:], True), Work(1, family.tokens[1][:3], True)])
    assert same(other, 2, family.logits[0][-1])
    assert same(other, 1, family.logits[1][2])
    with pytest.raises(ValueError, match="none of 80"):
        engine.pool.state.snapshot(0, 100, 80)


def test_a_snapshot_of_another_size_is_refused_and_nothing_changes(family: Family) -> None:
    engine, own = engine_for(family, 1), family.tokens[0]
    engine.launch([Work(0, own[:20], False)])
    assert engine.pool.state is not None
    data = engine.pool.state.snapshot(0, 20, 20)
    for broken in (b"", data[:-1], data + b"\0"):
        with pytest.raises(ValueError, match="bytes is expected"):
            engine.pool.state.restore(0, broken)
    engine.launch([Work(0, own[20:30], True)])
    assert same(engine, 0, family.logits[0][29])


@pytest.mark.parametrize("length", [50, 80])
def test_a_fork_at_a_saved_point_and_its_source_both_continue_with_the_same_bits(family: Family, length: int) -> None:
    engine, own = engine_for(family), family.tokens[0]
    engine.launch([Work(1, own[:50], False)])
    engine.mark(1)
    engine.launch([Work(1, own[50:80], False)])
    assert engine.pool.state is not None
    with pytest.raises(ValueError, match="none of 60"):
        engine.pool.state.fork(1, 80, 3, 60)
    engine.pool.state.fork(1, 80, 3, length)
    with_keys_of(engine, 1, length, engine, 3)
    engine.launch([Work(3, own[length:], True), Work(1, own[80:90], True)])
    assert same(engine, 3, family.logits[0][-1])
    assert same(engine, 1, family.logits[0][89])
    assert {n for n in range(201) if engine.can_truncate(3, n)} == {0, LENGTH}


def test_a_failed_forward_empties_its_sessions_and_leaves_nothing_behind(family: Family) -> None:
    engine, own = engine_for(family), family.tokens[0]
    engine.launch([Work(s, family.tokens[s][:20], False) for s in range(SESSIONS)])
    engine.mark(1)
    assert engine.pool.state is not None
    engine.pool.state.matrix[:, 1] = float("nan")
    with pytest.raises(BackendError):
        engine.launch([Work(1, own[:1], True), Work(2, family.tokens[2][20:21], True)])
    assert [len(engine.tokens(s)) for s in range(SESSIONS)] == [20, 0, 0, 20]
    assert not engine.can_truncate(1, 20)
    engine.launch([Work(1, own[:60], True), Work(0, own[20:40], True), Work(2, family.tokens[2], True)])
    assert same(engine, 1, family.logits[0][59])
    assert same(engine, 0, family.logits[0][39])
    assert same(engine, 2, family.logits[2][-1])


def test_the_ordered_path_gives_the_native_bits(family: Family) -> None:
    engine = engine_for(family, path=ORDERED)
    engine.launch([Work(s, family.tokens[s][:25], True) for s in (2, 0, 1)])
    assert all(same(engine, s, family.logits[s][24]) for s in range(3))
    engine.launch([Work(s, family.tokens[s][25:40], True) for s in (1, 0)])
    assert all(same(engine, s, family.logits[s][39]) for s in range(2))
    assert engine.native_forwards == 0


def test_two_threads_and_one_give_the_same_bits(family: Family) -> None:
    torch.set_num_threads(2)
    engine = engine_for(family)
    engine.launch([Work(s, own[:12], True) for s, own in enumerate(family.tokens)])
    assert all(same(engine, s, family.logits[s][11]) for s in range(SESSIONS))


def test_the_memory_that_is_planned_for_is_what_weights_and_states_take(family: Family) -> None:
    model, config = family.model, family.model.config
    planned = loaded_bytes(open_weights(str(family.directory)), config, CPU, model.dtype)
    assert planned == model.bytes
    assert extra_need(config).session * SESSIONS == model.new_state(SESSIONS).nbytes


def test_start_up_builds_an_engine_that_gives_the_same_bits(family: Family) -> None:
    dtype = "fp32" if family.model.dtype == torch.float32 else "bf16"
    settings = Settings(model=str(family.directory), ctx=CTX, batched_session=2, dtype=dtype, device="cpu", threads=1)
    engine = build(settings, family.path).engine
    engine.launch([Work(1, family.tokens[1], True)])
    assert same(engine, 1, family.logits[1][-1])
    assert not engine.can_truncate(1, 3)


def test_a_card_is_refused_before_anything_is_loaded(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ds4batch.engine.build.choose_device", lambda name: torch.device("cuda"))
    with pytest.raises(ModelError, match="use --device cpu"):
        build(Settings(model=str(family.directory), ctx=CTX, batched_session=2))


@pytest.mark.parametrize("multiple", [4, 16])
def test_a_row_of_a_mixture_is_the_same_bits_whatever_rows_its_experts_share(family: Family, multiple: int) -> None:
    layer = next((one.mlp for one in family.model.layers if isinstance(one.mlp, Mixture)), None)
    if layer is None:
        pytest.skip("this model has no experts")
    config = family.model.config
    x = torch.randn(64, config.hidden, generator=torch.Generator().manual_seed(9)).to(family.model.dtype)

    def evaluate(inputs: torch.Tensor, count: int) -> torch.Tensor:
        rows = plan([Segment([0], 0, [0] * count, False)], Layout(128, 2, CPU, multiple))
        with torch.inference_mode():
            return mixture(inputs[: len(rows.tokens)], layer, config, rows)[:count]

    whole = evaluate(x, 64)
    assert all(torch.equal(evaluate(x, count), whole[:count]) for count in range(1, 65))
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    assert torch.equal(evaluate(x[order], 64), whole[order])


def test_equal_chances_choose_the_lower_expert(family: Family) -> None:
    layer = next((one.mlp for one in family.model.layers if isinstance(one.mlp, Mixture)), None)
    if layer is None:
        pytest.skip("this model has no experts")
    config = family.model.config
    x = torch.zeros(4, config.hidden, dtype=family.model.dtype)
    x[:] = torch.randn(config.hidden, generator=torch.Generator().manual_seed(2))
    flat = layer._replace(router=type(layer.router)(torch.zeros(layer.router.shape, dtype=family.model.dtype)))
    first = flat._replace(experts=layer.experts[: config.top_k])  # any other would be out of range
    rows = plan([Segment([0], 0, [0] * 4, False)], Layout(128, 2, CPU, NATIVE.row_multiple))
    with torch.inference_mode():
        assert torch.equal(mixture(x, flat, config, rows), mixture(x, first, config, rows))
