"""Products on a card where K ends inside a tile or a block: one row's bits beside any others, for every format and way of multiplying."""

from __future__ import annotations

import pytest
import torch

from bench.kernels.linear_quant import empty_out, random_weight
from ds4batch.engine.linear import Linear
from ds4batch.engine.linear_cuda import Scratch, multiply
from triton_kernels import stream_plan as streams
from triton_kernels.linear import ADD, SILU_MUL, STORE, Tile, linear
from triton_kernels.linear_quant import Sums, chains, linear_quant
from triton_kernels.linear_quant import Tile as QuantTile
from triton_kernels.linear_stream import linear_stream
from triton_kernels.quant_formats import Format, dequantise
from triton_kernels.stream_plan import Plan

ROWS = (2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 128, 160)
SHAPES = ((960, 576), (576, 576), (1030, 2112))
QUANT_TILES = (
    QuantTile(16, 64, 8, 4),
    QuantTile(32, 64, 4, 3),
    QuantTile(64, 64, 4, 3),
    QuantTile(64, 64, 4, 3, weight_first=True),
)
TILES = (Tile(16, 32, 128, 4, 3), Tile(32, 64, 64, 4, 3), Tile(64, 64, 64, 4, 4), Tile(64, 64, 128, 4, 3, weight_first=True))


def activations(k: int) -> torch.Tensor:
    return torch.randn(max(ROWS), k, device="cuda", dtype=torch.bfloat16)


@pytest.mark.parametrize("epilogue", [STORE, ADD, SILU_MUL])
@pytest.mark.parametrize("fmt", [f for f in Format if f not in (Format.Q4_K, Format.Q6_K)])  # whose rows are whole blocks
def test_quantised_rows_keep_their_bits_where_a_row_ends_inside_a_block(fmt: Format, epilogue: int) -> None:
    torch.manual_seed(1)
    for n, k in SHAPES:
        weight, x = random_weight(fmt, n, k), activations(k)
        kept = Linear.of_quantised([weight], torch.bfloat16)
        scratch, sums = Scratch([kept]), Sums(x.device)
        alone = torch.cat(
            [multiply(x[i : i + 1], kept, empty_out(1, n, epilogue), epilogue=epilogue, scratch=scratch) for i in range(len(x))]
        )
        for rows in ROWS:
            out = multiply(x[-rows:].contiguous(), kept, empty_out(rows, n, epilogue), epilogue=epilogue, scratch=scratch)
            assert torch.equal(out, alone[-rows:]), f"{n} x {k}, {rows} rows"
            for tile in QUANT_TILES:
                out = empty_out(rows, n, epilogue)
                linear_quant(x[-rows:].contiguous(), weight, out, epilogue=epilogue, tile=tile, sums=sums)
                assert torch.equal(out, alone[-rows:]), f"{n} x {k}, {rows} rows, {tile}"


@pytest.mark.parametrize("epilogue", [STORE, ADD, SILU_MUL])
def test_plain_rows_keep_their_bits_where_a_row_ends_inside_a_tile(epilogue: int) -> None:
    torch.manual_seed(2)
    for n, k in (*SHAPES, (320, 72), (320, 1000)):
        weight, x = torch.randn(n, k, device="cuda").bfloat16() * k**-0.5, activations(k)
        alone = torch.cat([linear(x[i : i + 1], weight, empty_out(1, n, epilogue), epilogue=epilogue) for i in range(len(x))])
        for rows in ROWS:
            few = [tile for tile in TILES if rows <= 64]
            for tile in (None, *few):
                out = linear(x[-rows:].contiguous(), weight, empty_out(rows, n, epilogue), epilogue=epilogue, tile=tile)
                assert torch.equal(out, alone[-rows:]), f"{n} x {k}, {rows} rows, {tile}"


STREAMED = ((112, 512), (528, 4096), (1040, 12288))  # 1, 4 and 8 chains
ONE, OTHER = Plan(1, 1, 2, 64, False), Plan(2, 1, 4, 128, True)


@pytest.mark.parametrize("epilogue", [STORE, ADD, SILU_MUL])
@pytest.mark.parametrize("fmt", list(Format))
def test_streamed_rows_have_the_bits_of_the_plain_product(fmt: Format, epilogue: int) -> None:
    """With a bias, whatever the launch, beside rows with extreme values."""
    torch.manual_seed(3)
    sums = Sums(torch.device("cuda"))
    for n, k in STREAMED:
        count = chains(n, k)
        weight, x, bias = random_weight(fmt, n, k), activations(k)[: streams.ROWS], torch.randn(n, device="cuda").bfloat16()
        x[3] *= 1e30
        expected = linear(
            x, dequantise(weight).bfloat16(), empty_out(len(x), n, epilogue), bias=bias, epilogue=epilogue, chains=count
        )
        plans = [None, ONE, OTHER if count < 8 else Plan(8, count, 2, 128, True), Plan(4, count, 2, 64, True, rooms=3)]
        if fmt == Format.Q4_K:
            plans += [Plan(4, count, 4 if k > 512 else 2, 128, False, spread=True, rooms=rooms) for rooms in (2, 4)]
        for plan in plans:
            assert plan is None or streams.fits(plan, fmt, k, count)
            for rows in (1, 7, 8, 9, 15, 16):
                given, out = x[-rows:].contiguous(), empty_out(rows, n, epilogue)
                linear_stream(given, weight, out, bias=bias, epilogue=epilogue, early=True, sums=sums, count=count, chosen=plan)
                assert torch.equal(out, expected[-rows:]), f"{n} x {k}, {rows} rows, {plan}"
    assert not sums.arrived.any()
