"""Products on quantised weights: share of the read bandwidth at decode and of the matrix rate at prefill; and the search for tiles.

    python -m bench.kernels.linear_quant [--formats Q8_0,Q4_K] [--rows 1,16,32] [--prefill 2048]
    python -m bench.kernels.linear_quant --tune [--formats Q8_0,Q4_K] [--seconds 0.5] [--compile-seconds 60] [--out FILE]

Every weight's results are checked before they are timed: against the reference in fp64; and bit for bit between row counts, offsets,
row tiles, operand orders and ways to run the splits. Kernels are compiled in parallel first.

The last columns of the table are the times at 16 rows with half and with twice as many splits: a split count is a part of the
order of sums, so what they show belongs into `splits`, a rule of the weight, and never into the table of tiles, which `--tune`
writes and which changes no bits. A tile that gives other bits than the first is reported and not taken.
"""

from __future__ import annotations

import argparse
import json
import time
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures import TimeoutError as OutOfTime
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import torch
import triton

from bench.kernels import measure
from triton_kernels.linear_quant import (
    ADD,
    SILU_MUL,
    STORE,
    Scratch,
    Tile,
    bucket_of,
    config,
    linear_quant,
    linear_quant_reference,
    splits,
    tile_key,
)
from triton_kernels.quant_formats import LAYOUTS, Format, PackedWeight, pack_fp8, pack_gguf

HALVES = {Format.Q8_0: (0,), Format.Q4_0: (0,), Format.Q4_1: (0, 2), Format.Q4_K: (0, 2), Format.Q6_K: (208,)}
OUTGROW = 400 << 20  # bytes of distinct weights in one replay: several times the L2
PROCESSES = 14
PREFILL = 1 << 30  # the bucket of many rows


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
    """What decides which machine code a product runs."""

    fmt: Format
    tile: Tile
    epilogue: int
    wide: bool  # fp32 output
    split: bool


