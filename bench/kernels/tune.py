"""Finds the fastest tiles of triton_kernels.linear on this card and writes triton_kernels/tuned/CARD.json.

    python -m bench.kernels.tune [--models qwen3-8b,llama-3.1-8b,FILE] [--rows 16,64] [--tries 40] [--out FILE]

Tiles change speed and no bits, so the table may be made, lost or edited at will. For few rows a candidate is judged by the time of a whole
captured decode step, because a product's start and end overlap with its neighbours; for many rows by the product alone. Every candidate's
result is compared, bit for bit, with the first one's before it counts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import torch
import triton

from bench.kernels import measure
from bench.shapes import SHAPES, RandomWeights
from ds4batch.engine.models.dense import DenseModel
from ds4batch.engine.models.dense_cuda import CudaForward
from ds4batch.engine.pages import PagePool, PageShape
from ds4batch.engine.rows import Segment
from ds4batch.engine.weights.config import ModelConfig
from ds4batch.engine.weights.source import open_weights
from triton_kernels import card
from triton_kernels.linear import ADD, FEW_ROWS, ROW_BUCKETS, SHARED_MEMORY, SILU_MUL, STORE, Tile, choose, linear, table

PROCESSES = 14
LAYERS = 12  # of a model whose steps are timed
CONTEXT = 512
PAGE = 256
MID = 512  # rows up to which small tiles are worth trying
MANY = 2048  # rows that stand for all larger numbers


class Product(NamedTuple):
    """One product of a model's forward."""

    name: str
    n: int
    k: int
    epilogue: int
    wide_out: bool = False  # fp32 output

    @property
    def cols(self) -> int:
        """Columns of the output."""
        return self.n // 2 if self.epilogue == SILU_MUL else self.n

    def key(self, bucket: int) -> str:
        """Its place in the table."""
        return f"{self.n}x{self.k}:{bucket}:{self.epilogue}"


def products(config: ModelConfig) -> list[Product]:
    """What a layer and the head multiply."""
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    return [
        Product("qkv", q + 2 * kv, config.hidden, STORE),
        Product("out", config.hidden, q, ADD),
        Product("gate_up", 2 * config.ffn, config.hidden, SILU_MUL),
        Product("down", config.hidden, config.ffn, ADD),
        Product("head", config.vocab, config.hidden, STORE, True),
    ]


def candidates(product: Product, bucket: int) -> Iterator[Tile]:
    """Tiles worth trying for a number of rows."""
    halves = 2 if product.epilogue == SILU_MUL else 1
    if bucket <= FEW_ROWS:
        kinds = [(False, False), (False, True), (True, True)]
        grid = itertools.product([bucket], (16, 32, 64, 128), (64, 128, 256), (2, 4, 8), (2, 3, 4, 5, 6, 7, 8), kinds)
    else:
        sides = (64, 128) if bucket <= MID else (128,)
        widths = (32, 64, 128, 256) if bucket <= MID else (64, 128, 256)
        grid = itertools.product(sides, widths, (64, 128), (4, 8), (3, 4, 5, 6), [(False, False)])
    for rows, cols, inner, warps, stages, (weight_first, described) in grid:
        tile = Tile(rows, cols, inner, warps, stages, weight_first, described)
        accumulators = rows * cols * halves / (warps * 32)
        fits = stages * inner * (rows + cols * halves) * 2 <= SHARED_MEMORY and 2 <= accumulators <= 200
        groups = cols >= 64 and warps in (4, 8) and cols * 4 >= warps * 64  # a warp group owns 64 of the first operand's rows
        if fits and product.k % inner == 0 and cols <= product.cols and (groups or not weight_first):
            yield tile


