"""Models for engine tests: small random ones, and engines of any page size over any model."""

from __future__ import annotations

from dataclasses import replace

import torch

from bench.shapes import RandomWeights
from ds4batch.engine.engine import Engine
from ds4batch.engine.exact import ExactPath
from ds4batch.engine.models.dense import DenseModel
from ds4batch.engine.models.model import Model
from ds4batch.engine.pages import PagePool, PageShape
from ds4batch.engine.weights.config import ModelConfig, Rope
from scheduler.backend import Work

CPU = torch.device("cpu")
NATIVE = ExactPath(True, 4, "")
ORDERED = ExactPath(False, 16, "forced by the test")

TINY = ModelConfig(
    family="qwen3",
    name="tiny",
    layers=2,
    hidden=64,
    heads=6,
    kv_heads=2,
    head_dim=16,
    ffn=96,
    vocab=199,
    context=1024,
    norm_eps=1e-6,
    rope=Rope(10000.0),
    tied=True,
    qk_norm=True,
)


def tiny_model(dtype: torch.dtype = torch.float32, ctx: int = 512, **changes: object) -> DenseModel:
    """A random model of TINY's shape with `changes` to it."""
    return DenseModel(RandomWeights(replace(TINY, **changes), CPU, dtype=torch.float32), CPU, dtype, ctx)  # type: ignore[arg-type]


def engine_of(model: Model, slots: int, ctx: int, page_tokens: int = 0, path: ExactPath = NATIVE, pages: int = 0) -> Engine:
    """An engine with `pages`, or with room for every session's whole context."""
    size = page_tokens or -(-ctx // 128) * 128
    config = model.config
    shape = PageShape(config.kv_layers, config.kv_heads, size, config.head_dim, torch.float32)
    return Engine(model, PagePool(shape, pages or slots * -(-ctx // size), CPU, model.new_state(slots)), slots, ctx, path)


def feed(engine: Engine, slot: int, tokens: list[int], chunk: int) -> torch.Tensor:
    """Extend a slot by `tokens` in chunks; the logits of the last."""
    for at in range(0, len(tokens), chunk):
        engine.launch([Work(slot, tokens[at : at + chunk], True)])
    return engine.logits(slot).clone()
