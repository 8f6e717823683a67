"""Products on quantised weights: share of the read bandwidth at decode, beside torch's own product on bf16 weights.

    python -m bench.kernels.linear_quant [--formats Q8_0,Q4_K] [--rows 1,16,32] [--prefill 2048] [--sweep]

Every weight's results are checked before they are timed: against the reference in fp64; bit for bit between row counts, offsets,
row tiles and operand orders; and, with K in one chain, with triton_kernels.linear on the same weights rounded to bf16.
`--sweep` also tries tiles and split counts and names the fastest; a split count changes the order of sums, so it belongs into
`splits`, a rule of the weight, never into a table of tiles.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from functools import partial

import torch

from bench.kernels import measure
from triton_kernels.linear import linear
from triton_kernels.linear_quant import Scratch, Tile, config, linear_quant, linear_quant_reference, splits
from triton_kernels.quant_formats import LAYOUTS, Format, PackedWeight, dequantise, pack_fp8, pack_gguf

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)}
HALVES = {Format.Q8_0: (0,), Format.Q4_0: (0,), Format.Q4_1: (0, 2), Format.Q4_K: (0, 2), Format.Q6_K: (208,)}
OUTGROW = 400 << 20  # bytes of distinct weights in one replay: several times the L2


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


def product(
    x: torch.Tensor, weight: PackedWeight, scratch: Scratch, tile: Tile | None = None, parts: int | None = None
) -> torch.Tensor:
    """The product in fp32, so that a difference of bits cannot hide in the output's rounding."""
    out = torch.empty(x.shape[0], weight.n, device="cuda")
    return linear_quant(x, weight, out, scratch=scratch, tile=tile, parts=parts)


def faults(weight: PackedWeight, scratch: Scratch) -> list[str]:
    """What is wrong with this weight's products; empty when nothing is."""
    found = []
    x = torch.randn(160, weight.k, device="cuda").bfloat16()
    expected = linear_quant_reference(x, weight)
    whole = product(x, weight, scratch)
    error = float((whole - expected).norm() / expected.norm())
    if not error < 1e-5:
        found.append(f"relative error {error:.1e}")
    for first, rows in [(0, 1), (159, 1), (3, 16), (40, 17), (1, 32), (60, 64)]:
        part = x[first : first + rows].contiguous()
        default = config(weight.format, weight.n, weight.k, rows)
        for tile in (default, default._replace(weight_first=True), default._replace(program_a_split=False)):
            for _ in range(3):
                differ = int((product(part, weight, scratch, tile) != whole[first : first + rows]).sum())
                if differ:
                    found.append(f"{differ} of {rows * weight.n} bits differ: rows {first}+{rows}, {tile}")
                    break
    plain = linear(x[:16].contiguous(), dequantise(weight).bfloat16(), torch.empty(16, weight.n, device="cuda"))
    differ = int((product(x[:16].contiguous(), weight, scratch, parts=1) != plain).sum())
    if differ:
        found.append(f"{differ} of {16 * weight.n} outputs differ from the bf16 kernel's on the same weights")
    if scratch.arrived.any():
        found.append("arrival counters are not zero")
    return found


