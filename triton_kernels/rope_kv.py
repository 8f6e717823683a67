"""What follows the q, k and v product: norm of each head, rotation, and the write of keys and values into their pages.

qkv: [R, (heads + 2 kv_heads) D], bf16, fp16 or fp32; heads lie q, k, v. Dimensions 2i and 2i + 1 of a head rotate together.
positions: int64 or int32 [R]. cos, sin: fp32 [ctx, D / 2]. norm: fp32 [heads + kv_heads, D] or none. q: [R, heads, D].
k, v: one layer of the pool, [pages, kv_heads, page_tokens, D], in one of these types or e4m3. slot_pages, slot_offsets: int32 or int64
[R]; a row whose page is negative is padding: it writes no key and no value, and its q is rotated as at position 0.

    x = x * rsqrt(mean(x^2) + eps) * norm                                      (q and k, where norm is given)
    x[2i], x[2i + 1] = x[2i] cos - x[2i + 1] sin, x[2i] sin + x[2i + 1] cos    (q and k)
    all in fp32, rounded once, when stored

An e4m3 pool has no scale: what lies beyond +-448 is stored as +-448, infinities too, and NaN stays NaN. The limit is set in fp32, so
that it does not depend on the conversion, which below it rounds to nearest, ties to even.

Reduction order: a program holds a block of heads of one row, [block, D]; the mean is a sum along D whose order follows from that
block and the warps, both functions of D alone, and from the tensors' alignment, which is required. The row count enters nowhere.

Bytes a row: qkv read once and written once, and 4 D of the tables.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_TYPES = (torch.bfloat16, torch.float16, torch.float32)
_KV_TYPES = (*_TYPES, torch.float8_e4m3fn)
_ELEMENTS = 1024  # of a program: 8 a thread, one 16-byte access each in bf16
_WARPS = 4


@triton.jit
def _stored(x, pool):
    """x, fp32, in the type of the pool."""
    if pool.dtype.element_ty == tl.float8e4nv:
        x = tl.clamp(x, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    return x.to(pool.dtype.element_ty)


@triton.jit
def _rope_kv(
    qkv, positions, cos, sin, norm, q, k, v, slot_pages, slot_offsets, page_stride, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, PAGE_TOKENS: tl.constexpr, NORM: tl.constexpr,
    BLOCK: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """BLOCK heads of one row."""
    if EARLY:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dim = tl.arange(0, D)
    pair = tl.arange(0, D // 2)
    is_q = head < HEADS
    is_k = (head >= HEADS) & (head < HEADS + KV_HEADS)
    is_v = (head >= HEADS + KV_HEADS) & (head < HEADS + 2 * KV_HEADS)
    page = tl.load(slot_pages + row).to(tl.int64)
    offset = tl.load(slot_offsets + row).to(tl.int64)
    position = tl.where(page < 0, 0, tl.load(positions + row).to(tl.int64))
    inside = (is_q | is_k | is_v)[:, None] & (dim >= 0)[None, :]
    at = head[:, None] * D + dim[None, :]
    c = tl.load(cos + position * (D // 2) + pair)[None, :]
    s = tl.load(sin + position * (D // 2) + pair)[None, :]
    if NORM:
        scale = tl.load(norm + at, mask=(is_q | is_k)[:, None] & (dim >= 0)[None, :], other=0.0)
    if EARLY:
        gdc_wait()  # what has been loaded is as it was when the step began
    x = tl.load(qkv + row * ((HEADS + 2 * KV_HEADS) * D) + at, mask=inside, other=0.0).to(tl.float32)
    turned = x
    if NORM:
        mean = tl.sum(x * x, axis=1) / D
        turned = x * tl.rsqrt(mean + eps)[:, None] * scale
    even, odd = tl.split(tl.reshape(turned, (BLOCK, D // 2, 2)))
    turned = tl.reshape(tl.join(even * c - odd * s, even * s + odd * c), (BLOCK, D))
    tl.store(q + row * (HEADS * D) + at, turned.to(q.dtype.element_ty), mask=inside & is_q[:, None])
    place = page * page_stride + offset * D + dim[None, :]
    written = inside & (page >= 0)
    kept = (head - HEADS).to(tl.int64) * (PAGE_TOKENS * D)
    tl.store(k + place + kept[:, None], _stored(turned, k), mask=written & is_k[:, None])
    kept = (head - HEADS - KV_HEADS).to(tl.int64) * (PAGE_TOKENS * D)
    tl.store(v + place + kept[:, None], _stored(x, v), mask=written & is_v[:, None])


def rope_kv(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slot_pages: torch.Tensor,
    slot_offsets: torch.Tensor,
    *,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    early: bool = False,
) -> torch.Tensor:
    """Rotate, write k and v into their pages, and q into `q`, which is returned. `early`: see triton_kernels.linear."""
    rows, heads, head_dim = q.shape
    kv_heads, page_tokens = k.shape[1:3]
    block = max(_ELEMENTS // head_dim, 1)
    grid = (rows, triton.cdiv(heads + 2 * kv_heads, block))
    if rows:
        _rope_kv[grid](
            qkv, positions, cos, sin, norm, q, k, v, slot_pages, slot_offsets, k.stride(0), eps,
            heads, kv_heads, head_dim, page_tokens, norm is not None, block, early,
            num_warps=_WARPS, **({"launch_pdl": True} if early else {}),
        )  # fmt: skip
    return q


def supported(qkv: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, norm: torch.Tensor | None = None) -> str:
    """Why the rows cannot be rotated here; "" when they can."""
    heads, head_dim = q.shape[1:]
    kv_heads = k.shape[1]
    tensors = [qkv, q, k, v] + ([] if norm is None else [norm])
    known = qkv.dtype in _TYPES and q.dtype in _TYPES and k.dtype in _KV_TYPES and v.dtype in _KV_TYPES
    if not known or (norm is not None and norm.dtype != torch.float32):
        return f"types {[t.dtype for t in tensors]}"
    if head_dim < 16 or head_dim > 1024 or head_dim & (head_dim - 1):
        return f"head dimension {head_dim}: a power of two from 16 to 1024"
    if qkv.shape != (q.shape[0], (heads + 2 * kv_heads) * head_dim) or k.shape != v.shape or k.shape[3] != head_dim:
        return f"shapes {[tuple(t.shape) for t in tensors]}"
    if norm is not None and norm.shape != (heads + kv_heads, head_dim):
        return f"norm of shape {tuple(norm.shape)}"
    if not (qkv.is_contiguous() and q.is_contiguous() and k[0].is_contiguous() and k.stride() == v.stride()):
        return "tensors must be contiguous, k and v within each page"
    if any(t.data_ptr() % 16 for t in tensors):
        return "tensors must be 16-byte aligned"
    return ""


def rope_kv_reference(
    qkv: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int, kv_heads: int,
    norm: torch.Tensor | None = None, eps: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """q [R, heads, D], k and v [R, kv_heads, D] in plain torch, in fp64; the caller writes the pages."""
    split = qkv.double().view(len(qkv), heads + 2 * kv_heads, -1)
    qk, v = split[:, : heads + kv_heads], split[:, heads + kv_heads :]
    if norm is not None:
        qk = qk * (qk.square().mean(-1, keepdim=True) + eps).rsqrt() * norm.double()
    c, s = cos[positions.long()].double()[:, None], sin[positions.long()].double()[:, None]
    even, odd = qk[..., ::2], qk[..., 1::2]
    qk = torch.stack([even * c - odd * s, even * s + odd * c], -1).flatten(-2)
    return qk[:, :heads], qk[:, heads:], v
