"""The promise through the scheduler: whatever a conversation found in its slot, every logit it draws from equals a cold run's.

The real scheduler over the real engine and the demo model; each row a token is drawn from is kept and compared with a fresh
session that evaluates the same tokens in one piece.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pytest
import torch

from ds4batch.engine.engine import Engine
from ds4batch.engine.exact import ExactPath, decide
from ds4batch.engine.models.dense import DenseModel
from ds4batch.engine.output import Piece, TextOutput
from ds4batch.engine.sampler import Draw
from ds4batch.engine.vocabulary import TokenizerVocabulary
from ds4batch.messages import Sampling
from ds4batch.tokenizer import load_tokenizer
from scheduler import Job, Options, Routed, Scheduler
from scheduler.backend import Draws, Pick
from tests.engine.models import engine_of, feed

CTX = 2048


class Recording(Engine):
    """An engine that keeps every row it draws from, with the tokens before it."""

    rows: list[tuple[list[int], torch.Tensor]]

    def sample(self, picks: Sequence[Pick]) -> Draws:
        self.rows += [(list(self.tokens(pick.slot)), self.logits(pick.slot).clone()) for pick in picks]
        return super().sample(picks)


@dataclass
class Bench:
    """A scheduler over a recording engine."""

    engine: Recording
    words: TokenizerVocabulary
    scheduler: Scheduler
    ids: Iterator[int] = field(default_factory=itertools.count)
    tiers: dict[int, str] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)

    def ask(self, text: str, max_tokens: int = 6, tokens: list[int] | None = None, **sampling: object) -> int:
        """Submit a prompt; its id."""
        number = next(self.ids)
        self.texts[number] = ""

        def emit(piece: Piece) -> None:
            self.texts[number] += piece.text

        prompt = tokens or self.words.tokenise(text)
        draw = Draw(Sampling(**({"temperature": 0.0} | sampling)), prompt, self.words.stop_ids)  # type: ignore[arg-type]
        output = TextOutput(self.words.token_bytes, self.words.special_ids, [], emit)
        self.scheduler.submit(
            Job(
                id=number,
                tokens=prompt,
                text=text,
                max_tokens=max_tokens,
                sampling=draw,
                stop_tokens=self.words.stop_ids,
                api="chat",
                arrival=0.0,
                output=output,
            )
        )
        return number

    def step(self) -> None:
        for event in self.scheduler.step():
            if isinstance(event, Routed):
                self.tiers[event.job] = event.tier

    def run(self) -> None:
        while self.scheduler.busy:
            self.step()

    def turn(self, text: str, **rest: object) -> tuple[str, str]:
        """Ask and wait; the tier it was answered from, and the answer."""
        number = self.ask(text, **rest)  # type: ignore[arg-type]
        self.run()
        return self.tiers[number], self.texts[number]


@pytest.fixture(scope="module")
def path(demo: DenseModel) -> ExactPath:
    return decide(demo, 16, 2064)


@pytest.fixture
def bench(demo: DenseModel, demo_path: str, path: ExactPath) -> Bench:
    plain = engine_of(demo, 4, CTX, path=path)
    engine = Recording(demo, plain.pool, 4, CTX, path)
    engine.rows = []
    words = TokenizerVocabulary(load_tokenizer(demo_path))
    options = Options(
        mixed_prefill_quantum=64, idle_prefill_quantum=512, itl_budget=0.1, max_queue=64, overlap=False, rewind_min_tokens=32
    )
    clock = itertools.count()
    return Bench(engine, words, Scheduler(engine, words, lambda: next(clock) * 1e-3, slots=4, options=options))


@pytest.fixture
def all_equal_cold(bench: Bench, demo: DenseModel, path: ExactPath) -> Callable[[], int]:
    """Checks every kept row against a fresh session; how many there were."""

    def check() -> int:
        cold = engine_of(demo, 1, CTX, path=path)
        for tokens, logits in bench.engine.rows:
            cold.truncate(0, 0)
            assert torch.equal(feed(cold, 0, tokens, 512), logits), f"after {len(tokens)} tokens"
        assert bench.engine.native_forwards > 0
        assert not bench.engine.fallbacks
        return len(bench.engine.rows)

    return check


def user(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


LONG = "<|im_start|>system\n" + "Keep every rule of the house in mind when you answer. " * 12 + "<|im_end|>\n"


def test_each_tier_gives_the_bits_of_a_cold_run(bench: Bench, all_equal_cold: Callable[[], int]) -> None:
    first = LONG + user("What is the capital of Japan?")
    tier, answer = bench.turn(first)
    assert tier == "none"
    second = first + answer + user("And of France?")
    tier, answer = bench.turn(second)
    assert tier == "memory-token"
    assert bench.turn(second)[0] == "memory-rewind"  # a retry
    edited = second.replace("France", "Italy")
    assert bench.turn(edited)[0] == "memory-rewind"  # an edit of the last message
    tier, answer = bench.turn(edited, max_tokens=5)
    assert tier == "memory-rewind"
    assert all_equal_cold() >= 20


def test_the_text_tier_keeps_the_sampled_tokens_and_equals_a_cold_run_of_them(
    bench: Bench, all_equal_cold: Callable[[], int]
) -> None:
    text = user("Say hello.")
    # The same text cut into single characters: a history that a client sends back tokenises otherwise.
    odd = [
        t
        for piece in ("<|im_start|>", *"user\nSay hello.", "<|im_end|>", "\n", "<|im_start|>", *"assistant", "\n")
        for t in bench.words.tokenise(piece)
    ]
    assert odd != bench.words.tokenise(text)
    _, answer = bench.turn(text, tokens=odd)
    tier, _ = bench.turn(text + answer + user("Again."))
    assert tier == "memory-text"
    assert all_equal_cold() >= 8


def test_a_cancelled_neighbour_and_a_resumed_prefix_change_nothing(bench: Bench, all_equal_cold: Callable[[], int]) -> None:
    steady = bench.ask(user("Count from one to ten."), max_tokens=24)
    bench.step()
    doomed = bench.ask(LONG + user("Tell a story."), max_tokens=20)
    for _ in range(2):
        bench.step()
    bench.scheduler.cancel(doomed, "client")  # in the middle of its prefill
    other = bench.ask(user("Write a poem about rain."), max_tokens=20)
    for _ in range(5):
        bench.step()
    bench.scheduler.cancel(other, "client")  # in decode
    again = bench.ask(LONG + user("Tell a story."), max_tokens=6)
    bench.run()
    assert bench.tiers[again] == "memory-token"
    assert bench.texts[steady]
    assert all_equal_cold() >= 30


def test_sampled_text_with_a_seed_is_the_same_alone_and_in_company(bench: Bench, all_equal_cold: Callable[[], int]) -> None:
    asked = [user(f"Write a line about {what}.") for what in ("rain", "salt", "iron")]
    knobs = {"temperature": 1.1, "top_p": 0.95, "min_p": 0.02, "seed": 41, "max_tokens": 16}
    alone = [bench.turn(text, **knobs)[1] for text in asked]
    numbers = [bench.ask(text, **knobs) for text in [*asked, LONG + user("Anything.")]]  # type: ignore[arg-type]
    bench.run()
    assert [bench.texts[n] for n in numbers[:3]] == alone
    assert len(set(alone)) == 3
    assert all_equal_cold() >= 60
