"""A packed weight's values, written out: what many rows are multiplied with, by triton_kernels.linear.

weight: a `PackedWeight` [N, K]. out: [N, K] bf16, fp16 or fp32, contiguous: `quant_formats.dequantise` rounded once to out's type, by
the definition of a value that linear_quant unpacks with (quant_unpack), so that both products have the same bits.

No reduction. Bytes: the packed weight read, 2 N K written, which then come back through the L2 as far as they fit into it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triton_kernels.quant_formats import LAYOUTS, PackedWeight, unsupported
from triton_kernels.quant_unpack import CODE, FP8, Q6_K, Q8_0, scale_words, values_of

_ROWS = 32  # of a program


@triton.jit
def _expand(
    payload, meta, out, N, K, FORMAT: tl.constexpr, PAIRS: tl.constexpr, EVEN_K: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """One block of 256 values of BN rows a program."""
    BYTES: tl.constexpr = (FORMAT == Q8_0) | (FORMAT == FP8)
    WIDTH: tl.constexpr = 16 if FORMAT == Q6_K else 32
    SEGMENTS: tl.constexpr = 256 // WIDTH
    FIELDS: tl.constexpr = 2 if BYTES else 4
    PLANES: tl.constexpr = 6 if FORMAT == Q6_K else SEGMENTS // FIELDS
    strips = tl.cdiv(N, BN)
    block = tl.program_id(0) // strips
    row = tl.program_id(0) % strips * BN + tl.arange(0, BN)
    near = tl.minimum(row, N - 1)
    inner = tl.arange(0, WIDTH)
    plane = tl.cast(N, tl.int64) * WIDTH
    scales = scale_words(meta, block, near, N, FORMAT)
    words = payload + plane * (block * PLANES) + near[:, None] * WIDTH + inner[None, :]
    low = tl.load(words)
    high = low
    for s in tl.static_range(SEGMENTS):
        if s % FIELDS == 0 and s > 0:
            low = tl.load(words + plane * (s // FIELDS))
        if FORMAT == Q6_K and s % 8 == 0:
            high = tl.load(words + plane * (4 + s // 8))
        k = block * 256 + s * WIDTH + inner
        inside = row[:, None] < N
        if not EVEN_K:
            inside = inside & (k[None, :] < K)
        values = values_of(low, high, scales, out.dtype.element_ty, FORMAT, s, PAIRS)
        tl.store(out + row[:, None].to(tl.int64) * K + k[None, :], values, mask=inside)


def expand(weight: PackedWeight, out: torch.Tensor) -> torch.Tensor:
    """Into `out`, [N, K], which is returned."""
    n, k = weight.n, weight.k
    if tuple(out.shape) != (n, k) or not out.is_contiguous():
        raise ValueError(f"expand: out {tuple(out.shape)} must be [{n}, {k}], contiguous")
    pairs = out.is_cuda and out.dtype != torch.float32
    _expand[(weight.blocks * triton.cdiv(n, _ROWS),)](
        weight.payload, weight.meta, out, n, k, CODE[weight.format], pairs, k % LAYOUTS[weight.format].block_k == 0, _ROWS,
        num_warps=4,
    )  # fmt: skip
    return out


def supported(weight: PackedWeight, out: torch.Tensor) -> str:
    """Why the values cannot be written here; "" when they can."""
    return unsupported(weight, out, "values")
