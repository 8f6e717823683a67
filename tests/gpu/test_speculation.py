"""Drafts on a card: every row of a check has the bits of the session alone, and streams are those of plain decoding."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from bench.shapes import DEMO, LLAMA_31_8B, QWEN3_8B, RandomWeights
from bench.speculation import Forced, ForcedCudaMtp
from ds4batch.engine.build import assemble, warm_up
from ds4batch.engine.draft.build import random_head
from ds4batch.engine.draft.lookup import LookupDrafter
from ds4batch.engine.draft.mtp import MtpDrafter
from ds4batch.engine.draft.mtp_cuda import CudaMtpDrafter
from ds4batch.engine.engine import Engine
from ds4batch.engine.linear_cuda import quantised_formats
from ds4batch.engine.models.dense import DenseModel
from ds4batch.engine.pages import PagePool, PageShape
from ds4batch.engine.sampler import Draw
from ds4batch.engine.weights.source import open_weights
from ds4batch.messages import Sampling
from scheduler import Job, Options, Scheduler, Work
from tests.engine.models import feed
from tests.gpu.sessions import step_by_step, tokens_of
from tests.gpu.test_chained_steps import Reader, Text

SLOTS, CTX, BEHIND = 16, 1024, 30
KEY = 8  # tokens that tell sessions apart
LENGTHS = (8, 9, 200, 255, 256, 257, 511, 512)


@pytest.fixture(scope="module", params=["qwen3-8b", "qwen3-8b-q8_0", "llama-3.1-8b", "demo", "demo-kept"])
def model(request: pytest.FixtureRequest, card: torch.device) -> Iterator[DenseModel]:
    if request.param.startswith("demo"):
        if not DEMO.exists():
            pytest.fail(f"{DEMO} is missing; `make setup` fetches it")
        keep = quantised_formats(card) if request.param == "demo-kept" else frozenset()
        yield DenseModel(open_weights(str(DEMO)), card, torch.bfloat16, CTX, keep=keep)
    else:
        shape = LLAMA_31_8B if request.param.startswith("llama") else QWEN3_8B
        format = "Q8_0" if request.param.endswith("q8_0") else ""
        source = RandomWeights(replace(shape, layers=2), card, format=format)
        yield DenseModel(source, card, torch.bfloat16, CTX, keep=quantised_formats(card))
    torch.cuda.empty_cache()


def engine_of(model: DenseModel, slots: int, drafter: Any = None, drafts: int = 0, graphs: bool = True) -> Engine:
    config = model.config
    shape = PageShape(config.layers, config.kv_heads, 256, config.head_dim, torch.bfloat16)
    pool = PagePool(shape, slots * CTX // 256, model.device)
    return assemble(model, pool, slots, CTX, slots * (1 + drafts) + 1024, graphs=graphs, drafter=drafter, drafts=drafts)


@pytest.fixture(scope="module")
def alone(model: DenseModel) -> dict[int, tuple[list[int], dict[int, torch.Tensor]]]:
    """For each length, a session's tokens and its logits behind it and the tokens that follow, token by token and kernel by kernel."""
    found = {}
    for n in LENGTHS:
        tokens = tokens_of(model, n + BEHIND, 300 + n)
        found[n] = tokens, step_by_step(engine_of(model, 1, graphs=False), tokens, list(range(n, n + BEHIND + 1)))
    return found


