"""One load on one server from three programs in turn: bench/serve_concurrency.py, NVIDIA aiperf and guidellm.

    python -m bench.compare_tools -m MODEL [--rounds 2] [--requests 100] [--concurrency 4] [--apart] [-- further options of ds4batch serve]

Starts `ds4batch serve`, installs the other programs where they are missing (`--tools`, from bench/tools/*.txt), and lets all ask the same
texts in the order A B C A B C, every run with nonces of its own: none finds its prompts in the server's memory. Prints each run, with the
TTFT that the server itself counted, and how far the others' means are from the first one's. docs/benchmarking.md has the definitions.

Exit status: 0 when TTFT and output tokens a second are within `--limit` of each other and no request failed, 1 when not, 2 when a tool or
the server cannot be used.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.table import Table

from bench import corpus
from bench.environment import describe
from bench.http_stream import ChatClient, ServerUnusable
from bench.prompts import PromptBook
from bench.serve_concurrency import PLAIN_WIDTH
from bench.server_metrics import Reading, difference, histogram, settled
from bench.tools.environments import program
from bench.tools.load import Load, Seen, ToolFailed
from bench.tools.peers import Aiperf, Guidellm, Ours, Tool
from bench.with_server import serving
from ds4batch.tokenizer.load import load_tokenizer

SCHEMA = "ds4batch.compare_tools/1"
EXIT_APART = 1
EXIT_UNUSABLE = 2
COMPARED = ("output_throughput", "ttft_mean", "ttft_p50")  # these decide
LISTED = (*COMPARED, "token_mean", "e2e_mean")
TTFT = "vllm:time_to_first_token_seconds"
TOKENIZER = "tokenizer"  # its place among the files of the runs
TIMEOUT = 900.0  # seconds, of a run


@dataclass(frozen=True)
class Run:
    """One tool's turn."""

    tool: str
    round: int
    seen: Seen
    server_ttft_mean: float | None  # ms, of all requests that reached the server meanwhile


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and compare; the exit status."""
    parser = make_parser()
    options = parser.parse_args(argv)
    out = Console() if sys.stdout.isatty() else Console(width=PLAIN_WIDTH, soft_wrap=True)
    try:
        tools: list[Tool] = [
            Ours(),
            Aiperf(program("aiperf", options.tools.absolute())),
            Guidellm(program("guidellm", options.tools.absolute())),
        ]
        halves = apart(os.sched_getaffinity(0)) if options.apart else ()
        for half in halves[:1]:
            os.sched_setaffinity(0, half)  # what is started from here on stays there: the server
        with (
            tempfile.TemporaryDirectory() as folder,
            serving(options.model, str(options.slots), str(options.ctx), options.serve) as url,
        ):
            for half in halves[1:]:
                os.sched_setaffinity(0, half)  # the tools
            save_tokenizer(options.model, Path(folder) / TOKENIZER)
            runs = asyncio.run(measure(options, url, tools, Path(folder)))
    except (ServerUnusable, ToolFailed, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_UNUSABLE
    print_runs(out, runs)
    if options.json is not None:
        command = shlex.join(sys.argv if argv is None else [sys.argv[0], *argv])
        body = {
            "schema": SCHEMA,
            **asdict(describe("", command)),
            "deviations": deviations(runs),
            "runs": [asdict(run) for run in runs],
        }
        options.json.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    return 0 if agree(runs, options.limit) else EXIT_APART


def make_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(prog="compare_tools", description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("-m", "--model", required=True, help="GGUF file or model directory")
    add("--slots", type=int, default=4, help="resident sessions of the server (default: %(default)s)")
    add("--ctx", type=int, default=2048, help="context of each (default: %(default)s)")
    add("--tools", type=Path, default=Path("build/tools"), help="where the programs' environments are (default: %(default)s)")
    add("--rounds", type=int, default=2, help="turns of each program (default: %(default)s)")
    add("--requests", type=int, default=100, help="of a turn (default: %(default)s)")
    add("--concurrency", type=int, default=4, help="requests in flight (default: %(default)s)")
    add("--prompt-tokens", type=int, default=256, help="of a prompt (default: %(default)s)")
    add("--max-tokens", type=int, default=64, help="of every answer, exactly (default: %(default)s)")
    add("--seed", type=int, default=0, help="fixes the texts")
    add("--apart", action="store_true", help="the server has one half of the processors and the programs the other")
    add("--limit", type=float, default=0.1, help="of the deviations (default: %(default)s)")
    add("--json", type=Path, default=None, metavar="FILE", help="write the figures here")
    add("serve", nargs="*", help="further options of ds4batch serve, after --")
    return parser


async def measure(options: argparse.Namespace, url: str, tools: Sequence[Tool], folder: Path) -> list[Run]:
    """Every round. The first tool's first run is thrown away: the server's first steps are slow. Raises ServerUnusable, ToolFailed.

    `folder` has the tokenizer, and what the tools read and write goes there.
    """
    client = ChatClient(url, model="", temperature=0.0, ignore_eos=True, no_think=False, timeout=TIMEOUT)
    runs: list[Run] = []
    async with client:
        client.model = await client.first_model()
        load = Load(
            url, client.model, folder / TOKENIZER, options.requests, options.concurrency, options.prompt_tokens, options.max_tokens,
            options.seed, run_id="",
        )  # fmt: skip
        book = PromptBook(corpus.prose(), options.seed, secrets.token_hex(6), options.prompt_tokens)
        book = await book.calibrated(client, options.prompt_tokens)
        warm = replace(load, requests=2 * options.concurrency, run_id=f"{book.run}/warm")
        await _one(client, tools[0], warm, replace(book, run=warm.run_id), folder / "warm")
        for number in range(options.rounds):
            for tool in tools:
                mine = replace(load, run_id=f"{book.run}/{number}/{tool.name}")
                seen, server = await _one(client, tool, mine, replace(book, run=mine.run_id), folder / f"{number}-{tool.name}")
                runs.append(Run(tool.name, number, seen, server))
    return runs


async def _one(client: ChatClient, tool: Tool, load: Load, book: PromptBook, folder: Path) -> tuple[Seen, float | None]:
    """One turn, and the TTFT that the server counted. Raises ToolFailed."""
    folder.mkdir()
    prompts = [str(book.single(index)[0]["content"]) for index in range(load.requests)]
    command = tool.command(load, prompts, folder)
    before = await _reading(client)
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=folder,
    )
    try:
        said, _ = await asyncio.wait_for(process.communicate(), TIMEOUT)
    except TimeoutError:
        process.kill()
        await process.wait()
        raise ToolFailed(f"{tool.name}: not done after {TIMEOUT:g} s") from None
    if process.returncode:
        text = said.decode(errors="replace").strip()[-2000:]
        raise ToolFailed(f"{tool.name} ended with status {process.returncode}: {shlex.join(command)}\n{text}")
    waited = histogram(difference(before, await _reading(client)), TTFT)
    seen = tool.read(folder)
    print(f"{tool.name}: {seen.completed} requests in {seen.duration_s:.1f} s", file=sys.stderr, flush=True)
    return seen, waited.mean if waited else None


async def _reading(client: ChatClient) -> Reading:
    return await settled(client.session, f"{client.root}/metrics")


def apart(processors: set[int]) -> tuple[set[int], set[int]]:
    """Two halves; the first is no smaller. Raises ValueError for one processor."""
    ordered = sorted(processors)
    half = (len(ordered) + 1) // 2
    if half == len(ordered):
        raise ValueError("--apart: there is one processor")
    return set(ordered[:half]), set(ordered[half:])


def save_tokenizer(model: str, folder: Path) -> None:
    """The model's tokenizer as the tools' library reads it; what they count with it is not used. Raises ValueError."""
    folder.mkdir()
    load_tokenizer(model).tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}\n', encoding="utf-8")


def deviations(runs: Sequence[Run]) -> dict[str, dict[str, float]]:
    """For each other tool, how far the mean of its runs is from the mean of the first one's, relative to that."""
    names = list(dict.fromkeys(run.tool for run in runs))
    means = {name: {key: fmean(getattr(run.seen, key) for run in runs if run.tool == name) for key in LISTED} for name in names}
    return {name: {key: means[name][key] / means[names[0]][key] - 1.0 for key in LISTED} for name in names[1:]}


