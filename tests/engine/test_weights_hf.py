"""A Hugging Face directory: configurations against transformers' own classes, shards, and refusals."""

from __future__ import annotations

import json
import shutil
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ds4batch.engine.weights.config import ModelError, Rope
from ds4batch.engine.weights.hf_config import config_from_hf
from ds4batch.engine.weights.hf_dir import hf_name, read_header
from ds4batch.engine.weights.source import open_weights

SMALL = {
    "vocab_size": 40,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 5e5,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e6}
VARIANTS: list[tuple[str, dict[str, Any], Rope]] = [
    ("llama", {}, Rope()),
    ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}, Rope()),
    (
        "llama",
        {"head_dim": 32, "rope_parameters": LLAMA3},
        Rope(theta=5e5, kind="llama3", factor=8.0, original_context=64, low_freq_factor=1.0, high_freq_factor=4.0),
    ),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, Rope(kind="linear", factor=2.0)),
    (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
        Rope(kind="dynamic", factor=2.0, original_context=128),
    ),
    ("qwen2", {"rope_parameters": YARN}, Rope(theta=1e6, kind="yarn", factor=4.0, original_context=32)),
    (
        "qwen2",
        {"rope_parameters": {**YARN, "attention_factor": 0.7, "beta_fast": 16.0, "beta_slow": 2.0}},
        Rope(theta=1e6, kind="yarn", factor=4.0, original_context=32, attention_factor=0.7, beta_fast=16.0, beta_slow=2.0),
    ),
    ("qwen2", {"tie_word_embeddings": True, "use_sliding_window": True, "max_window_layers": 2}, Rope()),
    ("qwen3", {"head_dim": 16, "rope_parameters": {"rope_theta": 1e6}}, Rope(theta=1e6)),
    ("qwen3", {"attention_bias": True, "head_dim": 16}, Rope()),
]


def build(family: str, **changes: Any) -> Any:
    """A transformers configuration."""
    from transformers import AutoConfig

    return AutoConfig.for_model(family, **{**SMALL, **changes})


