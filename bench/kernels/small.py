"""Times the small kernels of one layer on this card: norm, rotation with its page writes, activation, embedding.

    python -m bench.kernels.small [--rows 1,16,32,4096]

Every result is compared with the reference before it is timed. With few rows these kernels last as long as a launch does, and
their data comes from the cache, as in a decode step; with many rows the fraction of the measured read bandwidth says how good
they are.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NamedTuple

import torch

from bench.kernels import measure
from triton_kernels.activation import silu_mul, silu_mul_reference
from triton_kernels.embedding import embed, embed_reference
from triton_kernels.norm import rms_norm, rms_norm_reference
from triton_kernels.rope_kv import rope_kv, rope_kv_reference

CTX, PAGE_TOKENS, EPS = 8192, 128, 1e-6


class Model(NamedTuple):
    """The sizes that matter here."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    qk_norm: bool


MODELS = {"qwen3-8b": Model(4096, 32, 8, 128, 12288, 151936, True), "demo": Model(576, 9, 3, 64, 1536, 49152, False)}


class Case(NamedTuple):
    """One launch over its own data: what it moves, and whether its result is right."""

    run: Callable[[], object]
    right: Callable[[], bool]
    bytes: int


def bf16(*size: int) -> torch.Tensor:
    return torch.randn(*size, device="cuda").bfloat16()


def near(found: torch.Tensor, exact: torch.Tensor) -> bool:
    """Within the rounding of bf16."""
    return bool(((found.double() - exact).abs() <= 0.004 * exact.abs() + 1e-6).all())


def norm_case(m: Model, rows: int) -> Case:
    hidden, weight = torch.randn(rows, m.hidden, device="cuda"), torch.randn(m.hidden, device="cuda")
    out = torch.empty(rows, m.hidden, dtype=torch.bfloat16, device="cuda")

    def run() -> None:
        rms_norm(hidden, weight, EPS, out)

    def right() -> bool:
        run()
        return near(out, rms_norm_reference(hidden, weight, EPS))

    return Case(run, right, rows * m.hidden * 6)


def rope_case(m: Model, rows: int) -> Case:
    pages = rows // PAGE_TOKENS + 1
    qkv = bf16(rows, (m.heads + 2 * m.kv_heads) * m.head_dim)
    q = torch.empty(rows, m.heads, m.head_dim, dtype=torch.bfloat16, device="cuda")
    k, v = (torch.zeros(pages, m.kv_heads, PAGE_TOKENS, m.head_dim, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    spot = torch.randperm(pages * PAGE_TOKENS, device="cuda")[:rows]
    page, offset = (spot // PAGE_TOKENS).int(), (spot % PAGE_TOKENS).int()
    positions = torch.randint(CTX, (rows,), device="cuda")
    angle = torch.rand(CTX, m.head_dim // 2, device="cuda") * 6.28
    cos, sin = angle.cos(), angle.sin()
    weights = torch.randn(m.heads + m.kv_heads, m.head_dim, device="cuda") if m.qk_norm else None

    def run() -> None:
        rope_kv(qkv, positions, cos, sin, q, k, v, page, offset, norm=weights, eps=EPS)

    def right() -> bool:
        exact = rope_kv_reference(qkv, positions, cos, sin, m.heads, m.kv_heads, weights, EPS)
        run()
        stored = (t[page.long(), :, offset.long()] for t in (k, v))
        return all(near(found, wanted) for found, wanted in zip((q, *stored), exact, strict=True))

    return Case(run, right, 2 * qkv.nbytes + rows * m.head_dim * 4)


def activation_case(m: Model, rows: int) -> Case:
    x, out = bf16(rows, 2 * m.ffn), torch.empty(rows, m.ffn, dtype=torch.bfloat16, device="cuda")
    return Case(lambda: silu_mul(x, out), lambda: near(silu_mul(x, out), silu_mul_reference(x)), x.nbytes + out.nbytes)


def embedding_case(m: Model, rows: int) -> Case:
    table, out = bf16(m.vocab, m.hidden), torch.empty(rows, m.hidden, device="cuda")
    tokens = torch.randint(m.vocab, (rows,), device="cuda")
    return Case(
        lambda: embed(tokens, table, out),
        lambda: torch.equal(embed(tokens, table, out), embed_reference(tokens, table)),
        rows * m.hidden * 6,
    )


def cases(m: Model, rows: int) -> dict[str, Callable[[], Case]]:
    """Makers of each kernel's data, by name."""
    return {
        "norm": lambda: norm_case(m, rows),
        "rope + kv": lambda: rope_case(m, rows),
        "silu * up": lambda: activation_case(m, rows),
        "embedding": lambda: embedding_case(m, rows),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,16,32,4096", help="row counts, comma separated")
    counts = [int(n) for n in parser.parse_args().rows.split(",")]
    torch.manual_seed(0)
    print(measure.describe())
    for name, model in MODELS.items():
        print(f"\n{name:12}" + "".join(f"{rows:>9} rows        " for rows in counts))
        for kernel in cases(model, 1):
            line = f"{kernel:12}"
            for rows in counts:
                made = cases(model, rows)[kernel]()
                if not made.right():
                    raise SystemExit(f"{name}, {kernel}, {rows} rows: the result is wrong")
                many = 1 if kernel == "embedding" else max(2, min(8, (400 << 20) // made.bytes))
                launches = [made.run] + [cases(model, rows)[kernel]().run for _ in range(many - 1)]
                spent = measure.seconds(launches * (1 if rows > 64 else 10))
                line += f"{spent * 1e6:9.2f} us {made.bytes / spent / measure.read_bandwidth():6.1%} "
            print(line, flush=True)


if __name__ == "__main__":
    main()