def random_weight(fmt: Format, n: int, k: int) -> PackedWeight:
    """Random codes; scales of about 1 / 64."""
    if fmt == Format.FP8:
        values = torch.randn(n, k, device="cuda").to(torch.float8_e4m3fn)
        return pack_fp8(values, torch.rand(-(-n // 128), -(-k // 128), device="cuda") / 64)
    layout = LAYOUTS[fmt]
    raw = torch.randint(0, 256, (n, k // layout.raw_values, layout.raw_bytes), dtype=torch.uint8, device="cuda")
    for at in HALVES[fmt]:
        raw[..., at : at + 2] = (torch.randn(*raw.shape[:2], 1, device="cuda") / 64).half().view(torch.uint8)
    return pack_gguf(fmt, raw.view(n, -1))


def empty_out(rows: int, n: int, epilogue: int, wide: bool = False) -> torch.Tensor:
    kind = torch.float32 if wide or epilogue == ADD else torch.bfloat16
    return torch.zeros(rows, n // 2 if epilogue == SILU_MUL else n, device="cuda", dtype=kind)


# ---- compiling, in parallel


def kernel_of(fmt: Format, product: Product, tile: Tile, epilogue: int, wide: bool) -> Kernel:
    return Kernel(fmt, tile, epilogue, wide, tile.program_a_split and splits(fmt, product.n, product.k) > 1)


def compile_one(kernel: Kernel) -> Kernel | None:
    """Fill the compiler's cache by a small product; None for a tile that asks for more than the card has. Runs in a process of its own."""
    weight = random_weight(kernel.fmt, 512, 1024)
    x = torch.randn(min(kernel.tile.rows, 16), 1024, device="cuda").bfloat16()
    out = empty_out(x.shape[0], 512, kernel.epilogue, kernel.wide)
    scratch = Scratch(x.device, 1 << 18, 64)
    try:
        linear_quant(x, weight, out, epilogue=kernel.epilogue, scratch=scratch, tile=kernel.tile, parts=2 if kernel.split else 1)
    except triton.runtime.errors.OutOfResources:
        return None
    torch.cuda.synchronize()
    return kernel


def compile_all(kernels: list[Kernel], limit: float) -> set[Kernel]:
    """Those of `kernels` that could be compiled, the first ones first, within `limit` seconds."""
    started, done = time.monotonic(), set()
    pool = ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn"))
    waiting: list[Future[Kernel | None]] = [pool.submit(compile_one, k) for k in dict.fromkeys(kernels)]
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


def checks(fmt: Format, product: Product) -> list[tuple[int, int, Tile]]:
    """(first row, rows, tile) of the products that are compared with those of 160 rows at once."""
    found = []
    for first, rows in [(0, 1), (159, 1), (3, 16), (40, 17), (1, 32), (60, 64)]:
        tile = config(fmt, product.n, product.k, rows)
        found.append((first, rows, tile))
        if product.name == "o" and rows == 16:
            found.append((first, rows, tile._replace(weight_first=not tile.weight_first)))
            found.append((first, rows, tile._replace(program_a_split=False)))
    return found


def faults(fmt: Format, product: Product, weight: PackedWeight, scratch: Scratch) -> list[str]:
    """What is wrong with this weight's products; empty when nothing is. In fp32, so that no rounding hides a difference."""
    found = []
    x = torch.randn(160, weight.k, device="cuda").bfloat16()
    expected = linear_quant_reference(x, weight)
    whole = linear_quant(x, weight, empty_out(160, weight.n, STORE, True), scratch=scratch)
    error = float((whole - expected).norm() / expected.norm())
    if not error < 1e-5:
        found.append(f"relative error {error:.1e}")
    for first, rows, tile in checks(fmt, product):
        part = x[first : first + rows].contiguous()
        for _ in range(3):
            again = linear_quant(part, weight, empty_out(rows, weight.n, STORE, True), scratch=scratch, tile=tile)
            differ = int((again != whole[first : first + rows]).sum())
            if differ:
                found.append(f"{differ} of {again.numel()} bits differ: rows {first}+{rows}, {tuple(tile)}")
                break
    if product.epilogue == SILU_MUL:
        scaled = x[:16] / expected.std()
        gated = linear_quant(scaled, weight, empty_out(16, weight.n, SILU_MUL, True), epilogue=SILU_MUL, scratch=scratch)
        reference = linear_quant_reference(scaled, weight, epilogue=SILU_MUL)
        if not float((gated - reference).norm() / reference.norm()) < 1e-5:
            found.append("the gate is wrong")
    if scratch.arrived.any():
        found.append("arrival counters are not zero")
    return found


def brief(wrong: list[str]) -> str:
    return "; ".join(wrong[:2] + ([f"and {len(wrong) - 2} more"] if len(wrong) > 2 else [])) or "ok"


# ---- timing


def duplicates(weight: PackedWeight) -> list[PackedWeight]:
    count = max(2, min(64, -(-OUTGROW // weight.bytes)))
    return [PackedWeight(weight.format, weight.n, weight.k, weight.payload.clone(), weight.meta.clone()) for _ in range(count)]


def quantised_seconds(
    weights: list[PackedWeight], product: Product, rows: int, scratch: Scratch, tile: Tile | None = None, parts: int | None = None
) -> float:
    x = torch.randn(rows, product.k, device="cuda").bfloat16()
    out = empty_out(rows, product.n, product.epilogue, product.epilogue != SILU_MUL)

    def launch(weight: PackedWeight) -> object:
        return linear_quant(x, weight, out, epilogue=product.epilogue, scratch=scratch, tile=tile, parts=parts)

    return measure.seconds([partial(launch, w) for w in weights])


def bf16_seconds(product: Product, rows: int) -> float:
    x = torch.randn(rows, product.k, device="cuda").bfloat16()
    out = torch.empty(rows, product.n, device="cuda", dtype=torch.bfloat16)
    weights = measure.copies(lambda: torch.randn(product.n, product.k, device="cuda").bfloat16(), 2 * product.n * product.k)
    return measure.seconds([partial(torch.mm, x, w.t(), out=out) for w in weights])


def table(formats: list[Format], row_counts: list[int], prefill: int, limit: float) -> bool:
    """Print the table; whether every check passed."""
    kernels = []
    measured = [*row_counts, *([prefill] if prefill else [])]
    for fmt in formats:
        for product in PRODUCTS:
            kernels += [kernel_of(fmt, product, tile, STORE, True) for _, _, tile in checks(fmt, product)]
            kernels.append(kernel_of(fmt, product, config(fmt, product.n, product.k, 160), STORE, True))
            kernels.append(kernel_of(fmt, product, config(fmt, product.n, product.k, 16), SILU_MUL, True))
            for rows in measured:
                tile = config(fmt, product.n, product.k, rows, product.epilogue)
                kernels.append(kernel_of(fmt, product, tile, product.epilogue, product.epilogue != SILU_MUL))
    compile_all(kernels, limit)
    scratch = Scratch(torch.device("cuda"))
    bandwidth, rate = measure.read_bandwidth(), measure.matrix_rate()
    plain = {rows: sum(bf16_seconds(p, rows) for p in PRODUCTS) for rows in measured}
    print("bf16 torch.mm, a layer: " + ", ".join(f"M={rows} {plain[rows] * 1e6:.1f} us" for rows in measured))
    fine = True
    for fmt in formats:
        layer = dict.fromkeys(measured, 0.0)
        size = 0
        for product in PRODUCTS:
            weight = random_weight(fmt, product.n, product.k)
            wrong = faults(fmt, product, weight, scratch)
            fine &= not wrong
            weights = duplicates(weight)
            size += weight.bytes
            cells = []
            for rows in measured:
                few = rows <= 64
                seconds = quantised_seconds(weights if few else weights[:4], product, rows, scratch)
                layer[rows] += seconds
                share = weight.bytes / seconds / bandwidth if few else 2 * product.n * product.k * rows / seconds / rate
                cells.append(f"{rows}: {seconds * 1e6:6.1f} {share:4.0%}")
            count = splits(fmt, product.n, product.k)
            for parts in (count // 2, 2 * count):
                if parts:
                    cells.append(f"/{parts}: {quantised_seconds(weights, product, 16, scratch, parts=parts) * 1e6:.1f}")
            print(f"{fmt} {product.name:7} /{count}  {'  '.join(cells)}  {brief(wrong)}", flush=True)
        cells = [f"{rows}: {layer[rows] * 1e6:.1f} us"
                 + (f" {size / layer[rows] / bandwidth:.0%}" if rows <= 64 else "")
                 + f" ({plain[rows] / layer[rows]:.2f}x)" for rows in measured]  # fmt: skip
        print(f"{fmt} LAYER  {'  '.join(cells)}", flush=True)
    return fine


# ---- tuning


def candidates(bucket: int) -> list[Tile]:
    """Tiles worth trying, the likeliest first."""
    if bucket == 16:
        return [Tile(16, 64, 4, 3), Tile(16, 64, 4, 3, True), Tile(16, 128, 8, 3), Tile(16, 64, 4, 4), Tile(16, 64, 2, 4),
                Tile(16, 128, 4, 3), Tile(16, 64, 4, 2), Tile(16, 32, 2, 4), Tile(16, 128, 8, 3, True)]  # fmt: skip
    if bucket == 32:
        return [Tile(32, 64, 4, 3), Tile(32, 64, 4, 3, True), Tile(32, 128, 8, 3), Tile(32, 128, 8, 3, True), Tile(32, 64, 4, 2)]
    if bucket == 64:
        return [Tile(64, 64, 4, 2, True), Tile(64, 128, 8, 2, True), Tile(32, 64, 4, 3), Tile(64, 64, 4, 3, True)]
    shapes = [(64, 128, 8, 2), (128, 128, 8, 2), (128, 64, 4, 2), (64, 64, 4, 3), (64, 128, 8, 3), (256, 64, 4, 2)]
    return [Tile(*shape, weight_first=True, program_a_split=False) for shape in shapes]


def best_tile(
    fmt: Format, product: Product, bucket: int, weights: list[PackedWeight], compiled: set[Kernel], scratch: Scratch, limit: float
) -> tuple[Tile, float] | None:
    """The fastest of the compiled candidates with the first one's bits, and its seconds."""
    started = time.monotonic()
    rows = min(bucket, 2048)
    x = torch.randn(rows, product.k, device="cuda").bfloat16()
    first: torch.Tensor | None = None
    best: tuple[Tile, float] | None = None
    for tile in candidates(bucket):
        if kernel_of(fmt, product, tile, product.epilogue, product.epilogue != SILU_MUL) not in compiled:
            continue
        if best is not None and time.monotonic() - started > limit:
            break
        out = empty_out(rows, product.n, product.epilogue, product.epilogue != SILU_MUL)
        linear_quant(x, weights[0], out, epilogue=product.epilogue, scratch=scratch, tile=tile)
        first = out if first is None else first
        if not torch.equal(out, first):
            print(f"{fmt} {product.name}: {tuple(tile)} gives other bits", flush=True)
            continue
        seconds = quantised_seconds(weights if bucket <= 64 else weights[:4], product, rows, scratch, tile)
        if best is None or seconds < best[1]:
            best = tile, seconds
    return best


def tune(formats: list[Format], limit: float, compile_limit: float, path: Path) -> None:
    """Measure the candidates of every product and add the best ones to the table at `path`."""
    buckets = (16, 32, 64, PREFILL)
    kernels = [
        kernel_of(fmt, product, candidates(bucket)[i], product.epilogue, product.epilogue != SILU_MUL)
        for i in range(max(len(candidates(b)) for b in buckets))
        for bucket in buckets
        if i < len(candidates(bucket))
        for fmt in formats
        for product in PRODUCTS
    ]
    compiled = compile_all(kernels, compile_limit)
    scratch = Scratch(torch.device("cuda"))
    bandwidth, rate = measure.read_bandwidth(), measure.matrix_rate()
    found: dict[str, list[int]] = json.loads(path.read_text()) if path.exists() else {}
    for fmt in formats:
        for product in PRODUCTS:
            weight = random_weight(fmt, product.n, product.k)
            weights = duplicates(weight)
            cells = []
            for bucket in buckets:
                best = best_tile(fmt, product, bucket, weights, compiled, scratch, limit)
                if best is None:
                    continue
                tile, seconds = best
                found[tile_key(fmt, product.n, product.k, bucket_of(bucket), product.epilogue)] = [int(v) for v in tile]
                few = bucket <= 64
                share = weight.bytes / seconds / bandwidth if few else 2 * product.n * product.k * 2048 / seconds / rate
                shape = ",".join(str(int(v)) for v in tile[:5])
                cells.append(f"{min(bucket, 2048)}: {seconds * 1e6:.1f} {share:.0%} ({shape})")
            print(f"{fmt} {product.name:7} {'  '.join(cells)}", flush=True)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(dict(sorted(found.items())), indent=0) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default=",".join(Format))
    parser.add_argument("--rows", default="1,16,32")
    parser.add_argument("--prefill", type=int, default=2048, help="rows of the prefill column; 0: none")
    parser.add_argument("--compile-seconds", type=float, default=75, help="stop compiling then and measure what there is")
    parser.add_argument("--tune", action="store_true", help="search tiles and write their table")
    parser.add_argument("--seconds", type=float, default=0.5, help="with --tune: time for one product and number of rows")
    card = torch.cuda.get_device_name().replace(" ", "_")
    default = Path(__file__).parents[2] / "triton_kernels" / "tuned" / f"{card}_quant.json"
    parser.add_argument("--out", type=Path, default=default, help="with --tune: the table (default: this card's)")
    options = parser.parse_args()
    formats = [Format(f) for f in options.formats.split(",")]
    print(measure.describe(), flush=True)
    if options.tune:
        tune(formats, options.seconds, options.compile_seconds, options.out)
    elif not table(formats, [int(r) for r in options.rows.split(",")], options.prefill, options.compile_seconds):
        raise SystemExit("some checks failed")


if __name__ == "__main__":
    main()
