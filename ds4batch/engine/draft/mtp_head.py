"""A next-n prediction module (MTP): one decoder block that guesses the token behind the next one.

    x_t = proj [embed_norm(embedding(token_{t+1})) ; hidden_norm(hidden_t)]
    y_t = x_t + attention(attn_norm(x))_t,  then  y_t + mlp(mlp_norm(y_t))      a layer of the model's shape, without biases
    logits_t = head(norm(y_t))                                                  the model's own head; they predict token_{t+2}

hidden_t is the model's residual stream behind its last layer and before its final norm; attention is causal, with the model's rope
at position t. The form is that of DeepSeek-V3 (arXiv 2412.19437, section 2.2), embedding first as its checkpoints have it.

Further drafts: y_t stands in for hidden_{t+1}, which the model has not computed yet. The n-th draft's row at position t attends to
the rows that were made from the model's own hidden states up to t - n + 1, and behind these to the rows of the drafts before.

Owns the weights, their file and a plain forward of whole sequences, for training and as the oracle of faster ones. Residual stream,
norms and rotations are fp32; products run in the weights' type.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ds4batch.engine.weights.config import ModelConfig

FORMAT = "ds4batch-mtp"
VERSION = "1"


@dataclass(frozen=True)
class Block:
    """A layer. Matrices are [out, in]. Rows of q and k are in the half-split rotary order, as in Hugging Face's files: value j of a
    head is rotated with value j + head_dim / 2."""

    attn_norm: torch.Tensor  # [hidden]
    q: torch.Tensor  # [heads * head_dim, hidden]
    k: torch.Tensor  # [kv_heads * head_dim, hidden]
    v: torch.Tensor
    out: torch.Tensor  # [hidden, heads * head_dim]
    mlp_norm: torch.Tensor
    gate: torch.Tensor  # [ffn, hidden]
    up: torch.Tensor
    down: torch.Tensor  # [hidden, ffn]


@dataclass(frozen=True)
class MtpWeights(Block):
    """The module. In a file `q` is `mtp.q.weight`, and so on."""

    embed_norm: torch.Tensor  # [hidden]
    hidden_norm: torch.Tensor  # [hidden]
    proj: torch.Tensor  # [hidden, 2 * hidden]: the columns of the embedding, then those of the hidden state
    norm: torch.Tensor  # [hidden]

    def named(self) -> dict[str, torch.Tensor]:
        """The tensors by their names in a file."""
        return {_stored(field.name): getattr(self, field.name) for field in fields(self)}

    def to(self, device: torch.device, dtype: torch.dtype) -> MtpWeights:
        """The tensors there; they need no gradient."""
        return MtpWeights(**{f.name: getattr(self, f.name).detach().to(device, dtype) for f in fields(self)})

    def save(self, path: str | os.PathLike[str], config: ModelConfig, about: Mapping[str, str] | None = None) -> None:
        """Write bf16 safetensors in place of what is at `path`, whole or not at all.

        The metadata hold the format, the model's name and shape, and `about` (the model's file, how it was trained). Raises
        ValueError naming a tensor that does not fit `config`.
        """
        named = self.named()
        for name, shape in shapes(config).items():
            _check(os.fspath(path), name, tuple(named[name].shape), shape)
        rope = config.rope
        known: dict[str, object] = {"format": FORMAT, "version": VERSION, "model": config.name, "family": config.family}
        known |= {key: getattr(config, key) for key in ("hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "norm_eps")}
        known |= {"rope": f"{rope.kind} {rope.theta:g}", "rope_order": "halves", "proj_order": "embedding, hidden"}
        metadata = {key: str(value) for key, value in known.items()} | dict(about or {})
        part = Path(f"{os.fspath(path)}.part")
        tensors = {name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in named.items()}
        save_file(tensors, part, metadata)
        part.replace(path)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], config: ModelConfig, device: torch.device, dtype: torch.dtype = torch.bfloat16
    ) -> MtpWeights:
        """Read a file that `save` wrote, for a model of this shape.

        Raises ValueError naming the file and the tensor that is missing, unknown, of another type or does not fit, before any is
        read; OSError where there is no file.
        """
        where, expected = os.fspath(path), shapes(config)
        try:
            with safe_open(where, framework="pt", device="cpu") as file:
                metadata = file.metadata() or {}
                found = (metadata.get("format"), metadata.get("version"))
                if found != (FORMAT, VERSION):
                    raise ValueError(f"{where}: format {found[0]} version {found[1]}; {FORMAT} version {VERSION} is read")
                names = set(file.keys())
                for name in sorted(names ^ expected.keys()):
                    raise ValueError(f"{where}: {name} is {'unknown' if name in names else 'missing'}")
                for name, shape in expected.items():
                    stored = file.get_slice(name)
                    _check(where, name, tuple(stored.get_shape()), shape)
                    if stored.get_dtype() not in ("BF16", "F16", "F32"):
                        raise ValueError(f"{where}: {name} is {stored.get_dtype()}; BF16, F16 and F32 are read")
                return cls(**{f.name: file.get_tensor(_stored(f.name)).to(device, dtype) for f in fields(cls)})
        except SafetensorError as error:
            raise ValueError(f"{where}: not a safetensors file: {error}") from None


def _stored(name: str) -> str:
    return f"mtp.{name}.weight"


def _check(where: str, name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if found != expected:
        raise ValueError(f"{where}: {name} has shape {list(found)}; the model takes {list(expected)}")


def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor of a file for this model."""
    hidden, ffn = config.hidden, config.ffn
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    found: dict[str, tuple[int, ...]] = {
        "embed_norm": (hidden,), "hidden_norm": (hidden,), "proj": (hidden, 2 * hidden), "attn_norm": (hidden,),
        "q": (q, hidden), "k": (kv, hidden), "v": (kv, hidden), "out": (hidden, q), "mlp_norm": (hidden,),
        "gate": (ffn, hidden), "up": (ffn, hidden), "down": (hidden, ffn), "norm": (hidden,),
    }  # fmt: skip
    return {_stored(name): shape for name, shape in found.items()}


