"""What a server makes of agents: nine conversations with one system prompt, over HTTP, with the habits of real clients.

    python -m bench.agents -m MODEL [options] [-- further options of ds4batch serve]
    python -m bench.agents -m MODEL --restart [--kill] [-- ...]
    python -m bench.agents -m MODEL --store-cost [-- ...]

docs/benchmarking.md says what each figure means. This module owns the options and the order of the scenario's runs.

Exit status: 0 when every goal that could be measured was met, 1 when one was missed, 2 when the options make no sense or
the model or the server cannot be used.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console

from bench import agent_restart, agent_store_cost, agent_trace, corpus
from bench.agent_accounting import Renderer
from bench.agent_check import check, chosen
from bench.agent_client import AgentClient
from bench.agent_report import NO_DISK_STORE, Evidence, Figure, check_figures, print_figures, scenario_figures
from bench.agent_scenario import FEWEST_TURNS, MAIN, REPORT_TOKENS, Plan, Record, Scenario
from bench.agent_servers import ctx_for, disk_options, has_disk_store, oracle_server, traced_server
from bench.environment import describe
from bench.http_stream import ServerUnusable
from bench.prompts import PromptBook
from bench.serve_concurrency import PLAIN_WIDTH

SCHEMA = "ds4batch.agents/1"
EXIT_MISSED = 1
EXIT_UNUSABLE = 2
SAMPLE_CHARACTERS = 20_000
LONGEST_CALL = 100  # tokens of a call, its frame and the frames of a turn, at most
LEAST_ROOM = 500  # tokens beside the shared beginning; the tools alone may be longer than was asked for


@dataclass(frozen=True)
class Result:
    """One table of the output."""

    title: str
    figures: Sequence[Figure]


def main(argv: Sequence[str] | None = None) -> int:
    """Run what `argv` describes; the exit status."""
    parser = _parser()
    options = parser.parse_args(argv)
    _check_together(parser, options)
    try:
        renderer = Renderer(options.model)
    except (OSError, ValueError) as error:
        parser.error(f"-m/--model: {error}")
    out = Console() if sys.stdout.isatty() else Console(width=PLAIN_WIDTH, soft_wrap=True)
    results: list[Result] = []
    try:
        for result in _results(options, renderer):
            print_figures(out, result.title, result.figures)  # at once: whatever goes wrong later, they are not lost
            results.append(result)
    except ServerUnusable as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_UNUSABLE
    if options.json is not None:
        command = shlex.join(sys.argv if argv is None else [sys.argv[0], *argv])
        body = {"schema": SCHEMA, **asdict(describe("", command)), "results": [asdict(result) for result in results]}
        options.json.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    return EXIT_MISSED if any(figure.met is False for result in results for figure in result.figures) else 0


def _results(options: argparse.Namespace, renderer: Renderer) -> Iterator[Result]:
    if options.restart:
        yield Result("restart", agent_restart.run(options, renderer, _book(options, renderer)))
    elif options.store_cost:
        yield Result("cost of the disk store", agent_store_cost.run(options))
    else:
        yield from _scenarios(options, renderer)


def _check_together(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Refuse what cannot be done, before anything is started for it."""
    if options.turns < FEWEST_TURNS:
        parser.error(f"--turns: {options.turns} is below {FEWEST_TURNS}, which the edit and the retry need")
    if options.kill and not options.restart:
        parser.error("--kill goes with --restart")
    if options.base_url and (options.restart or options.store_cost):
        parser.error("--base-url: --restart and --store-cost start their servers themselves")
    if options.json is not None and (options.json.is_dir() or not options.json.absolute().parent.is_dir()):
        parser.error(f"--json: {options.json} cannot be written: it is a directory or its directory does not exist")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="agents", description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("-m", "--model", required=True, help="GGUF file or model directory; prompts are counted with its tokenizer")
    add("--base-url", default="", help="a server of the same model that runs already; without it one is started for each --slots")
    add("--slots", type=_slots, default=(16, 4), metavar="N,...", help="resident sessions, a run each (default: 16,4)")
    add("--ctx", type=int, default=0, help="context of a session; 0 takes what the scenario needs")
    add("--page-tokens", type=int, default=0, help="tokens in a page; 0 leaves it to the server")
    add("--disk", action="store_true", help="each server of the scenario keeps checkpoints in a fresh directory")
    add("--main-tokens", type=int, default=512,
        help="system prompt and tools, which all agents share; the tools alone may be longer (default: %(default)s)")  # fmt: skip
    add("--turns", type=int, default=3, help="turns of each agent (default: %(default)s)")
    add("--turn-tokens", type=int, default=48, help="what a turn adds beside the answer (default: %(default)s)")
    add("--answer-tokens", type=int, default=16, help="the longest answer (default: %(default)s)")
    add("--check", type=_check, default=4, metavar="N",
        help="how many different requests are made again, alone, to a fresh server; all is every one (default: %(default)s)")  # fmt: skip
    add("--seed", type=int, default=0, help="fixes the texts, the sampling and the sample that is checked")
    add("--timeout", type=float, default=600.0, help="longest answer, seconds (default: %(default)s)")
    add("--json", type=Path, default=None, metavar="FILE", help="write the figures here")
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--restart", action="store_true", help="conversations, a stop, a start on the same --kv-disk-dir, and on")
    modes.add_argument("--store-cost", action="store_true", help="ITL of a busy server with the disk store and without")
    add("--kill", action="store_true", help="with --restart: SIGKILL instead of SIGTERM")
    add("--conversations", type=int, default=16, help="of --restart (default: %(default)s)")
    add("--conversation-tokens", type=int, default=640, help="prompt length of --restart and --store-cost (default: %(default)s)")
    add("--tail-tokens", type=int, default=32,
        help="with --restart: what a checkpoint may leave to evaluate again (default: %(default)s)")  # fmt: skip
    add("serve", nargs="*", help="further options of ds4batch serve, after --")
    return parser


