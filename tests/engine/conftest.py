from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ds4batch.engine.models.dense import DenseModel
from ds4batch.engine.weights.source import open_weights
from tests.engine import hybrid_models

DEMO = Path(__file__).parents[2] / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def demo_path() -> str:
    """The demo model's file."""
    if not DEMO.exists():
        pytest.fail(f"{DEMO} is missing; `make setup` fetches it")
    return str(DEMO)


@pytest.fixture(scope="session")
def demo(demo_path: str) -> DenseModel:
    """The demo model as the server loads it: bf16 weights on the CPU."""
    return DenseModel(open_weights(demo_path), torch.device("cpu"), torch.bfloat16, ctx=2048)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For models so small that threads cost more than they bring."""
    with hybrid_models.one_thread():
        yield
