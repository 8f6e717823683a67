"""Keys and values in e4m3 on a card: the promise holds among such answers, and they are near those of bf16 keys."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from bench.shapes import DEMO, QWEN3_8B, RandomWeights
from ds4batch.engine.build import assemble
from ds4batch.engine.engine import Engine
from ds4batch.engine.models.dense import DenseModel
from ds4batch.engine.pages import PagePool, PageShape
from ds4batch.engine.sampler import Draw
from ds4batch.engine.weights.source import open_weights
from ds4batch.messages import Sampling
from scheduler.backend import BackendError, Pick, Work
from tests.engine.models import feed
from tests.gpu.sessions import step_by_step, tokens_of
from triton_kernels.attention_decode import attention_decode, attention_decode_reference, decode_workspace
from triton_kernels.attention_parts import DEFAULT_SPLIT
from triton_kernels.attention_prefill import Segment, attention_prefill, prefill_tiles, prefill_workspace
from triton_kernels.rope_kv import rope_kv

E4M3 = torch.float8_e4m3fn
NAN = 0x7F  # e4m3's, as a byte
PAGE, CTX = 256, 2048


@pytest.fixture(scope="module", params=["qwen3-8b", "demo"])
def model(request: pytest.FixtureRequest, card: torch.device) -> Iterator[DenseModel]:
    if torch.cuda.get_device_capability(card) < (8, 9):
        pytest.skip("needs a card that has e4m3")
    if request.param == "demo":
        if not DEMO.exists():
            pytest.fail(f"{DEMO} is missing; `make setup` fetches it")
        yield DenseModel(open_weights(str(DEMO)), card, torch.bfloat16, CTX)
    else:
        yield DenseModel(RandomWeights(replace(QWEN3_8B, layers=4), card), card, torch.bfloat16, CTX)
    torch.cuda.empty_cache()


def engine_of(model: DenseModel, slots: int, kv: torch.dtype = E4M3, graphs: bool = True) -> Engine:
    config = model.config
    shape = PageShape(config.layers, config.kv_heads, PAGE, config.head_dim, kv)
    return assemble(model, PagePool(shape, slots * CTX // PAGE, model.device), slots, CTX, CTX + slots, graphs=graphs)


def alone(model: DenseModel, tokens: list[int], lengths: list[int]) -> dict[int, torch.Tensor]:
    return step_by_step(engine_of(model, 1, graphs=False), tokens, lengths)


def stored(engine: Engine, slot: int, count: int) -> torch.Tensor:
    """The bytes of a slot's first `count` keys and values."""
    halves = [
        torch.cat([x.view(torch.uint8)[:, p] for p in engine.sessions[slot].pages], 2) for x in (engine.pool.k, engine.pool.v)
    ]
    return torch.stack(halves)[:, :, :, :count]


def test_logits_are_near_those_of_bf16_keys(model: DenseModel) -> None:
    tokens = tokens_of(model, 700, 1)
    ours, theirs = (feed(engine_of(model, 1, kv), 0, tokens, 300) for kv in (E4M3, torch.bfloat16))
    assert torch.cosine_similarity(ours, theirs, dim=0) > 0.99
    assert not torch.equal(ours, theirs), "the pool was not e4m3"


def test_every_row_count_and_graph_bucket_gives_the_bits_of_one_row(model: DenseModel) -> None:
    lengths = [1, 255, 256, 257, 511, 512, 513]
    prompts = {n: tokens_of(model, n + 1, 100 + n) for n in lengths}
    expected = {n: alone(model, p, [n + 1])[n + 1] for n, p in prompts.items()}
    for graphs in (True, False):
        engine = engine_of(model, 33, graphs=graphs)
        order = lengths * 5
        for slot in range(33):
            feed(engine, slot, prompts[order[slot]][: order[slot]], CTX)
        rnd = random.Random(7)
        for rows in (*range(1, 17), 32, 33):
            slots = rnd.sample(range(33), rows)
            engine.launch([Work(s, [prompts[order[s]][-1]], True) for s in slots])
            wrong = [s for s in slots if not torch.equal(engine.logits(s), expected[order[s]])]
            assert not wrong, f"{rows} rows, graphs {graphs}: lengths {[order[s] for s in wrong]} differ"
            for s in slots:
                engine.truncate(s, order[s])


@pytest.mark.parametrize("chunk", [2, 64, 100, 512, 1300])
def test_chunks_equal_token_by_token_and_so_do_the_keys_they_write(model: DenseModel, chunk: int) -> None:
    tokens = tokens_of(model, 1301, 9)
    stepwise = engine_of(model, 1, graphs=False)
    expected = feed(stepwise, 0, tokens[:1300], 1)
    engine = engine_of(model, 2)
    assert torch.equal(feed(engine, 1, tokens[:1300], chunk), expected)
    assert torch.equal(feed(engine, 1, tokens[1300:], 1), feed(stepwise, 0, tokens[1300:], 1))
    assert torch.equal(stored(engine, 1, 1301), stored(stepwise, 0, 1301))