class BlockOutput(NamedTuple):
    """What a layer leaves of sequences of T positions."""

    hidden: torch.Tensor  # fp32 [B, T, hidden]: the residual stream behind it
    k: torch.Tensor  # [B, heads, T, head_dim], rotated; one a query head
    v: torch.Tensor


def layer(
    block: Block, config: ModelConfig, turns: torch.Tensor, x: torch.Tensor, before: Sequence[BlockOutput] = ()
) -> BlockOutput:
    """One decoder block over x, fp32 [B, T, hidden]. turns: complex64 [>= T, head_dim / 2], see engine.rope.

    `before`: the rows of the drafts before, the first draft's first. Each adds its row of the diagonal: see the module docstring.
    """
    normed = rms_norm(x, block.attn_norm, config)
    q = _turned(_heads(_product(normed, block.q), config.heads), turns)
    k = _turned(_heads(_product(normed, block.k), config.kv_heads), turns)
    v = _heads(_product(normed, block.v), config.kv_heads)
    found = BlockOutput(x, _shared(k, config), _shared(v, config))
    attended = _attention(q, [*before, found]).transpose(1, 2).flatten(2)
    x = x + _product(attended, block.out)
    normed = rms_norm(x, block.mlp_norm, config)
    x = x + _product(F.silu(_product(normed, block.gate)) * _product(normed, block.up), block.down)
    return found._replace(hidden=x)


def draft_rows(
    weights: MtpWeights, config: ModelConfig, turns: torch.Tensor, embedded: torch.Tensor, hidden: torch.Tensor, depth: int = 1
) -> list[BlockOutput]:
    """The rows of drafts 1 to `depth` over whole sequences.

    embedded: [B, T, hidden], the embedding of token_{t+1} at place t. hidden: [B, T, hidden], the model's. Row t of each result
    predicts token_{t+2}; that of draft n is part of the chain that began at t - n + 1, and places below n - 1 hold nothing of use.
    """
    entered = rms_norm(embedded.float(), weights.embed_norm, config)
    found: list[BlockOutput] = []
    for _ in range(depth):
        joined = torch.cat([entered, rms_norm(hidden.float(), weights.hidden_norm, config)], -1)
        x = _product(joined, weights.proj).float()
        found.append(layer(weights, config, turns, x, found))
        hidden = F.pad(found[-1].hidden[:, :-1], (0, 0, 1, 0))  # y_{t-1} for hidden_t
    return found


def rms_norm(x: torch.Tensor, weight: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """fp32, over the last dimension."""
    return F.rms_norm(x, (config.hidden,), weight.float(), config.norm_eps)


def _product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.linear(x.to(weight.dtype), weight)


def _heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[B, heads, T, head_dim] of [B, T, heads * head_dim]."""
    return x.view(*x.shape[:2], heads, -1).transpose(1, 2)


def _shared(x: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """Each key head once for every query head that reads it."""
    return x[:, :, None].expand(-1, -1, config.heads // config.kv_heads, -1, -1).flatten(1, 2)


def _turned(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """Rotate value j of a head with value j + head_dim / 2."""
    cos, sin = turns.real[: x.shape[2]], turns.imag[: x.shape[2]]
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def _attention(q: torch.Tensor, drafts: Sequence[BlockOutput]) -> torch.Tensor:
    """[B, heads, T, head_dim]. The last of `drafts` are the queries' own rows, whose place is theirs alone if there are others."""
    if len(drafts) == 1:
        return F.scaled_dot_product_attention(q, drafts[0].k, drafts[0].v, is_causal=True)
    count = q.shape[2]
    query, key = (torch.arange(count, device=q.device) for _ in range(2))
    behind = query[:, None] - key  # how far
    last = len(drafts) - 1
    mask = torch.cat([behind >= last, *(behind == last - i for i in range(1, last + 1))], 1)
    k, v = torch.cat([rows.k for rows in drafts], 2), torch.cat([rows.v for rows in drafts], 2)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
