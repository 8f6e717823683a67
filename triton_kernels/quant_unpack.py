"""From the words of a packed weight to operands and scales: what linear_quant's kernels share, a block of 256 values of K at a time.

Owns the bit tricks; quant_formats says where codes and scales lie. Unpacking takes two codes at a time: one logical operation puts
them into the mantissas of two numbers of x's type whose unit is one, and one packed subtraction takes what that added. Nothing is
converted, and no value changes place. Under the interpreter, and for fp32, the same values come by plain arithmetic.
"""

from __future__ import annotations

import triton
import triton.language as tl

from triton_kernels.quant_formats import Format

Q8_0, Q4_0, Q4_1, Q4_K, Q6_K, FP8 = (tl.constexpr(i) for i in range(6))
CODE = {Format.Q8_0: 0, Format.Q4_0: 1, Format.Q4_1: 2, Format.Q4_K: 3, Format.Q6_K: 4, Format.FP8: 5}


@triton.constexpr_function
def or_in(shift: int, keep: int, magic: int) -> str:
    """Machine code for two halves of a register at once: (half >> shift) & keep | magic."""
    move = f"shr.u32 t, $1, {shift};" if shift else "mov.b32 t, $1;"
    return f"{{ .reg .b32 t; {move} lop3.b32 $0, t, {keep * 0x10001:#x}, {magic * 0x10001:#x}, 0xEA; }}"


@triton.constexpr_function
def or_six_in(low_shift: int, high_shift: int, magic: int) -> str:
    """The same for a low nibble of $1 with two bits of $2 above it."""
    move = f"shr.u32 h, $2, {high_shift - 4};" if high_shift >= 4 else f"shl.b32 h, $2, {4 - high_shift};"
    return (
        f"{{ .reg .b32 l, h; shr.u32 l, $1, {low_shift}; {move} lop3.b32 l, l, 0xf000f, {magic * 0x10001:#x}, 0xEA; "
        f"lop3.b32 $0, h, 0x300030, l, 0xEA; }}"
    )


@triton.constexpr_function
def spread_e4m3(shift: int, mantissa: int) -> str:
    """Two e4m3 bytes as floats of `mantissa` bits, too small by the difference of the exponents' biases."""
    up = mantissa - 3 - shift
    move = f"shl.b32 t, $1, {up};" if up > 0 else f"shr.u32 t, $1, {-up};"
    keep = (0x7F << (mantissa - 3)) * 0x10001
    return (
        f"{{ .reg .b32 t, s; {move} and.b32 t, t, {keep:#x}; shl.b32 s, $1, {8 - shift}; lop3.b32 $0, s, 0x80008000, t, 0xEA; }}"
    )


@triton.jit
def _plain_codes(low, high, FORMAT: tl.constexpr, S: tl.constexpr):
    """Segment S of a block's codes, less their zero, as fp32: the meaning of `codes_of`, for machines without its instructions."""
    if FORMAT == Q8_0:
        codes = (low >> 8 * (S % 2)).to(tl.int8).to(tl.float32)
    elif FORMAT == FP8:
        codes = (low >> 8 * (S % 2)).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        codes = (low >> 4 * (S % 4)) & 15
        if FORMAT == Q6_K:
            codes = (codes | (((high >> 2 * (S % 8)) & 3) << 4)) - 32
        elif FORMAT == Q4_0:
            codes = codes - 8
        codes = codes.to(tl.float32)
    return codes


@triton.jit
def codes_of(x, low, high, FORMAT: tl.constexpr, S: tl.constexpr, PAIRS: tl.constexpr):
    """Segment S of a block's codes, less their zero, exact, of the type of `x`. low, high: words of the planes that hold it."""
    BASE: tl.constexpr = 128.0 if x.dtype == tl.bfloat16 else 1024.0  # the mantissa's last bit is worth one
    MAGIC: tl.constexpr = 0x4300 if x.dtype == tl.bfloat16 else 0x6400
    if not PAIRS:
        w = _plain_codes(low, high, FORMAT, S).to(x.dtype)
    elif FORMAT == Q8_0:
        # The sign bit is worth -128: bf16's mantissa has seven bits, but with the eighth set BASE becomes BASE + 128 all the same.
        below = tl.inline_asm_elementwise(or_in(8 * (S % 2), 0x7F, MAGIC), "=r,r", [low], dtype=x.dtype, is_pure=True, pack=2)
        sign = tl.inline_asm_elementwise(or_in(8 * (S % 2), 0x80, MAGIC), "=r,r", [low], dtype=x.dtype, is_pure=True, pack=2)
        w = below - sign
    elif FORMAT == FP8:
        MANTISSA: tl.constexpr = 7 if x.dtype == tl.bfloat16 else 10
        UNBIAS: tl.constexpr = 2.0**120 if x.dtype == tl.bfloat16 else 2.0**8
        spread: tl.constexpr = spread_e4m3(8 * (S % 2), MANTISSA)
        w = tl.inline_asm_elementwise(spread, "=r,r", [low], dtype=x.dtype, is_pure=True, pack=2) * UNBIAS
    elif FORMAT == Q6_K:
        six: tl.constexpr = or_six_in(4 * (S % 4), 2 * (S % 8), MAGIC)
        w = tl.inline_asm_elementwise(six, "=r,r,r", [low, high], dtype=x.dtype, is_pure=True, pack=2) - (BASE + 32)
    else:
        ZERO: tl.constexpr = BASE + (8 if FORMAT == Q4_0 else 0)
        w = tl.inline_asm_elementwise(or_in(4 * (S % 4), 15, MAGIC), "=r,r", [low], dtype=x.dtype, is_pure=True, pack=2) - ZERO
    return w.to(x.dtype)


