"""From the words of a packed weight to its values in the type of the activations: what the kernels of linear_stream, linear_quant
and expand share.

Owns the bit tricks and the one definition of a value on a card; quant_formats says where codes and scales lie, and `dequantise` there
says the same in torch. A value is code * scale + minimum in fp32, with one rounding (none, where there is no minimum and the scale is
an fp16), and is then rounded to x's type.

Two neighbouring codes lie in one register. They become fp32 without a conversion of integers, each by one or two instructions:

    4 bits         masked where they lie; the halves, read as fp16 below the normal ones, are code * 2^-24 or 2^-20
    6 and 8 bits   one byte permutation puts the code into the mantissa of 2^7 or 2^15
    e4m3           the card's own conversion to fp16

What that adds or multiplies is part of the group's factor and summand, so that one fma and half a conversion finish a value. All of
it is exact: factors have at most 19 bits, summands 21. Under the interpreter, and for fp32, the same values come by plain arithmetic.

Q4_0 becomes bf16 two at a time: its scale of 11 bits is cut into an upper part of 8 and a rest of 3. With c = code - 8, c * rest has at
most 7 bits and is exact in bf16, so that fma(c, upper, c * rest) rounds c * scale once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from triton_kernels.quant_formats import Format

Q8_0, Q4_0, Q4_1, Q4_K, Q6_K, FP8 = (tl.constexpr(i) for i in range(6))
CODE = {Format.Q8_0: 0, Format.Q4_0: 1, Format.Q4_1: 2, Format.Q4_K: 3, Format.Q6_K: 4, Format.FP8: 5}


@triton.constexpr_function
def nibble_numbers(field: int) -> str:
    """Machine code for field 0 .. 3, 4 bits, of both halves of $2: code * 2^-24 (even fields) or code * 2^-20."""
    move = "shr.u32 t, $2, 8;" if field >= 2 else "mov.b32 t, $2;"
    keep = "0xf000f0" if field % 2 else "0xf000f"
    return f"{{ .reg .b32 t; .reg .b16 p, q; {move} and.b32 t, t, {keep}; mov.b32 {{p, q}}, t; cvt.f32.f16 $0, p; cvt.f32.f16 $1, q; }}"


@triton.constexpr_function
def byte_numbers(field: int) -> str:
    """The same for field 0 or 1, 8 bits: 2^15 + code."""
    return (
        f"prmt.b32 $0, $2, 0x47000000, {0x7504 + (field << 4):#x}; prmt.b32 $1, $2, 0x47000000, {0x7504 + (field + 2 << 4):#x};"
    )


@triton.constexpr_function
def crumb_place(segment: int) -> int:
    """The bit of Q6_K's high planes where the upper two bits of segment 0 .. 7 lie."""
    return 8 * (segment % 4 // 2) + 2 * (segment % 2) + 4 * (segment // 4)


@triton.constexpr_function
def six_bit_numbers(segment: int) -> str:
    """The same for a nibble of $2 below two bits of $3, of segment 0 .. 7: 128 + code. Segments two apart share all but the last step."""
    move = "shr.u32 l, $2, 4;" if segment % 2 else "mov.b32 l, $2;"
    up = 4 - crumb_place(segment) % 8
    lift = f"shl.b32 h, $3, {up};" if up > 0 else f"shr.u32 h, $3, {-up};"
    byte = segment % 4 // 2
    return (
        f"{{ .reg .b32 l, h; {move} and.b32 l, l, 0xf0f0f0f; {lift} lop3.b32 l, h, 0x30303030, l, 0xEA; "
        f"prmt.b32 $0, l, 0x43000000, {0x7044 + (byte << 8):#x}; prmt.b32 $1, l, 0x43000000, {0x7044 + (byte + 2 << 8):#x}; }}"
    )


@triton.constexpr_function
def e4m3_numbers(field: int) -> str:
    """The same for field 0 or 1, e4m3: the number itself."""
    return (
        f"{{ .reg .b32 t, h; .reg .b16 p, q; prmt.b32 t, $2, $2, {field | field + 2 << 4:#x}; mov.b32 {{p, q}}, t; "
        f"cvt.rn.f16x2.e4m3x2 h, p; mov.b32 {{p, q}}, h; cvt.f32.f16 $0, p; cvt.f32.f16 $1, q; }}"
    )


@triton.constexpr_function
def nibble_values(field: int) -> str:
    """Machine code for field 0 .. 3, 4 bits, of both halves of $1 as bf16: (code - 8) times the sum of $2 and $4, both twice the same
    bf16 number."""
    move = f"shr.u32 t, $1, {4 * field};" if field else "mov.b32 t, $1;"
    return (
        f"{{ .reg .b32 t, k, s; {move} mov.b32 k, 0x43004300; lop3.b32 t, t, 0xf000f, k, 0xEA; mov.b32 k, 0x3f803f80; "
        "mov.b32 s, 0xc308c308; fma.rn.bf16x2 t, t, k, s; mov.b32 s, 0x80008000; fma.rn.bf16x2 s, t, $4, s; "
        "fma.rn.bf16x2 $0, t, $2, s; }"
    )  # 0x4300 is 128, 0x3f80 is 1, 0xc308 is -136, 0x8000 is -0


@triton.constexpr_function
def nibble_pair(field: int) -> str:
    """The same by fewer instructions, where the halves of $2 are `prepared`: a code where it lies, in the lowest or the next 4 bits, is a
    bf16 at the lower end of the range."""
    move = "shr.u32 t, $1, 8;" if field >= 2 else "mov.b32 t, $1;"
    keep, unit = ("0xf000f0", "0x7d007d00") if field % 2 else ("0xf000f", "0x7f007f00")
    return (
        f"{{ .reg .b32 t, k, s, u, r; .reg .b16 p, q; {move} and.b32 t, t, {keep}; mov.b32 k, {unit}; mov.b32 s, 0xbe00be00; "
        "fma.rn.bf16x2 t, t, k, s; mov.b32 {p, q}, $2; mov.b32 u, {q, q}; mov.b32 r, {p, p}; "
        "mov.b32 s, 0x80008000; fma.rn.bf16x2 s, t, r, s; fma.rn.bf16x2 $0, t, u, s; }"
    )  # 0x7f00 is 2^127, 0x7d00 is 2^123, 0xbe00 is -1/8, 0x8000 is -0


@triton.constexpr_function
def one_byte(byte: int) -> str:
    """Machine code for 2^15 + an unsigned byte of $1."""
    return f"prmt.b32 $0, $1, 0x47000000, {0x7504 + (byte << 4):#x};"


@triton.jit
def _plain_numbers(low, high, FORMAT: tl.constexpr, S: tl.constexpr):
    """Segment S's codes less their zero, fp32: for machines without those instructions."""
    if FORMAT == Q8_0:
        codes = ((low >> 8 * (S % 2)) & 255) - 128
    elif FORMAT == FP8:
        codes = (low >> 8 * (S % 2)).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    elif FORMAT == Q6_K:
        codes = (((low >> 4 * (S % 4)) & 15) | (((high >> crumb_place(S % 8)) & 3) << 4)) - 32
    else:
        codes = ((low >> 4 * (S % 4)) & 15) - (8 if FORMAT == Q4_0 else 0)
    return codes.to(tl.float32)


@triton.jit
def _numbers(low, high, FORMAT: tl.constexpr, S: tl.constexpr, PAIRS: tl.constexpr):
    """Segment S's codes as fp32, in the unit and from the zero that `_terms` reckons with."""
    if not PAIRS:
        numbers = _plain_numbers(low, high, FORMAT, S)
    elif FORMAT == Q6_K:
        six: tl.constexpr = six_bit_numbers(S % 8)
        numbers = tl.inline_asm_elementwise(six, "=&r,=&r,r,r", [low, high], dtype=tl.float32, is_pure=True, pack=2)
    else:
        one: tl.constexpr = (
            byte_numbers(S % 2) if FORMAT == Q8_0 else (e4m3_numbers(S % 2) if FORMAT == FP8 else nibble_numbers(S % 4))
        )
        numbers = tl.inline_asm_elementwise(one, "=&r,=&r,r", [low], dtype=tl.float32, is_pure=True, pack=2)
    return numbers


@triton.jit
def _half_float(words, HIGH: tl.constexpr):
    """The fp16 in the lower or upper half of each word, as fp32."""
    return (words >> (16 if HIGH else 0)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _scaled_byte(words, BYTE: tl.constexpr, ZERO: tl.constexpr, scale, PAIRS: tl.constexpr):
    """(an unsigned byte of each word - ZERO) * scale, exact for scales of 11 bits."""
    if PAIRS:
        byte: tl.constexpr = one_byte(BYTE)
        number = tl.inline_asm_elementwise(byte, "=r,r", [words], dtype=tl.float32, is_pure=True, pack=1)
        scaled = tl.fma(number, scale, scale * (-32768.0 - ZERO))
    else:
        scaled = (((words >> 8 * BYTE) & 255) - ZERO).to(tl.float32) * scale
    return scaled


@triton.jit
def _terms(words, FORMAT: tl.constexpr, G: tl.constexpr, PAIRS: tl.constexpr):
    """Factor and summand, fp32 [BN], that make the numbers of a block's group G into values. FP8 has no summand."""
    UNIT: tl.constexpr = (2.0**20 if G % 2 else 2.0**24) if PAIRS else 1.0  # of 4-bit numbers
    if FORMAT == Q4_1:
        factor = _half_float(words[G], False) * UNIT
        summand = _half_float(words[G], True)
    elif FORMAT == Q4_K:
        factor = _scaled_byte(words[1 + G // 2], 2 * (G % 2), 0, _half_float(words[0], False) * UNIT, PAIRS)
        summand = _scaled_byte(words[1 + G // 2], 2 * (G % 2) + 1, 0, -_half_float(words[0], True), PAIRS)
    elif FORMAT == Q6_K:
        factor = _scaled_byte(words[1 + G // 4], G % 4, 128, words[0].to(tl.float32, bitcast=True), PAIRS)
        summand = factor * (-160.0 if PAIRS else 0.0)
    elif FORMAT == FP8:
        factor = words[G]
        summand = factor
    else:
        scale = _half_float(words[G // 2], G % 2 == 1)
        if FORMAT == Q4_0:
            factor = scale * UNIT
            summand = scale * (-8.0 if PAIRS else 0.0)
        else:
            factor = scale
            summand = scale * (-32896.0 if PAIRS else 0.0)
    return factor, summand


@triton.jit
def _twice(scale):
    """The upper 16 bits of fp32 numbers in both halves of a word."""
    bits = scale.to(tl.int32, bitcast=True)
    return tl.inline_asm_elementwise("prmt.b32 $0, $1, $1, 0x3232;", "=r,r", [bits], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _nibble_values(low, words, S: tl.constexpr):
    """Segment S of Q4_0, bf16."""
    scale = _half_float(words[S // 2], S % 2 == 1)
    rest = scale - (scale.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    upper = tl.broadcast_to(_twice(scale)[:, None], low.shape)
    rest = tl.broadcast_to(_twice(rest)[:, None], low.shape)
    code: tl.constexpr = nibble_values(S % 4)
    return tl.inline_asm_elementwise(code, "=r,r,r,r,r,r", [low, upper, rest], dtype=tl.bfloat16, is_pure=True, pack=2)


@triton.jit
def values_of(low, high, words, dtype: tl.constexpr, FORMAT: tl.constexpr, S: tl.constexpr, PAIRS: tl.constexpr):
    """Segment S of a block, [BN, WIDTH] of `dtype`. low, high: words of the planes that hold it; words: the block's scales."""
    if PAIRS and FORMAT == Q4_0 and dtype == tl.bfloat16:
        value = _nibble_values(low, words, S)
    else:
        numbers = _numbers(low, high, FORMAT, S, PAIRS)
        factor, summand = _terms(words, FORMAT, S // 4 if FORMAT == FP8 else S, PAIRS)
        value = numbers * tl.broadcast_to(factor[:, None], numbers.shape)
        if FORMAT != FP8:
            value = tl.fma(
                numbers, tl.broadcast_to(factor[:, None], numbers.shape), tl.broadcast_to(summand[:, None], numbers.shape)
            )
    return value.to(dtype)


@triton.jit
def pair_terms(words, FORMAT: tl.constexpr, G: tl.constexpr):
    """What `pair_of` needs of group G's scale: one element a thread, on a card."""
    return _terms(words, FORMAT, 0 if FORMAT == FP8 else G, True)


@triton.constexpr_function
def from_quad(thread: int) -> str:
    """Machine code for the word that thread 0 .. 3 of each four has."""
    return f"shfl.sync.idx.b32 $0, $1, {thread}, 0x1c1f, 0xffffffff;"


@triton.jit
def shared_terms(scale, G: tl.constexpr):
    """The same for Q4_0, where thread t of each four has made group t's scale ready."""
    code: tl.constexpr = from_quad(G)
    word = tl.inline_asm_elementwise(code, "=r,r", [scale], dtype=tl.int32, is_pure=True, pack=1)
    return (word,)


SPLIT_SCALE = tl.constexpr(
    "{ .reg .b16 p, q; .reg .b32 s, t; mov.b32 {p, q}, $1; cvt.f32.f16 s, p; mul.f32 s, s, 0f42800000; "
    "and.b32 t, s, 0xffff0000; sub.f32 s, s, t; prmt.b32 $0, s, t, 0x7632; }"
)


@triton.jit
def prepared(half):
    """64 times an fp16 in the lower half of a word: as bf16, its first 8 bits in the upper half of a word and the rest in the lower."""
    return tl.inline_asm_elementwise(SPLIT_SCALE, "=r,r", [half], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def pair_of(low, high, terms, FORMAT: tl.constexpr, S: tl.constexpr):
    """Segment S's codes in both halves of a word as two bf16 values in one word: `values_of` a thread at a time. low, high: words of the
    planes."""
    if FORMAT == Q4_0:
        nibbles: tl.constexpr = nibble_pair(S % 4)
        pair = tl.inline_asm_elementwise(nibbles, "=r,r,r", [low, terms[0]], dtype=tl.int32, is_pure=True, pack=1)
    else:
        if FORMAT == Q6_K:
            six: tl.constexpr = six_bit_numbers(S % 8)
            one, two = tl.inline_asm_elementwise(
                six, "=&r,=&r,r,r", [low, high], dtype=(tl.float32, tl.float32), is_pure=True, pack=1
            )
        else:
            code: tl.constexpr = (
                byte_numbers(S % 2) if FORMAT == Q8_0 else (e4m3_numbers(S % 2) if FORMAT == FP8 else nibble_numbers(S % 4))
            )
            one, two = tl.inline_asm_elementwise(code, "=&r,=&r,r", [low], dtype=(tl.float32, tl.float32), is_pure=True, pack=1)
        if FORMAT == FP8:
            one = one * terms[0]
            two = two * terms[0]
        else:
            one = tl.fma(one, terms[0], terms[1])
            two = tl.fma(two, terms[0], terms[1])
        pair = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [one, two], dtype=tl.int32, is_pure=True, pack=1
        )
    return pair


@triton.jit
def scale_words(meta, block, near, N, FORMAT: tl.constexpr):
    """The scales of a block as they are stored, each [BN], of the rows `near`."""
    META: tl.constexpr = 2 if FORMAT == FP8 else (8 if FORMAT == Q4_1 else (4 if (FORMAT == Q8_0) | (FORMAT == Q4_0) else 5))
    wide = tl.cast(N, tl.int64)
    if FORMAT == FP8:
        wide = tl.cdiv(wide, 128)
        near = near // 128
    meta += wide * (block * META)
    words = (tl.load(meta + near),)
    for i in tl.static_range(1, META):
        words = words + (tl.load(meta + wide * i + near),)
    return words
