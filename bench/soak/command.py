"""Runs a server under load and injected faults, and says whether everything held that must.

    python -m bench.soak --minutes 20 [--seed N] [--json FILE]

Loopback only. docs/reliability.md says what is done and what is asserted. This module owns the options.

Exit status: 0 when everything held, 1 when something did not, 2 when it could not run, 130 when it was interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from bench.environment import describe
from bench.serve_concurrency import PLAIN_WIDTH
from bench.soak.judge import judge
from bench.soak.report import figures, show, write_json
from bench.soak.run import Options, Run
from bench.soak.subject import ROOT

DEMO = ROOT / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
HELD, NOT_HELD, UNABLE, INTERRUPTED = 0, 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run what `argv` describes; the exit status."""
    arguments = _parser().parse_args(argv)
    if not Path(arguments.model).exists():
        print(f"soak: {arguments.model} is missing; `make setup` fetches the demo model", file=sys.stderr)
        return UNABLE
    options = Options(
        model=str(Path(arguments.model).resolve()),
        minutes=arguments.minutes,
        seed=arguments.seed,
        slots=arguments.slots,
        ctx=arguments.ctx,
        queue=arguments.max_queue,
        clients=arguments.clients,
        threads=arguments.threads,
        disk_mb=arguments.disk_mb,
    )
    command = shlex.join(sys.argv if argv is None else ["soak", *argv])
    environment = describe("soak", command)
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ds4batch-soak-")))
        logs = arguments.keep or directory
        logs.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()

        def say(line: str) -> None:
            print(f"{time.monotonic() - began:6.0f} s  {line}", file=sys.stderr, flush=True)

        run = asyncio.run(_run(options, directory, logs, say))
    findings = judge(run.evidence)
    values = figures(run.evidence, findings, run.readings, run.methods)
    show(Console() if sys.stdout.isatty() else Console(width=PLAIN_WIDTH, soft_wrap=True), values)
    if arguments.json is not None:
        write_json(arguments.json, environment, asdict(options), values)
    if run.interrupted:
        return INTERRUPTED
    return NOT_HELD if findings else HELD


async def _run(options: Options, directory: Path, logs: Path, say: Callable[[str], None]) -> Run:
    run = Run(options, directory, logs, say)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, run.interrupt)
    await run.go()
    return run


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="soak", description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("-m", "--model", default=str(DEMO), help="GGUF file or model directory (default: the demo model)")
    add("--minutes", type=_minutes, default=3.0, help="of load; the reference comes on top (default: %(default)s)")
    add("--seed", type=int, default=0, help="fixes what is asked and what is done when (default: %(default)s)")
    add("--slots", type=int, default=16, help="of the server (default: %(default)s)")
    add("--ctx", type=int, default=1024, help="of each (default: %(default)s)")
    add("--max-queue", type=int, default=48, help="of the server (default: %(default)s)")
    add("--clients", type=int, default=10, help="in closed loops (default: %(default)s)")
    add(
        "--threads",
        type=int,
        default=1,
        help="of each engine; fewer than cores, or a step waits for whoever else is busy (default: %(default)s)",
    )
    add("--disk-mb", type=int, default=768, help="size of the file system of the checkpoints (default: %(default)s)")
    add("--json", type=Path, default=None, metavar="FILE", help="write everything as JSON")
    add("--keep", type=Path, default=None, metavar="DIR", help="leave the servers' logs there")
    return parser


def _minutes(text: str) -> float:
    value = float(text)
    if not 0.2 <= value <= 24 * 60:
        raise argparse.ArgumentTypeError(f"{text} is not between 0.2 and 1440")
    return value