def parsed(config: Any) -> dict[str, Any]:
    """What transformers writes into config.json."""
    return dict(json.loads(config.to_json_string(use_diff=False)))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny qwen3 model as transformers saves it, in shards."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(build("qwen3", head_dim=16))
    folder = tmp_path_factory.mktemp("hf") / "tiny-qwen3"
    model.save_pretrained(folder, max_shard_size="60KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


@pytest.fixture
def shards(saved: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    shutil.copytree(saved, tmp_path / "copy")
    return tmp_path / "copy"


@pytest.fixture
def single(saved: Path, tmp_path: Path) -> Path:
    """The same tensors in one file."""
    folder = tmp_path / "single"
    folder.mkdir()
    shutil.copy(saved / "config.json", folder)
    tensors = {name: value for shard in saved.glob("*.safetensors") for name, value in load_file(shard).items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def refused(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        open_weights(str(path))
    assert str(path) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(("family", "changes", "rope"), VARIANTS)
def test_config_means_what_transformers_means(family: str, changes: dict[str, Any], rope: Rope) -> None:
    theirs = build(family, **changes)
    ours = config_from_hf(parsed(theirs), "config.json", "m", 100)
    assert (ours.layers, ours.hidden, ours.heads, ours.kv_heads) == (2, 64, theirs.num_attention_heads, 2)
    assert ours.head_dim == getattr(theirs, "head_dim", None) or 16
    assert (ours.ffn, ours.vocab, ours.context, ours.norm_eps) == (96, 40, 128, theirs.rms_norm_eps)
    assert ours.tied == theirs.tie_word_embeddings
    assert ours.rope == rope


@pytest.mark.parametrize(("family", "changes", "rope"), VARIANTS)
def test_tensors_are_those_of_the_transformers_model(tmp_path: Path, family: str, changes: dict[str, Any], rope: Rope) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(build(family, **changes))
    model.save_pretrained(tmp_path / "m")
    source = open_weights(str(tmp_path / "m"))
    state = model.state_dict()
    assert source.parameters == model.num_parameters()
    for name in source.names():
        assert torch.equal(source.load(name), state[hf_name(name)]), name
    used = {hf_name(name) for name in source.names()}
    assert set(state) - used <= ({"lm_head.weight"} if source.config.tied else set())


def test_older_config_keys_mean_the_same() -> None:
    old = {
        "model_type": "llama",
        **SMALL,
        "rope_theta": 5e5,
        "rope_scaling": {key: value for key, value in LLAMA3.items() if key != "rope_theta"},
    }
    rope = config_from_hf(old, "config.json", "m", 100).rope
    assert rope == Rope(theta=5e5, kind="llama3", factor=8.0, original_context=64)
    older = {**old, "rope_scaling": {"type": "linear", "factor": 2.0}}
    assert config_from_hf(older, "config.json", "m", 100).rope == Rope(theta=5e5, kind="linear", factor=2.0)


def test_yarn_mscale_gives_transformers_attention_factor() -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    theirs = build("llama", rope_parameters={**YARN, "mscale": 1.2, "mscale_all_dim": 0.7})
    _, factor = ROPE_INIT_FUNCTIONS["yarn"](theirs)
    assert config_from_hf(parsed(theirs), "c", "m", 100).rope.attention_factor == pytest.approx(factor)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gemma3"}, "model_type is 'gemma3'"),
        ({"model_type": None}, "model_type is None"),
        ({"model_type": "qwen3_moe"}, "model_type is 'qwen3_moe'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config is {'quant_method': 'gptq'}"),
        ({"sliding_window": 64}, "sliding_window is 64"),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 1}, "use_sliding_window is True"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types is ['full_attention', 'sliding_attention']"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "rope_parameters.rope_type is 'longrope'"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_parameters.factor is missing"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters is {'full_attention'"),
        ({"rope_parameters": {**YARN, "truncate": False}}, "rope_parameters.truncate is False"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"num_hidden_layers": 10**9}, "1000000000 layers cannot come from 100 tensors"),
        ({"num_attention_heads": 0}, "heads is 0"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps is inf"),
        ({"head_dim": 15}, "head size 15 is odd"),
    ],
)
def test_what_would_change_the_answers_is_refused_by_key_and_value(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError) as caught:
        config_from_hf({"model_type": "llama", **SMALL, **changes}, "dir/config.json", "m", 100)
    assert str(caught.value).startswith("dir/config.json: ")
    assert words in str(caught.value)


def test_shards_and_single_file_give_the_same_model(saved: Path, single: Path) -> None:
    one, many = open_weights(str(single)), open_weights(str(saved))
    assert one.names() == many.names()
    assert one.parameters == many.parameters
    for name in one.names():
        assert torch.equal(one.load(name), many.load(name))
    assert many.bytes_on_disk == sum(shard.stat().st_size for shard in saved.glob("*.safetensors"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dtype_is_the_stored_one(single: Path, dtype: torch.dtype) -> None:
    file = single / "model.safetensors"
    tensors = {name: value.to(dtype) for name, value in load_file(file).items()}
    save_file(tensors, file)
    source = open_weights(str(single))
    for name in source.names():
        assert torch.equal(source.load(name), tensors[hf_name(name)])
        assert source.load(name).dtype == dtype


def test_loaded_tensor_does_not_live_in_the_file(single: Path) -> None:
    source = open_weights(str(single))
    kept = source.load("norm.weight")
    before = kept.clone()
    file = single / "model.safetensors"
    with file.open("r+b") as out:
        out.seek(file.stat().st_size // 2)
        out.write(b"\0" * (file.stat().st_size // 2))
    assert torch.equal(kept, before)


def test_truncation_anywhere_is_refused(single: Path) -> None:
    file = single / "model.safetensors"
    whole = file.read_bytes()
    for size in [*range(0, 3000, 61), *range(3000, len(whole), 9973), len(whole) - 1]:
        file.write_bytes(whole[:size])
        assert str(file) in refused(single)


def test_longer_file_is_refused(single: Path) -> None:
    file = single / "model.safetensors"
    file.write_bytes(file.read_bytes() + b"more")
    assert "4 bytes after the last tensor" in refused(single)


@pytest.mark.parametrize("length", [2**63, 2**40, 99_000_000])
def test_lying_header_length_costs_nothing(single: Path, length: int) -> None:
    file = single / "model.safetensors"
    file.write_bytes(struct.pack("<Q", length) + file.read_bytes()[8:])
    tracemalloc.start()
    try:
        assert f"says it has {length} bytes" in refused(single)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


def entry(**changes: Any) -> dict[str, Any]:
    return {"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16], **changes}}


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (entry(shape=[2**60]), "tensor a [1152921504606846976] F32 does not fill its bytes"),
        (entry(shape=[-4]), "tensor a has a shape or an offset"),
        (entry(shape=[4.0]), "tensor a has a shape or an offset"),
        (entry(shape="44"), "tensor a has a shape or an offset"),
        (entry(dtype="F99"), "tensor a has unknown dtype 'F99'"),
        (entry(dtype=["F32"]), "tensor a has unknown dtype"),
        (entry(data_offsets=[0, 2**50]), "needs bytes"),
        (entry(data_offsets=[4, 20]), "needs bytes"),
        (entry(data_offsets=[16]), "lacks dtype, shape or data_offsets of tensor a"),
        ({"a": 7}, "lacks dtype, shape or data_offsets of tensor a"),
        ({**entry(), "b": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}}, "tensor b begins at byte"),
    ],
)
def test_lying_header_entry_is_refused_by_tensor(tmp_path: Path, table: dict[str, Any], words: str) -> None:
    body = json.dumps(table).encode()
    file = tmp_path / "x.safetensors"
    file.write_bytes(struct.pack("<Q", len(body)) + body + b"\0" * 16)
    with pytest.raises(ModelError) as caught:
        read_header(str(file))
    assert words in str(caught.value)


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"\xff\xfe{}", b"{" * 5000, b'{"a":' * 100_000])
def test_broken_json_is_refused(single: Path, body: bytes) -> None:
    (single / "config.json").write_bytes(body)
    assert "config.json" in refused(single)


def test_missing_shard_is_refused_by_name(shards: Path) -> None:
    gone = sorted(shards.glob("*.safetensors"))[1]
    gone.unlink()
    assert f"{gone}: cannot open" in refused(shards)


def test_index_and_shards_must_agree(shards: Path) -> None:
    index = shards / "model.safetensors.index.json"
    table = json.loads(index.read_text())
    name = "model.layers.0.mlp.up_proj.weight"
    shard = table["weight_map"][name]
    assert list(table["weight_map"].values()).count(shard) > 1
    index.write_text(json.dumps({"weight_map": {**table["weight_map"], "model.ghost.weight": shard}}))
    assert f"tensor model.ghost.weight is not in {shard}" in refused(shards)
    fewer = {key: value for key, value in table["weight_map"].items() if key != name}
    index.write_text(json.dumps({"weight_map": fewer}))
    assert f"tensor {name} is here, but" in refused(shards)
    index.write_text(json.dumps({"weight_map": {**table["weight_map"], name: "../outside.safetensors"}}))
    assert "'../outside.safetensors', which is not a file of this directory" in refused(shards)
    index.write_text("{}")
    assert "weight_map is missing" in refused(shards)


def test_missing_and_surplus_tensors_are_named(single: Path) -> None:
    file = single / "model.safetensors"
    tensors = load_file(file)
    lost = tensors.pop("model.layers.1.self_attn.k_norm.weight")
    save_file(tensors, file)
    assert "1 of 25 tensors are missing: model.layers.1.self_attn.k_norm.weight" in refused(single)
    tensors["model.layers.1.self_attn.k_norm.weight"] = lost
    save_file(tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}, file)
    open_weights(str(single))
    save_file(tensors | {"score.weight": torch.ones(2, 64)}, file)
    assert "belong to no part of the model: score.weight" in refused(single)
    save_file(tensors | {"model.norm.weight": torch.ones(64, dtype=torch.int8)}, file)
    assert "tensor model.norm.weight is stored as I8" in refused(single)


def test_directory_without_a_model_says_what_is_missing(tmp_path: Path) -> None:
    assert "neither model.safetensors nor model.safetensors.index.json" in refused(tmp_path)


def test_safetensors_file_itself_points_to_its_directory(single: Path) -> None:
    assert "give the directory" in refused(single / "model.safetensors")
