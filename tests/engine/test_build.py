"""What start-up decides from the settings, before anything is loaded."""

from __future__ import annotations

import argparse
from dataclasses import replace

import pytest
import torch

from bench.shapes import QWEN3_8B
from ds4batch.cli import main
from ds4batch.engine import linear_cuda, memory
from ds4batch.engine.build import choose_device, kept, page_size, pool_pages
from ds4batch.engine.draft.build import head_of
from ds4batch.engine.memory import DoesNotFit, Need
from ds4batch.engine.models import dense_cuda
from ds4batch.engine.options import options_of
from ds4batch.engine.weights.config import ModelError
from ds4batch.settings import Settings, add_arguments, from_arguments
from triton_kernels.quant_formats import Format

CPU, CARD = torch.device("cpu"), torch.device("cuda")


def test_a_page_is_the_whole_context_on_a_cpu_and_256_tokens_on_a_card() -> None:
    assert page_size(Settings(ctx=1000), CPU) == 1024
    assert page_size(Settings(ctx=1000, page_tokens=48), CPU) == 48
    assert page_size(Settings(ctx=1000), CARD) == 256


def test_a_small_models_weights_do_not_stay_quantised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_cuda, "quantised_formats", lambda device: frozenset(Format))
    monkeypatch.setattr(dense_cuda, "supported", lambda config, device, dtype: "")
    small = replace(QWEN3_8B, hidden=576, ffn=1536, layers=30, vocab=49152, heads=9, kv_heads=3, head_dim=64)
    for config, card, formats in ((QWEN3_8B, CARD, frozenset(Format)), (small, CARD, frozenset()), (QWEN3_8B, CPU, frozenset())):
        assert kept(Settings(), config, card, torch.bfloat16) == formats
    assert kept(Settings(dequantise=True), QWEN3_8B, CARD, torch.bfloat16) == frozenset()


def test_what_is_left_to_the_device_is_filled_in_and_what_is_set_stands() -> None:
    left = Settings()
    assert left.resolved("cpu") == replace(left, mixed_prefill_quantum=128, idle_prefill_quantum=2048, itl_budget_ms=100.0)
    assert left.resolved("cuda") == replace(left, mixed_prefill_quantum=1024, idle_prefill_quantum=4096, itl_budget_ms=15.0)
    asked = Settings(mixed_prefill_quantum=64, idle_prefill_quantum=512, itl_budget_ms=30.0)
    assert asked.resolved("cuda") == asked


@pytest.mark.parametrize(("device", "budget", "overlap"), [(CPU, 0.1, False), (CARD, 0.015, True)])
def test_the_scheduler_reads_texts_behind_a_forward_only_where_the_device_works_on_its_own(
    device: torch.device, budget: float, overlap: bool
) -> None:
    options = options_of(Settings(), device.type)
    assert (options.itl_budget, options.overlap) == (budget, overlap)


@pytest.mark.parametrize(("text", "refused"), [("0", False), ("16", False), ("15", True), ("-1", True)])
def test_a_quantum_is_left_to_the_device_by_0_and_not_by_what_is_too_small(text: str, refused: bool) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    arguments = ["--mixed-prefill-quantum", text]
    if refused:
        with pytest.raises(SystemExit):
            parser.parse_args(arguments)
    else:
        assert from_arguments(parser.parse_args(arguments)).mixed_prefill_quantum == int(text)


def test_a_page_that_does_not_divide_the_kernels_split_is_refused_by_name() -> None:
    assert page_size(Settings(page_tokens=64), CARD) == 64
    with pytest.raises(ModelError, match="--page-tokens 300"):
        page_size(Settings(page_tokens=300), CARD)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_a_card_that_is_not_there_is_refused() -> None:
    assert choose_device("auto") == CPU
    with pytest.raises(ModelError, match="--device cuda"):
        choose_device("cuda")


def test_what_does_not_fit_is_refused_with_how_many_sessions_would() -> None:
    need = Need(weights=100 << 20, kv_per_session=50 << 20, scratch=10 << 20, sessions=8)
    memory.require(need, int(need.shared_total / memory.SHARE) + 1)
    with pytest.raises(DoesNotFit, match="3 sessions of this --ctx would fit"):
        memory.require(need, int((need.weights + need.scratch + 3.5 * need.kv_per_session) / memory.SHARE))
    with pytest.raises(DoesNotFit, match="not one session"):
        memory.require(need, 90 << 20)


def test_the_two_figures_differ_by_a_scratch_a_session() -> None:
    need = Need(weights=1000, kv_per_session=50, scratch=10, sessions=8)
    assert need.shared_total == 1000 + 8 * 50 + 10
    assert need.naive_total - need.shared_total == 7 * 10


@pytest.mark.parametrize(("tokens", "pages"), [(0, 64), (4096, 16), (4351, 16), (5000, 19), (10**6, 64)])
def test_the_pool_has_the_pages_that_were_asked_for_and_no_more_than_can_be_used(tokens: int, pages: int) -> None:
    assert pool_pages(Settings(batched_session=4, ctx=4096, kv_pool_tokens=tokens), 256) == pages


def test_a_pool_that_cannot_hold_one_session_is_refused_with_the_numbers() -> None:
    with pytest.raises(
        DoesNotFit, match=r"--kv-pool-tokens 4095: that is 15 pages of 256 tokens, and one session of --ctx 4096 takes 16"
    ):
        pool_pages(Settings(batched_session=4, ctx=4096, kv_pool_tokens=4095), 256)


def test_a_smaller_pool_is_told_beside_what_all_contexts_would_take() -> None:
    need = Need(weights=1 << 30, kv_per_session=2 << 30, scratch=0, sessions=8, pool=4 << 30)
    assert (need.shared_total, need.kv_total, need.as_dict()["kv_pool"]) == (5 << 30, 16 << 30, 4 << 30)
    assert "a pool of 4.00 GiB where all together would be 16.00 GiB" in need.describe()
    with pytest.raises(DoesNotFit, match=r"lower --kv-pool-tokens"):
        memory.require(need, 4 << 30)


@pytest.mark.parametrize(
    ("arguments", "drafter", "drafts"),
    [
        ([], "none", 0),
        (["--mtp-draft", "4"], "none", 0),
        (["--draft", "lookup"], "lookup", 1),
        (["--draft", "lookup", "--mtp-draft", "8"], "lookup", 8),
        (["--mtp"], "mtp", 1),
        (["--draft", "mtp", "--mtp-draft", "2"], "mtp", 2),
    ],
)
def test_how_drafting_is_asked_for(arguments: list[str], drafter: str, drafts: int) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    settings = from_arguments(parser.parse_args(arguments))
    assert (settings.drafter, settings.drafts, options_of(settings, "cpu").drafts) == (drafter, drafts, drafts)


def test_a_model_without_a_head_is_refused_before_it_is_loaded() -> None:
    with pytest.raises(ModelError, match="ships no MTP head"):
        head_of(Settings(model="nowhere.gguf", mtp=True), QWEN3_8B)
    assert head_of(Settings(model="nowhere.gguf", draft="lookup"), QWEN3_8B) is None
    assert head_of(Settings(model="nowhere.gguf"), QWEN3_8B) is None


def test_two_ways_to_draft_are_one_too_many(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "-m", "x", "--mtp", "--draft", "lookup"])
    assert "--draft lookup was given" in capsys.readouterr().err
