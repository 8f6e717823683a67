"""The same decode step through torch's own products and attention, captured in a graph: what a step costs without exactness.

Everything around them is torch too. No page table: keys and values lie as scaled_dot_product_attention likes them best, every session
has the same length, and nothing asks whether the result is finite.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ds4batch.engine.models.dense import DenseModel


class TorchStep:
    """A captured step of `sessions` rows at position `length`, over a cache of random keys and values."""

    def __init__(self, model: DenseModel, sessions: int, length: int) -> None:
        config, device = model.config, model.device
        self._model = model
        self._at = length
        size = (sessions, config.kv_heads, length + 1, config.head_dim)
        self._keys = [torch.randn(size, device=device, dtype=torch.bfloat16) for _ in range(config.layers)]
        self._values = [torch.randn(size, device=device, dtype=torch.bfloat16) for _ in range(config.layers)]
        self._tokens = torch.arange(sessions, device=device)
        turn = model.rotations[length, 0]  # [head_dim / 2], complex
        self._cos, self._sin = turn.real.bfloat16(), turn.imag.bfloat16()
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._run()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.logits = self._run()

    def _run(self) -> torch.Tensor:
        model, config = self._model, self._model.config
        heads, kv_heads, dim = config.heads, config.kv_heads, config.head_dim
        hidden = F.embedding(self._tokens, model.embed)
        rows = len(hidden)
        for layer, keys, values in zip(model.layers, self._keys, self._values, strict=True):
            normed = F.rms_norm(hidden, (config.hidden,), layer.attn_norm.bfloat16(), config.norm_eps)
            qkv = F.linear(normed, layer.qkv.weight, layer.qkv.bias).view(rows, heads + 2 * kv_heads, dim)
            qk, v = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
            if layer.qk_norm is not None:
                qk = F.rms_norm(qk, (dim,), None, config.norm_eps) * layer.qk_norm.bfloat16()
            even, odd = qk[..., ::2], qk[..., 1::2]
            qk = torch.stack([even * self._cos - odd * self._sin, even * self._sin + odd * self._cos], -1).flatten(-2)
            keys[:, :, self._at] = qk[:, heads:]
            values[:, :, self._at] = v
            attended = F.scaled_dot_product_attention(qk[:, :heads, None], keys, values, enable_gqa=True)
            hidden = hidden + F.linear(attended.reshape(rows, heads * dim), layer.out.weight, layer.out.bias)
            normed = F.rms_norm(hidden, (config.hidden,), layer.mlp_norm.bfloat16(), config.norm_eps)
            gate, up = F.linear(normed, layer.gate_up.weight, layer.gate_up.bias).chunk(2, dim=-1)
            hidden = hidden + F.linear(F.silu(gate) * up, layer.down.weight, layer.down.bias)
        return F.linear(F.rms_norm(hidden, (config.hidden,), model.norm.bfloat16(), config.norm_eps), model.head.weight)
