"""Simulates one box or many: the scheduler itself on a clock of its own, under the traffic of agents and chats.

    python -m bench.simulate --costs h200-qwen3-8b --slots 16 --boxes 1,10 --workload agents --requests 2000 --rate 2 \\
        --policy affinity-least,round-robin --report FILE --plots DIR

docs/scaling.md says what the figures mean and where the model ends. This module owns the options.

Exit status: 0 when every request was answered, 1 when one failed, 2 when the options make no sense.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.serve_concurrency import PLAIN_WIDTH
from bench.simulation.calibrate import Calibration, calibrate
from bench.simulation.costs import DEFAULTS, StepCosts, load_costs
from bench.simulation.figures import figures_of
from bench.simulation.report import Run, print_runs, write_json
from bench.simulation.routing import POLICIES
from bench.simulation.run import Plan, simulate
from bench.simulation.traffic import KINDS, Traffic

EXACT_REQUESTS = 4000  # more, on several boxes, are left to the coarse model
EXIT_FAILED = 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run what `argv` describes; the exit status."""
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        plans = _plans(options, load_costs(options.costs))
    except (OSError, ValueError) as error:
        parser.error(str(error))
    runs: list[Run] = []
    fitted: Calibration | None = None
    for plan in plans:
        began = time.perf_counter()
        calibration = None
        if _coarse(options.model, plan):
            fitted = calibration = fitted or calibrate(plan)  # every plan has the same load a box
            plan = replace(plan, coarse=calibration.factors)
        figures = figures_of(simulate(plan))
        runs.append(Run(plan, figures, calibration, time.perf_counter() - began))
        print(f"{plan.boxes} boxes, {plan.policy}: {runs[-1].wall_s:.1f} s", file=sys.stderr, flush=True)
    print_runs(Console() if sys.stdout.isatty() else Console(width=max(PLAIN_WIDTH, 220), soft_wrap=True), runs)
    if options.report is not None:
        write_json(options.report, shlex.join(sys.argv if argv is None else ["simulate", *argv]), runs)
    if options.plots is not None:
        from bench.simulation.plots import write_plots  # matplotlib is an extra

        options.plots.mkdir(parents=True, exist_ok=True)
        print(write_plots(options.plots, runs), file=sys.stderr)
    return EXIT_FAILED if any(run.figures.completed < run.figures.sent for run in runs) else 0


def _coarse(model: str, plan: Plan) -> bool:
    """One box is always the scheduler."""
    return plan.boxes > 1 and (model == "coarse" or (model == "auto" and plan.requests > EXACT_REQUESTS))


def _plans(options: argparse.Namespace, costs: StepCosts) -> list[Plan]:
    """A run for each number of boxes and policy; one box needs no policy. Raises ValueError."""
    plans = []
    for boxes in options.boxes:
        requests = options.requests * boxes if options.per_box else options.requests
        traffic = Traffic(
            kind=options.workload,
            ctx=options.ctx,
            users=options.users * boxes,
            apps=options.apps,
            agent_prompt=options.agent_prompt,
        )
        for policy in options.policy if boxes > 1 else options.policy[:1]:
            plans.append(
                Plan(
                    costs=costs,
                    traffic=traffic,
                    slots=options.slots,
                    boxes=boxes,
                    policy=policy,
                    requests=requests,
                    seed=options.seed,
                    rate=options.rate * boxes,
                    burstiness=options.burstiness,
                    clients=options.clients * boxes,
                )
            )
    return plans


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="simulate", description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add(
        "--costs", default="h200-qwen3-8b", help=f"prices of a step: {', '.join(DEFAULTS)}, or a JSON file (default: %(default)s)"
    )
    add("--slots", type=int, default=16, help="resident sessions of a box (default: %(default)s)")
    add("--ctx", type=int, default=32768, help="context of each (default: %(default)s)")
    add("--boxes", type=_list(int), default=[1], metavar="N,...", help="a run for each number; 1 is always the scheduler")
    add("--policy", type=_list(_policy), default=["affinity-least"], metavar="NAME,...", help=f"routers: {', '.join(POLICIES)}")
    add("--workload", choices=KINDS, default="agents", help="default: %(default)s")
    add("--requests", type=int, default=1000, help="of a run; with --per-box, of a box (default: %(default)s)")
    add("--per-box", action="store_true", help="--requests is for each box")
    add("--rate", type=float, default=0.0, help="requests a second and box, whose sessions begin at random; 0: closed loop")
    add("--burstiness", type=float, default=1.0, help="of the sessions' beginnings: 1 is Poisson, less is burstier")
    add("--clients", type=int, default=8, help="of a closed loop, a box: each has one session at a time (default: %(default)s)")
    add("--users", type=int, default=64, help="a box (default: %(default)s)")
    add("--apps", type=int, default=4, help="system prompts, over all boxes (default: %(default)s)")
    add("--agent-prompt", type=int, default=12_000, help="tokens of an agent's system prompt and tools (default: %(default)s)")
    add("--model", choices=("auto", "exact", "coarse"), default="auto",
        help=f"of several boxes: the scheduler in each, or the coarse model; auto: exact up to {EXACT_REQUESTS} requests")  # fmt: skip
    add("--seed", type=int, default=0, help="fixes everything (default: %(default)s)")
    add("--report", type=Path, default=None, metavar="FILE", help="write everything as JSON")
    add("--plots", type=Path, default=None, metavar="DIR", help="draw the figures as PNG")
    return parser


def _list(of: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    return lambda text: [of(part) for part in text.split(",")]


def _policy(name: str) -> str:
    if name not in POLICIES:
        raise argparse.ArgumentTypeError(f"{name} is none of {', '.join(POLICIES)}")
    return name


if __name__ == "__main__":
    sys.exit(main())
