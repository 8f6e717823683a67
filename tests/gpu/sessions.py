"""What the tests on a card share."""

from __future__ import annotations

import random

import torch

from ds4batch.engine.engine import Engine
from ds4batch.engine.models.dense import DenseModel
from scheduler.backend import Work


def tokens_of(model: DenseModel, count: int, seed: int) -> list[int]:
    """Random tokens of the model's vocabulary."""
    rnd = random.Random(seed)
    return [rnd.randrange(model.config.vocab) for _ in range(count)]


def step_by_step(engine: Engine, tokens: list[int], lengths: list[int]) -> dict[int, torch.Tensor]:
    """The oracle: one session, token by token; its logits after each of `lengths` tokens."""
    kept = {}
    for i, token in enumerate(tokens[: max(lengths)]):
        engine.launch([Work(0, [token], True)])
        if i + 1 in lengths:
            kept[i + 1] = engine.logits(0).clone()
    return kept
