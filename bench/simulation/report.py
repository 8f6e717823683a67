"""Runs as a table, as JSON and as plots."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.simulation.calibrate import Calibration
from bench.simulation.figures import Figures
from bench.simulation.run import Plan

SCHEMA = "ds4batch.simulate/1"
COARSE = "coarse: the scheduler did not run in these boxes; a model of them did, fitted to the scheduler on one box"


@dataclass(frozen=True)
class Run:
    """One line of the table."""

    plan: Plan
    figures: Figures
    calibration: Calibration | None
    wall_s: float


def print_runs(out: Console, runs: Sequence[Run]) -> None:
    """The table, and what must not be overlooked about it."""
    plan = runs[0].plan
    load = f"{plan.rate / plan.boxes:g} requests/s a box" if plan.rate else f"{plan.clients / plan.boxes:g} clients a box"
    table = Table(title=f"{plan.traffic.kind}, {plan.costs.name}, {plan.slots} slots a box, {load}, seed {plan.seed}")
    for name in ("boxes", "policy", "model", "done", "cached", "TTFT p50/p95/p99 s", "E2E p50/p95 s", "TPOT p50/p99 ms", "ITL p99 ms",
                 "goodput/s", "good", "tok/s", "Jain", "busy", "busiest", "evictions"):  # fmt: skip
        table.add_column(name, justify="left" if name in ("policy", "model") else "right")
    for run in runs:
        table.add_row(*_cells(run.figures))
    out.print(table)
    for run in runs:
        if run.figures.completed < run.figures.sent:
            out.print(f"{run.figures.sent - run.figures.completed} of {run.figures.sent} requests failed")
    if any(run.calibration for run in runs):
        out.print(COARSE)
    for calibration in {id(run.calibration): run.calibration for run in runs if run.calibration}.values():
        out.print(calibration_line(calibration))


def calibration_line(calibration: Calibration) -> str:
    """How far the coarse box is from the scheduler."""
    exact, coarse = calibration.exact, calibration.coarse
    parts = [
        f"{name} {_off(a, b)}"
        for name, a, b in (
            ("TTFT mean", exact.ttft_s.mean, coarse.ttft_s.mean),
            ("TTFT p95", exact.ttft_s.p95, coarse.ttft_s.p95),
            ("TPOT mean", exact.tpot_s.mean, coarse.tpot_s.mean),
            ("E2E mean", exact.e2e_s.mean, coarse.e2e_s.mean),
            ("cached share", exact.cached_share, coarse.cached_share),
            ("utilisation", exact.utilisation, coarse.utilisation),
        )
    ]
    factors = calibration.factors
    return (
        f"fitted: prompts x {factors.prefill:.2f}, decoding x {factors.decode:.2f}; on one box and another seed, "
        f"{exact.completed} requests, coarse against scheduler: {', '.join(parts)}"
    )


def _off(exact: float | None, coarse: float | None) -> str:
    return f"{(coarse / exact - 1) * 100:+.1f} %" if exact and coarse is not None else "-"


def _cells(figures: Figures) -> list[str]:
    ttft, e2e, tpot = figures.ttft_s, figures.e2e_s, figures.tpot_s
    itl = figures.itl_s.p99 if figures.itl_s else None
    return [
        str(figures.boxes), figures.policy, figures.model, f"{figures.completed:,}", f"{figures.cached_share:.1%}",
        f"{_n(ttft.p50)}/{_n(ttft.p95)}/{_n(ttft.p99)}", f"{_n(e2e.p50)}/{_n(e2e.p95)}",
        f"{_n(tpot.p50, 1e3)}/{_n(tpot.p99, 1e3)}", _n(itl, 1e3), f"{figures.goodput:.3g}", f"{figures.good_share:.1%}",
        f"{figures.output_throughput:,.0f}", f"{figures.fairness:.3f}", f"{figures.utilisation:.0%}", f"{figures.busiest:.2f}",
        f"{figures.evictions:,}",
    ]  # fmt: skip


def _n(value: float | None, scale: float = 1.0) -> str:
    return "-" if value is None else f"{value * scale:.3g}"


def write_json(path: Path, command: str, runs: Sequence[Run]) -> None:
    """Everything. Raises OSError."""
    body = {"schema": SCHEMA, "command": command, "runs": [asdict(run) for run in runs]}
    path.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
