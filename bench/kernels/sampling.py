"""Times the sampler on this card, by what its rows ask for.

    python -m bench.kernels.sampling [--rows 1,16,64] [--vocab 151936,49152]

Every batch's tokens are compared with the plain sampler's before it is timed; a draw on the edge of two tokens may differ, and is
counted. The logits stay in the cache between launches, as they do behind the head's product. The fraction is of reading them once
from memory.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch

from bench.kernels import measure
from triton_kernels.sampling import Request, pack, sample, sample_reference, workspace

KINDS = {
    "greedy": Request(),
    "temperature": Request(1.0),
    "top_k": Request(0.7, 20),
    "top_p": Request(0.8, 0, 0.95),
    "top_k, top_p": Request(0.6, 20, 0.95),
    "all knobs": Request(0.6, 100, 0.95, 0.01),
}


def batch(kind: str, rows: int) -> list[Request]:
    """Requests of one kind; "mixed" takes turns."""
    kinds = list(KINDS.values()) if kind == "mixed" else [KINDS[kind]]
    return [kinds[i % len(kinds)]._replace(seed=i, position=1000 + i) for i in range(rows)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,16,64", help="row counts, comma separated")
    parser.add_argument("--vocab", default="151936,49152", help="vocabularies, comma separated")
    options = parser.parse_args()
    counts = [int(n) for n in options.rows.split(",")]
    torch.manual_seed(0)
    print(measure.describe())
    differing = drawn = 0
    for vocab in (int(n) for n in options.vocab.split(",")):
        print(f"\n{f'vocab {vocab}':16}" + "".join(f"{rows:>9} rows         " for rows in counts))
        for kind in [*KINDS, "mixed"]:
            line = f"{kind:16}"
            for rows in counts:
                logits = torch.randn(rows, vocab, device="cuda") * 2.5
                requests = batch(kind, rows)
                knobs, needs = pack(requests)
                knobs, out = knobs.cuda(), torch.empty(rows, dtype=torch.int64, device="cuda")
                space = workspace(rows, vocab, logits.device)
                launch = partial(sample, logits, knobs, needs, out, space)
                launch()
                found, host = out.tolist(), logits.cpu()
                wrong = sum(found[i] != sample_reference(host[i], r) for i, r in enumerate(requests))
                if wrong > rows // 50:
                    raise SystemExit(f"{kind}, {rows} rows, vocabulary {vocab}: {wrong} tokens differ")
                differing, drawn = differing + wrong, drawn + rows
                spent = measure.seconds([launch] * 20)
                line += f"{spent * 1e6:9.2f} us {logits.nbytes / spent / measure.read_bandwidth():7.1%} "
            print(line, flush=True)
        for rows in counts:
            logits, kept = torch.randn(rows, vocab, device="cuda"), torch.empty(rows, dtype=torch.int64, device="cuda")
            spent = measure.seconds([partial(torch.argmax, logits, dim=1, out=kept)] * 20)
            print(f"torch.argmax, {rows} rows: {spent * 1e6:.2f} us")
    print(f"\n{differing} of {drawn} tokens differ from the plain sampler's")


if __name__ == "__main__":
    main()
