"""What decode and prefill attention share: the arithmetic, so that a row has the same bits from either kernel.

Owns the order of every sum of attention and the way a key block is found in the page pool. It launches nothing.

The order. Keys are numbered from the start of the session. Stretch t holds the keys [t*stretch, (t+1)*stretch), whatever the row
count, the chunk or the longest context; the first is cut into splits of `split` keys, those behind it into splits of `later`: short
ones let many programs share a short context, long ones cost deep prefills fewer merges. Inside a split an online
softmax walks key blocks of `block_k` keys in ascending order, starting empty; the splits of a stretch are merged in ascending order,
starting empty, and so are then the stretches. Merging into nothing changes nothing, so up to `stretch` keys the second level cannot
be seen. Nothing in this depends on the rows of a tile:

- scores and products are `tl.dot` with fp32 accumulators: a tensor-core tile computes a line from that line alone, in key order;
- the row maximum is exact in any order; the row sum is a dot with ones, in the order of the dot and not of the register layout;
- every multiply-add outside a dot is an explicit `tl.fma`, so that no compiler contracts it one way here and another way there;
- a block or split that a line does not see leaves its (m, row_sum, acc) as they were: the factors are exp2(0) = 1 and
  exp2(-inf) = 0. The single exception is the sign of a zero, which `normalised` removes.

A line that sees nothing has m = -inf, row_sum = 0, acc = 0 and gives zeros.

Layout of one layer's pool: [pages, kv_heads, page_tokens, head_dim], contiguous; `page_tokens` is a multiple of `block_k`, so a
key block lies in one page and costs one load of a page id. Loads are masked at the last visible key: what lies beyond it is
never read. Keys and values of a session's own later rows, inside the same tile, are read and given the weight zero: they must
be finite.

The pool's type is the query's, or e4m3. An e4m3 pool is read as int16, two dimensions at a time, and converted to the query's type,
which is exact. Scores then add the even dimensions before the odd ones, and the two are accumulated apart. Reading bytes instead would
let the compiler give a decode tile's dot another order of K than a prefill tile's, because it packs four 8-bit values into a register.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, type-arg"

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

KEY_BLOCK = 64
"""Keys per step of the online softmax. Part of the arithmetic: one constant for all shapes."""

DEFAULT_SPLIT = 256
"""Keys per split of the first stretch. Part of the arithmetic: a constant of the model's state layout."""

DEFAULT_LATER = 512
"""Keys per split of the stretches behind it. Part of the arithmetic."""

DEFAULT_STRETCH = 2048
"""Keys whose splits are merged among themselves first, so that stretches can be computed side by side. Part of the arithmetic."""

LOG2_E = math.log2(math.e)
HEAD_DIMS = (64, 80, 96, 128)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
POOL_ONLY = torch.float8_e4m3fn
"""A type that a pool may have instead of the queries'."""


