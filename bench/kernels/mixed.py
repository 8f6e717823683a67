"""Steps that decode and prefill at once: the time of a chunk beside decoders, by its length and by how deep in its prompt it lies.

    python -m bench.kernels.mixed [--model qwen3-8b | FILE] [--decoders 15x512] [--chunks 64,128,256,512] [--at 0,8192,16384]

What a long prompt costs those who decode beside it, and so what a latency budget leaves to it. Before a length is timed, the logits of
the chunk's last token are compared bit for bit with those of the same prompt in one go.
"""

from __future__ import annotations

import argparse
import random
from functools import partial

import torch

from bench.kernels import measure
from bench.kernels.step import CHUNK, load, make, profile
from scheduler.backend import Work


def main() -> None:
    """Measure and print a line each."""
    parser = argparse.ArgumentParser(prog="mixed", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="qwen3-8b", help="a shape or a model file (default: %(default)s)")
    parser.add_argument("--format", default="", help="of a shape's matrices; bf16 if not given")
    parser.add_argument("--dequantise", action="store_true", help="convert quantised matrices to bf16 at load")
    parser.add_argument("--decoders", default="15x512", help="sessions x context (default: %(default)s)")
    parser.add_argument("--chunks", default="64,128,256,512,1024", help="prompt tokens of a step (default: %(default)s)")
    parser.add_argument("--at", default="0,8192,16384", help="positions of a chunk's first token (default: %(default)s)")
    parser.add_argument("--profile", action="store_true", help="also print where a step's time goes, by kernel")
    options = parser.parse_args()
    sessions, length = map(int, options.decoders.split("x"))
    depths = [int(at) for at in options.at.split(",")]
    chunks = [int(tokens) for tokens in options.chunks.split(",")]
    ctx = max(depths) + max(chunks) + 16
    print(measure.describe(), flush=True)
    model = load(options.model, options.format, options.dequantise, ctx)
    engine = make(model, sessions + 1, ctx, torch.bfloat16)
    rnd = random.Random(length)
    vocab = model.config.vocab

    def prefill(slot: int, tokens: list[int]) -> None:
        engine.truncate(slot, 0)
        for at in range(0, len(tokens), CHUNK):
            engine.launch([Work(slot, tokens[at : at + CHUNK], True)])

    for slot in range(1, sessions + 1):
        prefill(slot, [rnd.randrange(vocab) for _ in range(length)])
    prompt = [rnd.randrange(vocab) for _ in range(max(depths) + max(chunks))]
    rows = [Work(slot, [slot], True) for slot in range(1, sessions + 1)]

    def step(at: int, tokens: int) -> None:
        for slot in range(1, sessions + 1):
            engine.truncate(slot, length)
        engine.truncate(0, at)
        engine.launch([Work(0, prompt[at : at + tokens], True), *rows])

    for tokens in chunks:
        for at in depths:
            prefill(0, prompt[: at + tokens])
            whole = engine.logits(0).clone()
            step(at, tokens)
            assert torch.equal(engine.logits(0), whole), "a chunk beside decoders differs from the prompt alone"
            times = sorted(measure.once(partial(step, at, tokens)) for _ in range(9))
            print(f"{sessions} x {length} and {tokens:5} tokens at {at:6}: {times[4] * 1e3:7.2f} ms, "
                  f"{times[4] * 1e6 / tokens:6.1f} us a token", flush=True)  # fmt: skip
            if options.profile:
                profile(partial(step, at, tokens))


if __name__ == "__main__":
    main()
