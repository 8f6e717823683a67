"""Norm, rotation with its page writes, activation, embedding and kept rows: right, and each row's bits its own."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from tests.kernels.compiling import Variant, compile_for_hopper
from triton_kernels import accepted, activation, embedding, keep_rows, norm, rope_kv

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TYPES = [torch.float16, torch.float32] + ([torch.bfloat16] if torch.cuda.is_available() else [])  # the interpreter truncates bf16
ROWS = 17
EPS = 1e-6


def random(*size: int, dtype: torch.dtype = torch.float32, key: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(key + sum(size))).to(DEVICE, dtype)


def close(found: torch.Tensor, exact: torch.Tensor) -> bool:
    """Within one unit in the last place of the stored type, and a few fp32 roundings."""
    unit = torch.finfo(found.dtype).eps
    return bool(((found.double() - exact).abs() <= (0.51 * unit + 1e-6) * exact.abs() + 1e-6).all())


def check_rows_are_independent(run: Callable[[list[int]], torch.Tensor], spoil: Callable[[int, float], object]) -> None:
    """`run` computes the listed rows in one launch; `spoil` fills a row's input. A row's bits must be those of the row alone."""
    alone = [run([row])[0] for row in range(ROWS)]
    backwards = list(range(ROWS))[::-1]
    for rows in [list(range(n)) for n in range(2, ROWS + 1)] + [backwards, [3] * 5, backwards[::2]]:
        together = run(rows)
        assert all(torch.equal(together[i], alone[row]) for i, row in enumerate(rows)), rows
    spoil(2, float("nan"))
    spoil(ROWS - 1, float("inf"))
    together = run(list(range(ROWS)))
    assert all(torch.equal(together[row], alone[row]) for row in range(ROWS) if row not in (2, ROWS - 1))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("width", [64, 576, 1024])
def test_norm_is_right(width: int, dtype: torch.dtype) -> None:
    hidden, weight = random(5, width, key=1), random(width)
    out = torch.empty(5, width, dtype=dtype, device=DEVICE)
    assert norm.supported(hidden, weight, out) == ""
    norm.rms_norm(hidden, weight, EPS, out)
    assert close(out, norm.rms_norm_reference(hidden, weight, EPS))


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow")
def test_norm_says_which_rows_are_finite() -> None:
    hidden, weight = random(4, 192), random(192)
    hidden[1, 7], hidden[2, 191] = float("nan"), float("-inf")
    hidden[3, 5] = 1e30  # its square is not finite, the row is
    finite = torch.zeros(4, dtype=torch.bool, device=DEVICE)
    norm.rms_norm(hidden, weight, EPS, torch.empty_like(hidden), finite=finite)
    assert finite.tolist() == [True, False, False, True]


def test_norm_in_place_equals_norm_aside() -> None:
    hidden, weight = random(3, 192), random(192)
    aside = norm.rms_norm(hidden, weight, EPS, torch.empty_like(hidden))
    assert torch.equal(norm.rms_norm(hidden, weight, EPS, hidden), aside)


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow")
def test_a_normed_rows_bits_do_not_depend_on_company() -> None:
    hidden, weight = random(ROWS, 192), random(192)

    def run(rows: list[int]) -> torch.Tensor:
        return norm.rms_norm(hidden[rows].clone(), weight, EPS, torch.empty(len(rows), 192, device=DEVICE))

    check_rows_are_independent(run, lambda row, value: hidden[row].fill_(value))


def test_norm_refuses_what_would_change_the_order_of_a_sum() -> None:
    hidden, weight = random(3, 192), random(192)
    assert "aligned" in norm.supported(random(3 * 192 + 1)[1:].view(3, 192), weight, hidden)
    assert "width" in norm.supported(random(3, 190), random(190), random(3, 190))
    assert "fp32" in norm.supported(hidden.half(), weight, hidden)
    assert "shapes" in norm.supported(hidden, weight, hidden[:2])


class Heads(NamedTuple):
    """Sizes of an attention, and one call's tensors."""

    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype
    norm: torch.Tensor | None
    qkv: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor


CTX, PAGES, PAGE_TOKENS = 64, 9, 4


def heads_of(heads: int, kv_heads: int, dim: int, dtype: torch.dtype, normed: bool, rows: int = ROWS) -> Heads:
    angle = torch.outer(torch.arange(CTX).double(), 10000 ** -(torch.arange(0, dim, 2).double() / dim))
    weights = random(heads + kv_heads, dim) if normed else None
    qkv = random(rows, (heads + 2 * kv_heads) * dim, dtype=dtype, key=3)
    return Heads(heads, kv_heads, dim, dtype, weights, qkv, angle.cos().float().to(DEVICE), angle.sin().float().to(DEVICE))


def pool(h: Heads) -> tuple[torch.Tensor, torch.Tensor]:
    """k and v of one layer, as the second of three layers, filled with what no write gives."""
    layers = torch.full((2, 3, PAGES, h.kv_heads, PAGE_TOKENS, h.dim), 77.0, device=DEVICE).to(h.dtype)
    return layers[0, 1], layers[1, 1]


def rotate(
    h: Heads, rows: list[int], positions: list[int], pages: list[int], offsets: list[int], k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    q = torch.full((len(rows), h.heads, h.dim), float("nan"), device=DEVICE).to(h.dtype)
    qkv = h.qkv[rows].clone()
    assert rope_kv.supported(qkv, q, k, v, h.norm) == ""
    where = [torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (pages, offsets)]
    return rope_kv.rope_kv(qkv, torch.tensor(positions, device=DEVICE), h.cos, h.sin, q, k, v, *where, norm=h.norm, eps=EPS)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (14, 2, 16), (4, 4, 128)])
@pytest.mark.parametrize("dtype", TYPES)
def test_rotation_is_right_and_lands_in_its_page(heads: int, kv_heads: int, dim: int, dtype: torch.dtype, normed: bool) -> None:
    rows = 6
    h = heads_of(heads, kv_heads, dim, dtype, normed, rows)
    positions, pages, offsets = [0, 1, CTX - 1, 17, 5, 5], [8, 0, 3, -1, 3, -1], [0, 3, 1, 2, 2, 0]
    k, v = pool(h)
    q = rotate(h, list(range(rows)), positions, pages, offsets, k, v)
    real = torch.tensor([p if page >= 0 else 0 for p, page in zip(positions, pages, strict=True)], device=DEVICE)
    exact_q, exact_k, exact_v = rope_kv.rope_kv_reference(h.qkv, real, h.cos, h.sin, heads, kv_heads, h.norm, EPS)
    assert close(q, exact_q)
    for row, (page, offset) in enumerate(zip(pages, offsets, strict=True)):
        if page >= 0:
            assert close(k[page, :, offset], exact_k[row])
            assert torch.equal(v[page, :, offset], exact_v[row].to(dtype))
            k[page, :, offset] = v[page, :, offset] = 77.0
    assert bool((k == 77).all()), "a page or an offset of nobody was written"
    assert bool((v == 77).all())
    whole = k._base
    assert whole is not None
    assert bool((whole == 77).all()), "another layer was written"