@triton.jit
def page_of(table, start, end, PAGE_TOKENS: tl.constexpr):
    """Id of the page of key `start`; 0, and no load, from `end` on.

    A loop over key blocks carries the id and loads the next block's at the end of its body. Loaded beside the keys it would be a
    pipelined load that the keys' own loads wait for, which halves the stages they can run ahead.
    """
    return tl.load(table + start // PAGE_TOKENS, mask=start < end, other=0).to(tl.int64)


@triton.jit
def ends_split(after, SPLIT: tl.constexpr, LATER: tl.constexpr, STRETCH: tl.constexpr):
    """Whether a split ends before key `after`, a multiple of the key block."""
    return (after % LATER == 0) | ((after <= STRETCH) & (after % SPLIT == 0))


@triton.jit
def split_of(key, SPLIT: tl.constexpr, LATER: tl.constexpr, STRETCH: tl.constexpr):
    """The number of the split that holds a key."""
    return tl.where(key < STRETCH, key // SPLIT, STRETCH // SPLIT + (key - STRETCH) // LATER)


@triton.jit
def key_block(
    pool,
    page,
    head,
    start,
    end,
    KV_HEADS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Keys [start, start + BLOCK_K) of one kv head, in page `page`, as [BLOCK_K, BLOCK_D]; with MASKED, zeros from `end` on, unread."""
    first = ((page * KV_HEADS + head) * PAGE_TOKENS + start % PAGE_TOKENS) * HEAD_DIM
    token = tl.arange(0, BLOCK_K)
    dim = tl.arange(0, BLOCK_D)
    address = pool + first + (token[:, None] * HEAD_DIM + dim[None, :])
    if MASKED and HEAD_DIM != BLOCK_D:
        return tl.load(address, mask=((start + token) < end)[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)
    if MASKED:
        return tl.load(address, mask=((start + token) < end)[:, None], other=0.0)
    if HEAD_DIM != BLOCK_D:
        return tl.load(address, mask=(dim < HEAD_DIM)[None, :], other=0.0)
    return tl.load(address)


@triton.jit
def queries_of(q, PACK: tl.constexpr):
    """Queries [lines, D] as `attend_block` takes them."""
    if PACK == 2:
        even, odd = tl.split(tl.reshape(q, (q.shape[0], q.shape[1] // 2, 2)))
    else:
        even, odd = q, q
    return even, odd


@triton.jit
def _dimensions(pairs, dtype: tl.constexpr):
    """The even and the odd dimensions of a block of e4m3 pairs, int16 [keys, D / 2], both [keys, D / 2] of `dtype`.

    By way of fp32, which is exact as well: on a Hopper card e4m3 straight to bf16 ends in one slow instruction a value.
    """
    even = pairs.to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    odd = (pairs >> 8).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    return even.to(tl.float32).to(dtype), odd.to(tl.float32).to(dtype)


@triton.jit
def attend_block(
    q, q_odd, k, v, m, row_sum, acc, acc_odd, visible, scale_log2, MASKED: tl.constexpr, PACK: tl.constexpr
):  # fmt: skip
    """One step of the online softmax over a key block.

    q [lines, D], k and v [keys, D], visible bool [lines, keys] (read only if MASKED); m fp32 [lines] running maximum in units
    of log2, row_sum fp32 [lines, 8] running row sum (8 equal columns: the narrowest dot), acc fp32 [lines, D]. With PACK 2
    k and v are e4m3 pairs, int16 [keys, D / 2]; q and acc hold the even dimensions, q_odd and acc_odd the odd ones, [lines, D / 2].
    """
    if PACK == 2:
        k_even, k_odd = _dimensions(k, q.dtype)
        v_even, v_odd = _dimensions(v, q.dtype)
        s = tl.dot(q, tl.trans(k_even), input_precision="ieee")
        s = tl.dot(q_odd, tl.trans(k_odd), s, input_precision="ieee")
    else:
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
    if MASKED:
        s = tl.where(visible, s, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, 1) * scale_log2)
    base = m_new
    if MASKED:
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
    alpha = tl.exp2(m - base)
    p = tl.exp2(tl.fma(s, tl.full(s.shape, 1.0, tl.float32) * scale_log2, tl.broadcast_to(-base[:, None], s.shape))).to(q.dtype)
    ones = tl.full([k.shape[0], 8], 1.0, q.dtype)
    row_sum = tl.dot(p, ones, row_sum * alpha[:, None], input_precision="ieee")
    if PACK == 2:
        acc = tl.dot(p, v_even, acc * alpha[:, None], input_precision="ieee")
        acc_odd = tl.dot(p, v_odd, acc_odd * alpha[:, None], input_precision="ieee")
    else:
        acc = tl.dot(p, v, acc * alpha[:, None], input_precision="ieee")
    return m_new, row_sum, acc, acc_odd


@triton.jit
def merge_split(m, row_sum, acc, m_split, sum_split, acc_split):
    """The run with the next split added: m, row_sum fp32 [lines], acc fp32 [lines, D]. Into the empty run: the split itself.

    Stretches are merged by the same steps.
    """
    m_new = tl.maximum(m, m_split)
    base = tl.where(m_new == float("-inf"), 0.0, m_new)
    keep = tl.exp2(m - base)
    add = tl.exp2(m_split - base)
    sum_new = tl.fma(sum_split, add, row_sum * keep)
    acc_new = tl.fma(acc_split, tl.broadcast_to(add[:, None], acc.shape), acc * keep[:, None])
    return m_new, sum_new, acc_new


@triton.jit
def normalised(row_sum, acc):
    """acc / row_sum [lines, D], zeros where the line saw no key.

    Adding +0 turns a negative zero, the one trace that a block unseen can leave, into +0.
    """
    seen = row_sum != 0.0
    inverse = tl.where(seen, 1.0 / tl.where(seen, row_sum, 1.0), 0.0)
    return tl.fma(acc, tl.broadcast_to(inverse[:, None], acc.shape), tl.zeros_like(acc))


def unsupported_reason(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, page_table: torch.Tensor, page_tokens: int, split: int, later: int,
    stretch: int, block_k: int,
) -> str:  # fmt: skip
    """Why the kernels cannot take these tensors; "" if they can. Pools as in the module docstring, q [rows, heads, head_dim]."""
    if q.dim() != 3 or k.dim() != 4 or v.shape != k.shape:
        return (
            "q must be [rows, heads, head_dim] and k, v both [pages, kv_heads, page_tokens, head_dim], "
            f"got {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        )
    kv_heads, head_dim = k.shape[1], k.shape[3]
    if q.dtype not in DTYPES or k.dtype not in (q.dtype, POOL_ONLY) or v.dtype != k.dtype:
        return f"q, k and v must share one of bf16, fp16, fp32, or k and v be float8_e4m3fn, got {q.dtype}, {k.dtype}, {v.dtype}"
    if head_dim not in HEAD_DIMS or q.shape[2] != head_dim:
        return f"head_dim must be one of {HEAD_DIMS} and the same for q and k, got {q.shape[2]} and {head_dim}"
    if q.shape[1] % kv_heads or not 1 <= q.shape[1] // kv_heads <= 16:
        return f"heads / kv_heads must be a whole number from 1 to 16, got {q.shape[1]} / {kv_heads}"
    if k.shape[2] != page_tokens or block_k < 16 or block_k & (block_k - 1) or page_tokens % block_k or split % page_tokens:
        return (
            "page_tokens must be the pool's, a multiple of block_k (a power of two >= 16) and a divisor of split, "
            f"got {page_tokens}, {block_k}, {split} and pages of {k.shape[2]}"
        )
    if stretch <= 0 or later <= 0 or stretch % later or later % split:
        return f"stretch must be a multiple of later, and later of split, got {stretch}, {later} and {split}"
    if page_table.dim() != 2 or page_table.dtype != torch.int32 or page_table.stride(1) != 1:
        return "page_table must be int32 [tables, max_pages] with contiguous rows"
    if not (q.is_contiguous() and k.is_contiguous() and v.is_contiguous()):
        return "q, k and v must be contiguous"
    return ""


def packed(pool: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The pool as the kernels read it, and how many dimensions lie in one of its elements."""
    return (pool.view(torch.int16), 2) if pool.dtype == POOL_ONLY else (pool, 1)


def reference_row(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pages: torch.Tensor, length: int, *, scale: float
) -> torch.Tensor:
    """Plain attention of one row in fp64: q [heads, head_dim], pages int32 [max_pages], `length` keys -> fp64 [heads * head_dim]."""
    _, kv_heads, page_tokens, head_dim = k.shape
    heads = q.shape[0]
    if length == 0:
        return torch.zeros(heads * head_dim, dtype=torch.float64, device=q.device)
    owned = pages[: -(-length // page_tokens)].long()
    keys, values = (pool[owned].transpose(0, 1).reshape(kv_heads, -1, head_dim)[:, :length].double() for pool in (k, v))
    grouped = q.double().view(kv_heads, heads // kv_heads, head_dim)
    weights = torch.softmax(grouped @ keys.transpose(1, 2) * scale, -1)
    return (weights @ values).reshape(heads * head_dim)


def padded(size: int) -> int:
    """The next power of two, at least 16: the size of a dot's side."""
    return max(16, int(triton.next_power_of_2(size)))
