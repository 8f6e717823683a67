"""Decode speed of resident sessions, in process: no HTTP, no scheduler, the engine alone.

    python -m bench.session_concurrency -m MODEL --concurrency 1,16 --ctx 0,2048 [--bitwise] [--mixed] [--breakdown]

A cell is one number of sessions at one context length; each runs in a process of its own, and with --repeat the second pass runs
in reverse order, so that a machine that warms up or slows down does so for all cells alike. Cells that do not fit in memory
are reported as skipped, with the numbers. --verify compares every token, --bitwise every logit, with each session run alone.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from bench import corpus, environment, seeded
from bench.stats import summarize

if TYPE_CHECKING:
    import torch

    from ds4batch.engine.engine import Engine

QUANTUM = 128  # prompt tokens beside each decode step with --mixed


@dataclass(frozen=True)
class Cell:
    """What is measured."""

    concurrency: int
    ctx: int  # tokens every session holds before the measured steps; 0 is a short prompt


@dataclass
class Result:
    """One cell's figures. Times are milliseconds."""

    cell: Cell
    skipped: str = ""
    steps: int = 0
    step_p50: float = 0.0
    step_p90: float = 0.0
    aggregate: float = 0.0  # tokens per second of all sessions, at the median step
    prefill: float = 0.0  # prompt tokens per second, one session after another, largest chunk
    mixed_step_p50: float | None = None
    mixed_prefill: float | None = None  # prompt tokens per second beside the decoders
    compared: int = 0  # rows compared with the solo run
    mismatches: int = 0
    worst: float = 0.0  # largest absolute difference of a logit
    smallest_margin: float | None = None  # top-1 minus top-2 over the compared rows
    native: int = 0
    fallback: int = 0
    clock_mhz: list[int] = field(default_factory=list)  # SM clock before and after, on a GPU
    breakdown: dict[str, float] = field(default_factory=dict)  # milliseconds of a step by kind of operation


