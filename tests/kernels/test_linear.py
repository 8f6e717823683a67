"""Products with fused epilogues: right, and each row's bits its own.

Under the interpreter a tile's product is numpy's, whose order of sums is its own; the invariance tests there use values whose sums
are exact, which still shows what masks, tiles, segments and company do. On a card the values are random.
"""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from tests.kernels.compiling import Variant, compile_for_hopper
from triton_kernels.linear import ADD, SILU_MUL, STORE, Tile, linear, linear_reference

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TYPES = [torch.float16, torch.float32] + ([torch.bfloat16] if torch.cuda.is_available() else [])
TILES = [
    Tile(16, 16, 32, 1, 2),
    Tile(32, 32, 16, 4, 2),
    Tile(64, 16, 64, 4, 1),
    Tile(16, 64, 32, 4, 2, weight_first=True),
    Tile(16, 64, 64, 4, 3, weight_first=True, described=True),
    Tile(32, 16, 32, 2, 3, described=True),
]


def operands(rows: int, n: int, k: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(rows * 7 + n + k)
    x = torch.randn(rows, k, generator=source).to(DEVICE, dtype)
    weight = (torch.randn(n, k, generator=source) / k**0.5).to(DEVICE, dtype)
    return x, weight, torch.randn(n, generator=source).to(DEVICE, dtype)


def settled(rows: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Operands for bitwise comparisons."""
    if DEVICE.type == "cuda":
        return operands(rows, n, k, torch.bfloat16)
    x, weight, bias = operands(rows, n, k, torch.float16)
    return (x * 8).round() / 8, (weight * 64).round() / 64, bias


def empty(rows: int, n: int, epilogue: int) -> torch.Tensor:
    if epilogue == ADD:
        return torch.randn(rows, n, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    return torch.full((rows, n // 2 if epilogue == SILU_MUL else n), float("nan"), device=DEVICE)


@pytest.mark.parametrize("epilogue", [STORE, ADD, SILU_MUL])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("rows", "n", "k"), [(1, 32, 64), (17, 48, 96), (5, 34, 72)])
def test_products_are_right(rows: int, n: int, k: int, dtype: torch.dtype, epilogue: int) -> None:
    x, weight, bias = operands(rows, n, k, dtype)
    out = empty(rows, n, epilogue)
    expected = linear_reference(x, weight, bias, epilogue, out.clone())
    linear(x, weight, out, bias=bias, epilogue=epilogue, tile=TILES[0])
    assert torch.isfinite(out).all()
    assert (out - expected).norm() / expected.norm() < (1e-5 if dtype == torch.float32 else 2e-3)


@pytest.mark.parametrize("epilogue", [STORE, ADD, SILU_MUL])
def test_a_rows_bits_do_not_depend_on_tiles_or_company(epilogue: int) -> None:
    x, weight, bias = settled(33, 48, 128)
    base = empty(33, 48, epilogue)
    whole = linear(x, weight, base.clone(), bias=bias, epilogue=epilogue, tile=TILES[0])
    for tile in TILES:
        for at, count in ((0, 1), (3, 1), (32, 1), (5, 16), (0, 17), (0, 33)):
            rows = slice(at, at + count)
            part = linear(x[rows].contiguous(), weight, base[rows].clone(), bias=bias, epilogue=epilogue, tile=tile)
            assert torch.equal(part, whole[rows]), (tile, at, count)


@pytest.mark.filterwarnings("ignore:invalid value")
def test_neighbours_that_are_not_finite_change_nothing() -> None:
    x, weight, _ = settled(16, 32, 64)
    expected = linear(x, weight, empty(16, 32, STORE), tile=TILES[0])
    x[3], x[15] = float("nan"), float("inf")
    out = linear(x, weight, empty(16, 32, STORE), tile=TILES[0])
    kept = [r for r in range(16) if r not in (3, 15)]
    assert torch.equal(out[kept], expected[kept])


@pytest.mark.parametrize("epilogue", [STORE, ADD, SILU_MUL])
def test_the_kernel_for_many_rows_gives_the_bits_of_the_one_for_few(epilogue: int) -> None:
    x, weight, bias = settled(70, 48, 128)
    base = empty(70, 48, epilogue)
    tiles = (Tile(32, 16, 64, 4, 2), Tile(64, 32, 32, 4, 3))
    several = [linear(x, weight, base.clone(), bias=bias, epilogue=epilogue, tile=tile) for tile in tiles]
    assert torch.equal(*several)
    for at, count in ((0, 1), (69, 1), (20, 16), (6, 64)):
        rows = slice(at, at + count)
        part = linear(x[rows].contiguous(), weight, base[rows].clone(), bias=bias, epilogue=epilogue, tile=TILES[0])
        assert torch.equal(part, several[0][rows]), (at, count)


@pytest.mark.parametrize("epilogue", [STORE, ADD, SILU_MUL])
@pytest.mark.parametrize("k", [1024, 1120])
def test_chains_are_products_over_runs_of_k_added_in_order(epilogue: int, k: int) -> None:
    x, weight, bias = settled(70, 48, k)
    base = empty(70, 48, epilogue)
    runs = [slice(0, 512), slice(512, 1024), slice(1024, k)]
    parts = [linear(x[:, r].contiguous(), weight[:, r].contiguous(), empty(70, 48, STORE)) for r in runs if r.start < k]
    y = bias.float() + sum(parts[1:], parts[0])
    gate, up = y.chunk(2, dim=-1)
    expected = gate / (1 + torch.exp(-gate)) * up if epilogue == SILU_MUL else y + (base if epilogue == ADD else 0)
    several = []
    for tile in (Tile(32, 16, 64, 4, 2), Tile(64, 64, 32, 1, 3)):
        out = linear(x, weight, base.clone(), bias=bias, epilogue=epilogue, tile=tile, chains=len(parts))
        assert torch.allclose(out, expected, rtol=1e-5, atol=1e-5) if epilogue == SILU_MUL else torch.equal(out, expected)
        several.append(out)
    assert torch.equal(*several)
    few = linear(x[3:8].contiguous(), weight, base[3:8].clone(), bias=bias, epilogue=epilogue, chains=len(parts))
    assert torch.equal(few, several[0][3:8])


def test_chains_without_descriptors_are_refused() -> None:
    x, weight, _ = settled(70, 32, 516)
    with pytest.raises(ValueError, match="2 chains"):
        linear(x, weight, empty(70, 32, STORE), chains=2)


def test_rows_that_no_descriptor_can_name_take_the_pointer_kernel() -> None:
    x, weight, _ = settled(70, 32, 60)
    out = linear(x, weight, empty(70, 32, STORE), tile=Tile(32, 16, 16, 4, 2))
    assert (out - linear_reference(x, weight)).abs().max() < 0.02


def test_every_kind_of_tile_compiles_for_hopper() -> None:
    """Without a card: tensor-core instructions of the expected kind, copies in flight, at most a spilled register or two."""
    run = {"x": "*bf16", "w": "*bf16", "M": "i32", "N": "i32", "K": "i32"}
    fixed = {"HAS_BIAS": False, "bias": None}

    def described(tile: Tile) -> dict[str, str]:
        return {"x": f"tensordesc<bf16[{tile.rows}, {tile.inner}]>", "w": f"tensordesc<bf16[{tile.cols}, {tile.inner}]>"}

    def few(tile: Tile, epilogue: int, **flags: bool) -> Variant:
        chosen = {"EPILOGUE": epilogue, "EVEN_K": True, "EVEN_M": False, "EARLY": True} | flags
        chosen |= {"WEIGHT_FIRST": tile.weight_first, "DESCRIBED": tile.described}
        sizes = {"BM": tile.rows, "BN": tile.cols, "BK": tile.inner}
        out = {"out": "*bf16" if epilogue == SILU_MUL else "*fp32"}
        return Variant(
            module,
            "_linear_few",
            run | (described(tile) if tile.described else {}) | out,
            fixed | chosen | sizes,
            tile.warps,
            tile.stages,
            ("N", "K"),
        )

    def many(tile: Tile, epilogue: int, chains: int = 1) -> Variant:
        sizes = {"BM": tile.rows, "BN": tile.cols, "BK": tile.inner, "EARLY": True, "GROUP": 8, "EPILOGUE": epilogue}
        sizes["CHAINS"] = chains
        out = {"out": "*bf16" if epilogue == SILU_MUL else "*fp32"}
        return Variant(module, "_linear_many", run | described(tile) | out, fixed | sizes, tile.warps, tile.stages, ("N", "K"))

    module = "triton_kernels.linear"
    decode = compile_for_hopper([
        few(Tile(16, 64, 256, 2, 4), STORE),
        few(Tile(16, 32, 256, 2, 5), ADD),
        few(Tile(16, 128, 128, 4, 3), SILU_MUL),
        few(Tile(16, 16, 64, 2, 4), STORE, EVEN_K=False, EVEN_M=True, EARLY=False),
    ])  # fmt: skip
    weight_first = compile_for_hopper([
        few(Tile(16, 64, 256, 4, 5, True, True), ADD),
        few(Tile(16, 64, 128, 4, 3, True, True), SILU_MUL),
        few(Tile(16, 64, 128, 4, 3, True, False), STORE),
    ])  # fmt: skip
    prefill = compile_for_hopper([
        many(Tile(128, 256, 64, 8, 3), STORE),
        many(Tile(128, 128, 64, 8, 4), SILU_MUL),
        many(Tile(128, 128, 64, 8, 4), ADD, 4),
        many(Tile(64, 64, 64, 4, 3), SILU_MUL, 2),
    ])  # fmt: skip
    assert all(built.stack_bytes <= 16 and built.async_copy and not built.wgmma for built in decode), decode
    assert all(built.stack_bytes <= 16 and built.wgmma for built in weight_first + prefill), (weight_first, prefill)
