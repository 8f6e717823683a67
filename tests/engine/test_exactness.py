"""The promise: a position's logits are the same bits whoever shares the batch and however the prompt was cut.

One oracle, the session alone and token by token; one comparison, torch.equal on full logits; the real demo model.
"""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest
import torch

from ds4batch.engine.engine import Engine
from ds4batch.engine.exact import ExactPath, decide
from ds4batch.engine.models.dense import DenseModel
from scheduler.backend import Work
from tests.engine.models import ORDERED, engine_of, feed

STEPS = 32
CTX = 1024
LENGTHS = (600, 1, 127, 128, 129, 17, 40, 3, 255, 64, 2, 16, 31, 90, 5, 33)


class Solo(NamedTuple):
    """One session alone: its prompt, the tokens it is fed after it, and the logits after the prompt and after each."""

    prompt: list[int]
    fed: list[int]
    logits: list[torch.Tensor]


@pytest.fixture(scope="module")
def path(demo: DenseModel) -> ExactPath:
    """What the start-up self-test decides here."""
    return decide(demo, 16, 2064)


@pytest.fixture(scope="module")
def solos(demo: DenseModel, path: ExactPath) -> list[Solo]:
    """Sixteen sessions, each run alone, one token a forward."""
    rnd = random.Random(11)
    found = []
    for length in LENGTHS:
        prompt = [rnd.randrange(demo.config.vocab) for _ in range(length)]
        fed = [rnd.randrange(demo.config.vocab) for _ in range(STEPS)]
        engine = engine_of(demo, 1, CTX, path=path)
        logits = [feed(engine, 0, prompt, 1)]
        logits += [feed(engine, 0, [token], 1) for token in fed]
        found.append(Solo(prompt, fed, logits))
    return found


def same(engine: Engine, slot: int, expected: torch.Tensor) -> bool:
    return torch.equal(engine.logits(slot), expected)


def test_the_native_path_is_taken_on_this_machine(path: ExactPath) -> None:
    assert path.native, path.reason


@pytest.mark.parametrize("sessions", [2, 8, 16])
def test_sessions_together_equal_each_alone(demo: DenseModel, path: ExactPath, solos: list[Solo], sessions: int) -> None:
    engine = engine_of(demo, sessions, CTX, path=path)
    engine.launch([Work(s, solos[s].prompt, True) for s in range(sessions)])
    assert all(same(engine, s, solos[s].logits[0]) for s in range(sessions))
    order = list(range(sessions))
    for step in range(STEPS):
        order = order[1:] + order[:1]
        engine.launch([Work(s, [solos[s].fed[step]], True) for s in order])
        wrong = [s for s in order if not same(engine, s, solos[s].logits[step + 1])]
        assert not wrong, f"step {step}: sessions {wrong} differ"
    assert engine.native_forwards == STEPS + 1
    assert not engine.fallbacks


def test_neighbours_that_come_and_go_change_nothing(demo: DenseModel, path: ExactPath, solos: list[Solo]) -> None:
    engine = engine_of(demo, 16, CTX, path=path)
    rnd = random.Random(3)
    target = solos[4]
    engine.launch([Work(9, target.prompt, True)])
    for step in range(STEPS):
        company = []
        for slot in rnd.sample([s for s in range(16) if s != 9], rnd.randrange(16)):
            if rnd.random() < 0.3:
                engine.truncate(slot, rnd.randrange(len(engine.tokens(slot)) + 1))
            count = rnd.choice((1, 1, 1, 2, 3, 4, 5, 40))
            company.append(Work(slot, [rnd.randrange(demo.config.vocab) for _ in range(count)], rnd.random() < 0.5))
        company.insert(rnd.randrange(len(company) + 1), Work(9, [target.fed[step]], True))
        engine.launch(company)
        assert same(engine, 9, target.logits[step + 1]), f"step {step} beside {[(w.slot, len(w.tokens)) for w in company]}"


