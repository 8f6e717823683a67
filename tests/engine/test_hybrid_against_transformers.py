"""Correctness of the hybrid family: logits and greedy text of tiny random models against transformers' plain torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ds4batch.engine.models.hybrid_load import loaded_bytes
from ds4batch.engine.weights.config import ModelError
from ds4batch.engine.weights.source import open_weights
from scheduler.backend import Work
from tests.engine.hybrid_models import DENSE, EXPERTS, NEXT, SPARSE, VOCAB, load, one_thread, save
from tests.engine.models import CPU, engine_of
from tests.engine.oracle import assert_equal_logits, greedy

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "partial_rotary_factor": 0.5,
}
CASES: list[tuple[str, dict[str, Any]]] = [
    NEXT,
    DENSE,
    SPARSE,
    ("qwen3_next", {**EXPERTS, "norm_topk_prob": False, "decoder_sparse_step": 2, "attention_bias": True}),
    ("qwen3_next", {"num_experts": 0, "linear_num_value_heads": 2, "rope_parameters": YARN}),
    ("qwen3_5_text", {"tie_word_embeddings": True, "linear_conv_kernel_dim": 3, "num_key_value_heads": 1}),
    ("qwen3_5_text", {"layer_types": ["full_attention", "linear_attention", "full_attention", "linear_attention"]}),
]


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    with one_thread():
        yield


@pytest.mark.parametrize(("family", "changes"), CASES)
def test_logits_equal_transformers_at_every_position(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    theirs = save(family, changes, tmp_path)
    model = load(tmp_path)
    assert model.config.family == family.removesuffix("_text").removesuffix("_moe")
    expected = assert_equal_logits(theirs, model, VOCAB, 150)
    assert expected.abs().max() > 1


@pytest.mark.parametrize(("family", "changes"), [NEXT, DENSE, SPARSE])
def test_greedy_text_equals_transformers(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    theirs = save(family, changes, tmp_path)
    prompt = torch.randint(VOCAB, (40,), generator=torch.Generator().manual_seed(6)).tolist()
    asked = torch.tensor([prompt])
    with torch.no_grad():
        found = theirs.generate(asked, attention_mask=torch.ones_like(asked), max_new_tokens=24, do_sample=False, pad_token_id=0)
    expected = found[0, len(prompt) :]
    ours = greedy(load(tmp_path), prompt, len(expected), 256)
    assert ours.tokens == expected.tolist(), f"smallest margin {ours.margin:.4f}"
    assert ours.margin > 1e-3, "a near tie decides this prompt; choose another"


def test_bf16_weights_stay_near_fp32(tmp_path: Path) -> None:
    theirs = save(*NEXT, tmp_path)
    tokens = torch.randint(VOCAB, (60,), generator=torch.Generator().manual_seed(4)).tolist()
    with torch.no_grad():
        expected = theirs(torch.tensor([tokens])).logits[0, -1]
    engine = engine_of(load(tmp_path, torch.bfloat16), 1, 256)
    engine.launch([Work(0, tokens, True)])
    assert torch.cosine_similarity(engine.logits(0), expected, dim=0) > 0.99


def test_the_text_part_of_a_model_with_a_vision_tower_is_read(tmp_path: Path) -> None:
    """As published: text_config, model.language_model, stacked experts, and a tower and draft layers to leave out."""
    from safetensors.torch import load_file, save_file

    save(*SPARSE, tmp_path)
    plain = load(tmp_path)
    tensors = {n.replace("model.", "model.language_model.", 1): t for n, t in load_file(tmp_path / "model.safetensors").items()}
    for layer in range(plain.config.layers):
        prefix = f"model.language_model.layers.{layer}.mlp.experts."
        gate, up, down = ([tensors.pop(f"{prefix}{e}.{name}_proj.weight") for e in range(8)] for name in ("gate", "up", "down"))
        tensors[f"{prefix}gate_up_proj"] = torch.cat([torch.stack(gate), torch.stack(up)], dim=1)
        tensors[f"{prefix}down_proj"] = torch.stack(down)
    tensors |= {"model.visual.patch_embed.proj.weight": torch.zeros(2, 2), "mtp.fc.weight": torch.zeros(2, 2)}
    text = json.loads((tmp_path / "config.json").read_text())
    text["rope_parameters"] |= {"mrope_section": [1, 1, 2], "mrope_interleaved": True}
    whole = {"model_type": "qwen3_5_moe", "text_config": text, "vision_config": {"depth": 1}, "tie_word_embeddings": False}
    other = tmp_path / "whole"
    other.mkdir()
    save_file(tensors, other / "model.safetensors")
    (other / "config.json").write_text(json.dumps(whole))
    read = load(other)
    assert read.config == replace(plain.config, name="whole", stacked_experts=True)
    assert read.bytes == plain.bytes == loaded_bytes(open_weights(str(other)), read.config, CPU, torch.float32)
    logits = []
    for model in (plain, read):
        engine = engine_of(model, 1, 256)
        engine.launch([Work(0, range(50), True)])
        logits.append(engine.logits(0))
    assert torch.equal(*logits)


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("layer_types", ["linear_attention"] * 4, "layer_types"),
        ("layer_types", ["linear_attention", "sliding_attention", "linear_attention", "full_attention"], "layer_types"),
        ("linear_num_value_heads", 5, "value heads"),
        ("linear_conv_kernel_dim", 1, "linear_conv_kernel_dim"),
        ("linear_key_head_dim", -16, "key_dim"),
        ("num_experts_per_tok", 9, "9 of 8 experts"),
        ("num_experts", "many", "num_experts"),
        ("hidden_act", "gelu", "hidden_act"),
        ("num_hidden_layers", 10**9, "layers"),
        ("quantization_config", {"quant_method": "fp8"}, "quantization_config"),
        ("linear_value_head_dim", 21, "tensor"),
    ],
)
def test_a_configuration_that_cannot_be_served_is_refused_by_name(tmp_path: Path, key: str, value: object, named: str) -> None:
    save(*NEXT, tmp_path)
    where = tmp_path / "config.json"
    where.write_text(json.dumps(json.loads(where.read_text()) | {key: value}))
    with pytest.raises(ModelError, match=named):
        open_weights(str(tmp_path))
