"""On a card the next step is launched before the tokens of the last one are known: the same answers, wherever they end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from bench.shapes import QWEN3_8B, RandomWeights
from ds4batch.engine.build import assemble, warm_up
from ds4batch.engine.engine import Engine
from ds4batch.engine.models.dense import DenseModel
from ds4batch.engine.pages import PagePool, PageShape
from ds4batch.engine.sampler import Draw
from ds4batch.messages import Sampling
from scheduler import CHAINED, Answered, Job, Options, Pick, Sampled, Scheduler, Verdict, Work

SLOTS, CTX = 6, 4096


class Reader:
    """An output that ends its job after a token of a given remainder, as a stop string would."""

    def __init__(self, remainder: int) -> None:
        self.tokens: list[int] = []
        self.remainder = remainder

    def push(self, sampled: Sampled) -> Verdict | None:
        self.tokens.append(sampled.token)
        return Verdict("stop", len(self.tokens) - 1) if sampled.token % 31 == self.remainder else None

    def finish(self, reason: Answered) -> Answered:
        return reason


class Text:
    """No text: the prompts are ids."""

    def tokenise(self, text: str) -> list[int]:
        return []

    def render(self, tokens: Any) -> str:
        return ""


@pytest.fixture(scope="module")
def model(card: torch.device) -> Iterator[DenseModel]:
    loaded = DenseModel(RandomWeights(replace(QWEN3_8B, layers=2), card), card, torch.bfloat16, CTX)
    yield loaded
    del loaded
    torch.cuda.empty_cache()


def answers(model: DenseModel, overlap: bool, temperature: float) -> tuple[list[list[int]], list[list[int]], int]:
    """The tokens of some jobs that come, end and go on beside each other; those that were read; rows that were chained."""
    config = model.config
    shape = PageShape(config.layers, config.kv_heads, 256, config.head_dim, torch.bfloat16)
    pool = PagePool(shape, SLOTS * -(-CTX // 256), model.device)
    engine: Engine = assemble(model, pool, SLOTS, CTX, 2048 + SLOTS)
    warm_up(engine, 2048)
    chained = 0
    launch = engine.launch

    def counted(work: list[Work]) -> None:
        nonlocal chained
        chained += sum(item.tokens is CHAINED for item in work)
        launch(work)

    engine.launch = counted  # type: ignore[method-assign, assignment]
    options = Options(
        mixed_prefill_quantum=256, idle_prefill_quantum=1024, itl_budget=0.05, max_queue=64, overlap=overlap, self_check=True
    )
    scheduler = Scheduler(engine, Text(), time.monotonic, slots=SLOTS, options=options)
    jobs = []
    for i in range(18):
        prompt = [(i * 7919 + j * 104729) % config.vocab for j in range(3000 if i == 7 else 20 + 37 * i)]
        sampling = Sampling(
            temperature=temperature, seed=i, top_p=0.9 if i % 2 else 1.0, presence_penalty=0.5 if i == 11 else 0.0,
            logit_bias={5: 3.0, 900: -1.5} if i % 5 == 2 else {}, ignore_eos=i % 5 == 3,
        )  # fmt: skip
        stops = frozenset(range(i, config.vocab, 41)) if i % 3 == 0 else frozenset()
        job = Job(
            id=i, tokens=prompt, text="", max_tokens=5 + 9 * i, sampling=Draw(sampling, prompt, stops), stop_tokens=stops,
            api="chat", arrival=0.0, output=Reader(i if i % 4 == 1 else 31),
        )  # fmt: skip
        scheduler.submit(job)
        jobs.append(job)
        scheduler.step()
    while scheduler.busy:
        scheduler.step()
    return [job.generated for job in jobs], [job.output.tokens for job in jobs], chained  # type: ignore[attr-defined]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_are_those_of_a_host_that_waits_for_every_token(model: DenseModel, temperature: float) -> None:
    chained = answers(model, True, temperature)
    waited = answers(model, False, temperature)
    assert chained[:2] == waited[:2]
    assert chained[2] > 200
    assert waited[2] == 0


def test_a_step_is_launched_while_the_one_before_runs(model: DenseModel) -> None:
    """Nothing between two launches waits for the device: behind a long kernel several steps can be given to it."""
    config = model.config
    shape = PageShape(config.layers, config.kv_heads, 256, config.head_dim, torch.bfloat16)
    engine = assemble(model, PagePool(shape, 2 * -(-CTX // 256), model.device), 2, CTX, 2048)
    warm_up(engine, 2048)
    draw = Draw(Sampling(temperature=1.0, top_p=0.9), [0], ())
    engine.launch([Work(0, [1, 2, 3], True)])
    earlier = engine.sample([Pick(0, draw)])
    engine.launch([Work(0, CHAINED, True), Work(1, [5] * 300, False)])  # compiles what a mixed step needs
    later = engine.sample([Pick(0, draw)])
    earlier.wait()
    torch.cuda.synchronize()
    running = torch.cuda.Event()
    torch.cuda._sleep(2_000_000_000)  # cycles: about a second
    running.record()
    engine.launch([Work(0, CHAINED, True), Work(1, [5] * 300, False)])
    last = engine.sample([Pick(0, draw)])
    done = running.query()
    assert not done, "a mixed step or its draws waited for the device"
    later.wait()
    last.wait()
    assert len(engine.tokens(0)) == 5
