"""What the host does in a step: the engine process's loop over a device that answers at once.

    python -m bench.host_step [--rows 16] [--steps 2000] [--temperature 0.7] [--profile]

Sessions decode on the real scheduler, service and engine; forwards and draws are stand-ins that return immediately, so what is
left is the host's own time: composing, checking, drawing's bookkeeping, detokenising, and encoding the report. Where tokens are
chained it passes beside the forward, and costs nothing while it is shorter than that.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

import ds4batch.messages as m
from bench.stats import summarize
from ds4batch.engine.engine import Engine
from ds4batch.engine.exact import ExactPath
from ds4batch.engine.models.model import Output
from ds4batch.engine.pages import PagePool, PageShape
from ds4batch.engine.rows import Segment
from ds4batch.engine.sampler import Draw
from ds4batch.engine.service import Service
from scheduler.options import Options
from triton_kernels.sampling import Request, pack

VOCAB = 49152
PROMPT = 64  # tokens
CPU = torch.device("cpu")


class Words:
    """A vocabulary of numbered words."""

    stop_ids = frozenset({0})
    special_ids = frozenset({0, 1, 2})

    def __init__(self) -> None:
        self._bytes = [f" w{token}".encode() for token in range(VOCAB)]

    def token_bytes(self, token: int) -> bytes:
        """The word."""
        return self._bytes[token]

    def tokenise(self, text: str) -> list[int]:
        """The numbers of the words."""
        return [int(word[1:]) for word in text.split()]

    def render(self, tokens: Sequence[int]) -> str:
        """The words."""
        return b"".join(map(self.token_bytes, tokens)).decode()


class Fetched:
    """Tokens that are there."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens

    def wait(self) -> tuple[list[int], bool]:
        """At once."""
        return self._tokens, True


class InstantSampler:
    """Packs the knobs as the device's sampler does and draws the position."""

    def launch(
        self, logits: torch.Tensor, draws: Sequence[Draw], positions: Sequence[int], flags: Sequence[torch.Tensor]
    ) -> Fetched:
        """One token for each row."""
        requests = [
            Request(d.sampling.temperature, d.sampling.top_k, d.sampling.top_p, d.sampling.min_p, d.sampling.seed, position)
            for d, position in zip(draws, positions, strict=True)
        ]
        pack(requests)
        return Fetched([3 + position % (VOCAB - 3) for position in positions])


def instant_engine(slots: int, ctx: int) -> Engine:
    """An engine whose forward returns logits that were there before."""
    config: Any = SimpleNamespace(heads=32, kv_heads=8, vocab=VOCAB)
    model: Any = SimpleNamespace(config=config, device=CPU)
    pool = PagePool(PageShape(1, 1, 256, 1, torch.float32), slots * -(-ctx // 256), CPU)
    logits, finite = torch.zeros(slots, 8), torch.ones(slots, dtype=torch.bool)

    def forward(segments: Sequence[Segment]) -> tuple[Output, list[int]]:
        owners = [i for i, segment in enumerate(segments) if segment.wants_logits]
        return Output(logits[: len(owners)], finite[: len(owners)]), owners

    sampler: Any = InstantSampler()
    return Engine(model, pool, slots, ctx, ExactPath(True, 1, ""), forward, sampler)


def run(rows: int, steps: int, temperature: float, profile: bool) -> list[float]:
    """Microseconds of each step in which all `rows` sessions decode."""
    ctx = PROMPT + steps + 64
    options = Options(mixed_prefill_quantum=1024, idle_prefill_quantum=4096, itl_budget=0.012, max_queue=64)
    service = Service(instant_engine(rows, ctx), Words(), time.perf_counter, rows, options)
    for i in range(rows):
        tokens = [3 + (i * 7919 + j) % (VOCAB - 3) for j in range(PROMPT)]
        sampling = m.Sampling(temperature=temperature, top_p=0.95 if temperature else 1.0, seed=i)
        service.handle(m.Submit(id=i, tokens=tokens, text="", max_tokens=steps + 32, sampling=sampling, arrival=0.0))
    for _ in range(rows + 8):
        m.frame(service.step())
    profiler = cProfile.Profile()
    if profile:
        profiler.enable()
    taken = []
    for _ in range(steps):
        started = time.perf_counter()
        m.frame(service.step())
        taken.append(1e6 * (time.perf_counter() - started))
    if profile:
        profiler.disable()
        pstats.Stats(profiler).sort_stats("tottime").print_stats(22)
    return taken


def main() -> None:
    """Print one line of figures, and with --profile where the time went."""
    parser = argparse.ArgumentParser(prog="host_step", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    figures = summarize(run(options.rows, options.steps, options.temperature, options.profile))
    print(f"{options.rows} rows, temperature {options.temperature:g}: {figures.p50:.0f} us a step (p99 {figures.p99:.0f})")


if __name__ == "__main__":
    main()