def _convert_to_e4m3_as_a_card_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's own conversion cuts bits off; a card's rounds to nearest even and keeps NaN, as torch's does."""
    if torch.cuda.is_available():
        return
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    plain = builder.create_fp_to_fp

    def create_fp_to_fp(self: Any, source: Any, kind: Any, rounding: Any) -> Any:
        if kind.scalar != tl.float8e4nv:
            return plain(self, source, kind, rounding)
        values = torch.from_numpy(source.data).to(torch.float8_e4m3fn)
        return interpreter.TensorHandle(values.view(torch.uint8).numpy(), kind.scalar)

    monkeypatch.setattr(builder, "create_fp_to_fp", create_fp_to_fp)


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow")
def test_keys_and_values_in_e4m3_are_rounded_once_saturate_and_keep_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    _convert_to_e4m3_as_a_card_does(monkeypatch)
    h = heads_of(2, 1, 16, torch.float32, False)
    big = torch.tensor([448.0, 449, 464, 480, 1e9, float("inf"), float("nan"), 2.0**-9])  # the last is the smallest e4m3 value
    h.qkv[0, 48:] = torch.cat([big, -big]).to(DEVICE)
    h.qkv[1, 32:48] = 1000.0
    k, v = (torch.zeros(PAGES, 1, PAGE_TOKENS, 16, device=DEVICE).to(torch.float8_e4m3fn) for _ in range(2))
    rotate(h, [0, 1, 2], [0, 0, 7], [3, 0, 5], [1, 2, 3], k, v)
    stored = v[3, 0, 1].float()
    expected = torch.tensor([448.0] * 6 + [float("nan"), 2.0**-9], device=DEVICE)
    assert torch.equal(stored.nan_to_num(7.0), torch.cat([expected, -expected]).nan_to_num(7.0))
    assert bool((k[0, 0, 2].float() == 448).all())
    _, exact_k, exact_v = rope_kv.rope_kv_reference(h.qkv[2:3], torch.tensor([7], device=DEVICE), h.cos, h.sin, 2, 1)
    for found, exact in ((k, exact_k), (v, exact_v)):
        assert torch.equal(found[5, 0, 3].float(), exact[0, 0].float().to(torch.float8_e4m3fn).float())
        found.view(torch.uint8)[[3, 0, 5], :, [1, 2, 3]] = 0
        assert not found.view(torch.uint8).any(), "a page or an offset of nobody was written"


def test_every_position_of_the_context_turns_by_its_own_angle() -> None:
    h = heads_of(2, 1, 16, torch.float32, False, CTX)
    k, v = pool(h)
    q = rotate(h, list(range(CTX)), list(range(CTX)), [-1] * CTX, [0] * CTX, k, v)
    first = rope_kv.rope_kv_reference(h.qkv, torch.zeros(CTX).long(), h.cos, h.sin, 2, 1)[0]
    assert close(q, first), "padding rows turn as at position 0"
    q = rotate(h, list(range(CTX)), list(range(CTX)), [0] * CTX, [0] * CTX, k, v)
    assert close(q, rope_kv.rope_kv_reference(h.qkv, torch.arange(CTX, device=DEVICE), h.cos, h.sin, 2, 1)[0])


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow")
@pytest.mark.parametrize("normed", [False, True])
def test_a_rotated_rows_bits_do_not_depend_on_company(normed: bool) -> None:
    h = heads_of(14, 2, 64, torch.float16, normed)

    def run(rows: list[int]) -> torch.Tensor:
        k, v = pool(h)
        spots = list(range(len(rows)))
        pages, offsets = [s // PAGE_TOKENS for s in spots], [s % PAGE_TOKENS for s in spots]
        q = rotate(h, rows, [row * 3 for row in rows], pages, offsets, k, v)
        return torch.cat([q, k[pages, :, offsets], v[pages, :, offsets]], 1)

    check_rows_are_independent(run, lambda row, value: h.qkv[row].fill_(value))


def test_rotation_refuses_heads_it_cannot_split() -> None:
    h = heads_of(2, 1, 16, torch.float32, False)
    k, v = pool(h)
    q = torch.empty(ROWS, 2, 16, device=DEVICE)
    assert "head dimension" in rope_kv.supported(random(ROWS, 4 * 80), torch.empty(ROWS, 2, 80, device=DEVICE), k, v)
    assert "norm" in rope_kv.supported(h.qkv, q, k, v, random(2, 16))
    assert "shapes" in rope_kv.supported(h.qkv[:, :-16], q, k, v)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("rows", "width"), [(3, 1536), (1, 40), (65, 64)])
