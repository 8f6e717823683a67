"""Bytes on their way to the card: through small pinned buffers, and what becomes of them there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.shapes import RandomWeights
from ds4batch.engine.models.dense import DenseModel
from ds4batch.engine.weights import staging
from ds4batch.engine.weights.raw import values
from tests.engine.models import TINY
from triton_kernels.quant_formats import Format

SHAPE = replace(TINY, hidden=256, heads=4, head_dim=64, ffn=512, vocab=5000)


@pytest.mark.parametrize("size", [0, 1, 4096, 4097, 3 * 4096, 50_001])
def test_pieces_arrive_in_order(card: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(staging, "PIECE", 4096)
    content = torch.randint(256, (size + 7,), dtype=torch.uint8)
    (tmp_path / "x").write_bytes(content.numpy().tobytes())
    read = staging.Staging(card).read(str(tmp_path / "x"), "t", 7, size)
    assert read.device.type == "cuda"
    assert torch.equal(read.cpu(), content[7:])


@pytest.mark.parametrize("fmt", list(Format))
def test_the_card_dequantises_as_the_host_does(card: torch.device, fmt: Format) -> None:
    source = RandomWeights(SHAPE, torch.device("cpu"), format=fmt)
    for name in ("embed.weight", "layers.0.down.weight"):
        raw = source.raw(name, torch.device("cpu"))
        there = raw._replace(data=raw.data.to(card), scales=None if raw.scales is None else raw.scales.to(card))
        assert torch.equal(
            values(there, source.shape(name), torch.bfloat16).cpu(), values(raw, source.shape(name), torch.bfloat16)
        )


def test_loading_leaves_nothing_but_the_weights(card: torch.device) -> None:
    source = RandomWeights(SHAPE, card, format=Format.Q4_K)
    before = torch.cuda.memory_allocated()
    model = DenseModel(source, card, torch.bfloat16, 256, keep=frozenset(Format))
    extra = torch.cuda.memory_allocated() - before - model.bytes - model.rotations.nbytes
    assert 0 <= extra < 512 * 200  # rounding of each allocation
