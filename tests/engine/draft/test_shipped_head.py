"""The demo model with the module that ships for it: found by itself, right often enough, answers as ever. Where heads are looked for."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.shapes import QWEN3_8B
from bench.speculation import run, scheduler_over
from ds4batch.chat.conversation import Conversation, Message
from ds4batch.chat.dialects.choose import choose, facts_of
from ds4batch.chat.template import template_for
from ds4batch.engine.draft.build import SHIPPED, draft_need, drafter_of, head_of, random_head
from ds4batch.engine.draft.lookup import LookupDrafter
from ds4batch.engine.draft.mtp import MtpDrafter
from ds4batch.engine.draft.mtp_head import shapes
from ds4batch.engine.engine import Engine
from ds4batch.engine.memory import Extra
from ds4batch.engine.models.dense import DenseModel
from ds4batch.engine.weights.config import ModelError
from ds4batch.settings import Settings
from ds4batch.tokenizer import load_tokenizer
from scheduler.pricing import Pricing
from tests.engine.models import NATIVE, engine_of

ASKED = ("Write a short story about a fox and a river.", "List five uses of a paper clip.", "Explain how rain is made.")
ANSWER = 48


@pytest.mark.parametrize("drafts", [1, 3])
def test_the_demo_model_drafts_well_and_answers_the_same(
    demo: DenseModel, demo_path: str, drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pricing, "next_drafts", lambda self, width, timed=True: True)  # whatever it costs here
    tokenizer = load_tokenizer(demo_path)
    dialect = choose(tokenizer.architecture, facts_of(tokenizer, template_for(tokenizer)))
    prompts = [tokenizer.encode(dialect.render(Conversation((Message("user", text),), ())).text) for text in ASKED]
    settings = Settings(model=demo_path, mtp=True, mtp_draft=drafts)
    head = head_of(settings, demo.config)
    assert head is not None
    assert head.parent == SHIPPED
    drafter = drafter_of(settings, demo, 3, head)
    plain = engine_of(demo, 3, 256, path=NATIVE)
    expected = run(scheduler_over(plain, 0), plain, prompts, ANSWER)
    engine = Engine(demo, plain.pool, 3, 256, NATIVE, drafter=drafter)
    found = run(scheduler_over(engine, drafts), engine, prompts, ANSWER)
    assert found.streams == expected.streams
    assert engine.native_forwards < 0.9 * plain.native_forwards  # of which each but the first gives every session a token


def test_a_head_is_given_or_lies_beside_the_model_or_ships(demo: DenseModel, demo_path: str, tmp_path: Path) -> None:
    model = tmp_path / "copy.gguf"
    model.touch()
    settings = Settings(model=str(model), draft="mtp")
    shipped = head_of(settings, demo.config)
    assert shipped is not None
    beside = tmp_path / "copy.mtp.safetensors"
    shutil.copy(shipped, beside)
    assert head_of(settings, demo.config) == beside
    given = tmp_path / "other.safetensors"
    with pytest.raises(ModelError, match=r"--mtp-head .*other.safetensors: no such file"):
        head_of(replace(settings, mtp_head=str(given)), demo.config)
    given.write_bytes(b"nothing")
    assert head_of(replace(settings, mtp_head=str(given)), demo.config) == given
    with pytest.raises(ModelError, match=r"--draft mtp: .*not a safetensors file"):
        drafter_of(replace(settings, mtp_head=str(given)), demo, 1, given)
    with pytest.raises(ModelError, match="ships no MTP head"):
        head_of(Settings(model="elsewhere.gguf", mtp=True), QWEN3_8B)


def test_what_does_not_draft_needs_no_head(demo: DenseModel, demo_path: str) -> None:
    for settings in (Settings(), Settings(draft="lookup"), Settings(mtp=True, load_format="dummy")):
        assert head_of(settings, demo.config) is None
    assert drafter_of(Settings(), demo, 1, None) is None
    assert isinstance(drafter_of(Settings(draft="lookup"), demo, 1, None), LookupDrafter)
    assert isinstance(drafter_of(Settings(mtp=True, load_format="dummy"), demo, 1, None), MtpDrafter)


def test_what_a_drafter_takes_is_planned_for(demo: DenseModel, demo_path: str) -> None:
    settings = Settings(model=demo_path, mtp=True)
    weights, extra = draft_need(settings, demo.config, demo.dtype)
    drafter = drafter_of(settings, demo, 3, head_of(settings, demo.config))
    assert isinstance(drafter, MtpDrafter)
    assert 3 * extra.session == drafter._ring.nbytes + drafter._k.nbytes + drafter._v.nbytes
    assert weights >= sum(tensor.numel() for tensor in random_head(demo.config).named().values()) * 2
    assert draft_need(Settings(draft="lookup"), demo.config, demo.dtype) == (0, Extra())


def test_a_random_head_has_the_models_shape(demo: DenseModel) -> None:
    named = random_head(demo.config).named()
    assert {name: tuple(tensor.shape) for name, tensor in named.items()} == shapes(demo.config)
    assert all(tensor.dtype == torch.bfloat16 for tensor in named.values())
    assert torch.equal(named["mtp.q.weight"], random_head(demo.config).named()["mtp.q.weight"])