def test_the_activation_is_right(rows: int, width: int, dtype: torch.dtype) -> None:
    x = random(rows, 2 * width, dtype=dtype) * 4
    x[0, 0], x[0, 1] = 80.0, -80.0
    out = torch.empty(rows, width, dtype=dtype, device=DEVICE)
    assert activation.supported(x, out) == ""
    assert close(activation.silu_mul(x, out), activation.silu_mul_reference(x))


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow")
def test_an_activated_rows_bits_do_not_depend_on_company_or_on_the_blocks_of_many_rows() -> None:
    x = random(ROWS, 96)

    def run(rows: list[int]) -> torch.Tensor:
        return activation.silu_mul(x[rows].clone(), torch.empty(len(rows), 48, device=DEVICE))

    many = activation.silu_mul(x.repeat(4, 1), torch.empty(4 * ROWS, 48, device=DEVICE))
    assert torch.equal(many[:ROWS], run(list(range(ROWS))))
    check_rows_are_independent(run, lambda row, value: x[row].fill_(value))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind", [torch.int64, torch.int32])
def test_embedding_fetches_exactly_its_row(dtype: torch.dtype, kind: torch.dtype) -> None:
    table = random(30, 1100, dtype=dtype)
    table[7] = float("nan")
    tokens = torch.tensor([29, 0, 3, 3], dtype=kind, device=DEVICE)
    out = torch.empty(4, 1100, device=DEVICE)
    assert embedding.supported(tokens, table, out) == ""
    assert torch.equal(embedding.embed(tokens, table, out), embedding.embed_reference(tokens, table))


def test_embedding_takes_tokens_that_were_just_drawn() -> None:
    table, out = random(50, 64), torch.empty(4, 64, device=DEVICE)
    tokens, drawn = torch.tensor([-2, 7, -1, -3], device=DEVICE), torch.tensor([11, 49, 0], device=DEVICE)
    assert torch.equal(embedding.embed(tokens, table, out, drawn), table[[49, 7, 11, 0]])
    assert torch.equal(out, embedding.embed_reference(tokens, table, drawn))