def _slots(text: str) -> tuple[int, ...]:
    counts = tuple(int(part) for part in text.split(","))
    if min(counts) < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return counts


def _check(text: str) -> int | None:
    return None if text == "all" else int(text)


def _book(options: argparse.Namespace, renderer: Renderer) -> PromptBook:
    prose = corpus.prose()
    rate = renderer.characters_per_token(prose[:SAMPLE_CHARACTERS])
    return PromptBook(prose, options.seed, run="", prompt_tokens=0, characters_per_token=rate)


def needed_ctx(options: argparse.Namespace) -> int:
    """A context in which the longest conversation of the scenario fits."""
    turn = max(options.turn_tokens, REPORT_TOKENS) + options.answer_tokens + LONGEST_CALL
    return ctx_for(options.main_tokens + LEAST_ROOM + (options.turns + 1) * turn)


def _scenarios(options: argparse.Namespace, renderer: Renderer) -> Iterator[Result]:
    book = _book(options, renderer)
    ctx = options.ctx or needed_ctx(options)
    records: list[Record] = []
    for slots in options.slots[:1] if options.base_url else options.slots:
        if options.base_url:
            run = asyncio.run(_scenario(options, renderer, book, options.base_url, slots))
        else:
            run = _served(options, renderer, book, ctx, slots)
        figures = scenario_figures(run, lambda name: f"-{MAIN}-" in name)
        if options.disk and not has_disk_store():
            figures.append(NO_DISK_STORE)
        yield Result(options.base_url or f"{slots} slots", figures)
        records += run.records
    sample = chosen(records, options.check, options.seed)
    if sample:
        with oracle_server(options.model, ctx, options.serve) as url:
            outcome = asyncio.run(check(url, options.timeout, records, sample))
        yield Result("answers", check_figures(outcome))


def _served(options: argparse.Namespace, renderer: Renderer, book: PromptBook, ctx: int, slots: int) -> Evidence:
    """One run against a server of its own, whose directory nobody has used: what it finds there it has evaluated itself."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.jsonl"
        extra = ["--page-tokens", str(options.page_tokens)] if options.page_tokens else []
        extra += disk_options(Path(folder) / "kv") if options.disk else []
        with traced_server(options.model, slots, ctx, [*extra, *options.serve], trace) as url:
            run = asyncio.run(_scenario(options, renderer, book, url, slots))
        return replace(run, placed=agent_trace.read_trace(trace))  # complete only now that the server has ended


async def _scenario(options: argparse.Namespace, renderer: Renderer, book: PromptBook, url: str, slots: int) -> Evidence:
    plan = Plan(options.seed, options.turns, options.main_tokens, options.turn_tokens, options.answer_tokens)
    async with AgentClient(url, options.timeout) as client:
        scenario = Scenario(plan, renderer, book, await client.first_model(), client.ask, f"s{slots}")
        readings = [await client.metrics()]

        async def after_round(turn: int) -> None:
            readings.append(await client.metrics())
            print(
                f"{slots} slots: turn {turn + 1} of {plan.turns}, {len(scenario.records)} requests", file=sys.stderr, flush=True
            )

        await scenario.run(after_round)
        readings.append(await client.metrics())
    return Evidence(scenario.records, readings, None, slots)


if __name__ == "__main__":
    sys.exit(main())