def main(argv: Sequence[str] | None = None) -> int:
    """Run the grid, or with --cell one cell of it. Exit status 1 when a comparison failed."""
    options = _options(argv)
    if options.cell is not None:
        print(json.dumps(asdict(run_cell(Cell(*options.cell), options))))
        return 0
    cells = [Cell(c, t) for t in options.ctx for c in options.concurrency]
    console = Console(soft_wrap=True, width=None if sys.stdout.isatty() else 120)
    results: list[Result] = []
    for turn in range(options.repeat):
        for cell in cells if turn % 2 == 0 else cells[::-1]:
            console.print(f"cell: {cell.concurrency} sessions, {cell.ctx} tokens each (pass {turn + 1})", highlight=False)
            results.append(_in_child(cell, sys.argv[1:] if argv is None else argv))
    _print(console, results, options)
    if options.csv:
        _write_csv(Path(options.csv), results)
    if options.json:
        record = {"environment": asdict(environment.describe(options.label, " ".join(sys.argv))), "results": results}
        Path(options.json).write_text(json.dumps(record, default=asdict, indent=1))
    return 1 if any(r.mismatches for r in results) else 0


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="session_concurrency", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-m", "--model", required=True, help="GGUF file or model directory")
    parser.add_argument("--concurrency", type=_numbers, default=[1, 2, 4, 8, 16], help="sessions, comma separated")
    parser.add_argument("--ctx", type=_numbers, default=[0], help="tokens each session holds, comma separated; 0: a short prompt")
    parser.add_argument("--gen", type=_positive, default=64, help="measured decode steps")
    parser.add_argument("--warmup", type=_positive, default=8, help="steps before them")
    parser.add_argument("--mixed", action="store_true", help=f"also decode beside a prefill of {QUANTUM}-token chunks")
    parser.add_argument("--verify", action="store_true", help="compare every token with each session run alone")
    parser.add_argument("--bitwise", action="store_true", help="compare every logit of every step with each session run alone")
    parser.add_argument("--breakdown", action="store_true", help="where a step's time goes, by kind of operation")
    parser.add_argument("--dtype", default="auto", choices=("auto", "bf16", "fp32"))
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--page-tokens", type=int, default=0)
    parser.add_argument("--repeat", type=_positive, default=1)
    parser.add_argument("--csv", help="write the figures to this file")
    parser.add_argument("--json", help="write the figures and where they were taken to this file")
    parser.add_argument("--label", default="")
    parser.add_argument("--cell", type=_numbers, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def _numbers(text: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers") from None
    if any(n < 0 for n in found):
        raise argparse.ArgumentTypeError(f"{text!r} has a negative number")
    return found


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _in_child(cell: Cell, argv: Sequence[str]) -> Result:
    command = [sys.executable, "-m", "bench.session_concurrency", *argv, "--cell", f"{cell.concurrency},{cell.ctx}"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"cell {cell} failed with status {done.returncode}")
    found = json.loads(done.stdout.splitlines()[-1])
    return Result(**(found | {"cell": Cell(**found["cell"])}))


def run_cell(cell: Cell, options: argparse.Namespace) -> Result:
    """Measure one cell in this process."""
    from ds4batch.engine.build import build
    from ds4batch.engine.memory import DoesNotFit
    from ds4batch.settings import Settings
    from ds4batch.tokenizer import load_tokenizer

    result = Result(cell)
    text = corpus.prose()
    ids = load_tokenizer(options.model).encode(text)
    length = cell.ctx or 24
    extra = (options.gen + 2) * QUANTUM if options.mixed else 0
    room = max(length + 2 * (options.gen + options.warmup) + 8, extra + 8)
    # One slot more for the prompt that --mixed prefills.
    settings = Settings(
        model=options.model,
        batched_session=cell.concurrency + (1 if options.mixed else 0),
        ctx=room,
        device=options.device,
        dtype=options.dtype,
        threads=options.threads,
        page_tokens=options.page_tokens,
    )
    try:
        built = build(settings)
    except DoesNotFit as error:
        result.skipped = str(error)
        return result
    bench = Bench(built.engine, ids, cell, length, options)
    bench.run(result)
    return result


class Bench:
    """The steps of one cell over one engine."""

    def __init__(self, engine: Engine, ids: list[int], cell: Cell, length: int, options: argparse.Namespace) -> None:
        import torch

        self.torch = torch
        self.engine = engine
        self.cell = cell
        self.options = options
        self.slots = list(range(cell.concurrency))
        # Sessions start at offsets of their own, so that no two hold the same tokens by accident.
        self.prompts = [_slice(ids, seeded.below(len(ids), 0, "offset", s), length) for s in self.slots]
        self.long = _slice(ids, seeded.below(len(ids), 0, "long"), (options.gen + 2) * QUANTUM)
        self.history: list[dict[int, int]] = []
        self.kept: list[dict[int, torch.Tensor]] = []

    def run(self, result: Result) -> None:
        """Fill in the figures."""
        engine, options = self.engine, self.options
        result.clock_mhz.append(_clock())
        result.prefill = self._prefill()
        self._decode(options.warmup)
        times = self._decode(options.gen)
        summary = summarize(times)
        result.steps = len(times)
        result.step_p50, result.step_p90 = 1e3 * (summary.p50 or 0), 1e3 * (summary.p90 or 0)
        result.aggregate = self.cell.concurrency / (summary.p50 or 1)
        if options.breakdown:
            result.breakdown = self._breakdown()
        if options.mixed:
            self._mixed(result)
        result.native, result.fallback = engine.native_forwards, sum(engine.fallbacks.values())
        result.clock_mhz.append(_clock())
        if options.verify or options.bitwise:
            self._compare(result)

    def _prefill(self) -> float:
        from scheduler.backend import Work

        start = self._now()
        for slot, prompt in zip(self.slots, self.prompts, strict=True):
            for at in range(0, len(prompt), 2048):
                self.engine.launch([Work(slot, prompt[at : at + 2048], True)])
        seconds = self._now() - start
        self._keep()
        return sum(map(len, self.prompts)) / seconds

    def _decode(self, steps: int) -> list[float]:
        from scheduler.backend import Work

        times = []
        for step in range(steps):
            start = self._now()
            tokens = self._greedy()
            order = self.slots[step % len(self.slots) :] + self.slots[: step % len(self.slots)]
            self.engine.launch([Work(s, [tokens[s]], True) for s in order])
            times.append(self._now() - start)
            self.history.append(tokens)
            self._keep()
        return times

    def _greedy(self) -> dict[int, int]:
        rows = self.torch.stack([self.engine.logits(s) for s in self.slots])
        return dict(zip(self.slots, rows.argmax(-1).tolist(), strict=True))

    def _keep(self) -> None:
        if self.options.bitwise:
            self.kept.append({s: self.engine.logits(s).cpu().clone() for s in self.slots})

    def _mixed(self, result: Result) -> None:
        from scheduler.backend import Work

        slot = self.cell.concurrency
        times = []
        for at in range(0, self.options.gen * QUANTUM, QUANTUM):
            start = self._now()
            tokens = self._greedy()
            rows = [Work(s, [tokens[s]], True) for s in self.slots]
            self.engine.launch([*rows, Work(slot, self.long[at : at + QUANTUM], False)])
            times.append(self._now() - start)
            self.history.append(tokens)
            self._keep()
        summary = summarize(times)
        result.mixed_step_p50 = 1e3 * (summary.p50 or 0)
        result.mixed_prefill = QUANTUM / (summary.p50 or 1)

    def _compare(self, result: Result) -> None:
        """Run every session again, alone, fed the same tokens; count rows that differ."""
        from scheduler.backend import Work

        engine, margins = self.engine, []
        for slot in range(len(engine.sessions)):
            engine.truncate(slot, 0)
        for slot, prompt in zip(self.slots, self.prompts, strict=True):
            engine.truncate(0, 0)
            engine.launch([Work(0, prompt, True)])
            for step in range(len(self.history) + 1):
                alone = engine.logits(0).cpu()
                best = alone.topk(2)
                margins.append(float(best.values[0] - best.values[1]))
                result.compared += 1
                if self.options.bitwise:
                    together = self.kept[step][slot]
                    wrong = not self.torch.equal(alone, together)
                    if wrong:
                        result.worst = max(result.worst, float((alone - together).abs().max()))
                else:
                    wrong = step < len(self.history) and int(best.indices[0]) != self.history[step][slot]
                if wrong:
                    result.mismatches += 1
                    print(f"mismatch: session {slot}, step {step}, margin {margins[-1]:.4f}", file=sys.stderr)
                if step < len(self.history):
                    engine.launch([Work(0, [self.history[step][slot]], True)])
        result.smallest_margin = min(margins)

    def _breakdown(self) -> dict[str, float]:
        """Milliseconds of a step by kind, from torch's profiler; it slows small operations, so shares are what counts."""
        from torch.profiler import ProfilerActivity, profile

        steps = 10
        cuda = self.engine.model.device.type == "cuda"
        with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as profiled:
            self._decode(steps)
        found: dict[str, float] = {}
        for event in profiled.key_averages():
            micros = event.self_device_time_total if cuda else event.self_cpu_time_total
            kind = next((k for k, test in _KINDS if test(event.key)), "other")
            found[kind] = found.get(kind, 0.0) + micros / 1e3 / steps
        return found

    def _now(self) -> float:
        if self.engine.model.device.type == "cuda":
            self.torch.cuda.synchronize()
        return time.perf_counter()


_KINDS: list[tuple[str, Callable[[str], bool]]] = [
    ("linear", lambda key: key in ("aten::mm", "aten::addmm") or "linear" in key or "gemm" in key),
    ("attention", lambda key: "bmm" in key or "softmax" in key or "attention" in key),
    ("kv write", lambda key: "index_put" in key),
    ("norm", lambda key: "rms_norm" in key or "norm" in key),
]


def _slice(ids: list[int], at: int, length: int) -> list[int]:
    doubled = ids[at:] + ids
    while len(doubled) < length:
        doubled += ids
    return doubled[:length]


def _clock() -> int:
    """The SM clock in MHz, 0 where there is no card."""
    try:
        command = ["nvidia-smi", "--query-gpu=clocks.sm", "--format=csv,noheader,nounits"]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0])
    except (OSError, subprocess.CalledProcessError, ValueError, IndexError):
        return 0