def test_rows_are_kept_where_they_have_a_place() -> None:
    rows, kept = random(5, 1100), random(9, 1100)
    places = torch.tensor([8, -1, 0, 3, -1], dtype=torch.int32, device=DEVICE)
    expected = keep_rows.keep_rows_reference(rows, places, kept.clone())
    assert torch.equal(expected[[8, 0, 3]], rows[[0, 2, 3]])
    assert keep_rows.supported(rows, places, kept) == ""
    assert torch.equal(keep_rows.keep_rows(rows, places, kept), expected)
    assert "types" in keep_rows.supported(rows, places.long(), kept)
    assert "shapes" in keep_rows.supported(rows, places[:4], kept)
    assert "contiguous" in keep_rows.supported(rows, places, random(9, 2200)[:, ::2])


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_drafts_that_were_right_say_where_the_next_queries_lie(rows: int) -> None:
    sessions, depth, seen, page, ring, limit = 5, 3, 3, 8, 4, 60
    torch.manual_seed(rows)
    tokens = torch.randint(2, (40,))  # half of all drafts are right
    drawn, guessed = torch.randint(40, (sessions, rows)), torch.randint(40, (sessions, rows - 1))
    counts, used = torch.randint(rows, (sessions,)), torch.tensor([1, 1, 1, 0, 1], dtype=torch.int32)
    base, slots, first = torch.tensor([0, 7, 30, 0, 58]), torch.tensor([4, 0, 2, 0, 1]), torch.tensor([0, 3, 17, 0, 58])
    last, at = torch.zeros(sessions, dtype=torch.int64), torch.zeros(depth, sessions, dtype=torch.int64)
    pages, offsets, lengths = (torch.full((depth, sessions), 99, dtype=torch.int32) for _ in range(3))
    table = torch.full((depth, sessions, seen), 99, dtype=torch.int32)
    given = [t.to(DEVICE) for t in (tokens, drawn, guessed, counts, base, slots, first, used)]
    made = [t.to(DEVICE) for t in (last, at, pages, offsets, table, lengths)]
    accepted.accepted(*given, *made, limit=limit, page=page, ring=ring)
    last, at, pages, offsets, table, lengths = (t.cpu() for t in made)
    right = accepted.accepted_reference(tokens, drawn, guessed, counts, used)
    assert torch.equal(last, torch.arange(sessions) * rows + right)
    for b in range(sessions):
        for d in range(depth):
            position = min(int(base[b] + right[b]) + d, limit - 1)
            own = position // page
            oldest = max(own - seen + 1, min(-(-int(first[b]) // page), own))
            real = bool(used[b])
            assert int(at[d, b]) == position
            assert int(pages[d, b]) == (int(slots[b]) * ring + own % ring if real else -1)
            assert int(offsets[d, b]) == position % page
            assert int(lengths[d, b]) == (position + 1 - oldest * page if real else 0)
            assert table[d, b].tolist() == [int(slots[b]) * ring + (oldest + i) % ring for i in range(seen)]


def test_every_kernel_compiles_for_hopper_without_spills() -> None:
    half = "*bf16"
    norms = {"hidden": "*fp32", "weight": "*fp32", "out": half, "eps": "fp32"}
    plain = {"finite": None, "FINITE": False}
    spots = {"positions": "*i64", "cos": "*fp32", "sin": "*fp32", "slot_pages": "*i32", "slot_offsets": "*i32"}
    rope = {"qkv": half, "q": half, "k": half, "v": half, "page_stride": "i32", "eps": "fp32", **spots}
    head = {"HEADS": 32, "KV_HEADS": 8, "D": 128, "PAGE_TOKENS": 128, "BLOCK": 8}
    small = {"HEADS": 9, "KV_HEADS": 3, "D": 64, "PAGE_TOKENS": 128, "BLOCK": 16}
    module = "triton_kernels.{}".format
    variants = [
        Variant(module("norm"), "_rms_norm", norms, {**plain, "H": 4096, "BLOCK": 4096, "EARLY": False}, norm.warps(4096)),
        Variant(module("norm"), "_rms_norm", norms, {**plain, "H": 576, "BLOCK": 1024, "EARLY": True}, norm.warps(576)),
        Variant(
            module("norm"),
            "_rms_norm",
            norms | {"finite": "*i1"},
            {"FINITE": True, "H": 4096, "BLOCK": 4096, "EARLY": True},
            norm.warps(4096),
        ),
        Variant(module("rope_kv"), "_rope_kv", {**rope, "norm": "*fp32"}, {**head, "NORM": True}),
        Variant(module("rope_kv"), "_rope_kv", {**rope, "norm": "*fp32"}, {**head, "NORM": True, "EARLY": True}),
        Variant(module("rope_kv"), "_rope_kv", rope, {**small, "norm": None, "NORM": False}),
        Variant(module("rope_kv"), "_rope_kv", rope | {"k": "*fp8e4nv", "v": "*fp8e4nv"}, {**small, "norm": None, "NORM": False}),
        Variant(module("activation"), "_silu_mul", {"gate_up": half, "out": half}, {"F": 12288, "BLOCK": 1024}),
        Variant(module("activation"), "_silu_mul", {"gate_up": half, "out": half}, {"F": 12288, "BLOCK": 4096}, 8),
        Variant(
            module("embedding"),
            "_embed",
            {"tokens": "*i64", "table": half, "out": "*fp32", "drawn": "*i64"},
            {"H": 4096, "DRAWN": True, "BLOCK": 1024, "EARLY": True},
        ),
        Variant(
            module("keep_rows"),
            "_keep_rows",
            {"rows": "*fp32", "places": "*i32", "kept": "*fp32"},
            {"H": 4096, "BLOCK": 1024, "EARLY": True},
        ),
        Variant(
            module("accepted"),
            "_accepted",
            dict.fromkeys(("tokens", "drawn", "guessed", "counts", "base", "slots", "first", "last", "at"), "*i64")
            | dict.fromkeys(("used", "pages", "offsets", "table", "lengths"), "*i32")
            | {"limit": "i32", "sessions": "i32"},
            {"ROWS": 4, "DEPTH": 3, "PAGE": 128, "PAGES": 6, "SEEN": 5},
            1,
        ),
    ]
    built = compile_for_hopper(variants)
    assert len(built) == len(variants)
    assert all(result.stack_bytes == 0 for result in built), built
