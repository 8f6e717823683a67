"""The next-n prediction module: its file, its forward against an independent one, and a training of it from the answers on, in small."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from bench.shapes import RandomWeights
from ds4batch.engine.draft.mtp_head import MtpWeights, draft_rows, rms_norm, shapes
from ds4batch.engine.engine import Engine
from ds4batch.engine.rope import rotations
from ds4batch.engine.sampler import Draw
from ds4batch.messages import Sampling
from scripts.mtp_acceptance import Matched, acceptance, measure, tokens_a_step
from scripts.mtp_prompts import KINDS, Grammar
from scripts.mtp_streams import IN_LOOP, LONGEST_PERIOD, REPEATED, Answers, Limits, Stream, generate, in_loop, repeats
from scripts.mtp_training import Corpus, Plan, Teacher, loss_of, states, train
from tests.engine.models import CPU, TINY, engine_of, feed, tiny_model
from tests.engine.test_chained_steps import chaining

CONFIG = replace(TINY, family="llama", qk_norm=False, heads=4)
CTX = 512
GREEDY = Draw(Sampling(temperature=0.0), (), ())


def random_weights(seed: int = 0) -> MtpWeights:
    source = torch.Generator().manual_seed(seed)

    def drawn(shape: tuple[int, ...]) -> torch.Tensor:
        values = torch.randn(shape, generator=source)
        return values * 0.1 + 1 if len(shape) == 1 else values * shape[-1] ** -0.5

    return MtpWeights(**{name.split(".")[1]: drawn(shape) for name, shape in shapes(CONFIG).items()})


def random_inputs(batch: int, places: int) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(3)
    return (
        torch.randn(batch, places, CONFIG.hidden, generator=source),
        torch.randn(batch, places, CONFIG.hidden, generator=source),
    )


TURNS = rotations(CONFIG.rope, CONFIG.head_dim, CTX)


# the file


def test_a_file_brings_back_what_was_saved_and_says_what_it_is(tmp_path: Path) -> None:
    path, weights = tmp_path / "head.safetensors", random_weights()
    weights.save(path, CONFIG, {"model_file": "tiny.gguf"})
    loaded = MtpWeights.load(path, CONFIG, CPU)
    for name, tensor in weights.named().items():
        assert torch.equal(loaded.named()[name], tensor.bfloat16()), name
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    assert metadata["format"] == "ds4batch-mtp"
    assert metadata["hidden"] == str(CONFIG.hidden)
    assert metadata["model_file"] == "tiny.gguf"
    assert [p.name for p in tmp_path.iterdir()] == ["head.safetensors"]


@pytest.mark.parametrize("wrong", ["hidden", "ffn", "kv_heads"])
def test_a_tensor_that_does_not_fit_the_model_is_named(tmp_path: Path, wrong: str) -> None:
    path = tmp_path / "head.safetensors"
    random_weights().save(path, CONFIG)
    other = replace(CONFIG, **{wrong: 2 * getattr(CONFIG, wrong)})  # type: ignore[arg-type]  # all three are whole numbers
    with pytest.raises(ValueError, match=r"head.safetensors: mtp\.\w+\.weight has shape \[.*\]; the model takes \["):
        MtpWeights.load(path, other, CPU)
    with pytest.raises(ValueError, match=r"mtp\.\w+\.weight has shape"):
        random_weights().save(tmp_path / "other.safetensors", other)


def test_files_that_are_something_else_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "head.safetensors"
    random_weights().save(path, CONFIG)
    tensors = load_file(path)
    known = {"format": "ds4batch-mtp", "version": "1"}

    def refused(named: dict[str, torch.Tensor], metadata: dict[str, str], match: str) -> None:
        save_file(named, path, metadata)
        with pytest.raises(ValueError, match=match):
            MtpWeights.load(path, CONFIG, CPU)

    refused(tensors, known | {"version": "2"}, "version 2")
    refused(tensors, {}, "format None")
    refused({k: v for k, v in tensors.items() if k != "mtp.proj.weight"}, known, r"mtp\.proj\.weight is missing")
    refused(tensors | {"mtp.extra": torch.zeros(1)}, known, r"mtp\.extra is unknown")
    refused(tensors | {"mtp.norm.weight": torch.zeros(CONFIG.hidden, dtype=torch.int8)}, known, r"mtp\.norm\.weight is I8")
    path.write_bytes(b"no safetensors at all")
    with pytest.raises(ValueError, match="not a safetensors file"):
        MtpWeights.load(path, CONFIG, CPU)
    with pytest.raises(FileNotFoundError):
        MtpWeights.load(tmp_path / "none.safetensors", CONFIG, CPU)


# the forward


def test_the_forward_is_that_of_transformers_layers() -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

    theirs = LlamaConfig(
        hidden_size=CONFIG.hidden, intermediate_size=CONFIG.ffn, num_attention_heads=CONFIG.heads, num_key_value_heads=CONFIG.kv_heads,
        head_dim=CONFIG.head_dim, rms_norm_eps=CONFIG.norm_eps, num_hidden_layers=1, attn_implementation="eager",
        rope_parameters={"rope_type": "default", "rope_theta": CONFIG.rope.theta},
    )  # fmt: skip
    weights, (embedded, hidden) = random_weights(), random_inputs(2, 37)
    layer = LlamaDecoderLayer(theirs, 0)
    names = {
        "input_layernorm": "attn_norm", "self_attn.q_proj": "q", "self_attn.k_proj": "k", "self_attn.v_proj": "v",
        "self_attn.o_proj": "out", "post_attention_layernorm": "mlp_norm", "mlp.gate_proj": "gate", "mlp.up_proj": "up",
        "mlp.down_proj": "down",
    }  # fmt: skip
    layer.load_state_dict({f"{name}.weight": getattr(weights, ours) for name, ours in names.items()})

    def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        norm = LlamaRMSNorm(CONFIG.hidden, CONFIG.norm_eps)
        norm.load_state_dict({"weight": weight})
        found: torch.Tensor = norm(x)
        return found

    with torch.no_grad():
        x = torch.cat([normed(embedded, weights.embed_norm), normed(hidden, weights.hidden_norm)], -1) @ weights.proj.t()
        places = torch.arange(37)[None]
        mask = torch.full((37, 37), -torch.inf).triu(1)[None, None]
        rotary = LlamaRotaryEmbedding(theirs)(x, places)
        found = layer(x, attention_mask=mask, position_ids=places, position_embeddings=rotary)
        expected = found[0] if isinstance(found, tuple) else found
        (ours,) = draft_rows(weights, CONFIG, TURNS, embedded, hidden)
    torch.testing.assert_close(ours.hidden, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(rms_norm(ours.hidden, weights.norm, CONFIG), normed(expected, weights.norm), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("depth", [1, 3])
def test_no_place_sees_what_comes_behind_it(depth: int) -> None:
    weights, (embedded, hidden) = random_weights(), random_inputs(1, 20)
    before = draft_rows(weights, CONFIG, TURNS, embedded, hidden, depth)[-1].hidden
    embedded[:, 11:], hidden[:, 11:] = 7.0, -3.0
    after = draft_rows(weights, CONFIG, TURNS, embedded, hidden, depth)[-1].hidden
    torch.testing.assert_close(after[:, :11], before[:, :11])
    assert not torch.allclose(after[:, 11:], before[:, 11:])


def test_further_drafts_are_those_of_a_chain_that_feeds_its_own_output_back() -> None:
    weights, (embedded, hidden) = random_weights(), random_inputs(1, 24)
    together = draft_rows(weights, CONFIG, TURNS, embedded, hidden, 3)
    for begins in (0, 1, 9, 21):
        known = hidden[:, : begins + 1]
        for n in range(3):
            places = begins + 1 + n
            alone = draft_rows(weights, CONFIG, TURNS, embedded[:, :places], known)[0].hidden[:, -1:]
            torch.testing.assert_close(together[n].hidden[:, places - 1 : places], alone, rtol=1e-5, atol=1e-5)
            known = torch.cat([known, alone], 1)


# training


def teacher_of(dtype: torch.dtype = torch.float32) -> Teacher:
    return Teacher(RandomWeights(CONFIG, CPU, dtype=torch.float32), CPU, dtype)


def streams(count: int) -> list[Stream]:
    source = np.random.default_rng(5)
    return [
        Stream(source.integers(CONFIG.vocab, size=5 + i % 4).tolist(), KINDS[i % 3], i % 4 == 0, GREEDY) for i in range(count)
    ]


def answered(engine: Engine, count: int, new: int = 40, stops: frozenset[int] = frozenset({7, 50})) -> list[Stream]:
    limits = Limits(new, len(engine.sessions) + 40, time.monotonic() + 60, 10**9)
    return generate(engine, iter(streams(count)), stops, limits, lambda text: None)


def test_the_plain_forward_gives_the_engines_logits() -> None:
    engine = engine_of(tiny_model(family="llama", qk_norm=False, heads=4), 1, CTX)
    tokens = torch.arange(60).mul(37).remainder(CONFIG.vocab)
    teacher = teacher_of()
    torch.testing.assert_close(teacher.logits(teacher.hidden(tokens[None])[:, -1])[0], feed(engine, 0, tokens.tolist(), 16))


@pytest.mark.parametrize("chained", [True, False])
def test_answers_are_those_of_each_prompt_alone_whatever_the_slots(chained: bool) -> None:
    engine = chaining(3) if chained else engine_of(tiny_model(), 3, 256)
    assert engine.can_chain(0, GREEDY) == chained
    found = answered(engine, 11)
    alone = engine_of(tiny_model(), 1, 256)
    assert [s.prompt for s in found] == [s.prompt for s in streams(11)]
    for stream in found:
        alone.truncate(0, 0)
        logits, tokens = feed(alone, 0, stream.prompt, 99), []
        while len(tokens) < 40 and tokens[-1:] not in ([7], [50]):
            tokens.append(int(logits.argmax()))
            logits = feed(alone, 0, tokens[-1:], 1)
        assert stream.tokens == tokens
    assert all(not engine.tokens(slot) for slot in range(3))


def test_what_is_unfinished_at_the_deadline_is_kept() -> None:
    limits = Limits(200, 60, time.monotonic(), 10**9)
    found = generate(chaining(3), iter(streams(9)), frozenset(), limits, lambda text: None)
    assert [len(s.tokens) for s in found] == [1, 1, 1]


def test_repetition_is_seen_after_so_many_repeated_tokens() -> None:
    head = list(range(1000, 1040))
    for period in (1, 7, LONGEST_PERIOD):
        loop = (list(range(period)) * 200)[: period + REPEATED]
        assert repeats(head + loop)
        assert not repeats(head + loop[:-1])
        flags = in_loop(np.array(head + loop, np.int32))
        assert int(flags.sum()) == REPEATED - IN_LOOP + 1
        assert not flags[: len(head) + period + IN_LOOP - 1].any()
    assert not repeats((list(range(LONGEST_PERIOD + 1)) * 3)[: LONGEST_PERIOD + 1 + REPEATED])
    assert not in_loop(np.arange(5, dtype=np.int32)).any()


EVERY = slice(0, None, 1)


def test_the_gradient_of_the_loss_is_autograds(monkeypatch: pytest.MonkeyPatch) -> None:
    teacher, source = teacher_of(), torch.Generator().manual_seed(1)
    hidden = torch.randn(11, CONFIG.hidden, generator=source)
    best = teacher.logits(hidden).argmax(-1)
    parts = [EVERY, slice(1, None, 2), slice(3, None, 4)]
    found = [torch.randn(rows, CONFIG.hidden, generator=source, requires_grad=True) for rows in (11, 5, 2)]
    wanted = 0.3 * F.one_hot(best, CONFIG.vocab) + 0.7 * teacher.logits(hidden).softmax(-1)
    logits = [state @ teacher.head.t() for state in found]
    losses = [F.cross_entropy(rows, wanted[part], reduction="sum") / 11 for rows, part in zip(logits, parts, strict=True)]
    expected = torch.autograd.grad(torch.stack(losses).sum(), found)
    monkeypatch.setattr("scripts.mtp_training.pieces", lambda device: 4)
    loss = loss_of([state.detach() for state in found], parts, teacher, hidden, best, 0.3)
    for ours, theirs in zip(loss.gradients, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    surprise = [F.cross_entropy(rows, best[part]) for rows, part in zip(logits, parts, strict=True)]
    torch.testing.assert_close(loss.surprise, torch.stack(surprise).detach())


def corpus_of(teacher: Teacher, count: int = 24) -> Corpus:
    engine = engine_of(tiny_model(family="llama", qk_norm=False, heads=4), 4, CTX)
    return Corpus(Answers.of(answered(engine, count, 90)), teacher, 256, lambda text: None)


def test_every_drafted_token_is_in_one_batch_and_the_models_tokens_are_the_engines(tmp_path: Path) -> None:
    teacher = teacher_of()
    corpus = corpus_of(teacher)
    answers = corpus.answers
    assert corpus.agreement == 1.0
    every = np.arange(len(answers.lengths))
    drafted = torch.cat([batch.now + 2 for batch in corpus.batches(every, np.random.default_rng(0))])
    expected = [
        at for i in every for at in range(answers.offset[i] + answers.prompt[i] + 1, answers.offset[i + 1])
    ]  # all tokens of an answer but the first
    assert sorted(drafted.tolist()) == expected
    assert torch.equal(corpus.best[drafted - 1], corpus.tokens[drafted])
    answers.save(tmp_path / "answers.npz")
    again = Answers.load(tmp_path / "answers.npz")
    assert all(np.array_equal(getattr(again, f.name), getattr(answers, f.name)) for f in fields(Answers))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # as on a CPU and on a GPU
def test_a_short_training_lowers_the_loss_of_every_draft_and_is_seen_on_the_way(dtype: torch.dtype) -> None:
    teacher = teacher_of(dtype)
    corpus = corpus_of(teacher)
    every = np.arange(len(corpus.answers.lengths))
    start = teacher.start(corpus.hidden)
    seen: list[MtpWeights] = []
    plan = Plan(time.monotonic() + 60, 3e-3, 0.5, 3, 0, 0.2, 60)
    trained, steps = train(start, teacher, corpus, every, plan, seen.append, lambda text: None)
    assert steps == 60

    def surprise(weights: MtpWeights) -> torch.Tensor:
        batch = next(corpus.batches(every))
        with torch.no_grad():
            found = states(weights, teacher, corpus, batch, 3)
        return loss_of(found, [EVERY] * 3, teacher, corpus.hidden[batch.now + 1], corpus.best[batch.now + 1], 0.5).surprise

    before, after = surprise(start), surprise(trained)
    assert bool((after < 0.7 * before).all()), (before, after)
    assert (
        acceptance(measure(trained, teacher, corpus, every, 3))["draft_1"]
        > acceptance(measure(start, teacher, corpus, every, 3))["draft_1"]
    )
    assert seen


def test_training_without_time_returns_the_start() -> None:
    teacher = teacher_of()
    corpus = corpus_of(teacher, 4)
    start = teacher.start(corpus.hidden)
    plan = Plan(time.monotonic(), 1e-3, 0.5, 1, 0, 9.0)
    trained, steps = train(start, teacher, corpus, np.arange(4), plan, lambda weights: None, lambda text: None)
    assert steps == 0
    assert torch.equal(trained.proj, start.proj)


# figures


def matched(rows: Sequence[str], looping: str = "") -> Matched:
    right = np.array([[letter == "1" for letter in row] for row in rows])
    loops = np.array([letter == "1" for letter in looping.ljust(right.shape[1], "0")])
    return Matched(0, right, loops)


def test_later_drafts_count_where_those_before_were_right() -> None:
    found = [matched(["11010", "1010.", "110.."])]
    # draft 1: 3 of 5; draft 2 behind the right ones at 0, 1, 3: 1 of 3; draft 3 behind 0: 1 of 1
    assert acceptance(found) == {"draft_1": 0.6, "draft_2": 0.3333, "draft_3": 1.0, "tokens": 5, "streams": 1}
    assert acceptance([matched(["11010"], "10000")], loops=False)["draft_1"] == 0.5
    # from 0: three right, four tokens; from 4: wrong, one
    assert tokens_a_step(found, 3) == 2.5
    assert tokens_a_step(found, 1) == round(5 / 3, 3)


def test_held_out_prompts_share_no_template_and_no_topic_with_the_others() -> None:
    learnt, held = Grammar(0, False), Grammar(0, True)
    for kind in KINDS:
        assert not set(learnt._templates[kind]) & set(held._templates[kind])
    for pool in ("topic", "task", "thing"):
        assert not set(learnt._pools[pool]) & set(held._pools[pool])
    prompts = learnt.prompts(2000)
    assert len({p.messages for p in prompts}) == 2000
    assert {p.kind for p in held.prompts(33)} == set(KINDS)
    assert [p.messages for p in Grammar(0, False).prompts(50)] == [p.messages for p in prompts[:50]]
