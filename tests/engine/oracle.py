"""transformers as an oracle: random models of its families, saved as it saves them, and the comparison of logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch

from ds4batch.engine.models.model import Model
from scheduler.backend import Work
from tests.engine.models import engine_of


def save_random(family: str, config: dict[str, Any], directory: Path) -> Any:
    """A random transformers model of the family, saved to `directory`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(2)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **config), dtype=torch.float32)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "norm" in name or "bias" in name:
                value.add_(torch.randn_like(value) * 0.2)
    model.eval().save_pretrained(directory)
    return model


def assert_equal_logits(theirs: Any, ours: Model, vocab: int, length: int) -> torch.Tensor:
    """Every position token by token, and the last one in one forward, within 1e-4. Returns what transformers gives."""
    tokens = torch.randint(vocab, (length,), generator=torch.Generator().manual_seed(4)).tolist()
    with torch.no_grad():
        expected: torch.Tensor = theirs(torch.tensor([tokens])).logits[0]
    engine = engine_of(ours, 1, 256)
    for at, token in enumerate(tokens):
        engine.launch([Work(0, [token], True)])
        assert (engine.logits(0) - expected[at]).abs().max() < 1e-4, f"position {at}"
    engine.truncate(0, 0)
    engine.launch([Work(0, tokens, True)])
    assert (engine.logits(0) - expected[-1]).abs().max() < 1e-4
    return expected


class Greedy(NamedTuple):
    """A greedy answer, and how far the best logit of its least certain step lay above the next."""

    tokens: list[int]
    margin: float


def greedy(ours: Model, prompt: list[int], count: int, ctx: int) -> Greedy:
    """`count` tokens after the prompt."""
    engine = engine_of(ours, 1, ctx)
    tokens, margins, feed = [], [], prompt
    while len(tokens) < count:
        engine.launch([Work(0, feed, True)])
        best = engine.logits(0).topk(2)
        margins.append(float(best.values[0] - best.values[1]))
        tokens.append(int(best.indices[0]))
        feed = [tokens[-1]]
    return Greedy(tokens, min(margins))
