"""Products on quantised weights: a decode layer's share of the read bandwidth, many rows beside bf16, and the search for launches.

    python -m bench.kernels.linear_quant [--formats Q8_0,Q4_K] [--rows 1,32,64,272,2048]
    python -m bench.kernels.linear_quant --tune [--formats Q8_0,Q4_K] [--rows-tuned 16] [--seconds 1.5] [--compile-seconds 60]
        [--out FOLDER]

Results are checked before they are timed: each must have the bits of the plain product on the dequantised weight, in the weight's
number of chains, for all row counts, both kernels of few rows, both operand orders and every launch tried; one that gives other bits
is reported and not taken. Up to 16 rows are linear_stream's, whose plans are searched, above linear_quant's, whose tiles are. A layer
is its four products in turn, as a decode step launches them: one graph over several layers of weights of their own, each product set
up while its predecessor ends. Kernels are compiled in parallel first.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures import TimeoutError as OutOfTime
from functools import lru_cache, partial
from itertools import product as all_of
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton

from bench.kernels import measure
from ds4batch.engine.linear import Linear
from ds4batch.engine.linear_cuda import Scratch, multiply
from triton_kernels import card
from triton_kernels import stream_plan as streams
from triton_kernels.linear import ADD, FEW_ROWS, ROW_BUCKETS, SILU_MUL, STORE, linear
from triton_kernels.linear_quant import Sums, Tile, bucket_of, chains, config, linear_quant, table, tile_key
from triton_kernels.linear_stream import linear_stream
from triton_kernels.quant_formats import LAYOUTS, Format, PackedWeight, dequantise, pack_fp8, pack_gguf
from triton_kernels.stream_plan import Plan

HALVES = {Format.Q8_0: (0,), Format.Q4_0: (0,), Format.Q4_1: (0, 2), Format.Q4_K: (0, 2), Format.Q6_K: (208,)}
GOALS = {Format.Q8_0: "60 %", Format.Q4_0: "45 %", Format.Q4_1: "45 %", Format.Q4_K: "45 %"}
LAYERS = 8
PROCESSES = 15
CHECKED_ROWS = (*range(1, 18), 31, 32, 33, 48, 63, 64, 65, 160)


class Product(NamedTuple):
    """One product of a layer."""

    name: str
    n: int
    k: int
    epilogue: int


PRODUCTS = (
    Product("qkv", 6144, 4096, STORE),
    Product("o", 4096, 4096, ADD),
    Product("gate_up", 24576, 4096, SILU_MUL),
    Product("down", 4096, 12288, ADD),
)


class Kernel(NamedTuple):
    """What decides which machine code a product of few rows runs."""

    fmt: Format
    tile: Tile
    epilogue: int
    early: bool
    chains: int


class Streamed(NamedTuple):
    """What decides which machine code a product of up to 16 rows runs."""

    fmt: Format
    product: Product
    plan: Plan


Layer = dict[str, Linear]


def random_weight(fmt: Format, n: int, k: int) -> PackedWeight:
    """Random codes; scales that keep products at about the size of what is multiplied."""
    if fmt == Format.FP8:
        values = torch.randn(n, k, device="cuda").to(torch.float8_e4m3fn)
        return pack_fp8(values, (torch.rand(-(-n // 128), -(-k // 128), device="cuda") + 0.5) * k**-0.5)
    layout = LAYOUTS[fmt]
    raw = torch.randint(0, 256, (n, k // layout.raw_values, layout.raw_bytes), dtype=torch.uint8, device="cuda")
    largest = {Format.Q8_0: 128, Format.Q4_K: 512, Format.Q6_K: 4096}.get(fmt, 8)
    for at in HALVES[fmt]:
        halves = torch.randn(*raw.shape[:2], 1, device="cuda") * (2 * k**-0.5 / largest)
        raw[..., at : at + 2] = halves.half().view(torch.uint8)
    return pack_gguf(fmt, raw.view(n, -1))


def empty_out(rows: int, n: int, epilogue: int) -> torch.Tensor:
    kind = torch.float32 if epilogue == ADD else torch.bfloat16
    return torch.zeros(rows, n // 2 if epilogue == SILU_MUL else n, device="cuda", dtype=kind)


# ---- compiling, in parallel


def compile_one(kernel: Kernel) -> Kernel | None:
    """Fill the compiler's cache by a small product; None for a tile that asks for more than the card has. Runs in a process of its own."""
    weight = _small_weight(kernel.fmt)
    x = torch.ones(16, weight.k, device="cuda", dtype=torch.bfloat16)
    out = empty_out(16, weight.n, kernel.epilogue)
    try:
        linear_quant(
            x, weight, out, epilogue=kernel.epilogue, tile=kernel.tile, early=kernel.early, sums=sums(), count=kernel.chains
        )
    except triton.runtime.errors.OutOfResources:
        return None
    torch.cuda.synchronize()
    return kernel