@triton.jit
def half_float(words, HIGH: tl.constexpr):
    """The fp16 in the lower or upper half of each word, as fp32."""
    return (words >> (16 if HIGH else 0)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _byte(words, BYTE: tl.constexpr, ZERO: tl.constexpr):
    """An unsigned byte of each word, less ZERO, as fp32, exact: or'ed where it lies into the mantissa of 2^23."""
    PLACE: tl.constexpr = 8 * (BYTE % 2)
    if BYTE >= 2:
        words = words >> 16
    number = ((words & (255 << PLACE)) | 0x4B000000).to(tl.float32, bitcast=True)
    return number * (1.0 / (1 << PLACE)) - (8388608.0 / (1 << PLACE) + ZERO)


@triton.constexpr_function
def twice_in(byte: int, magic: int) -> str:
    """Machine code for one byte of $1 (which $2 equals) as the low byte of both halves, with the high byte of `magic` above it."""
    return f"prmt.b32 $0, $1, {magic >> 8:#x}, {0x4040 | byte * 0x101:#x};"


@triton.jit
def constant_along_k(x, words, BYTE: tl.constexpr, PAIRS: tl.constexpr, WIDTH: tl.constexpr):
    """An unsigned byte (below 128) of each word, exact, of the type of `x`, [BN, WIDTH]."""
    BASE: tl.constexpr = 128.0 if x.dtype == tl.bfloat16 else 1024.0
    MAGIC: tl.constexpr = 0x4300 if x.dtype == tl.bfloat16 else 0x6400
    words = tl.broadcast_to(words[:, None], (words.shape[0], WIDTH))
    if PAIRS:
        twice: tl.constexpr = twice_in(BYTE, MAGIC)
        w = tl.inline_asm_elementwise(twice, "=r,r,r", [words], dtype=x.dtype, is_pure=True, pack=2) - BASE
    else:
        w = ((words >> 8 * BYTE) & 255).to(tl.float32)
    return w.to(x.dtype)


@triton.jit
def _scale_word(
    meta, near, first, second, PAIRS: tl.constexpr, TWINS: tl.constexpr, WEIGHT_FIRST: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """meta[row] of the tile's rows `near`, [BN] int32. first, second [BN / 2]: the even and the odd ones of them.

    With x first a thread holds two outputs side by side, whose words come in one load where they can; that the load then has half as
    many elements also keeps the compiler from sending the words through shared memory.
    """
    if WEIGHT_FIRST:
        words = tl.load(meta + near)
    else:
        if TWINS:
            both = tl.load(meta.to(tl.pointer_type(tl.int64)) + first // 2)
            if PAIRS:
                even, odd = tl.inline_asm_elementwise(
                    "mov.b64 {$0, $1}, $2;", "=r,=r,l", [both], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
                )
            else:
                even, odd = both.to(tl.int32), (both >> 32).to(tl.int32)
        else:
            even, odd = tl.load(meta + first), tl.load(meta + second)
        words = tl.reshape(tl.join(even, odd), (BN,))
    return words


@triton.jit
def scale_words(
    meta, block, near, first, second, N,
    FORMAT: tl.constexpr, PAIRS: tl.constexpr, TWINS: tl.constexpr, WEIGHT_FIRST: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The scales of a block as they are stored, each [BN]."""
    META: tl.constexpr = 2 if FORMAT == FP8 else (8 if FORMAT == Q4_1 else (4 if (FORMAT == Q8_0) | (FORMAT == Q4_0) else 5))
    wide = tl.cast(N, tl.int64)
    if FORMAT == FP8:
        wide = tl.cdiv(wide, 128)
        near, first, second = near // 128, first // 128, second // 128
    meta += wide * (block * META)
    words = (_scale_word(meta, near, first, second, PAIRS, TWINS and FORMAT != FP8, WEIGHT_FIRST, BN),)
    for _ in tl.static_range(1, META):
        meta += wide
        words = words + (_scale_word(meta, near, first, second, PAIRS, TWINS and FORMAT != FP8, WEIGHT_FIRST, BN),)  # type: ignore[assignment]  # noqa: RUF005
    return words


@triton.jit
def minimum_words(meta, block, near, N):
    """Q4_K: the words of a block's minima once more, for the registers of an operand."""
    at = meta + tl.cast(N, tl.int64) * (block * 5) + near
    return tl.load(at + N), tl.load(at + 2 * N), tl.load(at + 3 * N), tl.load(at + 4 * N)


@triton.jit
def group_scale(words, FORMAT: tl.constexpr, S: tl.constexpr):
    """The factor of segment S's sum, fp32 [BN]; of Q4_K and Q6_K only the integer part."""
    if FORMAT == Q4_1:
        scale = half_float(words[S], False)
    elif FORMAT == Q4_K:
        scale = _byte(words[1 + S // 2], 2 * (S % 2), 0)
    elif FORMAT == Q6_K:
        scale = _byte(words[1 + S // 4], S % 4, 128)
    else:
        scale = half_float(words[S // 2], S % 2 == 1)
    return scale
