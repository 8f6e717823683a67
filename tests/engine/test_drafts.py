"""Drafts that are right, wrong, cut and lost change no bit: full logits of sessions with them equal those of sessions without."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from ds4batch.engine.engine import Engine
from ds4batch.engine.models.dense import DenseModel
from ds4batch.engine.sampler import Draw
from ds4batch.messages import Sampling
from scheduler.backend import BackendError, Pick, Work
from tests.engine.models import CPU, NATIVE, ORDERED, engine_of, feed, tiny_model
from tests.engine.speculating import Decoded, Forced, assert_same, cycle, drafting, plainly, speculatively

pytestmark = pytest.mark.usefixtures("one_thread")

MODEL = tiny_model()
GREEDY = Draw(Sampling(temperature=0.0), [0], ())
PROMPTS = {0: [3, 1, 4, 1, 5], 1: [9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3], 2: [2, 7, 1, 8, 2, 8]}


def warm(seed: int) -> Draw:
    return Draw(Sampling(temperature=0.8, top_p=0.95, seed=seed), [0], ())


def run(
    model: DenseModel,
    rights: object,
    drafts: int,
    draws: dict[int, Draw],
    counts: dict[int, int],
    ctx: int = 256,
    plain: float = 0.0,
    prompts: dict[int, list[int]] = PROMPTS,
    **rest: object,
) -> tuple[dict[int, Decoded], dict[int, Decoded]]:
    """What sessions with drafts give, and what each gives alone without."""
    drafter = Forced(rights)  # type: ignore[arg-type]
    engine = drafting(model, len(prompts), ctx, drafter, drafts, **rest)
    expected = {slot: plainly(model, prompts[slot], draws[slot], counts[slot] + drafts, ctx) for slot in prompts}
    drafter.answers = {slot: one.tokens for slot, one in expected.items()}
    found = speculatively(engine, prompts, draws, counts, drafts, random.Random(drafts), plain)
    wanted = {
        slot: Decoded(one.tokens[: len(prompts[slot]) + counts[slot]], one.logits[: counts[slot]])
        for slot, one in expected.items()
    }
    return found, wanted


@pytest.mark.parametrize("path", [NATIVE, ORDERED], ids=["native", "ordered"])
@pytest.mark.parametrize(("drafts", "right"), [(k, j) for k in (1, 2, 3) for j in range(k + 1)])
def test_drafts_that_are_right_up_to_any_place(path: object, drafts: int, right: int) -> None:
    draws = dict.fromkeys(PROMPTS, GREEDY)
    found, expected = run(
        MODEL, lambda slot, at: [i < right for i in range(drafts)], drafts, draws, dict.fromkeys(PROMPTS, 20), path=path
    )
    for slot in PROMPTS:
        assert_same(found[slot], expected[slot])


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("page_tokens", [16, 0])
def test_mixes_of_plain_and_speculative_cycles_across_page_borders(seed: int, page_tokens: int) -> None:
    rnd = random.Random(seed)
    lots = {(slot, at): [rnd.random() < 0.7 for _ in range(rnd.randrange(4))] for slot in PROMPTS for at in range(300)}
    draws = {0: GREEDY, 1: warm(5), 2: warm(seed)}
    found, expected = run(
        MODEL, lambda slot, at: lots[slot, at], 3, draws, {0: 40, 1: 30, 2: 47}, plain=0.3, page_tokens=page_tokens
    )
    for slot in PROMPTS:
        assert_same(found[slot], expected[slot])


def test_tokens_that_were_sampled_with_a_seed_are_accepted_and_the_same() -> None:
    drafter = Forced(lambda slot, at: [True] * 3)
    engine = drafting(MODEL, 1, 256, drafter, 3)
    expected = plainly(MODEL, PROMPTS[0], warm(3), 43, 256)
    drafter.answers = {0: expected.tokens}
    found = speculatively(engine, {0: PROMPTS[0]}, {0: warm(3)}, {0: 40}, 3, random.Random(0))
    assert found[0].tokens == expected.tokens[: len(found[0].tokens)]
    assert engine.native_forwards == 1 + 10  # the prompt, then four tokens a forward: all drafts were right


def test_at_the_contexts_end_as_many_drafts_are_checked_as_fit() -> None:
    ctx, drafter = 64, Forced(lambda slot, at: [True] * 3)
    engine = drafting(MODEL, 1, ctx, drafter, 3)
    prompt = list(range(1, 58))
    expected = plainly(MODEL, prompt, GREEDY, 8, ctx)  # 7 are evaluated
    drafter.answers = {0: [*expected.tokens, 1, 1, 1]}
    engine.launch([Work(0, prompt, True)])
    found = Decoded(expected.tokens[:58], [engine.logits(0).clone()])
    assert engine.propose([(0, found.tokens[-1])], 3) == [3]
    cycle(engine, {0: found}, {0: GREEDY}, {0: 3}, {0: 4})
    assert engine.propose([(0, found.tokens[-1])], 3) == [3]
    with pytest.raises(ValueError, match="65 tokens; its context is 64"):
        engine.launch([Work(0, [found.tokens[-1]], True, 3)])
    cycle(engine, {0: found}, {0: GREEDY}, {0: 1}, {0: 4})
    assert engine.propose([(0, found.tokens[-1])], 3) == [3]
    with pytest.raises(ValueError, match="65 tokens; its context is 64"):
        engine.launch([Work(0, [found.tokens[-1]], True, 1)])
    cycle(engine, {0: found}, {0: GREEDY}, {0: 0}, {0: 4})
    assert len(engine.tokens(0)) == ctx
    assert_same(found, expected)
    with pytest.raises(ValueError, match="65 tokens"):
        engine.launch([Work(0, [1], True)])
    assert len(engine.tokens(0)) == ctx


def begun(rights: Sequence[bool] = (True, True), slots: int = 2, **rest: object) -> tuple[Engine, Forced, int]:
    """An engine whose slot 0 has read its prompt; and the token drawn for it, with drafts proposed."""
    drafter = Forced(lambda slot, at: rights)
    engine = drafting(MODEL, slots, 256, drafter, 3, **rest)
    drafter.answers = {slot: plainly(MODEL, PROMPTS[0], GREEDY, 12, 256).tokens for slot in range(slots)}
    engine.launch([Work(0, PROMPTS[0], True)])
    (one,) = engine.sample([Pick(0, GREEDY)]).wait()
    assert engine.propose([(0, one.token)], 3) == [len(rights)]
    return engine, drafter, one.token


def cold(tokens: Sequence[int]) -> torch.Tensor:
    return feed(engine_of(MODEL, 1, 256), 0, list(tokens), len(tokens))


def test_drafts_are_for_the_token_they_follow_and_for_one_launch() -> None:
    engine, _, token = begun()
    live = len(PROMPTS[0])
    for work in (Work(0, [token + 1], True, 1), Work(0, [token, 5], True, 1), Work(0, [token], True, 3), Work(1, [token], True, 1)):
        with pytest.raises(ValueError, match="were not proposed to follow"):
            engine.launch([work])
    assert len(engine.tokens(0)) == live
    engine.launch([Work(0, [token], True)])
    assert engine.truncate(0, live)
    with pytest.raises(ValueError, match="were not proposed to follow"):
        engine.launch([Work(0, [token], True, 1)])
    assert torch.equal(feed(engine, 0, [token], 1), cold([*PROMPTS[0], token]))


def test_what_is_done_to_a_session_drops_its_drafts() -> None:
    for change in (lambda e: e.truncate(0, 3), lambda e: e.truncate(0, 5), lambda e: e.fork(1, 0, 5)):
        engine, _, token = begun()
        engine.launch([Work(1, PROMPTS[0], True)])
        assert change(engine)
        with pytest.raises(ValueError, match="were not proposed to follow"):
            engine.launch([Work(0, [token], True, 1)])


def test_drafts_lie_behind_the_checkpoint_until_they_are_accepted() -> None:
    engine, drafter, token = begun((True, True, False))
    engine.launch([Work(0, [token], True, 3)])
    tokens = [*PROMPTS[0], token]
    assert list(engine.tokens(0)) == tokens
    with pytest.raises(ValueError, match="neither accepted nor cut"):
        engine.launch([Work(0, [1], True)])
    engine.sample([Pick(0, GREEDY, row) for row in range(4)]).wait()
    with pytest.raises(ValueError, match="no logits of row 4"):
        engine.sample([Pick(0, GREEDY, 4)])
    with pytest.raises(ValueError, match="4 drafts cannot be accepted"):
        engine.accept(0, 4)
    engine.accept(0, 1)
    engine.accept(0, 2)
    with pytest.raises(ValueError, match="1 drafts cannot be accepted"):
        engine.accept(0, 1)
    tokens += engine.drafts(0)[:2]
    assert list(engine.tokens(0)) == tokens == drafter.answers[0][: len(tokens)]
    assert torch.equal(engine.logits(0), cold(tokens))
    assert engine.truncate(0, len(tokens))
    assert torch.equal(engine.logits(0), cold(tokens))
    assert engine.drafts(0) == ()


def test_a_cut_takes_the_pages_that_drafts_had() -> None:
    engine, _, token = begun((True, True, True), page_tokens=4)
    engine.launch([Work(0, [token], True, 3)])
    assert len(engine.sessions[0].pages) == 3
    engine.truncate(0, len(engine.tokens(0)))
    assert (len(engine.sessions[0].pages), engine.pool.free) == (2, engine.pool.pages - 2)


def test_a_launch_whose_drafts_find_no_page_changes_nothing() -> None:
    engine, _, token = begun((True, True, True), page_tokens=4, pages=2)
    assert engine.shortage([Work(0, [token], True, 3)]) == 1
    with pytest.raises(ValueError, match="KV pages wanted"):
        engine.launch([Work(0, [token], True, 3)])
    engine.launch([Work(0, [token], True, 2)])  # what was proposed is still there
    assert len(engine.tokens(0)) == 6


def test_forks_of_a_session_with_drafts_behind_it_hold_what_was_accepted() -> None:
    engine, _, token = begun((True, True), slots=2, page_tokens=16)
    engine.launch([Work(0, [token], True, 2)])
    engine.accept(0, 1)
    tokens = list(engine.tokens(0))
    assert engine.fork_point(0, 99) == len(tokens)
    assert engine.fork(0, 1, len(tokens))
    assert torch.equal(feed(engine, 1, [42], 1), cold([*tokens, 42]))
    engine.truncate(0, len(tokens))
    assert torch.equal(feed(engine, 0, [43], 1), cold([*tokens, 43]))


def test_drafts_never_write_a_page_that_another_session_holds() -> None:
    engine, _, token = begun((False, True, False), slots=2, page_tokens=16)
    assert engine.fork(0, 1, 5)
    engine.pool.share(engine.sessions[0].pages)  # as if its last page were whole
    engine.sessions[1].pages = list(engine.sessions[0].pages)
    engine.launch([Work(0, [token], True, 3)])
    engine.truncate(0, 6)
    assert torch.equal(feed(engine, 1, [77], 1), cold([*PROMPTS[0], 77]))
    assert torch.equal(feed(engine, 0, [78], 1), cold([*PROMPTS[0], token, 78]))


@pytest.mark.parametrize("path", [NATIVE, ORDERED], ids=["native", "ordered"])
def test_a_forward_that_fails_with_drafts_in_it_loses_its_members(path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, drafter, token = begun(path=path)
    real = type(MODEL).forward
    with monkeypatch.context() as patch:
        patch.setattr(type(MODEL), "forward", lambda *args: (out := real(*args))._replace(finite=torch.zeros_like(out.finite)))
        with pytest.raises(BackendError, match="not finite"):
            engine.launch([Work(0, [token], True, 2)])
    assert not engine.tokens(0)
    assert not engine.drafts(0)
    assert drafter.told[-1] == ("cut", 0, 0)
    assert torch.equal(feed(engine, 0, [9], 1), cold([9]))


def test_a_drafter_that_fails_loses_those_it_drafted_for_and_nobody_else() -> None:
    engine, drafter, token = begun()
    engine.launch([Work(1, [7, 8], True)])
    drafter.fails = True
    with pytest.raises(BackendError, match="out of order"):
        engine.propose([(0, token)], 2)
    assert not engine.tokens(0)
    assert len(engine.tokens(1)) == 2
    with pytest.raises(ValueError, match="were not proposed"):
        engine.launch([Work(0, [token], True, 1)])
    assert torch.equal(feed(engine, 0, [9], 1), cold([9]))


def test_a_draft_that_is_no_token_is_a_failure_of_the_drafter() -> None:
    engine, drafter, token = begun()
    drafter.answers[0][6] = 199
    with pytest.raises(BackendError, match="outside the vocabulary"):
        engine.propose([(0, token)], 2)
    assert not engine.tokens(0)


def test_draws_that_depend_on_one_another_are_not_begun_together() -> None:
    engine, _, token = begun()
    engine.launch([Work(0, [token], True, 2)])
    counting = Draw(Sampling(temperature=0.0, repetition_penalty=1.3), PROMPTS[0], ())
    assert not engine.independent(counting)
    assert engine.independent(Draw(Sampling(temperature=1.0, seed=1, logprobs=2), [0], ()))
    with pytest.raises(ValueError, match="depend on one another"):
        engine.sample([Pick(0, counting, 0), Pick(0, counting, 1)])


def test_an_engine_without_a_drafter_drafts_nothing() -> None:
    engine = engine_of(MODEL, 1, 64)
    assert not engine.can_draft(0)
    assert engine.propose([(0, 5)], 3) == [0]


@pytest.mark.parametrize("path", [NATIVE, ORDERED], ids=["native", "ordered"])
def test_a_drafter_is_told_of_every_row_and_every_change(path: object) -> None:
    drafter = Forced(lambda slot, at: [True, False], wants_hidden=True)
    engine = drafting(MODEL, 2, 256, drafter, 2, path=path)
    drafter.answers = {0: plainly(MODEL, PROMPTS[0], GREEDY, 12, 256).tokens}
    engine.launch([Work(0, PROMPTS[0], True)])
    token = drafter.answers[0][5]
    engine.propose([(0, token)], 2)
    engine.launch([Work(1, PROMPTS[1], False), Work(0, [token], True, 2)])
    engine.sample([Pick(0, GREEDY, row) for row in range(3)]).wait()
    engine.accept(0, 1)
    engine.truncate(0, 7)
    engine.fork(0, 1, 4)
    noted = [(slot, at) for kind, slot, at, *_ in drafter.told if kind == "note"]
    assert set(drafter.hidden) == {*((0, i) for i in range(8)), *((1, i) for i in range(11))}
    assert noted[0] == (0, 0)
    assert drafter.told[-2:] == [("cut", 0, 7), ("fork", 0, 1, 4)]
    alone = Forced(lambda slot, at: [], wants_hidden=True)
    drafting(MODEL, 1, 256, alone, 0).launch([Work(0, drafter.answers[0][:7], True)])
    for at in range(7):
        assert torch.equal(drafter.hidden[0, at], alone.hidden[0, at])
    normed = torch.nn.functional.rms_norm(alone.hidden[0, 6][None], (64,), MODEL.norm, MODEL.config.norm_eps)
    assert torch.allclose(MODEL.head.precise(normed.to(CPU, MODEL.dtype))[0], cold(drafter.answers[0][:7]), atol=1e-4)


def test_a_session_that_comes_from_elsewhere_is_told_to_the_drafter_and_has_no_drafts() -> None:
    engine, drafter, token = begun()
    engine.replaced(0)
    assert drafter.told[-1] == ("replaced", 0, len(PROMPTS[0]))
    with pytest.raises(ValueError, match="were not proposed to follow"):
        engine.launch([Work(0, [token], True, 1)])