def test_a_prefill_beside_decoders_and_neighbours_of_any_kind_change_nothing(model: DenseModel) -> None:
    prompt, fed = tokens_of(model, 700, 5), tokens_of(model, 24, 6)
    expected = alone(model, prompt + fed, [700 + i for i in range(1, 25)])
    engine = engine_of(model, 9)
    feed(engine, 5, prompt, 700)
    rnd = random.Random(2)
    for step, token in enumerate(fed):
        company = []
        for slot in rnd.sample([s for s in range(9) if s != 5], rnd.randrange(9)):
            if rnd.random() < 0.4 or len(engine.tokens(slot)) > CTX - 130:
                engine.truncate(slot, rnd.randrange(len(engine.tokens(slot)) // 2 + 1))
            company.append(Work(slot, tokens_of(model, rnd.choice((1, 1, 1, 2, 5, 130)), step), rnd.random() < 0.5))
        company.insert(rnd.randrange(len(company) + 1), Work(5, [token], True))
        engine.launch(company)
        assert torch.equal(engine.logits(5), expected[701 + step]), f"step {step} beside {[len(w.tokens) for w in company]}"


def test_truncation_and_reuse_equal_cold(model: DenseModel) -> None:
    tokens = tokens_of(model, 1100, 12)
    expected = alone(model, tokens, [1100])[1100]
    engine = engine_of(model, 2)
    feed(engine, 0, tokens, 1100)
    for length in (1099, 1024, 513, 512, 511, 256, 1, 0):
        engine.truncate(0, length)
        feed(engine, 0, tokens_of(model, 60, length), 60)
        engine.truncate(0, length)
        assert torch.equal(feed(engine, 0, tokens[length:], CTX), expected), f"after truncation to {length}"


def test_what_others_pages_hold_changes_nothing_and_nan_in_ones_own_is_an_error(model: DenseModel) -> None:
    prompt = tokens_of(model, 300, 8)
    expected = alone(model, prompt, [299, 300])
    engine = engine_of(model, 3)
    for part in (engine.pool.k, engine.pool.v):
        part.view(torch.uint8).fill_(NAN)
    assert torch.equal(feed(engine, 2, prompt[:299], 100), expected[299])
    feed(engine, 0, [1] * 50, 50)
    own = list(engine.sessions[0].pages)
    engine.pool.v.view(torch.uint8)[:, own] = NAN
    engine.launch([Work(0, [1], True), Work(2, [prompt[-1]], True)])
    assert torch.equal(engine.logits(2), expected[300])
    with pytest.raises(BackendError, match="not finite"):
        engine.sample([Pick(0, Draw(Sampling(temperature=0.0), [0], ()))]).wait()
    assert not engine.tokens(0)
    assert not engine.tokens(2), "nobody knows which row of the forward it was"
    assert not engine.pool.v.view(torch.uint8)[:, own].any()
    assert torch.equal(feed(engine, 2, prompt, 100), expected[300])


def test_a_copied_page_holds_the_same_bytes(model: DenseModel) -> None:
    engine = engine_of(model, 2)
    feed(engine, 0, tokens_of(model, 40, 3), 40)
    pool, (page,) = engine.pool, engine.sessions[0].pages
    pool.share([page])
    copy = pool.copy(page)
    for part in (pool.k.view(torch.uint8), pool.v.view(torch.uint8)):
        assert part[:, page].any()
        assert torch.equal(part[:, copy], part[:, page])


@pytest.mark.parametrize("head_dim", [64, 128])
def test_extreme_keys_and_values_saturate_and_decode_agrees_with_prefill(card: torch.device, head_dim: int) -> None:
    heads, kv_heads, rows = 8, 2, 600
    source = torch.Generator(card).manual_seed(4)
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * head_dim, generator=source, device=card)
    qkv[::7, heads * head_dim :] *= 1e4
    qkv[5, -head_dim:] = float("inf")
    qkv = qkv.bfloat16()
    k, v = (torch.zeros(3, kv_heads, PAGE, head_dim, dtype=E4M3, device=card) for _ in range(2))
    q = torch.empty(rows, heads, head_dim, dtype=torch.bfloat16, device=card)
    at = torch.arange(rows, dtype=torch.int32, device=card)
    still = torch.zeros(rows, dtype=torch.int64, device=card)
    ones, zeros = torch.ones(1, head_dim // 2, device=card), torch.zeros(1, head_dim // 2, device=card)
    rope_kv(qkv, still, ones, zeros, q, k, v, at // PAGE, at % PAGE)
    split = qkv.float().view(rows, heads + 2 * kv_heads, head_dim)
    for pool, written in ((k, split[:, heads : heads + kv_heads]), (v, split[:, heads + kv_heads :])):
        found = pool.transpose(1, 2).reshape(3 * PAGE, kv_heads, head_dim)[:rows]
        assert torch.equal(found.float(), written.clamp(-448, 448).to(E4M3).float())
    table = torch.arange(3, dtype=torch.int32, device=card)[None]
    out = torch.empty(rows, heads * head_dim, dtype=torch.bfloat16, device=card)
    shared = {"scale": head_dim**-0.5, "page_tokens": PAGE}
    tiles = prefill_tiles([Segment(0, rows, 0, 0)], heads=heads, kv_heads=kv_heads, device=card)
    workspace = prefill_workspace(len(tiles.rows), kv_heads, head_dim, 1, card)
    attention_prefill(q, k, v, table, tiles, out, workspace, max_stretches=1, **shared)
    assert torch.isfinite(out).all()
    single = torch.empty_like(out)
    splits = -(-rows // DEFAULT_SPLIT)
    attention_decode(q, k, v, table.expand(rows, -1).contiguous(), at + 1, single,
                     decode_workspace(rows, heads, kv_heads, head_dim, splits, card), max_splits=splits, **shared)  # fmt: skip
    assert torch.equal(single, out)
    some = torch.tensor([0, 3, 511, 512, 599], device=card)
    expected = attention_decode_reference(q[some], k, v, table.expand(5, -1), at[some] + 1, scale=head_dim**-0.5)
    torch.testing.assert_close(out[some].double(), expected, rtol=2e-2, atol=2e-2 * float(expected.abs().max()))
