"""Prints a run: a table by kind, how the memory went, and each failure with the lines that send it again."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from bench.hostile.attack import Attack
from bench.hostile.growth import growth

SHOWN = 40
"""Failures that are printed whole."""


def print_report(attack: Attack, requests: int) -> int:
    """The exit status: 1 where anything failed."""
    console = Console(width=150)
    table = Table(
        "kind",
        "sent",
        "answers",
        "slowest",
        "failures",
        title=f"{attack.sent} of {requests} hostile requests, seed {attack.seed}",
    )
    for kind, record in sorted(attack.records.items()):
        answers = ", ".join(f"{count} x {what}" for what, count in sorted(record.answers.items()))
        table.add_row(
            kind, str(record.sent), answers, f"{record.slowest[0]:.2f} s: {record.slowest[1][:50]}", str(record.failures)
        )
    console.print(table)
    refused = ", ".join(f"{count} x {why}" for why, count in attack.oracle.refused_by_meaning.most_common())
    console.print(f"as described and refused for what they mean: {refused or 'none'}", highlight=False)
    failures = [*attack.failures, *attack.probe.stalls]
    for name in ("front", "engine"):
        samples = [(sent, getattr(facts, f"{name}_bytes")) for sent, facts in attack.facts]
        went = growth(samples)
        console.print(
            f"memory of the {name}: {went.first / 2**20:.1f} to {went.last / 2**20:.1f} MiB over the last {went.requests} requests, "
            f"{went.per_request:.0f} bytes a request",
            highlight=False,
        )
        if went.grew:
            failures.append(f"the {name} grew by {went.per_request:.0f} bytes a request")
    if attack.facts:
        first, last = attack.facts[0][1], attack.facts[-1][1]
        console.print(
            f"open files: front {first.front_files} to {last.front_files}, engine {first.engine_files} to {last.engine_files}; "
            f"restarts {last.restarts}; /health answered {attack.probe.rounds} times, at most {attack.probe.slowest:.2f} s",
            highlight=False,
        )
    for failure in failures[:SHOWN]:
        console.print(f"FAILED {failure}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"{len(failures)} failures", highlight=False)
    return 1 if failures else 0