def in_flight(product: Product, tile: Tile) -> int:
    """Bytes of weights that the whole card has asked for at a time."""
    programs = -(-product.cols // tile.cols)
    halves = 2 if product.epilogue == SILU_MUL else 1
    return (tile.stages - 1) * tile.inner * tile.cols * halves * 2 * programs


def chosen(product: Product, bucket: int, tries: int) -> list[Tile]:
    """The tile in use, then up to `tries` others: a fixed draw from those that can hide the memory's latency."""
    tiles = list(candidates(product, bucket))
    if bucket <= FEW_ROWS and product.n * product.k > 1 << 22:
        tiles = [t for t in tiles if in_flight(product, t) >= (3 << 20 if t.weight_first else 6 << 20)]
    random.Random(product.key(bucket)).shuffle(tiles)
    now = choose(product.n, product.k, bucket, product.epilogue)
    return [now, *[t for t in tiles if t != now][:tries]]


def _operands(product: Product, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.randn(rows, product.k, device="cuda").bfloat16()
    weight = (torch.randn(product.n, product.k, device="cuda") * product.k**-0.5).bfloat16()
    wide = product.wide_out or product.epilogue == ADD
    return x, weight, torch.zeros(rows, product.cols, device="cuda", dtype=torch.float32 if wide else torch.bfloat16)


def _compile(job: tuple[Product, int, list[Tile]]) -> int:
    """Fill the kernel cache; runs in a process of its own."""
    product, rows, tiles = job
    small = product._replace(n=min(product.n, 4096 if product.epilogue != SILU_MUL else 3072))
    x, weight, out = _operands(small, rows)
    done = 0
    for tile in tiles:
        try:
            linear(x, weight, out, epilogue=product.epilogue, early=True, tile=tile)
            done += 1
        except triton.runtime.errors.OutOfResources:
            continue
    torch.cuda.synchronize()
    return done


class Steps:
    """Times decode steps of `rows` sessions of a model, under whatever tiles the table holds."""

    def __init__(self, model: DenseModel, rows: int) -> None:
        config = model.config
        shape = PageShape(config.layers, config.kv_heads, PAGE, config.head_dim, torch.bfloat16)
        self._pages = CONTEXT // PAGE + 1
        self._pool = PagePool(shape, rows * self._pages, model.device)
        for layer in range(config.layers):
            self._pool.k[layer].normal_()
            self._pool.v[layer].normal_()
        self._model, self._rows = model, rows

    def run(self) -> tuple[float, torch.Tensor]:
        """Seconds of a step, and the logits of its rows."""
        rows, pages = self._rows, self._pages
        forward = CudaForward(self._model, self._pool, rows, pages * PAGE, rows)
        segments = [Segment(list(range(i * pages, (i + 1) * pages)), CONTEXT, [i], True) for i in range(rows)]
        logits = forward(segments)[0].logits.clone()
        replay = forward.graph(rows).replay
        return sorted(measure.once(replay) for _ in range(15))[7], logits


def tune_steps(model: DenseModel, bucket: int, tries: int) -> None:
    """Set the table's entries of one model and row bucket, product after product."""
    steps = Steps(model, bucket)
    for product in products(model.config):
        expected: torch.Tensor | None = None
        timed = []
        for tile in chosen(product, bucket, tries if product.name != "head" else min(tries, 8)):
            table()[product.key(bucket)] = list(tile)
            try:
                taken, logits = steps.run()
            except triton.runtime.errors.OutOfResources:
                continue
            expected = logits if expected is None else expected
            if torch.equal(logits, expected):
                timed.append((taken, tile))
            else:
                print(f"  {product.name}: {tile} gives other bits", flush=True)
        table()[product.key(bucket)] = list(min(timed)[1])
        print(f"{product.name:8} rows {bucket:3}: step {timed[0][0] * 1e3:6.3f} ms -> {min(timed)[0] * 1e3:6.3f}, "
              f"{len(timed)} tiles, {tuple(min(timed)[1])}", flush=True)  # fmt: skip


def tune_many(product: Product, bucket: int) -> None:
    """Set the table's entry of one product for a bucket of many rows."""
    rows = min(bucket, MANY)
    x, weight, out = _operands(product, rows)
    weights = measure.copies(lambda: weight.clone(), weight.nbytes)
    base = torch.randn_like(out)
    expected: torch.Tensor | None = None
    timed = []
    for tile in candidates(product, bucket):
        launch: Callable[[torch.Tensor], torch.Tensor] = partial(_launch, x, out, product.epilogue, tile)
        try:
            out.copy_(base)
            found = launch(weight).clone()
        except triton.runtime.errors.OutOfResources:
            continue
        expected = found if expected is None else expected
        if torch.equal(found, expected):
            timed.append((measure.seconds([partial(launch, w) for w in weights], 3), tile))
        else:
            print(f"  {product.name}: {tile} gives other bits", flush=True)
    taken, tile = min(timed)
    table()[product.key(bucket)] = list(tile)
    theirs = measure.seconds([partial(torch.mm, x, w.t()) for w in weights], 3)
    rate = 2 * rows * product.n * product.k / taken / 1e12
    print(
        f"{product.name:8} rows {rows}: {taken * 1e6:6.1f} us, torch {theirs * 1e6:6.1f}, {rate:4.0f} TFLOP/s, {tuple(tile)}",
        flush=True,
    )


def _launch(x: torch.Tensor, out: torch.Tensor, epilogue: int, tile: Tile, weight: torch.Tensor) -> torch.Tensor:
    return linear(x, weight, out, epilogue=epilogue, early=True, tile=tile)


def main() -> None:
    """Tune every product of the named models."""
    parser = argparse.ArgumentParser(prog="tune", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default=",".join(SHAPES), help="shapes or model files (default: %(default)s)")
    parser.add_argument("--rows", default=",".join(map(str, ROW_BUCKETS)), help="row buckets (default: %(default)s)")
    parser.add_argument(
        "--tries", type=int, default=40, help="tiles tried for a product and number of few rows (default: %(default)s)"
    )
    default = Path(__file__).parents[2] / "triton_kernels" / "tuned" / f"{card.name()}.json"
    parser.add_argument("--out", default=str(default), help="the table (default: this card's)")
    options = parser.parse_args()
    device = torch.device("cuda")
    buckets = [b for b in ROW_BUCKETS if str(b) in options.rows.split(",")]
    print(measure.describe(), flush=True)
    for name in options.models.split(","):
        if name in SHAPES:
            source = RandomWeights(replace(SHAPES[name], layers=LAYERS), device)
            model = DenseModel(source, device, torch.bfloat16, CONTEXT + PAGE)
        else:
            model = DenseModel(open_weights(name), device, torch.bfloat16, CONTEXT + PAGE)
        variants: dict[tuple[object, ...], tuple[Product, int, Tile]] = {}  # by what their machine code depends on
        for product, bucket in itertools.product(products(model.config), buckets):
            few = bucket <= FEW_ROWS
            for tile in chosen(product, bucket, options.tries) if few else candidates(product, bucket):
                variants[few, product.epilogue, product.wide_out, tile] = (product, min(bucket, MANY), tile)
        jobs = [(*key, [tile for *_, tile in group]) for key, group in itertools.groupby(variants.values(), lambda v: v[:2])]
        jobs = [(product, rows, tiles[i::8]) for product, rows, tiles in jobs for i in range(8) if tiles[i::8]]
        with ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn")) as pool:
            print(f"{name}: compiled {sum(pool.map(_compile, jobs))} variants", flush=True)
        for bucket in buckets:
            if bucket <= FEW_ROWS:
                tune_steps(model, bucket, options.tries)
            else:
                for product in products(model.config)[:-1]:
                    tune_many(product, bucket)
        del model
        torch.cuda.empty_cache()
    out = Path(options.out)
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(dict(sorted(table().items())), separators=(",", ":")).replace("],", "],\n") + "\n")


if __name__ == "__main__":
    main()