@pytest.mark.parametrize(("drafts", "graphs"), [(1, True), (1, False), (2, True), (3, True), (5, True)])
def test_every_checked_row_has_the_bits_of_one_row(
    model: DenseModel, alone: dict[int, tuple[list[int], dict[int, torch.Tensor]]], drafts: int, graphs: bool
) -> None:
    forced = Forced(model.config.vocab)
    streams = [tokens for tokens, _ in alone.values()]
    forced.drew(streams, [tokens[:KEY] for tokens in streams])
    forced.share = 0.6
    drafter = ForcedCudaMtp(model, random_head(model.config), SLOTS + 1, drafts)
    drafter.forced = forced
    engine = engine_of(model, SLOTS + 1, drafter, drafts, graphs)
    rnd = random.Random(drafts)
    own = {slot: LENGTHS[slot % len(LENGTHS)] for slot in range(SLOTS)}
    for slot, n in own.items():
        feed(engine, slot, alone[n][0][:n], 8192)
    checked = 0
    for cycle in range(40):
        slots = [s for s in own if len(engine.tokens(s)) < own[s] + BEHIND and rnd.random() < 0.8]
        if not slots:
            continue
        wants = [(s, alone[own[s]][0][len(engine.tokens(s))]) for s in rnd.sample(slots, len(slots))]
        engine.propose(wants, drafts)
        work = []
        for slot, token in wants:
            room = own[slot] + BEHIND - len(engine.tokens(slot)) - 1
            work.append(Work(slot, [token], True, min(rnd.randrange(drafts + 1), room)))
        if cycle % 5 == 4:  # a prompt rides along
            engine.truncate(SLOTS, 0)
            work.append(Work(SLOTS, tokens_of(model, rnd.choice((2, 40, 300)), cycle), True))
        engine.launch(work)
        for item in work[: len(wants)]:
            tokens, expected = alone[own[item.slot]]
            at, drafted = len(engine.tokens(item.slot)), list(engine.drafts(item.slot))
            right = next((i for i, draft in enumerate(drafted) if draft != tokens[at + i]), len(drafted))
            for row in range(right + 1):
                assert torch.equal(engine._row(item.slot, row), expected[at + row]), (
                    f"{own[item.slot]} tokens, cycle {cycle}, row {row}"
                )
                checked += 1
            if item.drafts:
                engine.accept(item.slot, right)
            engine.truncate(item.slot, at + right)
    assert checked > 200


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("how", ["mtp", "forced", "lookup"])
def test_streams_are_those_of_plain_decoding(model: DenseModel, how: str, temperature: float) -> None:
    drafts, prompts = 2, [tokens_of(model, 20 + 37 * i, 50 + i) for i in range(8)]
    plain = answers(engine_of(model, 4), prompts, temperature, 0)
    if how == "lookup":
        drafter: Any = LookupDrafter(4)
    else:
        drafter = ForcedCudaMtp(model, random_head(model.config), 4, drafts)
        drafter.forced = Forced(model.config.vocab)
        drafter.forced.drew([[*p, *a] for p, a in zip(prompts, plain, strict=True)], prompts)
        drafter.forced.share = 0.7 if how == "forced" else None
    engine = engine_of(model, 4, drafter, drafts)
    warm_up(engine, 1024, drafts)
    assert answers(engine, prompts, temperature, drafts) == plain


def answers(engine: Engine, prompts: list[list[int]], temperature: float, drafts: int) -> list[list[int]]:
    """What jobs that come one after another, and end at different tokens, are answered."""
    options = Options(mixed_prefill_quantum=64, idle_prefill_quantum=512, itl_budget=0.05, max_queue=99, drafts=drafts)
    now = iter(range(1 << 30))
    scheduler = Scheduler(engine, Text(), lambda: next(now) * 1e-3, slots=4, options=options)
    jobs = []
    for i, prompt in enumerate(prompts):
        draw = Draw(Sampling(temperature=temperature, seed=i), prompt, ())
        jobs.append(Job(id=i, tokens=prompt, text="", max_tokens=40 + 7 * i, sampling=draw, stop_tokens=frozenset(), api="completions",
                        arrival=0.0, output=Reader(i)))  # fmt: skip
        scheduler.submit(jobs[-1])
        for _ in range(5):
            scheduler.step()
    while scheduler.busy:
        scheduler.step()
    return [job.generated for job in jobs]


def test_drafts_are_mostly_those_of_plain_torch(model: DenseModel) -> None:
    """Both round in their own order, so a near tie may fall otherwise."""
    head = random_head(model.config)
    ours, plain = CudaMtpDrafter(model, head, 4, 2), MtpDrafter(model, head, 4)
    engine = engine_of(model, 4, ours, 2)
    same = count = 0
    for slot in range(4):
        tokens = tokens_of(model, 300 + slot, slot)
        feed(engine, slot, tokens, 100)
        plain._windows[slot].extend(0, len(tokens))
    plain._ring.copy_(ours.ring)
    for token in range(20):
        wants = [(slot, 100 + token) for slot in range(4)]
        mine, theirs = (d.propose(wants, engine.tokens, 2) for d in (ours, plain))
        for slot in range(4):
            same += sum(a == b for a, b in zip(mine.values(slot), theirs.values(slot), strict=True))
            count += 2
    assert same >= 0.8 * count
