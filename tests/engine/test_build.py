"""What start-up decides from the settings, before anything is loaded."""

from __future__ import annotations

import pytest
import torch

from ds4batch.engine import memory
from ds4batch.engine.build import choose_device, page_size
from ds4batch.engine.memory import DoesNotFit, Need
from ds4batch.engine.weights.config import ModelError
from ds4batch.settings import Settings

CPU, CARD = torch.device("cpu"), torch.device("cuda")


def test_a_page_is_the_whole_context_on_a_cpu_and_256_tokens_on_a_card() -> None:
    assert page_size(Settings(ctx=1000), CPU) == 1024
    assert page_size(Settings(ctx=1000, page_tokens=48), CPU) == 48
    assert page_size(Settings(ctx=1000), CARD) == 256


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
