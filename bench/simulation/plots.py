"""Draws as PNG: runs, each figure over the number of boxes, a line a policy, or side by side for one number of boxes; and one load's
requests, measured and simulated.

Imports matplotlib, and is imported only when a plot was asked for; it draws without a display.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from bench.agent_scenario import MAIN
from bench.simulation.figures import Figures
from bench.simulation.report import Run
from bench.simulation.traced import Agents, Name

COLOURS = ("#3070b0", "#e0a030", "#c03030", "#309060", "#806090", "#909090")
PANELS: tuple[tuple[str, Callable[[Figures], float]], ...] = (
    ("cached share of prompts", lambda f: f.cached_share),
    ("TTFT p50, s", lambda f: f.ttft_s.p50 or 0.0),
    ("TTFT p95, s", lambda f: f.ttft_s.p95 or 0.0),
    ("requests within the goals", lambda f: f.good_share),
    ("device busy", lambda f: f.utilisation),
    ("busiest box / mean", lambda f: f.busiest),
)


def write_plots(directory: Path, runs: Sequence[Run]) -> Path:
    """All panels of `runs` in one file; its path. Raises OSError."""
    plan = runs[0].plan
    figure = Figure(figsize=(12, 6.4), layout="constrained")
    lines: dict[str, list[Figures]] = {}
    for run in runs:
        lines.setdefault(run.plan.policy, []).append(run.figures)
    grid = figure.subplots(2, 3).flat
    for axes, (title, value) in zip(grid, PANELS, strict=True):
        _panel(axes, title, value, lines)
    models = " and ".join(sorted({run.figures.model for run in runs}))
    figure.suptitle(f"{plan.traffic.kind}, {plan.costs.name}, {plan.slots} slots a box, boxes by model: {models}")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    if labels:
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=8)
    FigureCanvasAgg(figure)  # binds the figure to the backend that needs no display
    path = directory / f"scaling-{plan.traffic.kind}.png"
    figure.savefig(path, format="png", dpi=90)
    return path


def plot_requests(path: Path, real: Agents, model: Agents) -> None:
    """A point for each request of `real`, with what `model` has for it, and where they would lie within 15 %. Raises OSError."""
    figure = Figure(figsize=(10, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    _points(left, "TTFT, s", real.ttft, model.ttft)
    _points(right, "E2E, s", real.e2e, model.e2e)
    FigureCanvasAgg(figure)
    figure.savefig(path, format="png", dpi=90)


def _points(axes: Axes, title: str, real: Mapping[Name, float], model: Mapping[Name, float]) -> None:
    most = 1.1 * max(*real.values(), *model.values())
    axes.fill_between([0, most], [0, 0.85 * most], [0, 1.15 * most], color=COLOURS[-1], alpha=0.25, label="within 15 %")
    for colour, who, chosen in ((COLOURS[2], "main agent", True), (COLOURS[0], "sub-agents", False)):
        names = [name for name in real if (name.agent == MAIN) == chosen]
        axes.plot([real[name] for name in names], [model[name] for name in names], "o", color=colour, markersize=4, label=who)
    axes.set(title=title, xlabel="measured", ylabel="simulated", xlim=(0, most), ylim=(0, most))
    axes.legend(fontsize=8)


def _panel(axes: Axes, title: str, value: Callable[[Figures], float], lines: dict[str, list[Figures]]) -> None:
    axes.set_title(title, fontsize=10)
    if all(len(figures) == 1 for figures in lines.values()):
        bars = axes.bar(list(lines), [value(figures[0]) for figures in lines.values()], color=COLOURS[0])
        axes.bar_label(bars, fmt="%.3g", fontsize=8)
        axes.tick_params(axis="x", labelrotation=20, labelsize=7)
    else:
        for colour, (policy, figures) in zip(COLOURS, lines.items(), strict=False):
            axes.plot([f.boxes for f in figures], [value(f) for f in figures], "o-", color=colour, label=policy, markersize=4)
        axes.set_xscale("log")
        axes.set_xlabel("boxes", fontsize=8)
    if title.startswith("TTFT"):
        axes.set_yscale("log")  # an overload is a thousand times the rest
    else:
        axes.set_ylim(bottom=0)