def _print(console: Console, results: list[Result], options: argparse.Namespace) -> None:
    table = Table("sessions", "ctx", "step p50 ms", "p90 ms", "tok/s", "prefill tok/s", "mixed step ms", "native", "ordered")
    for r in results:
        if r.skipped:
            table.add_row(str(r.cell.concurrency), str(r.cell.ctx), f"skipped: {r.skipped}")
            continue
        mixed = "" if r.mixed_step_p50 is None else f"{r.mixed_step_p50:.2f}"
        table.add_row(
            str(r.cell.concurrency),
            str(r.cell.ctx),
            f"{r.step_p50:.2f}",
            f"{r.step_p90:.2f}",
            f"{r.aggregate:.0f}",
            f"{r.prefill:.0f}",
            mixed,
            str(r.native),
            str(r.fallback),
        )
    console.print(table)
    for r in results:
        if r.breakdown:
            shares = ", ".join(f"{kind} {ms:.1f} ms" for kind, ms in sorted(r.breakdown.items(), key=lambda p: -p[1]))
            console.print(f"{r.cell.concurrency} sessions, ctx {r.cell.ctx}: {shares}", highlight=False)
    ones = {r.cell.ctx: r.aggregate for r in results if r.cell.concurrency == 1 and not r.skipped}
    for r in results:
        if r.cell.concurrency > 1 and r.cell.ctx in ones and not r.skipped:
            ratio = r.aggregate / ones[r.cell.ctx]
            console.print(f"{r.cell.concurrency} sessions at ctx {r.cell.ctx}: {ratio:.2f} x one session", highlight=False)
    if options.verify or options.bitwise:
        what = "logit rows" if options.bitwise else "tokens"
        margin = min((r.smallest_margin for r in results if r.smallest_margin is not None), default=0.0)
        console.print(
            f"compared {sum(r.compared for r in results)} {what} with solo runs (smallest margin {margin:.4f}): "
            f"mismatches = {sum(r.mismatches for r in results)}",
            highlight=False,
        )


def _write_csv(path: Path, results: list[Result]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        names = [
            "step_p50",
            "step_p90",
            "aggregate",
            "prefill",
            "mixed_step_p50",
            "compared",
            "mismatches",
            "worst",
            "native",
            "fallback",
            "skipped",
        ]
        writer.writerow(["concurrency", "ctx", *names])
        for r in results:
            writer.writerow([r.cell.concurrency, r.cell.ctx, *(getattr(r, name) for name in names)])


if __name__ == "__main__":
    sys.exit(main())
