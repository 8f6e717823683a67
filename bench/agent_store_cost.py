"""What the disk store costs those who are being answered: ITL of a busy server with it and without, in the order A B B A.

Owns the order of the rounds and the comparison. The load is serve_concurrency's closed loop; each of its prompts drives an
earlier conversation out, which the store then has to save.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from rich.console import Console

from bench.agent_report import NO_DISK_STORE, UNKNOWN, Figure
from bench.agent_servers import ctx_for, disk_options, has_disk_store
from bench.http_stream import Outcome
from bench.serve_concurrency import measure
from bench.serve_options import parse_options
from bench.with_server import serving

COST_GOAL = 0.05  # of the p50 ITL
SLOTS = 4
ROUNDS = (True, False, False, True)  # with the store or without: a machine that slows down slows both alike
REQUESTS = 3 * SLOTS
ANSWER_TOKENS = 48
ROOM = 256  # for the chat template and what the prompt's length misses the goal by


def run(options: argparse.Namespace) -> list[Figure]:
    """All rounds and their comparison."""
    gaps: dict[bool, list[float]] = {True: [], False: []}
    rounds: list[str] = []
    stored = 0.0
    ctx = options.ctx or ctx_for(options.conversation_tokens + ANSWER_TOKENS + ROOM)
    load = ["--concurrency", str(SLOTS), "--requests", str(REQUESTS), "--prompt-tokens", str(options.conversation_tokens),
            "--max-tokens", str(ANSWER_TOKENS), "--ignore-eos", "--seed", str(options.seed), "--run-id", "store",
            "--timeout", str(options.timeout)]  # fmt: skip
    for number, on in enumerate(ROUNDS):
        with tempfile.TemporaryDirectory() as folder:
            extra = [*(disk_options(Path(folder) / "kv") if on else ()), *options.serve]
            with serving(options.model, str(SLOTS), str(ctx), extra) as url:
                measured = asyncio.run(
                    measure(parse_options(["--base-url", url, "--metrics-url", f"{url}/metrics", *load]), Console(stderr=True))
                )[0]
        mine = [1e3 * (end - start) for r in measured.measured.results if r.outcome is Outcome.COMPLETED for start, end in r.gaps]
        gaps[on] += mine
        rounds.append(f"{'on' if on else 'off'} {median(mine):.2f}" if mine else f"round {number + 1}: no answer")
        server = measured.report.server
        stored += sum(v for name, v in (server.delta if server else {}).items() if name.startswith("ds4batch_disk_store_total"))
    figures = cost_figures(gaps[True], gaps[False], stored, rounds)
    return figures if has_disk_store() else [*figures, NO_DISK_STORE]


def cost_figures(on: Sequence[float], off: Sequence[float], stored: float, rounds: Sequence[str]) -> list[Figure]:
    """The p50 of all gaps with the store over that without. Without one store there is nothing to compare."""
    if not on or not off:
        return [Figure("answered", 0, "nothing was answered", False)]
    cost = median(on) / median(off) - 1
    text = f"{cost:+.1%}, goal < {COST_GOAL:.0%}" + ("" if stored else "; it stored nothing, so this is the noise of the machine")
    return [
        Figure("checkpoints stored", stored, f"{stored:g}" if stored else UNKNOWN),
        Figure("p50 ITL with the store, ms", median(on), f"{median(on):.2f}"),
        Figure("p50 ITL without, ms", median(off), f"{median(off):.2f}"),
        Figure("rounds, p50 ITL in ms", None, ", ".join(rounds)),
        Figure("cost", cost, text, cost < COST_GOAL if stored else None),
    ]
