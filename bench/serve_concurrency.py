"""Load benchmark over HTTP for any server that speaks the OpenAI chat API.

Run it by its path: `python bench/serve_concurrency.py --concurrency 16 --requests 64`. docs/benchmarking.md says what
each figure means. This module owns the order of a run: options, calibration, load, result. It measures nothing itself.

Exit status: 0 when every stream could be counted, 1 when some were rejected (unless --allow-failures) or none was
completed, 2 when the options make no sense or the server cannot be measured at all, 130 when interrupted; what was
measured until then is still reported.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Run by its path, Python puts this folder on the module path instead of the one above it.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.console import Console

from bench import corpus, tables
from bench.environment import describe
from bench.http_stream import ChatClient, ServerUnusable
from bench.load import Load, Measured, WarmupFailed
from bench.progress import Progress
from bench.prompts import PromptBook
from bench.report import Report, build_report, compare, sweep_to_json, to_json
from bench.serve_options import DEFAULT_KEY_VARIABLE, Cell, Options, parse_options
from bench.server_metrics import Reading, settled

PLAIN_WIDTH = 132
EXIT_FAILURES = 1
EXIT_UNUSABLE = 2
EXIT_INTERRUPTED = 130


@dataclass(frozen=True)
class Run:
    """One load and its figures."""

    cell: Cell
    measured: Measured
    report: Report


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark that `argv` describes; the exit status."""
    options = parse_options(argv)
    errors = Console(stderr=True)
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runs = runner.run(measure(options, errors))
    except (ServerUnusable, ValueError) as error:
        errors.print(f"error: {error}", markup=False, highlight=False)
        return EXIT_UNUSABLE
    except WarmupFailed as error:
        errors.print(f"error: {error}", markup=False, highlight=False)
        return EXIT_FAILURES
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    _publish(options, runs, shlex.join(sys.argv if argv is None else [sys.argv[0], *argv]))
    return exit_status(options, [run.report for run in runs])


def exit_status(options: Options, reports: Sequence[Report]) -> int:
    """What the figures mean for whoever called this program."""
    if any(report.interrupted for report in reports):
        return EXIT_INTERRUPTED
    failed = any(report.failed for report in reports) and not options.allow_failures
    nothing = any(not report.completed and not report.disconnected for report in reports)
    return EXIT_FAILURES if failed or nothing else 0


def _loop_factory() -> Any:
    """uvloop's loop where it is installed: less of the client's own time in the figures."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


async def measure(options: Options, errors: Console) -> list[Run]:
    """Every load the options ask for, one after another.

    Raises ServerUnusable, WarmupFailed, and ValueError for a bad prompt file or a missing API key.
    """
    client = ChatClient(
        options.base_url,
        model=options.model,
        temperature=options.temperature,
        ignore_eos=options.ignore_eos,
        no_think=options.no_think,
        timeout=options.timeout,
        api_key=_api_key(options),
    )
    runs: list[Run] = []
    async with client:
        client.model = client.model or await client.first_model()
        book = await _book(options, options.run_id or secrets.token_hex(6)).calibrated(client, options.longest_text)
        for number, cell in enumerate(options.sweep or (Cell(options.concurrency, None),)):
            # Each cell of a sweep asks about the same text, under nonces of its own.
            runs.append(await _one(options, client, book.for_load(number), cell, errors))
            if runs[-1].report.interrupted:
                break
    return runs


async def _one(options: Options, client: ChatClient, book: PromptBook, cell: Cell, errors: Console) -> Run:
    requests = cell.requests or options.total_requests
    config = _config(options, client.model, cell.concurrency, requests, book)
    load = Load(client, book, options, Progress(errors, config["load"]), concurrency=cell.concurrency, requests=requests)
    await load.warm_up()
    before = await settled(client.session, options.metrics_url) if options.metrics_url else None
    measured = await load.run()
    readings: tuple[Reading, Reading] | None = None
    if before is not None:
        readings = before, await settled(client.session, options.metrics_url)
    return Run(cell, measured, build_report(measured, options, config, config["width"], readings))


def _api_key(options: Options) -> str:
    if options.api_key_env not in ("", DEFAULT_KEY_VARIABLE) and options.api_key_env not in os.environ:
        raise ValueError(f"--api-key-env: the environment has no variable {options.api_key_env}")
    return os.environ.get(options.api_key_env, "") if options.api_key_env else ""


def _book(options: Options, run: str) -> PromptBook:
    if options.prompt_file is not None:
        text = corpus.from_file(options.prompt_file)
    else:
        text = corpus.code() if options.prompt_set == "code" else corpus.prose()
    return PromptBook(text, options.seed, run, options.prompt_tokens, options.shared_prefix)


def _config(options: Options, model: str, concurrency: int, requests: int, book: PromptBook) -> dict[str, Any]:
    """What a reader needs to repeat the load. `width` is how many requests it keeps in flight, 1 if that varies."""
    loads = {
        "closed": (f"concurrency {concurrency}", min(concurrency, requests)),
        "poisson": (f"{options.request_rate:g} requests/s", 1),
        "sessions": (f"{options.sessions} sessions of {options.turns} turns", options.sessions),
    }
    load, width = loads[options.mode]
    return {
        "base_url": options.base_url,
        "model": model,
        "load": load,
        "width": width,
        "mode": options.mode,
        "shape": f"{options.prompt_tokens}/{options.max_tokens}",
        "concurrency": concurrency,
        "request_rate": options.request_rate,
        "burstiness": options.burstiness,
        "max_concurrency": options.max_concurrency,
        "sessions": options.sessions,
        "turns": options.turns,
        "turn_tokens": options.turn_tokens,
        "think_time": options.think_time,
        "prompt_tokens": options.prompt_tokens,
        "max_tokens": options.max_tokens,
        "prompt_set": str(options.prompt_file or options.prompt_set),
        "characters_per_token": book.characters_per_token,
        "requests": requests,
        "warmup": options.warmup,
        "temperature": options.temperature,
        "shared_prefix": options.shared_prefix,
        "ignore_eos": options.ignore_eos,
        "no_think": options.no_think,
        "disconnect_fraction": options.disconnect_fraction,
        "intruder_tokens": options.intruder_tokens,
        "seed": options.seed,
        "run_id": book.run,
    }


def _publish(options: Options, runs: Sequence[Run], command: str) -> None:
    """Print, write and draw. The figures are printed first: whatever goes wrong afterwards, they are not lost."""
    out = Console()
    if not out.is_terminal:
        out = Console(width=PLAIN_WIDTH, soft_wrap=True)  # a file or a pipe has no width: do not squeeze the tables
    rows = compare([run.report for run in runs]) if options.sweep else ()
    for run in runs:
        tables.print_report(out, run.report)
    if rows:
        tables.print_sweep(out, rows)
    if options.json is not None:
        environment = describe(options.label, command)
        bodies = [to_json(run.report, environment, run.measured.results if options.per_request else None) for run in runs]
        body = sweep_to_json(rows, bodies, environment) if rows else bodies[0]
        options.json.write_text(json.dumps(body, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    if options.plot is not None:
        from bench.plots import write_plots  # matplotlib takes a second to load and is optional

        for run in runs:
            prefix = f"c{run.cell.concurrency}_" if options.sweep else ""
            for path in write_plots(options.plot, prefix, run.report, run.measured.results, run.measured.intruder):
                out.print(f"wrote {path}", markup=False, highlight=False)


if __name__ == "__main__":
    sys.exit(main())
