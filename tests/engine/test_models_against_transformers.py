"""Correctness: logits of tiny random models of each family, and the demo model's greedy text, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ds4batch.chat.template import template_for
from ds4batch.engine.models.dense import DenseModel
from ds4batch.engine.weights.config import ModelError
from ds4batch.engine.weights.source import open_weights
from ds4batch.tokenizer import load_tokenizer
from tests.engine.models import CPU
from tests.engine.oracle import assert_equal_logits, greedy, save_random

SMALL = {
    "vocab_size": 311,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.15,
}

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
DEFAULT = {"rope_type": "default", "rope_theta": 1000000.0}

CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"rope_parameters": DEFAULT}),
    ("llama", {"rope_parameters": DEFAULT, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    ("llama", {"rope_parameters": LLAMA3, "num_key_value_heads": 1, "head_dim": 32}),
    ("llama", {"rope_parameters": LINEAR, "num_key_value_heads": 4}),
    ("llama", {"rope_parameters": YARN}),
    ("qwen2", {"rope_parameters": DEFAULT}),
    ("qwen3", {"rope_parameters": DEFAULT, "head_dim": 24}),
    ("qwen3", {"rope_parameters": YARN, "head_dim": 16, "tie_word_embeddings": True}),
]


def save(family: str, changes: dict[str, Any], directory: Path) -> Any:
    return save_random(family, SMALL | changes, directory)


@pytest.mark.parametrize(("family", "changes"), CASES)
def test_logits_equal_transformers(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    theirs = save(family, changes, tmp_path)
    model = DenseModel(open_weights(str(tmp_path)), CPU, torch.float32, ctx=256)
    assert model.config.family == family
    assert_equal_logits(theirs, model, 311, 200)


def test_dynamic_rope_is_refused_beyond_its_trained_context(tmp_path: Path) -> None:
    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    save("llama", {"rope_parameters": dynamic, "max_position_embeddings": 128}, tmp_path)
    DenseModel(open_weights(str(tmp_path)), CPU, torch.float32, ctx=128)
    with pytest.raises(ModelError, match="dynamic"):
        DenseModel(open_weights(str(tmp_path)), CPU, torch.float32, ctx=256)


PROMPTS = ("What is 2+2?", "What is the capital of Japan?", "Count from one to ten.")
GENERATED = 28


@pytest.fixture(scope="module")
def theirs(demo_path: str) -> Any:
    from transformers import AutoModelForCausalLM

    folder, name = str(Path(demo_path).parent), Path(demo_path).name
    return AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32).eval()


@pytest.mark.parametrize("prompt", PROMPTS)
def test_demo_model_says_what_transformers_says(demo: DenseModel, demo_path: str, theirs: Any, prompt: str) -> None:
    tokenizer = load_tokenizer(demo_path)
    prompt_ids = tokenizer.encode(template_for(tokenizer).render([{"role": "user", "content": prompt}]))
    with torch.no_grad():
        expected = theirs.generate(torch.tensor([prompt_ids]), max_new_tokens=GENERATED, do_sample=False)[0, len(prompt_ids) :]
    ours = greedy(demo, prompt_ids, len(expected), 512)
    assert ours.tokens == expected.tolist(), f"{tokenizer.decode(ours.tokens)!r}, smallest margin {ours.margin:.3f}"
    assert ours.margin > 0.1, "a near tie decides this prompt; choose another"
    assert len(ours.tokens) > 2