@pytest.mark.parametrize("chunk", [16, 64, 128, 512])
def test_chunks_beside_decoders_equal_token_by_token(demo: DenseModel, path: ExactPath, solos: list[Solo], chunk: int) -> None:
    engine = engine_of(demo, 4, CTX, path=path)
    long = solos[0]
    engine.launch([Work(s, solos[s].prompt, True) for s in (1, 2, 3)])
    for step, at in enumerate(range(0, len(long.prompt), chunk)):
        rows = [Work(s, [solos[s].fed[step]], True) for s in (1, 2, 3)] if step < STEPS else []
        engine.launch([*rows[:2], Work(0, long.prompt[at : at + chunk], True), *rows[2:]])
        assert all(same(engine, w.slot, solos[w.slot].logits[step + 1]) for w in rows)
    assert same(engine, 0, long.logits[0])
    for i, token in enumerate(long.fed):
        engine.launch([Work(0, [token], True)])
        assert same(engine, 0, long.logits[i + 1])


@pytest.mark.parametrize("page_tokens", [16, 48, 256])
def test_the_page_size_changes_nothing(demo: DenseModel, path: ExactPath, solos: list[Solo], page_tokens: int) -> None:
    engine = engine_of(demo, 5, CTX, page_tokens, path)
    for step in range(9):  # sessions grow in turns, so that their pages interleave
        engine.launch(
            [
                Work(s, solos[s].prompt[step * 70 : (step + 1) * 70], True)
                for s in (0, 2, 4, 3, 8 - 7)
                if solos[s].prompt[step * 70 : (step + 1) * 70]
            ]
        )
    for step in range(8):
        assert all(same(engine, s, solos[s].logits[step]) for s in range(5))
        engine.launch([Work(s, [solos[s].fed[step]], True) for s in (3, 1, 4, 0, 2)])
    assert len(set(engine.sessions[0].pages)) == -(-608 // page_tokens)


def test_truncated_and_extended_equals_cold(demo: DenseModel, path: ExactPath, solos: list[Solo]) -> None:
    engine = engine_of(demo, 2, CTX, path=path)
    long, other = solos[0], solos[2]
    feed(engine, 0, long.prompt + long.fed, 512)
    for length in (599, 257, 256, 255, 128, 1, 0):
        assert engine.truncate(0, length)
        feed(engine, 0, other.prompt[:20], 20)  # a turn that is then edited away
        assert engine.truncate(0, length)
        engine.launch([Work(0, long.prompt[length:], True)])
        assert same(engine, 0, long.logits[0]), f"after truncation to {length}"
    for i, token in enumerate(long.fed):
        engine.launch([Work(0, [token], True)])
        assert same(engine, 0, long.logits[i + 1])


def test_a_slot_used_by_another_conversation_equals_a_fresh_one(demo: DenseModel, path: ExactPath, solos: list[Solo]) -> None:
    engine = engine_of(demo, 1, CTX, path=path)
    for solo in (solos[0], solos[2], solos[6], solos[8]):
        engine.truncate(0, 0)
        assert torch.equal(feed(engine, 0, solo.prompt, 600), solo.logits[0])


def test_the_ordered_path_gives_the_native_bits(demo: DenseModel, solos: list[Solo]) -> None:
    engine = engine_of(demo, 3, CTX, path=ORDERED)
    engine.launch([Work(s, solos[s].prompt, True) for s in (2, 1, 0)])
    for step in range(4):
        assert all(same(engine, s, solos[s].logits[step]) for s in range(3))
        engine.launch([Work(s, [solos[s].fed[step]], True) for s in (1, 0, 2)])
    assert engine.fallbacks == {ORDERED.reason: 5}
    assert engine.native_forwards == 0


def test_two_threads_and_one_give_the_same_bits(demo: DenseModel, path: ExactPath, solos: list[Solo]) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        engine = engine_of(demo, 16, CTX, path=path)
        engine.launch([Work(s, solos[s].prompt, True) for s in range(16)])
        assert all(same(engine, s, solos[s].logits[0]) for s in range(16))
    finally:
        torch.set_num_threads(before)
