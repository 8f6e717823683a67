"""The promise through the scheduler when sessions fork, give way and are parked: every logit a token is drawn from equals a cold
run's, and every answer the one that a pool with room for everybody gives."""

from __future__ import annotations

import itertools

import pytest
import torch

from ds4batch.engine.exact import ExactPath, decide
from ds4batch.engine.models.dense import DenseModel
from ds4batch.engine.vocabulary import TokenizerVocabulary
from ds4batch.tokenizer import load_tokenizer
from scheduler import Options, Scheduler
from tests.engine.models import engine_of, feed
from tests.engine.test_reuse_exactness import LONG, Bench, Recording, user

CTX, SLOTS, PAGE = 256, 5, 16


@pytest.fixture(scope="module")
def path(demo: DenseModel) -> ExactPath:
    return decide(demo, SLOTS, 2064)


def bench_of(demo: DenseModel, demo_path: str, path: ExactPath, pages: int) -> Bench:
    plain = engine_of(demo, SLOTS, CTX, PAGE, path, pages)
    engine = Recording(demo, plain.pool, SLOTS, CTX, path)
    engine.rows = []
    words = TokenizerVocabulary(load_tokenizer(demo_path))
    options = Options(
        mixed_prefill_quantum=64,
        idle_prefill_quantum=256,
        itl_budget=0.1,
        max_queue=64,
        overlap=False,
        lookahead=1,
        self_check=True,
    )
    clock = itertools.count()
    return Bench(engine, words, Scheduler(engine, words, lambda: next(clock) * 1e-3, slots=SLOTS, options=options))


def play(bench: Bench) -> list[str]:
    """A main agent that talks on while three sub-agents come with the same beginning, and a stranger at the end."""
    main = bench.ask(LONG + user("Plan a garden."), max_tokens=30, ignore_eos=True)
    for _ in range(500):  # a failed answer has no text
        if bench.texts[main]:
            break
        bench.step()
    assert bench.texts[main]
    agents = [bench.ask(LONG + user(f"Name {i} flowers."), max_tokens=30, ignore_eos=True) for i in range(2, 5)]
    bench.run()
    stranger = bench.ask(user("Tell me of the sea."), max_tokens=8)
    bench.run()
    assert [bench.tiers[agent] for agent in agents] == ["fork"] * 3
    return [bench.texts[number] for number in (main, *agents, stranger)]


def test_forks_evictions_and_parks_give_the_bits_of_a_cold_run_and_the_answers_of_a_large_pool(
    demo: DenseModel, demo_path: str, path: ExactPath
) -> None:
    large = bench_of(demo, demo_path, path, 0)
    expected = play(large)
    assert large.scheduler.stats().pool.parks == 0
    small = bench_of(demo, demo_path, path, CTX // PAGE + 2)
    assert play(small) == expected
    pool = small.scheduler.stats().pool
    assert pool.parks == pool.resumes > 0
    assert pool.parked == 0
    cold = engine_of(demo, 1, CTX, path=path)
    rows = small.engine.rows
    assert len(rows) > 100
    for tokens, logits in rows[::30]:
        cold.truncate(0, 0)
        assert torch.equal(feed(cold, 0, tokens, 512), logits), f"after {len(tokens)} tokens"
    held = [page for session in small.engine.sessions for page in session.pages]
    assert small.engine.pool.free == small.engine.pool.pages - len(set(held))
