"""A pool of e4m3 keys and values: its size, its pages, and where it is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ds4batch.engine.build import kv_type
from ds4batch.engine.memory import estimate
from ds4batch.engine.pages import PagePool, PageShape
from ds4batch.engine.weights.config import ModelError
from ds4batch.settings import Settings
from tests.engine.models import CPU, TINY

E4M3 = torch.float8_e4m3fn
SHAPE = PageShape(layers=2, kv_heads=2, page_tokens=16, head_dim=16, dtype=E4M3)


def test_fp8_halves_what_a_session_takes_beside_bf16() -> None:
    fp8, bf16 = (estimate(TINY, SHAPE._replace(dtype=dtype), 4, 8, 1000, 64) for dtype in (E4M3, torch.bfloat16))
    assert 2 * fp8.kv_per_session == bf16.kv_per_session == 4 * 2 * 2 * 2 * 16 * 16 * 2
    assert bf16.shared_total - fp8.shared_total == bf16.naive_total - fp8.naive_total == 8 * fp8.kv_per_session
    pool = PagePool(SHAPE, 3, CPU)
    assert pool.k.nbytes + pool.v.nbytes == 3 * SHAPE.bytes


def test_pages_of_e4m3_are_copied_and_zeroed_byte_by_byte() -> None:
    pool = PagePool(SHAPE, 4, CPU)
    mine, other = pool.take(2)
    for part in (pool.k, pool.v):
        part.view(torch.uint8).copy_(torch.arange(part.numel()).remainder(256).view(part.shape))  # NaN among them
    pool.share([mine])
    copy = pool.copy(mine)
    kept = [part.view(torch.uint8)[:, other].clone() for part in (pool.k, pool.v)]
    for part in (pool.k.view(torch.uint8), pool.v.view(torch.uint8)):
        assert torch.equal(part[:, copy], part[:, mine])
    pool.clear([mine])
    for part, before in zip((pool.k.view(torch.uint8), pool.v.view(torch.uint8)), kept, strict=True):
        assert not part[:, mine].any()
        assert part[:, copy].any()
        assert torch.equal(part[:, other], before)


@pytest.mark.parametrize("choice", ["fp8", "bf16"])
def test_a_cpu_refuses_a_type_it_cannot_attend_by_name(choice: str) -> None:
    settings = Settings(kv_cache_dtype=choice)
    with pytest.raises(ModelError, match=f"--kv-cache-dtype {choice}"):
        kv_type(settings, replace(TINY, head_dim=64), CPU, torch.bfloat16)
    assert kv_type(Settings(), TINY, CPU, torch.bfloat16) == torch.float32


def test_a_card_takes_the_type_that_its_kernels_can_read(monkeypatch: pytest.MonkeyPatch) -> None:
    card, config, fp8 = torch.device("cuda"), replace(TINY, head_dim=64), Settings(kv_cache_dtype="fp8")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert kv_type(Settings(), config, card, torch.bfloat16) == torch.bfloat16
    assert kv_type(Settings(), config, card, torch.float32) == torch.float32
    assert kv_type(fp8, config, card, torch.bfloat16) == E4M3
    assert kv_type(Settings(kv_cache_dtype="bf16"), config, card, torch.bfloat16) == torch.bfloat16
    for wrong, dtype in ((config, torch.float32), (replace(config, head_dim=96), torch.bfloat16)):
        with pytest.raises(ModelError, match="--kv-cache-dtype fp8"):
            kv_type(fp8, wrong, card, dtype)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    with pytest.raises(ModelError, match=r"8\.9"):
        kv_type(fp8, config, card, torch.bfloat16)
