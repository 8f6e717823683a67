"""The promise on a card: full logits, bit for bit, over rows, positions, buckets, graphs, chunks, company, reuse and extremes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.shapes import LLAMA_31_8B, QWEN3_8B, RandomWeights
from ds4batch.engine.build import assemble
from ds4batch.engine.engine import Engine
from ds4batch.engine.linear_cuda import quantised_formats
from ds4batch.engine.memory import weight_bytes
from ds4batch.engine.models.dense import DenseModel
from ds4batch.engine.models.dense_cuda import ROWS
from ds4batch.engine.pages import PagePool, PageShape
from ds4batch.engine.rows import Layout, Segment, plan
from ds4batch.engine.weights.dummy import MIXED
from ds4batch.engine.weights.source import WeightSource, open_weights
from scheduler.backend import Work
from tests.engine.models import feed
from tests.gpu.sessions import step_by_step, tokens_of

DEMO = Path(__file__).parents[2] / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
CTX = 9216
LAYERS = 4  # of the 8B shapes: every kernel and shape occurs in each, and the rest of a forward repeats them
QUANTISED_LAYERS = 2
FORMATS = {f"qwen3-8b-{name.lower()}": name for name in ("Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K", "FP8", MIXED)}
MODELS = ("qwen3-8b", "llama-3.1-8b", "demo")

every_model = pytest.mark.parametrize("model", MODELS, indirect=True, scope="module")
every_format = pytest.mark.parametrize("model", [*MODELS, *FORMATS], indirect=True, scope="module")
"""Also the formats in which weights stay quantised: what their products could break."""


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, card: torch.device) -> Iterator[DenseModel]:
    name = request.param
    if name == "demo":
        if not DEMO.exists():
            pytest.fail(f"{DEMO} is missing; `make setup` fetches it")
        source: WeightSource = open_weights(str(DEMO))
    elif name in FORMATS:
        source = RandomWeights(replace(QWEN3_8B, layers=QUANTISED_LAYERS), card, format=FORMATS[name])
    else:
        source = RandomWeights(replace(QWEN3_8B if name == "qwen3-8b" else LLAMA_31_8B, layers=LAYERS), card)
    loaded = DenseModel(source, card, torch.bfloat16, CTX, keep=quantised_formats(card))
    assert loaded.quantised == (name == "demo" or name in FORMATS)
    assert loaded.bytes == weight_bytes(source, card, torch.bfloat16, quantised_formats(card))
    yield loaded
    del loaded
    _ALONE.clear()
    torch.cuda.empty_cache()


def engine_of(model: DenseModel, slots: int, graphs: bool = True, ctx: int = CTX, largest: int = 8192) -> Engine:
    config = model.config
    shape = PageShape(config.layers, config.kv_heads, 256, config.head_dim, torch.bfloat16)
    return assemble(model, PagePool(shape, slots * -(-ctx // 256), model.device), slots, ctx, largest + slots, graphs=graphs)


_ALONE: dict[tuple[int, tuple[int, ...]], dict[int, torch.Tensor]] = {}


def alone(model: DenseModel, tokens: list[int], lengths: list[int]) -> dict[int, torch.Tensor]:
    """The oracle: one session, token by token, kernel by kernel without graphs; its logits after each of `lengths` tokens."""
    key = (id(model), tuple(tokens))
    if key not in _ALONE:
        engine = engine_of(model, 1, graphs=False, ctx=max(lengths) + 1, largest=16)
        _ALONE[key] = step_by_step(engine, tokens, lengths)
    return _ALONE[key]


@every_format
def test_logits_are_near_those_of_plain_torch(model: DenseModel) -> None:
    tokens = tokens_of(model, 300, 1)
    ours = feed(engine_of(model, 1), 0, tokens, 300)
    config = model.config
    shape = PageShape(config.layers, config.kv_heads, 512, config.head_dim, torch.float32)
    pool = PagePool(shape, 1, model.device)
    layout = Layout(512, config.heads // config.kv_heads, model.device, 1)
    theirs = model.forward(plan([Segment([0], 0, tokens, True)], layout), pool).logits[0]
    assert (ours - theirs).norm() / theirs.norm() < 0.03
    assert torch.cosine_similarity(ours, theirs, dim=0) > 0.999


@every_format
@pytest.mark.parametrize("repetition", range(3))
def test_every_row_count_and_graph_bucket_gives_the_bits_of_one_row(model: DenseModel, repetition: int) -> None:
    lengths = [1, 2, 255, 256, 257, 511, 512, 513]
    prompts = {n: tokens_of(model, n + 1, 100 + n) for n in lengths}
    expected = {n: alone(model, p, [n, n + 1]) for n, p in prompts.items()}
    for graphs in (True, False):
        engine = engine_of(model, 33, graphs, ctx=1024)
        order = lengths * 5
        for slot in range(33):
            feed(engine, slot, prompts[order[slot]][: order[slot]], 8192)
        rnd = random.Random(repetition)
        for rows in (*range(1, 17), 32, 33):
            slots = rnd.sample(range(33), rows)
            engine.launch([Work(s, [prompts[order[s]][-1]], True) for s in slots])
            wrong = [s for s in slots if not torch.equal(engine.logits(s), expected[order[s]][order[s] + 1])]
            assert not wrong, f"{rows} rows, graphs {graphs}: lengths {[order[s] for s in wrong]} differ"
            for s in slots:
                engine.truncate(s, order[s])


@every_format
@pytest.mark.parametrize("chunk", [64, 100, 128, 512, 1024, 4096])
def test_chunks_equal_token_by_token_and_so_do_the_keys_they_write(model: DenseModel, chunk: int) -> None:
    tokens = tokens_of(model, 1400, 9)
    marks = [1300, 1301, 1400]
    expected = alone(model, tokens, marks)
    engine = engine_of(model, 3, ctx=2048)
    assert torch.equal(feed(engine, 0, tokens[:1300], chunk), expected[1300])
    for token in tokens[1300:]:
        engine.launch([Work(0, [token], True)])
        if len(engine.tokens(0)) in marks:
            assert torch.equal(engine.logits(0), expected[len(engine.tokens(0))])
    stepwise = engine_of(model, 1, graphs=False, ctx=2048)
    feed(stepwise, 0, tokens, 1)
    for a, b in ((engine.pool.k, stepwise.pool.k), (engine.pool.v, stepwise.pool.v)):
        ours = torch.cat([a[:, p] for p in engine.sessions[0].pages], dim=2)[:, :, :1400]
        theirs = torch.cat([b[:, p] for p in stepwise.sessions[0].pages], dim=2)[:, :, :1400]
        assert torch.equal(ours, theirs)


@every_format
def test_every_size_of_a_recorded_step_with_a_chunk_gives_the_bits_of_one_row(model: DenseModel) -> None:
    tokens, prompt, start = tokens_of(model, 1400, 10), tokens_of(model, 40, 11), 300
    engine = engine_of(model, 3, ctx=2048)
    feed(engine, 0, tokens[:start], 8192)
    for slot in (1, 2):
        feed(engine, slot, prompt[:39], 39)
    expected = alone(model, tokens, [start + rows - filled for rows in ROWS for filled in (0, 4)])
    neighbour = alone(model, prompt, [40])[40]
    for rows, company in itertools.product(ROWS, (0, 2)):
        end = start + rows - (4 if company else 0)  # two decode rows are filled up to four
        engine.launch([*(Work(slot, prompt[39:], True) for slot in range(1, company + 1)), Work(0, tokens[start:end], True)])
        assert torch.equal(engine.logits(0), expected[end]), f"{rows} rows, {company} of them decode"
        assert all(torch.equal(engine.logits(slot), neighbour) for slot in range(1, company + 1)), f"decode in {rows} rows"
        for slot, length in ((0, start), (1, 39), (2, 39)):
            engine.truncate(slot, length)


@every_format
def test_long_contexts_equal_token_by_token(model: DenseModel) -> None:
    """Around two borders at which attention begins a new stretch, and behind them."""
    marks = [4095, 4096, 4097, 8191, 8192, 8193, 8300]
    tokens = tokens_of(model, marks[-1], 3)
    expected = alone(model, tokens, marks)
    engine = engine_of(model, 3)
    for slot, chunk in enumerate((8192, 777, 100)):
        for before, mark in itertools.pairwise([0, *marks]):
            assert torch.equal(feed(engine, slot, tokens[before:mark], chunk), expected[mark]), (
                f"{mark} tokens in chunks of {chunk}"
            )
    for slot, mark in enumerate((4096, 8192)):
        engine.truncate(slot, mark - 1)
    engine.launch([Work(slot, [tokens[mark - 1]], True) for slot, mark in enumerate((4096, 8192))])
    assert torch.equal(engine.logits(0), expected[4096])
    assert torch.equal(engine.logits(1), expected[8192])


@every_format
def test_a_prefill_beside_decoders_and_neighbours_of_any_kind_change_nothing(model: DenseModel) -> None:
    prompt, fed = tokens_of(model, 700, 5), tokens_of(model, 24, 6)
    expected = alone(model, prompt + fed, [700 + i for i in range(1, 25)])
    engine = engine_of(model, 17, ctx=4096)
    feed(engine, 5, prompt, 700)
    rnd = random.Random(2)
    for step, token in enumerate(fed):
        company = []
        for slot in rnd.sample([s for s in range(17) if s != 5], rnd.randrange(17)):
            if rnd.random() < 0.4:
                engine.truncate(slot, rnd.randrange(len(engine.tokens(slot)) + 1))
            count = rnd.choice((1, 1, 1, 2, 5, 130))
            company.append(Work(slot, tokens_of(model, count, rnd.randrange(1 << 20)), rnd.random() < 0.5))
        company.insert(rnd.randrange(len(company) + 1), Work(5, [token], True))
        engine.launch(company)
        assert torch.equal(engine.logits(5), expected[701 + step]), f"step {step} beside {[len(w.tokens) for w in company]}"


@every_model
def test_extreme_neighbours_change_nothing(model: DenseModel) -> None:
    prompt = tokens_of(model, 300, 8)
    expected = alone(model, prompt, [299, 300])
    engine = engine_of(model, 4, ctx=1024)
    engine.pool.k.fill_(float("nan"))
    engine.pool.v.fill_(float("inf"))
    assert torch.equal(feed(engine, 2, prompt[:299], 100), expected[299])
    feed(engine, 0, [1] * 50, 50)
    engine.pool.v[:, engine.sessions[0].pages] = 3e38
    engine.launch([Work(0, [1], True), Work(2, [prompt[-1]], True)])
    assert torch.equal(engine.logits(2), expected[300])


@every_model
def test_truncation_and_reuse_equal_cold(model: DenseModel) -> None:
    tokens = tokens_of(model, 1100, 12)
    expected = alone(model, tokens, [1100])[1100]
    engine = engine_of(model, 2, ctx=2048)
    feed(engine, 0, tokens, 1100)
    for length in (1099, 1024, 513, 512, 511, 256, 1, 0):
        engine.truncate(0, length)
        feed(engine, 0, tokens_of(model, 60, length), 60)
        engine.truncate(0, length)
        assert torch.equal(feed(engine, 0, tokens[length:], 8192), expected), f"after truncation to {length}"