def agree(runs: Sequence[Run], limit: float) -> bool:
    """Whether all made the same requests and are within `limit` of the first one where it counts."""
    requests = {(run.seen.completed, run.seen.output_tokens) for run in runs}
    apart = max((abs(of[key]) for of in deviations(runs).values() for key in COMPARED), default=0.0)
    return apart <= limit and len(requests) == 1 and not any(run.seen.failed for run in runs)


def print_runs(out: Console, runs: Sequence[Run]) -> None:
    """The runs in their order, and the deviations."""
    table = Table("tool", *("requests", "s", "prompt tokens", "cached", "tok/s", "TTFT mean", "p50", "server's", "token", "E2E"))
    for column in table.columns[1:]:
        column.justify = "right"
    for run in runs:
        seen, server = run.seen, run.server_ttft_mean
        table.add_row(
            run.tool, f"{seen.completed}" + (f" +{seen.failed} failed" if seen.failed else ""), f"{seen.duration_s:.1f}",
            f"{seen.prompt_tokens}", f"{seen.cached_tokens}", f"{seen.output_throughput:.1f}", f"{seen.ttft_mean:.0f}",
            f"{seen.ttft_p50:.0f}", "" if server is None else f"{server:.0f}", f"{seen.token_mean:.2f}", f"{seen.e2e_mean:.0f}",
        )  # fmt: skip
    for name, of in deviations(runs).items():
        shown = {key: f"{value:+.1%}" for key, value in of.items()}
        table.add_row(
            f"{name}, off", "", "", "", "", shown["output_throughput"], shown["ttft_mean"], shown["ttft_p50"], "",
            shown["token_mean"], shown["e2e_mean"],
        )  # fmt: skip
    out.print(table)


if __name__ == "__main__":
    sys.exit(main())