def compile_streamed(asked: Streamed) -> Streamed:
    """The same for a product of its own size, of 16 rows."""
    n, k = asked.product.n, asked.product.k
    layout = LAYOUTS[asked.fmt]
    payload = torch.empty(k // layout.block_k, layout.planes, n, layout.width, dtype=torch.int16, device="cuda")
    if asked.fmt == Format.FP8:
        meta = torch.empty(2 * len(payload), -(-n // 128), device="cuda")
    else:
        meta = torch.empty(len(payload), layout.meta_words, n, dtype=torch.int32, device="cuda")
    weight = PackedWeight(asked.fmt, n, k, payload, meta)
    x, out = torch.ones(16, k, device="cuda", dtype=torch.bfloat16), empty_out(16, n, asked.product.epilogue)
    linear_stream(x, weight, out, epilogue=asked.product.epilogue, early=True, sums=sums(), chosen=asked.plan)
    torch.cuda.synchronize()
    return asked


@lru_cache
def _small_weight(fmt: Format) -> PackedWeight:
    return random_weight(fmt, 512, 8192)


@lru_cache
def sums() -> Sums:
    return Sums(torch.device("cuda"))


def compile_all(kernels: Iterable[Kernel | Streamed], limit: float) -> set[Any]:
    """Those of `kernels` that could be compiled, the first ones first, within `limit` seconds."""
    started, done = time.monotonic(), set()
    pool = ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn"))
    waiting: list[Future[Any]] = [
        pool.submit(compile_streamed, k) if isinstance(k, Streamed) else pool.submit(compile_one, k)
        for k in dict.fromkeys(kernels)
    ]
    try:
        for future in as_completed(waiting, timeout=limit):
            found = future.result()
            if found is not None:
                done.add(found)
    except OutOfTime:
        pass
    pool.shutdown(wait=True, cancel_futures=True)
    print(f"compiled {len(done)} of {len(waiting)} kernels in {time.monotonic() - started:.0f} s", flush=True)
    return done


# ---- checking


class Plain(NamedTuple):
    """A product on the dequantised weight, of all rows that are compared."""

    x: torch.Tensor
    expected: torch.Tensor


def plain(weight: PackedWeight, product: Product) -> Plain:
    x = torch.randn(max(CHECKED_ROWS), weight.k, device="cuda").bfloat16()
    out = empty_out(len(x), weight.n, product.epilogue)
    return Plain(x, linear(x, dequantise(weight).bfloat16(), out, epilogue=product.epilogue, chains=chains(product.n, product.k)))


def same(known: Plain, weight: PackedWeight, product: Product, rows: int, tile: Tile | None = None) -> bool:
    """Whether the last `rows` rows have the bits of the plain product."""
    x = known.x[-rows:].contiguous()
    out = empty_out(rows, weight.n, product.epilogue)
    linear_quant(x, weight, out, epilogue=product.epilogue, tile=tile, early=rows <= FEW_ROWS, sums=sums())
    return torch.equal(out, known.expected[-rows:])


def same_stream(known: Plain, weight: PackedWeight, product: Product, rows: int, chosen: Plan | None = None) -> bool:
    """The same of linear_stream, for up to 16 rows."""
    out = empty_out(rows, weight.n, product.epilogue)
    x = known.x[-rows:].contiguous()
    linear_stream(x, weight, out, epilogue=product.epilogue, early=True, sums=sums(), chosen=chosen)
    return torch.equal(out, known.expected[-rows:])


def faults(weight: PackedWeight, product: Product) -> list[str]:
    """Row counts, operand orders and ways whose bits are not those of the plain product."""
    known = plain(weight, product)
    found = [f"rows {rows}" for rows in CHECKED_ROWS if not same(known, weight, product, rows)]
    found += [
        f"streamed rows {rows}" for rows in CHECKED_ROWS if rows <= streams.ROWS and not same_stream(known, weight, product, rows)
    ]
    tile = config(weight.format, weight.n, weight.k, 16, product.epilogue)
    for other in others(tile):
        if not same(known, weight, product, 16, other):
            found.append(f"tile {tuple(other)}")
    if sums().arrived.any():
        found.append("counters")
    kept = Linear.of_quantised([weight], torch.bfloat16)
    out = empty_out(len(known.x), weight.n, product.epilogue)
    if not torch.equal(multiply(known.x, kept, out, epilogue=product.epilogue, scratch=Scratch([kept])), known.expected):
        found.append("written out")
    return found


def others(tile: Tile) -> tuple[Tile, Tile]:
    """The tile with the other operand first, and with the chains in turn."""
    return tile._replace(weight_first=not tile.weight_first, cols=max(tile.cols, 64)), tile._replace(shared=False)


def brief(wrong: list[str]) -> str:
    return f"OTHER BITS: {', '.join(wrong[:6])}" + (f" and {len(wrong) - 6} more" if len(wrong) > 6 else "") if wrong else "ok"


# ---- timing


def layers_of(weights: dict[str, PackedWeight]) -> list[Layer]:
    """Several layers of these weights, each in memory of its own."""

    def copy(weight: PackedWeight) -> Linear:
        again = PackedWeight(weight.format, weight.n, weight.k, weight.payload.clone(), weight.meta.clone())
        return Linear.of_quantised([again], torch.bfloat16)

    return [{name: copy(weight) for name, weight in weights.items()} for _ in range(LAYERS)]


def plain_layers() -> list[Layer]:
    return [{p.name: Linear(torch.randn(p.n, p.k, device="cuda").bfloat16()) for p in PRODUCTS} for _ in range(LAYERS)]


def seconds(layers: Sequence[Layer], rows: int, products: Sequence[Product] = PRODUCTS) -> float:
    """Seconds of a layer's products, one after the other, in a graph of all layers."""
    inputs = {p.k: torch.randn(rows, p.k, device="cuda").bfloat16() for p in products}
    outs = {p.name: empty_out(rows, p.n, p.epilogue) for p in products}
    scratch = Scratch([layers[0][p.name] for p in PRODUCTS])

    def launch(layer: Layer) -> None:
        for p in products:
            multiply(inputs[p.k], layer[p.name], outs[p.name], epilogue=p.epilogue, scratch=scratch, early=rows <= FEW_ROWS)

    return measure.seconds([partial(launch, layer) for layer in layers])


def report(formats: list[Format], row_counts: list[int], limit: float) -> bool:
    """Print the table; whether every check passed."""
    kernels: list[Kernel | Streamed] = []
    for fmt in formats:
        for p in PRODUCTS:
            chosen = streams.plan(fmt, p.n, p.k, chains(p.n, p.k), p.epilogue)
            kernels += [Streamed(fmt, p, chosen)] if chosen else []
            for bucket in ROW_BUCKETS:
                tile = config(fmt, p.n, p.k, bucket, p.epilogue)
                tiles = {16: (tile, *others(tile)), 32: (tile,), 64: (tile,)}.get(bucket, (tile, tile._replace(shared=False)))
                kernels += [Kernel(fmt, each, p.epilogue, bucket <= FEW_ROWS, chains(p.n, p.k)) for each in tiles]
    compile_all(kernels, limit)
    bandwidth = measure.read_bandwidth()
    layers = plain_layers()
    counts = [16, *row_counts]
    beside = {rows: seconds(layers, rows) for rows in counts}
    print("bf16     " + "  ".join(f"{rows}: {beside[rows] * 1e6:.1f} us" for rows in counts), flush=True)
    del layers
    fine = True
    for fmt in formats:
        weights = {p.name: random_weight(fmt, p.n, p.k) for p in PRODUCTS}
        wrong = [f"{p.name} {fault}" for p in PRODUCTS for fault in faults(weights[p.name], p)]
        fine &= not wrong
        layers = layers_of(weights)
        size = sum(weight.bytes for weight in weights.values())
        layer = seconds(layers, 16)
        alone = {p.name: seconds(layers, 16, [p]) for p in PRODUCTS}
        cells = [f"{name} {s * 1e6:.1f} us {weights[name].bytes / s / bandwidth:.0%}" for name, s in alone.items()]
        print(f"{fmt:5} layer of 16 rows {layer * 1e6:.1f} us, {size / layer / bandwidth:.1%} of the bandwidth (goal "
              f"{GOALS.get(fmt, 'none')}), {beside[16] / layer:.2f} x bf16; alone: {', '.join(cells)}; {brief(wrong)}")  # fmt: skip
        times = {rows: seconds(layers, rows) for rows in row_counts}
        cells = [f"{rows}: {s * 1e6:.1f} us ({beside[rows] / s:.2f} x bf16)" for rows, s in times.items()]
        print(f"{fmt:5} rows {'  '.join(cells)}", flush=True)
    return fine


# ---- tuning


def candidates(bucket: int) -> list[Tile]:
    """Tiles worth trying for 32 or 64 rows, the likeliest first."""
    if bucket == 32:
        return [Tile(16, 32, 4, 4, 2), Tile(32, 64, 4, 3), Tile(32, 64, 4, 3, 2), Tile(32, 128, 8, 3), Tile(16, 64, 4, 3),
                Tile(32, 64, 4, 4, 1, True), Tile(16, 64, 8, 4, 2)]  # fmt: skip
    return [Tile(64, 64, 4, 3, 1, True), Tile(32, 64, 4, 3), Tile(64, 64, 4, 3), Tile(16, 32, 4, 4, 2), Tile(64, 128, 8, 2, 1, True),
            Tile(64, 64, 4, 2, 1, True)]  # fmt: skip


def tune_format(fmt: Format, buckets: list[int], compiled: set[Kernel], limit: float) -> dict[str, Tile]:
    """The tiles that make a layer quickest, found product after product, the largest first. Their bits are those of plain products."""
    weights = {p.name: random_weight(fmt, p.n, p.k) for p in PRODUCTS}
    known = {p.name: plain(weights[p.name], p) for p in PRODUCTS}
    layers = layers_of(weights)
    size, bandwidth = sum(weight.bytes for weight in weights.values()), measure.read_bandwidth()
    found: dict[str, Tile] = {}
    for bucket in buckets:
        started = time.monotonic()
        best = seconds(layers, bucket)
        for p in sorted(PRODUCTS, key=lambda p: -p.n * p.k):
            key = tile_key(fmt, p.n, p.k, bucket, p.epilogue)
            kept = found[key] = table()[key] = config(fmt, p.n, p.k, bucket, p.epilogue)
            if not same(known[p.name], weights[p.name], p, bucket, kept):
                print(f"{fmt} {p.name}: the tile in use, {tuple(kept)}, gives other bits", flush=True)
            count = chains(p.n, p.k)
            for tile in candidates(bucket):
                late = time.monotonic() - started > limit
                if late or tile == kept or Kernel(fmt, tile, p.epilogue, True, count) not in compiled:
                    continue
                if not same(known[p.name], weights[p.name], p, bucket, tile):
                    print(f"{fmt} {p.name}: {tuple(tile)} gives other bits", flush=True)
                    continue
                table()[key] = tile
                now = seconds(layers, bucket)
                if now < best:
                    best, found[key] = now, tile
            table()[key] = found[key]
        chosen = ", ".join(f"{p.name} {tuple(map(int, found[tile_key(fmt, p.n, p.k, bucket, p.epilogue)]))}" for p in PRODUCTS)
        print(f"{fmt:5} {bucket} rows: {best * 1e6:.1f} us a layer, {size / best / bandwidth:.1%}: {chosen}", flush=True)
    return found


def plans(fmt: Format, product: Product) -> list[Plan]:
    """Launches of up to 16 rows worth trying."""
    count, four_bits = chains(product.n, product.k), fmt in (Format.Q4_0, Format.Q4_K)
    groups, copies = {1: ((4, 2), ((256, 2), (256, 3), (128, 4))), 4: ((1, 2, 4), ((128, 2), (64, 4), (256, 2), (256, 4)))}.get(
        count, ((4, 8), ((256, 2), (256, 3), (256, 4), (128, 4)))
    )
    turns, spreads = (8, 4) if four_bits else (4, 2), (False, True) if fmt == Format.Q4_K else (False,)
    found = [
        Plan(g, count if g >= 4 else 1, turn, part, ahead, spread, rooms)
        for g, turn, (part, rooms), ahead, spread in all_of(groups, turns, copies, (True, False), spreads)
        if part < 256 or g >= 4  # fewer warps: many copies a thread
    ]
    return [each for each in found if streams.fits(each, fmt, product.k, count)]


def tune_streams(fmt: Format, compiled: set[Any]) -> dict[str, Plan]:
    """The plans that make a layer quickest, found product after product, twice, the largest first, all with the right bits."""
    weights = {p.name: random_weight(fmt, p.n, p.k) for p in PRODUCTS}
    layers = layers_of(weights)
    size, bandwidth = sum(weight.bytes for weight in weights.values()), measure.read_bandwidth()
    good = {}
    for p in PRODUCTS:
        known = plain(weights[p.name], p)
        asked = [plan for plan in plans(fmt, p) if Streamed(fmt, p, plan) in compiled]
        good[p] = [plan for plan in asked if same_stream(known, weights[p.name], p, 16, plan)]
        if len(good[p]) < len(asked):
            print(f"{fmt} {p.name}: {len(asked) - len(good[p])} plans give other bits", flush=True)
    best = seconds(layers, 16)
    found = {}
    for p in sorted(PRODUCTS, key=lambda p: -p.n * p.k) * 2:
        key = streams.plan_key(fmt, p.n, p.k, p.epilogue)
        kept = streams.plan(fmt, p.n, p.k, chains(p.n, p.k), p.epilogue)
        for plan in good[p]:
            streams.table()[key] = plan
            now = seconds(layers, 16)
            if now < best:
                best, kept = now, plan
        if kept is not None:
            found[key] = streams.table()[key] = kept
    print(f"{fmt:5} 16 rows: {best * 1e6:.1f} us a layer, {size / best / bandwidth:.1%}: {found}", flush=True)
    return found


def tune(formats: list[Format], buckets: list[int], limit: float, compile_limit: float, folder: Path) -> None:
    """Add each format's best plans and tiles to the tables in `folder`."""
    more = [bucket for bucket in buckets if bucket > streams.ROWS]
    if len(more) < len(buckets):
        asked = [Streamed(fmt, p, plan) for fmt in formats for p in PRODUCTS for plan in plans(fmt, p)]
        built = compile_all(asked, compile_limit)
        for fmt in formats:
            keep(folder / f"{card.name()}_stream.json", tune_streams(fmt, built))
    if more:
        ranked = [
            (rank, Kernel(fmt, tile, p.epilogue, True, chains(p.n, p.k)))
            for bucket in more
            for fmt in formats
            for p in PRODUCTS
            for rank, tile in enumerate(candidates(bucket))
        ]
        built = compile_all([kernel for _, kernel in sorted(ranked, key=lambda pair: pair[0])], compile_limit)
        for fmt in formats:
            keep(folder / f"{card.name()}_quant.json", tune_format(fmt, more, built, limit))


def keep(path: Path, found: Mapping[str, Plan | Tile]) -> None:
    """Add entries to a table, a line each."""
    known = json.loads(path.read_text()) if path.exists() else {}
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [
        f"{json.dumps(key)}:{json.dumps(list(each), separators=(',', ':'))}"
        for key, each in sorted((known | dict(found)).items())
    ]
    path.write_text("{" + ",\n".join(rows) + "}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default=",".join(Format))
    parser.add_argument("--rows", default="1,32,64,272,2048", help="row counts beside 16")
    parser.add_argument("--compile-seconds", type=float, default=60, help="stop compiling then and measure what there is")
    parser.add_argument("--tune", action="store_true", help="search launches and write their tables")
    parser.add_argument("--rows-tuned", default="16", help="with --tune: row counts up to 64 whose launches are searched")
    parser.add_argument("--seconds", type=float, default=1.5, help="with --tune: time for one format and number of rows above 16")
    default = Path(__file__).parents[2] / "triton_kernels" / "tuned"
    parser.add_argument("--out", type=Path, default=default, help="with --tune: the folder of the card's tables")
    options = parser.parse_args()
    formats = [Format(f) for f in options.formats.split(",")]
    print(measure.describe(), flush=True)
    if options.tune:
        buckets = [bucket_of(int(r)) for r in options.rows_tuned.split(",")]
        tune(formats, buckets, options.seconds, options.compile_seconds, options.out)
    elif not report(formats, [int(r) for r in options.rows.split(",")], options.compile_seconds):
        raise SystemExit("some checks failed")


if __name__ == "__main__":
    main()
