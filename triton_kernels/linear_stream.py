"""y = x W^T for up to 16 rows where W stays quantised: weights go from memory straight into the registers of the tensor cores' operand.

x: [M <= 16, K] bf16, contiguous. W: a `PackedWeight` [N, K], K in whole blocks. y, epilogues and bits are linear_quant's: the same
values, rounded once to bf16, in the same chains of multiply-accumulates over K, whose sums are added in ascending order.

Written thread by thread: every tensor has one element for each thread of the program, so that a value is a register, and machine code
says what Triton cannot: which thread loads which words, and when. A warp owns 16 rows of W and one chain. A step is 128 values of K; a
thread's words and scales of a step are loaded TURN - 1 steps before they are used, TURN steps being one turn of the loop. Activations
come through shared memory, copied by the warps of a chain together while the values before are multiplied: loaded like the weights they
were slower, as if each waited for the weights that were asked for before it. Where SPREAD, a warp's threads make the terms of a block's
groups once, for all of them, and pass them through shared memory; else each makes those of its own rows. The chains of a tile are warps
of one program, whose sums meet in shared memory, or programs, whose sums meet in the L2.

The weights' first steps are on their way before the kernel before this one has ended, and the kernel behind this one may begin early
(AHEAD: when this one begins, else at its end). A program's code is small: a layer's products follow each other, and each starts with
none of its code in the caches.

Within 16 values of K, thread t of a quad takes values 4t .. 4t + 3, its eight bytes of words, where the instruction's own order is 2t,
2t + 1, 2t + 8, 2t + 9. Both operands do, so that the same products are summed, and a tensor core's sum of 16 products does not depend on
their order: tests/gpu/test_products.py compares the bits with linear's.

Bytes: the packed weight once; x once a program, through the L1; with programs for chains 8 bytes x chains x rows x N beside.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from triton_kernels.linear import ADD, SILU_MUL, STORE
from triton_kernels.linear_quant import Sums, chains, check_shapes
from triton_kernels.quant_formats import Format, PackedWeight, unsupported
from triton_kernels.quant_unpack import CODE, FP8, Q4_0, Q4_K, Q6_K, pair_of, pair_terms, prepared, shared_terms
from triton_kernels.stream_code import (
    PRODUCT,
    TERMS_ROW,
    copy_code,
    load_code,
    planes_of,
    read_code,
    room_code,
    scale_at,
    scales_of,
    sum_code,
    sum_operands,
    wait_code,
    word_at,
    words_of,
    write_code,
)
from triton_kernels.stream_plan import ROWS, Plan, fits, plan

__all__ = ["ADD", "ROWS", "SILU_MUL", "STORE", "linear_stream", "supported"]

# ---- loading


@triton.jit
def _load(pointer, more, BITS: tl.constexpr, ALWAYS: tl.constexpr):
    code: tl.constexpr = load_code(BITS, ALWAYS)
    if BITS == 64:
        loaded = tl.inline_asm_elementwise(code, "=r,=r,l,r", [pointer, more], dtype=(tl.int32, tl.int32), is_pure=False, pack=1)
    else:
        loaded = (tl.inline_asm_elementwise(code, "=r,l,r", [pointer, more], dtype=tl.int32, is_pure=False, pack=1),)
    return loaded


@triton.jit
def _step(
    payloads, metas, more, N: tl.constexpr, FORMAT: tl.constexpr, SPREAD: tl.constexpr, AT: tl.constexpr, ALWAYS: tl.constexpr
):  # fmt: skip
    """A thread's words of the step AT steps behind the pointers, of both halves of rows, then its scale words."""
    PLANES: tl.constexpr = planes_of(FORMAT)
    PARTS: tl.constexpr = 1 if FORMAT == Q6_K else 2  # of 16 values in a row of a plane
    MINE: tl.constexpr = 1 if PLANES == 2 else 2  # planes of a step, but for Q6_K's upper bits
    PLANE: tl.constexpr = N * 4 * PARTS
    SCALES: tl.constexpr = scales_of(FORMAT)
    out = ()
    for i in tl.static_range(2):
        for p in tl.static_range(MINE):
            for h in tl.static_range(PARTS):
                out = out + _load(payloads[i] + ((AT // 2 * PLANES + AT % 2 * MINE + p) * PLANE + h * 4), more, 64, ALWAYS)
        if FORMAT == Q6_K:
            out = out + _load(payloads[i] + (AT // 2 * PLANES + 4 + AT % 2) * PLANE, more, 64, ALWAYS)
    if SPREAD & (AT % 2 == 0):
        for w in tl.static_range(len(metas)):
            out = out + _load(metas[w] + AT // 2 * 5 * N, more, 32, ALWAYS)
    for i in tl.static_range(0 if SPREAD else 2):
        if FORMAT == Q4_0:
            out = out + _load(metas[i] + AT * 4 * N, more, 16, ALWAYS)
        elif FORMAT == FP8:
            out = out + _load(metas[i] + AT * ((N + 127) // 128), more, 32, ALWAYS)
        elif (FORMAT == Q4_K) | (FORMAT == Q6_K):
            out = out + _load(metas[i] + AT // 2 * 5 * N, more, 32, ALWAYS)
            for w in tl.static_range(2):
                out = out + _load(metas[i] + (AT // 2 * 5 + 1 + AT % 2 * 2 + w) * N, more, 32, ALWAYS)
        else:
            for w in tl.static_range(SCALES):
                out = out + _load(metas[i] + (AT * SCALES + w) * N, more, 32, ALWAYS)
    # keeps the loads here: they would be moved down to where they are used
    tl.inline_asm_elementwise(
        "bar.warp.sync 0xffffffff; mov.b32 $0, 0;", "=r,l", [metas[0]], dtype=tl.int32, is_pure=False, pack=1
    )
    return out


@triton.jit
def _moved(pointers, BY: tl.constexpr):
    out = ()
    for i in tl.static_range(len(pointers)):
        out = out + (pointers[i] + BY,)
    return out


@triton.jit
def _copy_piece(into, source, own, OFFSET: tl.constexpr):
    code: tl.constexpr = copy_code(OFFSET)
    tl.inline_asm_elementwise(code, "=r,r,l,r", [into, source, own], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _copy(into, sources, own, AT: tl.constexpr, PART: tl.constexpr, APART: tl.constexpr):
    """Begin to copy a thread's pieces of the activations of part AT behind `sources`."""
    for i in tl.static_range(len(sources)):
        _copy_piece(into, sources[i] + AT * PART, own, i * APART)
    tl.inline_asm_elementwise("cp.async.commit_group; mov.b32 $0, 0;", "=r,r", [into], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _arrived(into, ROOMS: tl.constexpr):
    """Wait for the part that was asked for first, and for all warps, which have read the one before it."""
    code: tl.constexpr = wait_code(ROOMS - 2)
    tl.inline_asm_elementwise(code, "=r,r", [into], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _read(reads, OFFSET: tl.constexpr):
    code: tl.constexpr = read_code(2, OFFSET)
    return tl.inline_asm_elementwise(code, "=r,=r,r", [reads], dtype=(tl.int32, tl.int32), is_pure=False, pack=1)


# ---- multiplying


@triton.jit
def _write_pair(place, one, two, AT: tl.constexpr, FIRST: tl.constexpr):
    """Two groups' factor and summand, which the warp can read behind the last pair."""
    code: tl.constexpr = write_code(AT, FIRST, not FIRST)
    tl.inline_asm_elementwise(
        code, "=r,r,r,r,r,r", [place, one[0], one[1], two[0], two[1]], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _spread(loaded, place, FORMAT: tl.constexpr):
    """Write a block's terms, of which a thread has the scales of a row and four groups, where the warp reads them. place: the thread's."""
    words = loaded[2 * words_of(FORMAT) :]
    _write_pair(place, pair_terms(words, FORMAT, 0), pair_terms(words, FORMAT, 1), 0, True)
    _write_pair(place, pair_terms(words, FORMAT, 2), pair_terms(words, FORMAT, 3), 16, False)


@triton.jit
def _read_terms(place, OFFSET: tl.constexpr):
    code: tl.constexpr = read_code(4, OFFSET)
    return tl.inline_asm_elementwise(code, "=r,=r,=r,=r,r", [place], dtype=(tl.float32,) * 4, is_pure=False, pack=1)


@triton.jit
def _scales(loaded, FORMAT: tl.constexpr, ROW: tl.constexpr):
    """A row's scale words of a step; Q4_0: made ready for the quad."""
    if FORMAT == Q4_0:
        words = (prepared(loaded[scale_at(FORMAT, ROW, 0)]),)
    else:
        words = (loaded[scale_at(FORMAT, ROW, 0)],)
        if FORMAT == FP8:
            words = (words[0].to(tl.float32, bitcast=True),)
        for i in tl.static_range(1, scales_of(FORMAT)):
            words = words + (loaded[scale_at(FORMAT, ROW, i)],)
    return words


@triton.jit
def _group(words, FORMAT: tl.constexpr, S: tl.constexpr):
    if FORMAT == Q4_0:
        terms = shared_terms(words[0], S)
    else:
        terms = pair_terms(words, FORMAT, S)
    return terms


@triton.jit
def _values(loaded, terms, FORMAT: tl.constexpr, ROW: tl.constexpr, S: tl.constexpr, H: tl.constexpr):
    """A thread's four values of a row and 16 of K, in two words."""
    low = pair_of(loaded[word_at(FORMAT, ROW, S, H, False)], loaded[word_at(FORMAT, ROW, S, H, True)], terms, FORMAT, S)
    high = pair_of(loaded[word_at(FORMAT, ROW, S, H, False) + 1], loaded[word_at(FORMAT, ROW, S, H, True) + 1], terms, FORMAT, S)
    return low, high


@triton.jit
def _multiply(
    totals, loaded, reads, terms, FORMAT: tl.constexpr, SPREAD: tl.constexpr, EIGHTS: tl.constexpr, ROW: tl.constexpr,
    BEGIN: tl.constexpr, END: tl.constexpr, ODD: tl.constexpr, FROM: tl.constexpr,
):  # fmt: skip
    """Values BEGIN to END of a loaded step, by the activations FROM bytes behind `reads`, in rows of ROW bytes. totals: four values for
    each eight rows of x. terms: where a thread's row has them in shared memory (SPREAD); ODD: the second step of a block."""
    WIDTH: tl.constexpr = 16 if FORMAT == Q6_K else 32
    if not SPREAD:
        first = _scales(loaded, FORMAT, 0)
        second = _scales(loaded, FORMAT, 1)
    for j in tl.static_range(BEGIN // WIDTH, END // WIDTH):
        if SPREAD:
            if j % 2 == 0:
                uppers = _read_terms(terms, (ODD * 4 + j) * 8)
                lowers = _read_terms(terms, (ODD * 4 + j) * 8 + 8 * TERMS_ROW)
            upper = uppers[j % 2 * 2 : j % 2 * 2 + 2]
            lower = lowers[j % 2 * 2 : j % 2 * 2 + 2]
        else:
            upper = _group(first, FORMAT, j)
            lower = _group(second, FORMAT, j)
        for h in tl.static_range(WIDTH // 16):
            a0, a2 = _values(loaded, upper, FORMAT, 0, j, h)
            a1, a3 = _values(loaded, lower, FORMAT, 1, j, h)
            new = ()
            for r in tl.static_range(EIGHTS):
                b0, b1 = _read(reads, FROM + r * 8 * ROW + ((j - BEGIN // WIDTH) * (WIDTH // 16) + h) * 32)
                new = new + tl.inline_asm_elementwise(
                    PRODUCT, "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r",
                    [a0, a1, a2, a3, b0, b1, totals[4 * r], totals[4 * r + 1], totals[4 * r + 2], totals[4 * r + 3]],
                    dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
                )  # fmt: skip
            totals = new
    return totals


# ---- the end


@triton.jit
def _all_chains(t, CHAINS: tl.constexpr, GROUPS: tl.constexpr):
    """The sums over a program's chains, for the threads of its first."""
    VALUES: tl.constexpr = len(t)
    code: tl.constexpr = sum_code(CHAINS, GROUPS * 32, VALUES)
    operands: tl.constexpr = sum_operands(VALUES)
    if VALUES == 4:
        out = tl.inline_asm_elementwise(code, operands, [t[0], t[1], t[2], t[3]], dtype=(tl.float32,) * 4, is_pure=False, pack=1)
    else:
        out = tl.inline_asm_elementwise(
            code, operands, [t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7]], dtype=(tl.float32,) * 8, is_pure=False, pack=1
        )
    return out


@triton.jit
def _all_parts(place, SPLIT: tl.constexpr, VALUES: tl.constexpr, THREADS: tl.constexpr):
    """The sums over programs, each of one chain. place: fp32 [SPLIT, VALUES, THREADS], at the thread."""
    out = ()
    for v in tl.static_range(VALUES):
        total = tl.zeros((THREADS,), tl.float32)
        for part in tl.static_range(SPLIT):
            total += tl.load(place + (part * VALUES + v) * THREADS, cache_modifier=".cg")
        out = out + (total,)
    return out


@triton.jit
def _store(
    totals, bias, out, stride, first, lane, mine, M, N: tl.constexpr, EPILOGUE: tl.constexpr, EIGHTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """first: a warp's first column of `out`. A thread has a column of either half, in SILU_MUL a gate and its up-projection."""
    col = first + lane // 4
    for r in tl.static_range(EIGHTS):
        for odd in tl.static_range(2):
            row = lane % 4 * 2 + (8 * r + odd)
            here = out + row.to(tl.int64) * stride + col
            inside = mine & (row < M)
            one = totals[4 * r + odd]
            two = totals[4 * r + 2 + odd]
            if EPILOGUE == 2:
                inside = inside & (col < N // 2)
                if HAS_BIAS:
                    one += tl.load(bias + col, mask=inside, other=0.0).to(tl.float32)
                    two += tl.load(bias + N // 2 + col, mask=inside, other=0.0).to(tl.float32)
                value = one / (1.0 + tl.exp(-one)) * two
                tl.store(here, value.to(out.dtype.element_ty), mask=inside)
            else:
                second = inside & (col + 8 < N)
                inside = inside & (col < N)
                if HAS_BIAS:
                    one += tl.load(bias + col, mask=inside, other=0.0).to(tl.float32)
                    two += tl.load(bias + col + 8, mask=second, other=0.0).to(tl.float32)
                if EPILOGUE == 1:
                    one = tl.load(here, mask=inside, other=0.0) + one
                    two = tl.load(here + 8, mask=second, other=0.0) + two
                tl.store(here, one.to(out.dtype.element_ty), mask=inside)
                tl.store(here + 8, two.to(out.dtype.element_ty), mask=second)


# ---- the kernel


@triton.jit(do_not_specialize=["M"])
def _linear_stream(
    x, payload, meta, bias, out, partial, arrived, stride, M, N: tl.constexpr, K: tl.constexpr, FORMAT: tl.constexpr,
    EPILOGUE: tl.constexpr, HAS_BIAS: tl.constexpr, EARLY: tl.constexpr, EIGHTS: tl.constexpr, GROUPS: tl.constexpr,
    CHAINS: tl.constexpr, SPLIT: tl.constexpr, TURN: tl.constexpr, PART: tl.constexpr, AHEAD: tl.constexpr, SPREAD: tl.constexpr,
    ROOMS: tl.constexpr,
):  # fmt: skip
    """GROUPS tiles of 16 rows of W by EIGHTS x 8 rows of x, in all chains or one. payload: 8 bytes an element; meta: of Q4_0 2, else 4."""
    LOCAL: tl.constexpr = CHAINS // SPLIT
    THREADS: tl.constexpr = GROUPS * LOCAL * 32
    STEPS: tl.constexpr = K // 128 // CHAINS
    HALF: tl.constexpr = N // 2 if EPILOGUE == 2 else 8  # rows of W from a thread's first to its second
    COLS: tl.constexpr = 8 if EPILOGUE == 2 else 16
    BLOCK: tl.constexpr = N * (24 if FORMAT == Q6_K else 8 * planes_of(FORMAT))
    META: tl.constexpr = 2 * ((N + 127) // 128) if FORMAT == FP8 else N * (
        8 if FORMAT == Q4_0 else (5 if (FORMAT == Q4_K) | (FORMAT == Q6_K) else 2 * scales_of(FORMAT))
    )  # fmt: skip
    thread = tl.arange(0, THREADS)
    lane = thread % 32
    group = thread // 32 % GROUPS
    local = thread // 32 // GROUPS
    strip = tl.program_id(0) // SPLIT
    which = tl.program_id(0) % SPLIT
    chain = which * LOCAL + local
    first = (strip * GROUPS + group) * COLS

    block = (chain * (STEPS // 2)).to(tl.int64)
    payloads = ()
    metas = ()
    for i in tl.static_range(2):
        near = tl.minimum(first + lane // 4, (N // 2 if EPILOGUE == 2 else N - 8 * i) - 1) + i * HALF
        payloads = payloads + (payload + block * BLOCK + near * (4 if FORMAT == Q6_K else 8) + lane % 4,)
        if FORMAT == Q4_0:
            metas = metas + (meta + block * META + (lane % 4 // 2 * N + near) * 2 + lane % 2,)
        else:
            metas = metas + (meta + block * META + (near // 128 if FORMAT == FP8 else near),)

    if SPREAD:  # a thread loads the scales of one row and four groups
        row = lane // 2 % 8
        upper = tl.minimum(first + row, (N // 2 if EPILOGUE == 2 else N) - 1)
        lower = tl.minimum(first + row, (N // 2 if EPILOGUE == 2 else N - 8) - 1) + HALF
        metas = (meta + block * META + tl.where(lane < 16, upper, lower),)
        for w in tl.static_range(2):
            metas = metas + (metas[0] + (lane % 2 * 2 + 1 + w) * N,)

    # rows of PART values lie 32 bytes apart, so that a warp's reads meet no bank twice
    ROW: tl.constexpr = PART * 2 + 32
    PIECES: tl.constexpr = PART // 8  # of 16 bytes, of a row
    APART: tl.constexpr = GROUPS * 32 // PIECES  # rows that a chain's threads copy at a time
    SIZE: tl.constexpr = LOCAL * EIGHTS * 8 * ROW
    room: tl.constexpr = room_code(ROOMS * SIZE + (GROUPS * LOCAL * 16 * TERMS_ROW if SPREAD else 0))
    start = tl.inline_asm_elementwise(room, "=r,r", [thread], dtype=tl.int32, is_pure=False, pack=1)
    terms = start + ROOMS * SIZE + thread // 32 * (16 * TERMS_ROW)
    spread = terms + lane // 2 * TERMS_ROW + lane % 2 * 32
    terms = terms + lane // 4 * TERMS_ROW
    base = start + local * (SIZE // LOCAL)
    reads = base + lane // 4 * ROW + lane % 4 * 8
    piece = group * 32 + lane
    into = base + piece // PIECES * ROW + piece % PIECES * 16
    own = (piece < EIGHTS * 8 * PIECES).to(tl.int32)
    sources = ()
    for i in tl.static_range((EIGHTS * 8 + APART - 1) // APART):
        row = tl.minimum(piece // PIECES + i * APART, M - 1)
        sources = sources + (x + row * K + chain * (STEPS * 128) + piece % PIECES * 8,)

    held = ()
    for d in tl.static_range(TURN - 1):
        held = held + (_step(payloads, metas, own, N, FORMAT, SPREAD, d, True),)
    if EARLY:
        gdc_wait()
        if AHEAD:
            gdc_launch_dependents()
    for i in tl.static_range(ROOMS - 1):
        _copy(into + i * SIZE, sources, own * (i < STEPS * 128 // PART), i, PART, APART * ROW)
    if SPREAD:
        _spread(held[0], spread, FORMAT)
    totals = ()
    for _ in tl.static_range(4 * EIGHTS):
        totals = totals + (tl.zeros((THREADS,), tl.float32),)
    for turn in range(STEPS // TURN):
        more = (turn + 1 < STEPS // TURN).to(tl.int32)
        for u in tl.static_range(TURN):
            for begin in tl.static_range(0, 128, min(PART, 128)):
                if (u * 128 + begin) % PART == 0:
                    number = turn * (TURN * 128 // PART) + (u * 128 + begin) // PART
                    here = reads + number % ROOMS * SIZE
                    _arrived(into, ROOMS)
                    _copy(
                        into + (number + ROOMS - 1) % ROOMS * SIZE, sources,
                        own * (number + ROOMS - 1 < STEPS * 128 // PART).to(tl.int32), (u * 128 + begin) // PART + ROOMS - 1, PART,
                        APART * ROW,
                    )  # fmt: skip
                if begin == 0:
                    held = held + (_step(payloads, metas, more, N, FORMAT, SPREAD, u + TURN - 1, u == 0),)
                totals = _multiply(
                    totals, held[0], here, terms, FORMAT, SPREAD, EIGHTS, ROW, begin, begin + min(PART, 128), u % 2,
                    (u * 128 + begin) % PART * 2,
                )  # fmt: skip
            held = held[1:]
            if SPREAD & (u % 2 == 1):
                _spread(held[0], spread, FORMAT)
        payloads = _moved(payloads, TURN // 2 * BLOCK)
        metas = _moved(metas, TURN // 2 * META)
        sources = _moved(sources, TURN * 128)
    if EARLY and not AHEAD:
        gdc_launch_dependents()

    if LOCAL > 1:
        totals = _all_chains(totals, LOCAL, GROUPS)
    if SPLIT > 1:
        VALUES: tl.constexpr = 4 * EIGHTS
        place = partial + strip * (SPLIT * VALUES * THREADS) + thread
        for v in tl.static_range(VALUES):
            tl.store(place + (which * VALUES + v) * THREADS, totals[v])
        tl.debug_barrier()  # every thread's part is written before the arrival is
        last = tl.atomic_add(arrived + strip, 1, sem="acq_rel") == SPLIT - 1
        if last:
            tl.store(arrived + strip, 0)
            totals = _all_parts(place, SPLIT, VALUES, THREADS)
            _store(totals, bias, out, stride, first, lane, thread >= 0, M, N, EPILOGUE, EIGHTS, HAS_BIAS)
    else:
        _store(totals, bias, out, stride, first, lane, local == 0, M, N, EPILOGUE, EIGHTS, HAS_BIAS)


# ---- launching


def supported(
    x: torch.Tensor, weight: PackedWeight, sums: Sums | None = None, count: int | None = None, epilogue: int = STORE
) -> str:
    """Why the product cannot be taken here; "" when it can. The arguments are `linear_stream`'s."""
    reason = unsupported(weight, x, "activations")
    if reason:
        return reason
    if not x.is_cuda or x.dtype != torch.bfloat16:
        return f"activations {x.dtype} on {x.device.type}"
    if len(x) > ROWS:
        return f"{len(x)} rows"
    if x.data_ptr() % 16:
        return "activations that begin between multiples of 16 bytes"
    if weight.n < 16:
        return f"{weight.n} rows of W"
    chosen = plan(weight.format, weight.n, weight.k, count or chains(weight.n, weight.k), epilogue)
    if chosen is None:
        return f"K = {weight.k}"
    if chosen.split > 1 and (sums is None or not sums.hold(*_sums(chosen, weight.n))):
        return "no room for the sums of chains"
    return ""


def _sums(chosen: Plan, n: int) -> tuple[int, int]:
    """Tiles, and values of each, of a product whose chains are programs."""
    return int(triton.cdiv(n, chosen.groups * 16)), chosen.split * chosen.groups * 16 * ROWS


def linear_stream(
    x: torch.Tensor,
    weight: PackedWeight,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    epilogue: int = STORE,
    early: bool = False,
    sums: Sums | None = None,
    count: int | None = None,
    chosen: Plan | None = None,
) -> torch.Tensor:
    """Compute into `out` and return it, where `supported` has no objection.

    x [M <= 16, K], out [M, N] (STORE: any float type; ADD: fp32, added to) or [M, N / 2] (SILU_MUL, the weight's rows being [gate; up]),
    bias [N]. The rows of `out` may be apart, its columns not. The other arguments are linear_quant's.
    """
    check_shapes("linear_stream", x, weight, out, epilogue)
    rows, n, k = len(x), weight.n, weight.k
    count = count or chains(n, k)
    chosen = chosen or plan(weight.format, n, k, count, epilogue)
    if rows == 0:
        return out
    if chosen is None or rows > ROWS or not fits(chosen, weight.format, k, count, rows):
        raise ValueError(f"linear_stream: {rows} rows of {n} x {k} in {count} chains do not fit {chosen}")
    shared = chosen.split > 1
    if shared and (sums is None or not sums.hold(*_sums(chosen, n))):
        raise ValueError("linear_stream: chains in programs of their own need sums with room for them")
    meta = weight.meta.view(torch.int16) if weight.format == Format.Q4_0 else weight.meta
    options = {"launch_pdl": True} if early else {}
    _linear_stream[(int(triton.cdiv(n, chosen.groups * 16)) * chosen.split,)](
        x, weight.payload.view(torch.int64), meta, bias, out, sums.partial if shared and sums else None,
        sums.arrived if shared and sums else None, out.stride(0), rows, n, k, CODE[weight.format], epilogue, bias is not None, early,
        -(-rows // 8), chosen.groups, count, chosen.split, chosen.turn, chosen.part, chosen.ahead,
        chosen.spread, chosen.rooms,
        num_warps=chosen.groups * count // chosen.split, num_stages=1, **options,
    )  # fmt: skip
    return out
