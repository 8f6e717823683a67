"""Shapes of models whose weights are not at hand, and directories that a server can start on random weights of them.

python -m bench.shapes DIRECTORY [--model qwen3-8b] [--tokenizer FILE] [--fp8]
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from ds4batch.engine.weights.config import ModelConfig, Rope
from ds4batch.engine.weights.dummy import RandomWeights
from ds4batch.tokenizer import load_tokenizer

__all__ = ["LLAMA_31_8B", "QWEN3_8B", "SHAPES", "RandomWeights", "write_directory"]

DEMO = Path(__file__).parents[1] / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"

QWEN3_8B = ModelConfig(
    family="qwen3", name="qwen3-8b-shape", layers=36, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=12288, vocab=151936,
    context=40960, norm_eps=1e-6, rope=Rope(1e6), tied=False, qk_norm=True,
)  # fmt: skip
LLAMA_31_8B = ModelConfig(
    family="llama", name="llama-3.1-8b-shape", layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336,
    vocab=128256, context=131072, norm_eps=1e-5, rope=Rope(5e5), tied=False,
)  # fmt: skip
SHAPES = {"qwen3-8b": QWEN3_8B, "llama-3.1-8b": LLAMA_31_8B}


def write_directory(config: ModelConfig, path: str | os.PathLike[str], tokenizer_from: str, fp8: bool = False) -> None:
    """Write config.json, tokenizer.json and tokenizer_config.json for `ds4batch serve -m PATH --load-format dummy`.

    The tokenizer and chat template are those of the model at `tokenizer_from`; the embedding's further rows stand for words that no
    prompt brings, so that every answer has text. Raises ValueError for a shape whose rope is scaled, and ModelError for a tokenizer
    that cannot be read.
    """
    if config.rope != Rope(config.rope.theta):
        raise ValueError(f"{config.name}: a scaled rope is not written")
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    words = load_tokenizer(tokenizer_from)
    (folder / "tokenizer.json").write_text(json.dumps(_widened(json.loads(words.tokenizer.to_str()), config.vocab)))
    named = {"bos_token": words.bos_id, "eos_token": words.eos_id}
    settings: dict[str, Any] = {key: words.tokenizer.id_to_token(i) for key, i in named.items() if i is not None}
    settings |= {"add_bos_token": words.add_bos, "chat_template": words.chat_template}
    for name, table in (("config.json", hf_config(config, fp8)), ("tokenizer_config.json", settings)):
        (folder / name).write_text(json.dumps(table, indent=2) + "\n")


def _widened(tokenizer: dict[str, Any], vocab: int) -> dict[str, Any]:
    """The tokenizer with a word for every id below `vocab`: a space and the id."""
    known = tokenizer["model"]["vocab"]
    taken = set(known.values()) | {token["id"] for token in tokenizer["added_tokens"]}
    known |= {f"\u0120{i}": i for i in range(vocab) if i not in taken}
    return tokenizer


def hf_config(config: ModelConfig, fp8: bool = False) -> dict[str, Any]:
    """The shape as Hugging Face's config.json spells it."""
    table: dict[str, Any] = {
        "architectures": [{"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[config.family] + "ForCausalLM"],
        "model_type": config.family,
        "hidden_act": "silu",
        "hidden_size": config.hidden,
        "intermediate_size": config.ffn,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab,
        "max_position_embeddings": config.context,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope.theta,
        "tie_word_embeddings": config.tied,
        "attention_bias": config.qkv_bias and config.family != "qwen2",
        "mlp_bias": config.mlp_bias,
        "torch_dtype": "bfloat16",
    }
    if fp8:
        scheme = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
        table["quantization_config"] = scheme
    return table


def main() -> None:
    """Write a directory."""
    parser = argparse.ArgumentParser(prog="shapes", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory")
    parser.add_argument("--model", default="qwen3-8b", choices=list(SHAPES))
    parser.add_argument("--tokenizer", default=str(DEMO), help="model whose tokenizer to take (default: the demo model's)")
    parser.add_argument("--fp8", action="store_true", help="matrices in FP8 with a scale for each square of 128 x 128")
    options = parser.parse_args()
    write_directory(SHAPES[options.model], options.directory, options.tokenizer, options.fp8)


if __name__ == "__main__":
    main()
