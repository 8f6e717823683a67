"""Whatever rung of the ladder a turn was answered from, every logit row it draws from has the bits of a cold run of its tokens.

The real scheduler over the demo model and small random ones, dense and with a recurrent state. Clients write calls in their own way,
leave the reasoning out, retry and edit; the plain tiers are in test_reuse_exactness.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from ds4batch.engine.engine import Engine
from ds4batch.engine.models.dense import DenseModel
from ds4batch.engine.models.model import Model
from ds4batch.engine.sampler import Draw
from ds4batch.messages import Sampling
from scheduler import Answered, Job, Options, Routed, Sampled, Scheduler, Verdict
from scheduler.backend import Draws, Pick
from scheduler.bindings import Continuation, Keys
from scheduler.fake import FakeText
from tests.engine.hybrid_models import DENSE, load, one_thread, save
from tests.engine.models import engine_of, feed, tiny_model

CTX = 512
OPEN = "<|assistant|>"
TEXT = FakeText()
CALLS = frozenset({"call_1"})


class Recording(Engine):
    """An engine that keeps every row it draws from, with the tokens before it."""

    rows: list[tuple[list[int], torch.Tensor]]

    def sample(self, picks: Sequence[Pick]) -> Draws:
        self.rows += [(list(self.tokens(pick.slot)), self.logits(pick.slot).clone()) for pick in picks]
        return super().sample(picks)


class SixTokens:
    """An answer that ends by itself."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def push(self, sampled: Sampled) -> Verdict | None:
        self.tokens.append(sampled.token)
        return Verdict("stop", 6) if len(self.tokens) == 6 else None

    def finish(self, reason: Answered) -> Answered:
        return reason


class Desk:
    """One slot, asked turn by turn."""

    def __init__(self, model: Model, page_tokens: int) -> None:
        self.model = model
        pool = engine_of(model, 1, CTX, page_tokens).pool
        self.engine = Recording(model, pool, 1, CTX, engine_of(model, 1, CTX).path)
        self.engine.rows = []
        options = Options(mixed_prefill_quantum=16, idle_prefill_quantum=32, itl_budget=0.1, max_queue=4, rewind_min_tokens=16)
        clock = itertools.count()
        self.scheduler = Scheduler(self.engine, TEXT, lambda: next(clock) * 1e-3, slots=1, options=options)
        self.ids = itertools.count(1)

    def ask(self, text: str, keys: Keys | None = None, continues: Continuation | None = None) -> tuple[Routed, Job]:
        """A turn; how it was placed."""
        tokens = TEXT.tokenise(text)
        draw = Draw(Sampling(temperature=0.0), tokens, frozenset())
        job = Job(
            id=next(self.ids), tokens=tokens, text=text, max_tokens=20, sampling=draw, stop_tokens=frozenset(), api="chat",
            arrival=0.0, output=SixTokens(), keys=lambda: keys, continues=continues, generation_from=len(text) - len(OPEN),
        )  # fmt: skip
        self.scheduler.submit(job)
        placed = None
        while self.scheduler.busy:
            for event in self.scheduler.step():
                placed = event if isinstance(event, Routed) else placed
        assert placed is not None
        return placed, job

    def all_equal_cold(self) -> int:
        """How many rows were drawn from, all with the bits of a session of their own."""
        for tokens, logits in self.engine.rows:
            assert torch.equal(feed(engine_of(self.model, 1, CTX), 0, tokens, 64), logits), f"after {len(tokens)} tokens"
        return len(self.engine.rows)


@pytest.fixture(scope="module", autouse=True)
def few_threads() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, demo: DenseModel) -> dict[str, Model]:
    directory: Path = tmp_path_factory.mktemp("hybrid")
    save(*DENSE, directory)
    return {"dense": tiny_model(), "hybrid": load(directory), "demo": demo}


@pytest.fixture(
    params=[("dense", 0), ("dense", 16), ("hybrid", 0), ("hybrid", 16), ("demo", 0), ("demo", 48)], ids=lambda p: f"{p[0]}-{p[1]}"
)
def desk(request: pytest.FixtureRequest, models: dict[str, Model]) -> Desk:
    family, page_tokens = request.param
    return Desk(models[family], page_tokens)


def user(text: str) -> str:
    return f"<|user|>{text}<|end|>{OPEN}"


FIRST = "<|system|>be brief<|end|>" + user("look there, then here")


def test_tool_results_behind_calls_that_are_written_otherwise(desk: Desk) -> None:
    desk.ask(FIRST, Keys(CALLS))
    live = list(desk.engine.tokens(0))
    head = FIRST + "[the call]"
    text = head + "<|end|>" + user("a result")
    placed, job = desk.ask(text, continues=Continuation(CALLS, len(head)))
    assert (placed.tier, placed.cached_tokens) == ("chat-tool-output", len(live))
    assert job.prompt[: len(live)] == live
    again, repeated = desk.ask(text, continues=Continuation(CALLS, len(head)))
    assert (again.tier, again.cached_tokens) == ("rewind-point", len(job.prompt) - 1)
    assert (repeated.prompt, repeated.generated) == (job.prompt, job.generated)
    assert desk.all_equal_cold() == 18


def test_an_answer_that_comes_back_without_its_reasoning(desk: Desk) -> None:
    shown = FIRST + "in short"
    desk.ask(FIRST, Keys(visible=shown))
    live = len(desk.engine.tokens(0))
    text = shown + "<|end|>" + user("and?")
    placed, _ = desk.ask(text)
    assert (placed.tier, placed.cached_tokens) == ("thinking-visible", live)
    assert desk.all_equal_cold() == 12


def test_a_retry_and_a_further_message_after_an_answer_nobody_waited_for(desk: Desk) -> None:
    _, first = desk.ask(FIRST)
    again, _ = desk.ask(FIRST)
    assert (again.tier, again.cached_tokens) == ("memory-rewind", len(first.tokens) - 1)
    further, _ = desk.ask(FIRST[: -len(OPEN)] + user("no, the other way"))
    assert further.tier in ("memory-rewind", "rewind-point")
    assert further.cached_tokens == len(first.tokens) - 1  # the opening of the answer is one token
    assert desk.all_equal_cold() == 18


def test_an_edit_of_the_last_message(desk: Desk) -> None:
    desk.ask(FIRST, Keys(CALLS))
    live = len(desk.engine.tokens(0))
    head = FIRST + "[the call]"
    desk.ask(head + "<|end|>" + user("a result"), continues=Continuation(CALLS, len(head)))
    placed, _ = desk.ask(head + "<|end|>" + user("another result"))
    if desk.engine.needs_marks:
        assert placed.tier == "none"  # its one point lies behind the message that was edited
    else:
        assert (placed.tier, placed.cached_tokens) == ("rewind-point", live)
    assert desk.all_equal_cold() == 18