def duplicates(weight: PackedWeight) -> list[PackedWeight]:
    count = max(2, min(64, -(-OUTGROW // weight.bytes)))
    return [PackedWeight(weight.format, weight.n, weight.k, weight.payload.clone(), weight.meta.clone()) for _ in range(count)]


def quantised_seconds(
    weights: list[PackedWeight], rows: int, scratch: Scratch, tile: Tile | None = None, parts: int | None = None
) -> float:
    x = torch.randn(rows, weights[0].k, device="cuda").bfloat16()
    out = torch.empty(rows, weights[0].n, device="cuda", dtype=torch.bfloat16)

    def launch(weight: PackedWeight) -> object:
        return linear_quant(x, weight, out, scratch=scratch, tile=tile, parts=parts)

    return measure.seconds([partial(launch, w) for w in weights])


def bf16_seconds(n: int, k: int, rows: int) -> float:
    x = torch.randn(rows, k, device="cuda").bfloat16()
    out = torch.empty(rows, n, device="cuda", dtype=torch.bfloat16)
    weights = measure.copies(lambda: torch.randn(n, k, device="cuda").bfloat16(), 2 * n * k)
    return measure.seconds([partial(torch.mm, x, w.t(), out=out) for w in weights])


def candidates(fmt: Format, n: int, k: int, rows: int) -> Iterator[tuple[Tile, int]]:
    height = 16 if rows <= 16 else 32
    for cols, warps, stages, first in itertools.product((32, 64, 128), (4, 8), (2, 3, 4), (False, True)):
        if not (first and cols < 64) and cols // warps >= 8:
            for parts in sorted({1, splits(fmt, n, k) // 2 or 1, splits(fmt, n, k), 2 * splits(fmt, n, k)}):
                yield Tile(height, cols, warps, stages, first), parts


def sweep(weights: list[PackedWeight], rows: int, scratch: Scratch) -> None:
    timed = []
    weight = weights[0]
    for tile, parts in candidates(weight.format, weight.n, weight.k, rows):
        try:
            timed.append((quantised_seconds(weights, rows, scratch, tile, parts), tile, parts))
        except Exception as error:  # a tile that asks for more shared memory than the card has is no candidate
            if "out of resource" not in str(error):
                raise
    for seconds, tile, parts in sorted(timed)[:4]:
        share = weight.bytes / seconds / measure.read_bandwidth()
        print(f"    {seconds * 1e6:7.1f} us {share:6.1%}  {parts} splits  {tuple(tile)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default=",".join(Format))
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--rows", default="1,16,32")
    parser.add_argument("--prefill", type=int, default=2048, help="rows of the prefill line; 0: none")
    parser.add_argument("--sweep", action="store_true")
    options = parser.parse_args()
    print(measure.describe())
    scratch = Scratch(torch.device("cuda"))
    bandwidth, rate = measure.read_bandwidth(), measure.matrix_rate()
    row_counts = [int(r) for r in options.rows.split(",")]
    shapes = {name: SHAPES[name] for name in options.shapes.split(",")}
    measured = [*row_counts, *([options.prefill] if options.prefill else [])]
    plain = {(name, rows): bf16_seconds(n, k, rows) for name, (n, k) in shapes.items() for rows in measured}
    failed = False
    for fmt in (Format(f) for f in options.formats.split(",")):
        layer = dict.fromkeys(row_counts, 0.0)
        size = 0
        for name, (n, k) in shapes.items():
            weight = random_weight(fmt, n, k)
            wrong = faults(weight, scratch)
            failed |= bool(wrong)
            print(f"{fmt} {name} {n}x{k}: {weight.bits_per_weight:.3f} bits a weight, {splits(fmt, n, k)} splits, "
                  f"{'; '.join(wrong) or 'checked'}", flush=True)  # fmt: skip
            weights = duplicates(weight)
            size += weight.bytes
            for rows in row_counts:
                seconds = quantised_seconds(weights, rows, scratch)
                layer[rows] += seconds
                mm = plain[name, rows]
                print(f"  M={rows:<5d} {seconds * 1e6:7.1f} us {weight.bytes / seconds / 1e9:6.0f} GB/s "
                      f"{weight.bytes / seconds / bandwidth:6.1%} of read bandwidth; "
                      f"bf16 torch.mm {mm * 1e6:7.1f} us ({mm / seconds:.2f}x)", flush=True)  # fmt: skip
                if options.sweep:
                    sweep(weights, rows, scratch)
            if options.prefill:
                seconds = quantised_seconds(weights[:4], options.prefill, scratch)
                flops = 2 * n * k * options.prefill
                print(f"  M={options.prefill:<5d} {seconds * 1e6:7.1f} us {flops / seconds / rate:6.1%} of the matrix rate; "
                      f"bf16 torch.mm {plain[name, options.prefill] * 1e6:.1f} us", flush=True)  # fmt: skip
        for rows, seconds in layer.items():
            bf16 = sum(plain[name, rows] for name in shapes)
            print(f"{fmt} layer M={rows}: {seconds * 1e6:.1f} us, {size / seconds / bandwidth:.1%} of read bandwidth; "
                  f"bf16 torch.mm {bf16 * 1e6:.1f} us", flush=True)  # fmt: skip
    if failed:
        raise SystemExit("some checks failed")


if __name__ == "__main__":
    main()
