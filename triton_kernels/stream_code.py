"""The machine code of linear_stream, and which of a thread's loaded words is which.

Owns strings of PTX and numbers known when a kernel is compiled; formats are numbered as in quant_unpack. It launches nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

PRODUCT = tl.constexpr(
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
)


TERMS_ROW = tl.constexpr(80)
"""Bytes from a row's eight pairs of terms in shared memory to the next row's: a warp's reads and writes meet no bank twice."""


@triton.constexpr_function
def load_code(bits: int, always: bool) -> str:
    """Load 16, 32 or 64 bits, not kept in the L1; unless `always`, only where the last operand is not 0."""
    words = 2 if bits == 64 else 1
    kind = "ld.global.L1::no_allocate." + {16: "u16 h,", 32: "b32 $0,", 64: "L2::128B.v2.b32 {$0, $1},"}[bits]
    ask, only = ("", "") if always else (f".reg .pred p; setp.ne.b32 p, ${words + 1}, 0;", "@p")
    half, widen = (".reg .b16 h;", "cvt.u32.u16 $0, h;") if bits == 16 else ("", "")
    return f"{{ {ask} {half} {only} {kind} [${words}]; {widen} }}"


@triton.constexpr_function
def copy_code(offset: int) -> str:
    """Begin to copy 16 bytes to shared memory, `offset` behind $1, where $3 is not 0."""
    return f"{{ .reg .pred p; setp.ne.b32 p, $3, 0; @p cp.async.ca.shared.global [$1+{offset}], [$2], 16; mov.b32 $0, 0; }}"


@triton.constexpr_function
def read_code(words: int, offset: int) -> str:
    """Two or four words of shared memory, `offset` behind the last operand."""
    values = ", ".join(f"${i}" for i in range(words))
    return f"ld.shared.v{words}.b32 {{{values}}}, [${words}+{offset}];"


@triton.constexpr_function
def write_code(offset: int, before: bool, after: bool) -> str:
    """Four words to shared memory, `offset` behind $1. `before`, `after`: the warp meets there."""
    meet = "bar.warp.sync 0xffffffff;"
    return f"{meet if before else ''} st.shared.v4.b32 [$1+{offset}], {{$2, $3, $4, $5}}; {meet if after else ''} mov.b32 $0, 0;"


@triton.constexpr_function
def room_code(size: int) -> str:
    """The address of `size` bytes of shared memory."""
    return f".shared .align 16 .b8 activations[{size}]; mov.u32 $0, activations;"


@triton.constexpr_function
def wait_code(later: int) -> str:
    """Wait until no more than `later` groups of copies are on their way, and for the whole program."""
    return f"cp.async.wait_group {later}; bar.sync 0; mov.b32 $0, 0;"


@triton.constexpr_function
def sum_code(chains: int, threads: int, values: int) -> str:
    """Add `values` values of each of a chain's `threads` threads over the chains, in ascending order, into those of chain 0."""
    apart = (chains - 1) * threads * 4
    lines = [
        ".reg .b32 base, tid, far, r; .reg .pred first;",
        f".shared .align 16 .b8 chain_sums[{apart * values}];",
        f"mov.u32 tid, %tid.x; setp.lt.u32 first, tid, {threads}; mov.u32 base, chain_sums; shl.b32 tid, tid, 2;",
        f"add.u32 base, base, tid; sub.u32 far, base, {threads * 4};",
    ]
    lines += [f"@!first st.shared.b32 [far+{v * apart}], ${values + v};" for v in range(values)]
    lines += ["bar.sync 0;", *(f"add.f32 ${v}, ${values + v}, 0f00000000;" for v in range(values))]
    for chain in range(chains - 1):
        for v in range(values):
            lines.append(f"@first ld.shared.b32 r, [base+{v * apart + chain * threads * 4}]; @first add.f32 ${v}, ${v}, r;")
    return "{ " + " ".join(lines) + " }"


@triton.constexpr_function
def sum_operands(values: int) -> str:
    return ",".join(["=&r"] * values + ["r"] * values)


@triton.constexpr_function
def planes_of(fmt: int) -> int:
    """Of a block; see quant_formats."""
    return {0: 4, 4: 6, 5: 4}.get(fmt, 2)


@triton.constexpr_function
def words_of(fmt: int) -> int:
    """Payload words that a thread loads of a row and a step."""
    return {0: 8, 4: 6, 5: 8}.get(fmt, 4)


@triton.constexpr_function
def scales_of(fmt: int) -> int:
    """Scale words that a thread loads of a row and a step: Q4_0's is one group's, which the quad shares."""
    return {1: 1, 2: 4, 3: 3, 4: 3, 5: 1}.get(fmt, 2)


@triton.constexpr_function
def word_at(fmt: int, row: int, segment: int, part: int, high: bool) -> int:
    """Which loaded word holds the first two of a thread's four codes of 16 values: part `part` of a segment of a step, of the first or
    second of a warp's halves of rows. `high`: Q6_K's upper bits."""
    first: int = words_of(fmt) * row
    if fmt == 4:
        return first + (4 if high else 2 * (segment // 4))
    return first + 2 * part + (segment // 2 * 4 if fmt in (0, 5) else 0)


@triton.constexpr_function
def scale_at(fmt: int, row: int, i: int) -> int:
    """Which loaded word is scale word i."""
    return int(2 * words_of(fmt) + row * scales_of(fmt) + i)
