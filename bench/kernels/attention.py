"""Attention on the page pool: decode against the memory's speed, prefill against torch's flash attention.

Every line is checked before it is timed: some rows against fp64, and decode against prefill bit for bit. Needs a card.
Run: python -m bench.kernels.attention [--part bits|chunk|decode|prefill|all]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from bench.kernels.measure import describe, matrix_rate, read_bandwidth, seconds
from triton_kernels.attention_decode import attention_decode, decode_workspace
from triton_kernels.attention_parts import DEFAULT_LATER, DEFAULT_SPLIT, DEFAULT_STRETCH, reference_row
from triton_kernels.attention_prefill import PrefillWorkspace, Segment, attention_prefill, prefill_tiles, prefill_workspace

KV_HEADS, GROUP, HEAD_DIM, PAGE = 8, 4, 128, 256
HEADS = KV_HEADS * GROUP
SCALE = HEAD_DIM**-0.5
CACHE_BYTES = 400 << 20  # data that no L2 holds
STRETCHES = 8  # of a context of 32,768


class Layer(NamedTuple):
    """One layer's pool with `tables.shape[0]` sessions in scattered pages."""

    k: torch.Tensor
    v: torch.Tensor
    tables: torch.Tensor


def make_layer(sessions: int, ctx: int) -> Layer:
    pages = -(-ctx // PAGE)
    tables = torch.randperm(sessions * pages, device="cuda").to(torch.int32).view(sessions, pages)
    k, v = (torch.randn(sessions * pages, KV_HEADS, PAGE, HEAD_DIM, device="cuda").bfloat16() for _ in range(2))
    return Layer(k, v, tables)


def queries(rows: int) -> torch.Tensor:
    return torch.randn(rows, HEADS, HEAD_DIM, device="cuda").bfloat16()


def empty_out(rows: int) -> torch.Tensor:
    return torch.empty(rows, HEADS * HEAD_DIM, dtype=torch.bfloat16, device="cuda")


def with_later(options: dict[str, Any]) -> dict[str, Any]:
    """A kernel's options, with later splits that are no shorter than the first ones."""
    return {"later": max(options.get("split", DEFAULT_SPLIT), DEFAULT_LATER), **options}


def decode(
    q: torch.Tensor, layer: Layer, lengths: torch.Tensor, max_splits: int, **options: Any
) -> tuple[Callable[[], None], torch.Tensor]:
    options = with_later(options)
    out, workspace = empty_out(q.shape[0]), decode_workspace(q.shape[0], HEADS, KV_HEADS, HEAD_DIM, max_splits, "cuda")

    def launch() -> None:
        attention_decode(
            q, layer.k, layer.v, layer.tables, lengths, out, workspace, scale=SCALE, page_tokens=PAGE, max_splits=max_splits,
            **options,
        )  # fmt: skip

    return launch, out


@lru_cache(maxsize=1)
def workspace_of(tiles: int, tile_lines: int) -> PrefillWorkspace:
    """One for all layers, as in a model."""
    return prefill_workspace(tiles, KV_HEADS, HEAD_DIM, STRETCHES, "cuda", tile_lines)


def prefill(
    q: torch.Tensor, layer: Layer, segments: Sequence[Segment], tile_lines: int = 64, pad_to: int = 0, **options: Any
) -> tuple[Callable[[], None], torch.Tensor]:
    options = with_later(options)
    out = empty_out(q.shape[0])
    tiles = prefill_tiles(segments, heads=HEADS, kv_heads=KV_HEADS, device="cuda", tile_lines=tile_lines, pad_to=pad_to)
    # Room for several parts of any launch, so that they can be compared where the default is one.
    workspace = workspace_of(len(tiles.rows) * (STRETCHES if options.get("parts", 1) > 1 else 1), tile_lines)

    def launch() -> None:
        attention_prefill(
            q, layer.k, layer.v, layer.tables, tiles, out, workspace, scale=SCALE, page_tokens=PAGE, tile_lines=tile_lines,
            max_stretches=STRETCHES, **options,
        )  # fmt: skip

    return launch, out


def check(
    out: torch.Tensor, q: torch.Tensor, layer: Layer, rows: Sequence[int], tables: Sequence[int], lengths: Sequence[int]
) -> None:
    for row, table, length in zip(rows, tables, lengths, strict=True):
        expected = reference_row(q[row], layer.k, layer.v, layer.tables[table], length, scale=SCALE)
        torch.testing.assert_close(out[row].double(), expected, rtol=2e-2, atol=4e-3)


def bits() -> None:
    """Decode rows against the same rows of a prefill, for tiles, warps, stages, parts and splits; prints differing values."""
    total = 8192
    layer, q = make_layer(1, total), queries(total)
    rows = torch.tensor([0, 254, 255, 256, 510, 511, 512, 1023, 1024, 2047, 3000, 4095, 4096, 5555, 8190, 8191], device="cuda")
    shared = layer._replace(tables=layer.tables.expand(len(rows), -1).contiguous())
    for split in (256, 512, 1024):
        outs = []
        for tile_lines, warps, stages, parts in [
            (128, 8, 3, 1), (128, 4, 2, 2), (64, 4, 3, 1), (64, 4, 3, 2), (64, 8, 2, 2), (16, 4, 3, 3), (32, 2, 3, 1),
        ]:  # fmt: skip
            options = {"split": split, "num_warps": warps, "num_stages": stages, "parts": parts}
            launch, out = prefill(q, layer, [Segment(0, total, 0, 0)], tile_lines, **options)
            launch()
            outs.append(out)
        check(outs[0], q, layer, [0, 511, 8191], [0] * 3, [1, 512, 8192])
        differ = [int((out != outs[0]).sum()) for out in outs]
        for warps, stages, programs in product((1, 2, 4, 8), (2, 4), (1, 5, 32)):
            launch, out = decode(
                q[rows].contiguous(), shared, (rows + 1).int(), -(-total // split), split=split, num_warps=warps,
                num_stages=stages, split_programs=programs,
            )  # fmt: skip
            for _ in range(3):
                launch()
            differ.append(int((out != outs[0][rows]).sum()))
        print(
            f"bits: split {split}: {sum(differ)} of {outs[0].numel() * len(outs)} values differ {differ if any(differ) else ''}"
        )
    for check_rows in (2, 4):
        pair = torch.arange(6000, 6000 + check_rows, device="cuda")
        launch, out = decode(q[pair].contiguous(), layer, (pair + 1).int(), 32, rows_per_session=check_rows)
        launch()
        reference, expected = prefill(q, layer, [Segment(0, total, 0, 0)], 128)
        reference()
        print(f"bits: {check_rows} check rows: {int((out != expected[pair]).sum())} values differ")


def time_decode() -> None:
    variants = [
        {"split": split, "num_warps": warps, "num_stages": stages}
        for split, warps, stages in [(256, 4, 3), (256, 4, 4), (256, 4, 6), (256, 2, 6), (256, 8, 6), (512, 4, 6), (1024, 4, 6)]
    ]
    for rows, ctx in [(16, 512), (16, 1024), (16, 8192), (1, 512), (1, 8192), (64, 512), (1, 65536)]:
        size = 2 * rows * KV_HEADS * ctx * HEAD_DIM * 2
        layers = [make_layer(rows, ctx) for _ in range(max(2, min(24, -(-CACHE_BYTES // size))))]
        lengths, q = torch.full((rows,), ctx, dtype=torch.int32, device="cuda"), queries(rows)
        lean = [variants[2] | {"slots": slots} for slots in (66, 264, 528)] if ctx > 512 else []
        for options in [*variants, *lean]:
            launches = [decode(q, layer, lengths, -(-ctx // options["split"]), **options) for layer in layers]
            launches[0][0]()
            check(launches[0][1], q, layers[0], [0, rows - 1], [0, rows - 1], [ctx, ctx])
            time = seconds([launch for launch, _ in launches])
            rate = size / time / read_bandwidth()
            print(f"decode: {rows:3} rows, ctx {ctx:6}, {options}: {time * 1e6:7.1f} us, {rate:5.1%} of the read rate")
        wide = decode(q, layers[0], lengths, 256, split=512)[0]
        time = seconds([wide] * 20)
        print(f"decode: {rows:3} rows, ctx {ctx:6}, room for 256 splits, one layer again and again: {time * 1e6:7.1f} us")


def time_chunks() -> None:
    """Chunks of a long prompt, padded like a recorded forward: by default, by one part and by as many as there are stretches."""
    deepest = 16384 + 4096
    layers = [make_layer(1, deepest) for _ in range(5)]
    for rows, position in product((64, 128, 256, 512, 640, 1024, 4096), (0, 4096, 8192, 16384)):
        flop = 4 * (rows * position + rows * (rows + 1) // 2) * HEADS * HEAD_DIM
        q, segments, pad_to = queries(rows), [Segment(0, rows, position, 0)], rows * GROUP // 64 + 8
        border = -(-position // DEFAULT_STRETCH) * DEFAULT_STRETCH - position
        some = sorted({at for at in (0, 1, border - 1, border, rows // 2, rows - 2, rows - 1) if 0 <= at < rows})
        lengths = torch.tensor(some, dtype=torch.int32, device="cuda") + position + 1
        shared = layers[0]._replace(tables=layers[0].tables.expand(len(some), -1).contiguous())
        single, expected = decode(q[some].contiguous(), shared, lengths, -(-deepest // 256))
        single()
        check(expected[-1:], q[-1:], layers[0], [0], [0], [position + rows])
        words = []
        for name, options in {"default": {}, "1 part": {"parts": 1}, f"{STRETCHES} parts": {"parts": STRETCHES}}.items():
            if rows > 1024 and options.get("parts", 1) > 1:
                continue
            launches = [prefill(q, layer, segments, pad_to=pad_to, **options) for layer in layers]
            launches[0][0]()
            differ = int((launches[0][1][some] != expected).sum())
            time = seconds([launch for launch, _ in launches])
            words.append(f"{name} {time * 1e6:7.1f} us {flop / time / matrix_rate():5.1%}" + f" ({differ} DIFFER)" * (differ > 0))
        print(f"chunk: {rows:4} rows at {position:5}: {'; '.join(words)}")


def time_prefill() -> None:
    for rows, position in [(8192, 0), (2048, 6144), (512, 7680), (2048, 0)]:
        total = rows + position
        layer, q = make_layer(1, total), queries(rows)
        pairs = rows * position + rows * (rows + 1) // 2
        flop = 4 * pairs * HEADS * HEAD_DIM
        if position == 0:
            k, v = (
                pool[layer.tables[0].long()].transpose(0, 1).reshape(1, KV_HEADS, -1, HEAD_DIM)[:, :, :total]
                for pool in layer[:2]
            )
            wide_k, wide_v = (x.repeat_interleave(GROUP, 1) for x in (k, v))
            heads_first = q.transpose(0, 1).unsqueeze(0).contiguous()
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                time = seconds([partial(scaled_dot_product_attention, heads_first, wide_k, wide_v, is_causal=True)] * 3)
            print(f"prefill: {rows} rows at {position}: torch flash {time * 1e6:8.1f} us, {flop / time / 1e12:5.0f} TFLOP/s")
        for tile_lines, warps, stages in [(128, 8, 2), (128, 8, 3), (128, 8, 4), (64, 4, 2), (64, 4, 3), (128, 4, 3)]:
            launch, out = prefill(q, layer, [Segment(0, rows, position, 0)], tile_lines, num_warps=warps, num_stages=stages)
            launch()
            check(out, q, layer, [0, rows - 1], [0, 0], [position + 1, total])
            time = seconds([launch] * 3)
            rate = flop / time
            print(f"prefill: {rows} rows at {position}: tile {tile_lines} warps {warps} stages {stages}: {time * 1e6:8.1f} us, "
                  f"{rate / 1e12:5.0f} TFLOP/s, {rate / matrix_rate():5.1%} of the matrix rate")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--part", choices=["bits", "chunk", "decode", "prefill", "all"], default="all")
    part = parser.parse_args().part
    torch.manual_seed(0)
    print(describe())
    for name, run in {"bits": bits, "chunk": time_chunks, "decode": time_decode, "prefill": time_prefill}.items():
        if part in (name, "all"):
            run()


if __name__ == "__main__":
    main()
