"""Finds the fastest tiles of triton_kernels.linear on this card and writes triton_kernels/tuned/CARD.json.

    python -m bench.kernels.tune [--shapes qwen3-8b,demo] [--out FILE]

Tiles change speed and no bits, so the table may be made, lost or edited at will. Every candidate's result is compared, bit for
bit, with the first one's before it is timed.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import torch
import triton

from bench.kernels import measure
from triton_kernels.linear import _BUCKETS, ADD, SILU_MUL, STORE, Tile, linear

SMEM = 220 << 10
PROCESSES = 14


class Product(NamedTuple):
    """One product of a model's forward."""

    name: str
    n: int
    k: int
    epilogue: int
    wide_out: bool = False  # fp32 output


MODELS = {
    "qwen3-8b": [Product("qkv", 6144, 4096, STORE), Product("out", 4096, 4096, ADD), Product("gate_up", 24576, 4096, SILU_MUL),
                 Product("down", 4096, 12288, ADD), Product("head", 151936, 4096, STORE, True)],
    "llama-3.1-8b": [Product("gate_up", 28672, 4096, SILU_MUL), Product("down", 4096, 14336, ADD),
                     Product("head", 128256, 4096, STORE, True)],
    "demo": [Product("qkv", 960, 576, STORE), Product("out", 576, 576, ADD), Product("gate_up", 3072, 576, SILU_MUL),
             Product("down", 576, 1536, ADD), Product("head", 49152, 576, STORE, True)],
}  # fmt: skip


def candidates(product: Product, bucket: int) -> Iterator[Tile]:
    """Tiles worth trying for a number of rows."""
    gated = product.epilogue == SILU_MUL
    if bucket <= 64:
        grid = itertools.product([bucket], (16, 32, 64, 128), (64, 128, 256), (2, 4, 8), (2, 3, 4, 5))
    else:
        grid = itertools.product((128,), (64, 128, 256), (64, 128), (4, 8), (3, 4, 5))
    for rows, cols, inner, warps, stages in grid:
        tile = Tile(rows, cols, inner, warps, stages)
        used = stages * inner * (rows + cols * (2 if gated else 1)) * 2
        accumulators = rows * cols * (2 if gated else 1) / (warps * 32)
        small = product.k % inner != 0 or cols > product.n
        if used <= SMEM and accumulators <= 200 and not small and rows * cols // (warps * 32) >= 2:
            yield tile


def _operands(product: Product, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.randn(rows, product.k, device="cuda").bfloat16()
    weight = (torch.randn(product.n, product.k, device="cuda") * product.k**-0.5).bfloat16()
    width = product.n // 2 if product.epilogue == SILU_MUL else product.n
    wide = product.wide_out or product.epilogue == ADD
    return x, weight, torch.zeros(rows, width, device="cuda", dtype=torch.float32 if wide else torch.bfloat16)


def _compile(job: tuple[Product, int, list[Tile]]) -> int:
    """Fill the kernel cache; runs in a process of its own."""
    product, rows, tiles = job
    small = product._replace(n=min(product.n, 4096 if product.epilogue != SILU_MUL else 3072))
    x, weight, out = _operands(small, rows)
    done = 0
    for tile in tiles:
        try:
            linear(x, weight, out, epilogue=product.epilogue, tile=tile)
            done += 1
        except triton.runtime.errors.OutOfResources:
            continue
    torch.cuda.synchronize()
    return done


def tune(product: Product, bucket: int) -> tuple[Tile, float, float]:
    """The best tile, its seconds, and torch's."""
    rows = min(bucket, 2048)
    x, weight, out = _operands(product, rows)
    weights = measure.copies(lambda: weight.clone(), weight.nbytes)
    base = torch.randn_like(out)
    expected: torch.Tensor | None = None
    best, fastest = None, float("inf")
    for tile in candidates(product, bucket):

        def launch(w: torch.Tensor, tile: Tile = tile) -> torch.Tensor:
            return linear(x, w, out, epilogue=product.epilogue, tile=tile)

        try:
            out.copy_(base)
            found = launch(weight).clone()
        except triton.runtime.errors.OutOfResources:
            continue
        if expected is None:
            expected = found
        if not torch.equal(found, expected):
            print(f"  {product.name}: {tile} gives other bits: max {(found - expected).abs().max():.3g}", flush=True)
            continue
        taken = measure.seconds([partial(launch, w) for w in weights], 3)
        if taken < fastest:
            best, fastest = tile, taken
    assert best is not None
    theirs = measure.seconds([partial(torch.mm, x, w.t()) for w in weights], 3)
    return best, fastest, theirs


def main() -> None:
    """Tune every product of the named models."""
    parser = argparse.ArgumentParser(prog="tune", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", default=",".join(MODELS), help="models to tune for (default: %(default)s)")
    parser.add_argument("--rows", default="16,32,64,1073741824", help="row buckets (default: %(default)s)")
    default = Path(__file__).parents[2] / "triton_kernels" / "tuned" / (torch.cuda.get_device_name().replace(" ", "_") + ".json")
    parser.add_argument("--out", default=str(default), help="the table (default: this card's)")
    options = parser.parse_args()
    products = [p for name in options.shapes.split(",") for p in MODELS[name]]
    buckets = [b for b in _BUCKETS if str(b) in options.rows.split(",")]
    work = [(p, b) for p in products for b in buckets if not (p.name == "head" and b > 64)]
    jobs = []
    for product, bucket in work:
        tiles = list(candidates(product, bucket))
        jobs += [(product, min(bucket, 2048), tiles[i::4]) for i in range(4) if tiles[i::4]]
    with ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn")) as pool:
        print(f"compiled {sum(pool.map(_compile, jobs))} variants", flush=True)
    out = Path(options.out)
    table = json.loads(out.read_text()) if out.exists() else {}
    print(measure.describe(), flush=True)
    for product, bucket in work:
        tile, ours, theirs = tune(product, bucket)
        table[f"{product.n}x{product.k}:{bucket}:{product.epilogue}"] = list(tile)
        rows = min(bucket, 2048)
        floor = product.n * product.k * 2 / measure.read_bandwidth()
        flops = 2 * rows * product.n * product.k
        print(f"{product.name:8} {product.n:6}x{product.k:<5} rows {rows:4}: {ours * 1e6:8.1f} us, torch {theirs * 1e6:8.1f}, "
              f"weight floor {floor * 1e6:6.1f}, {flops / ours / 1e12:5.0f} TFLOP/s  {tuple(tile)}", flush=True)  # fmt: skip
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(dict(sorted(table.items())), indent=0) + "\n")


if __name__ == "__main__":
    main()
