"""Small random models of the hybrid family, made by transformers and read from the directories it saves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ds4batch.engine.models.hybrid import HybridModel
from ds4batch.engine.weights.source import open_weights
from tests.engine.models import CPU
from tests.engine.oracle import save_random

VOCAB = 311
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 100,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 20,
    "initializer_range": 0.08,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 44,
    "shared_expert_intermediate_size": 36,
}
NEXT: tuple[str, dict[str, Any]] = ("qwen3_next", {**EXPERTS, "mlp_only_layers": [1]})
DENSE: tuple[str, dict[str, Any]] = ("qwen3_5_text", {})
SPARSE: tuple[str, dict[str, Any]] = ("qwen3_5_moe_text", EXPERTS)


def save(family: str, changes: dict[str, Any], directory: Path) -> Any:
    """A random transformers model of the family, saved to `directory`."""
    return save_random(family, SMALL | changes, directory)


def load(directory: Path, dtype: torch.dtype = torch.float32, ctx: int = 512) -> HybridModel:
    """What we make of it."""
    return HybridModel(open_weights(str(directory)), CPU, dtype, ctx)


@contextmanager
def one_thread() -> Iterator[None]:
    """A machine that others use too starts threads slowly, and these models have nothing to share out."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
