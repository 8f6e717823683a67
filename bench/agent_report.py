"""Turns a scenario's requests, and what the server reported, into figures, each with its goal.

Owns the definition of every published figure and of the goals. A figure that the server did not make possible has no
value and misses no goal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from bench import agent_trace
from bench.agent_check import Check
from bench.agent_scenario import Record
from bench.agent_trace import Placed
from bench.server_metrics import Reading, difference

PREFILL_GOAL = 1.1  # prefilled / new
MEMORY_GOAL = 0.35  # with sharing / without
UNKNOWN = "not reported by the server"

Value = int | float | str | None


@dataclass(frozen=True)
class Figure:
    """One line of the result."""

    name: str
    value: Value
    text: str  # for a reader
    met: bool | None = None  # None without a goal, or without a value


NO_DISK_STORE = Figure("disk store", None, "this server has no --kv-disk-dir and was measured without")


@dataclass(frozen=True)
class Evidence:
    """All that is known of one run."""

    records: Sequence[Record]
    readings: Sequence[Reading]  # the server's metrics: before, after each round, at the end; empty where it shows none
    placed: Sequence[Placed] | None  # from the trace; None where it cannot be read
    slots: int


def scenario_figures(run: Evidence, is_main: Callable[[str], bool]) -> list[Figure]:
    """What was asked, what was evaluated for it, and what became of the main agent's session."""
    delta = difference(run.readings[0], run.readings[-1])
    tiers = agent_trace.by_tier(delta)
    figures = [*request_figures(run.records), *prefill_figures(run.records, delta)]
    figures.append(Figure("reused by tier", sum(tiers.values()), ", ".join(f"{tier} {n}" for tier, n in tiers.items()) or "none"))
    figures += _main_figures(run, is_main)
    figures += _memory_figures(run.readings)
    figures += [Figure(series, value, f"{value:g}") for series, value in agent_trace.notable(delta).items()]
    return figures


def request_figures(records: Sequence[Record]) -> list[Figure]:
    """How the requests ended."""
    kinds = Counter(record.request.kind for record in records)
    failures = [record for record in records if record.answer.failure]
    figures = [
        Figure("requests", len(records), f"{len(records)}: " + ", ".join(f"{n} {kind}" for kind, n in kinds.items())),
        Figure("failed", len(failures), f"{len(failures)}" + "".join(f"; {r.request.id}: {r.answer.failure}" for r in failures[:3]),
               not failures),
    ]  # fmt: skip
    otherwise = sum(bool(r.answer.prompt_tokens) and r.answer.prompt_tokens != r.rendered_tokens for r in records)
    if otherwise:
        figures.append(Figure("counted otherwise", otherwise, f"{otherwise} prompts have another length in the server's usage"))
    return figures


def prefill_figures(records: Sequence[Record], delta: Reading) -> list[Figure]:
    """The tokens: received, new to the box, evaluated. Without metrics a prompt that was given up counts as evaluated."""
    made = [record for record in records if not record.answer.failure]
    received = sum(record.answer.prompt_tokens or record.rendered_tokens for record in made)
    new = sum(record.new_tokens for record in made)
    measured = agent_trace.prefilled(delta)
    by_usage = received - sum(record.answer.cached_tokens for record in made)
    evaluated = by_usage if measured is None else measured
    ratio = evaluated / new if new else None
    return [
        Figure("prompt tokens received", received, f"{received}"),
        Figure("new to the box", new, f"{new}"),
        Figure("prefilled", evaluated, f"{evaluated}, by {'usage' if measured is None else 'the metrics'}"),
        Figure("prefilled / new", ratio, f"{ratio:.3f}, goal {PREFILL_GOAL}" if ratio else "nothing was asked",
               None if ratio is None else ratio <= PREFILL_GOAL),
    ]  # fmt: skip


def _main_figures(run: Evidence, is_main: Callable[[str], bool]) -> list[Figure]:
    if run.placed is None:
        return [Figure("main agent driven out", None, "unknown without the server's trace")]
    lost = agent_trace.losses(run.placed, run.slots, is_main)
    needless = [loss for loss in lost if loss.better]
    text = f"{len(lost)} times" + "".join(f"; {loss.tokens} tokens by {loss.request}" for loss in lost[:3])
    return [
        Figure("main agent driven out", len(lost), text),
        Figure("  while an empty or stale slot was there", len(needless), f"{len(needless)} times, goal 0", not needless),
    ]


def _memory_figures(readings: Sequence[Reading]) -> list[Figure]:
    pair = agent_trace.widest(readings)
    if pair is None:
        return [Figure("memory with sharing / without", None, UNKNOWN)]
    shared, unshared = pair
    ratio = shared / unshared
    text = f"{ratio:.3f} ({shared / 1e6:.1f} of {unshared / 1e6:.1f} MB), goal {MEMORY_GOAL} with 16 slots and pages of 256"
    return [Figure("memory with sharing / without", ratio, text)]


def check_figures(check: Check) -> list[Figure]:
    """Whether equal requests had equal answers, and the answers of requests made alone."""
    alone = f"{len(check.mismatches)} of {check.compared} differ" + "".join(f"; {name}" for name in check.mismatches[:3])
    alone += f"; {check.failed} without an answer" if check.failed else ""
    alone += f"; {check.warm} not evaluated from the first token" if check.warm else ""
    again = f"{len(check.unlike)} of {check.repeated} differ" + "".join(f"; {name}" for name in check.unlike[:3])
    return [
        Figure("answers to the same request", len(check.unlike), again, not check.unlike),
        Figure("answers beside the same request alone", len(check.mismatches) if check.compared else None, alone,
               not check.mismatches and not check.failed if check.compared or check.failed else None),
    ]  # fmt: skip


def print_figures(console: Console, title: str, figures: Sequence[Figure]) -> None:
    """A table."""
    console.print(f"\n[bold]{title}[/bold]", highlight=False)
    table = Table(show_header=False, box=None)
    for _ in range(3):
        table.add_column(overflow="fold")  # a series' labels are the end of its name
    for figure in figures:
        verdict = {None: "", True: "[green]met[/green]", False: "[red]MISSED[/red]"}[figure.met]
        table.add_row(figure.name, figure.text.replace("[", "\\["), verdict)
    console.print(table)
