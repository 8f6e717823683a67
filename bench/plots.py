"""Draws a load as PNG: its latency percentiles, and each request's life on a common time axis.

The only module that imports matplotlib, and only when a plot was asked for; it draws without a display.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from bench.http_stream import Outcome, Result
from bench.report import Report
from bench.stats import Summary

PERCENTILES = ("p50", "p75", "p90", "p95", "p99")
PANELS = (("TTFT", "ttft_ms"), ("ITL", "itl_ms"), ("TPOT", "tpot_ms"), ("E2EL", "e2el_ms"))
WAITING, DECODING, REJECTED, HUNG_UP = "#e0a030", "#3070b0", "#c03030", "#909090"
MOST_TICKS = 40  # more token marks than this a line and request would be a solid bar


def write_plots(directory: Path, prefix: str, report: Report, results: Sequence[Result], intruder: Result | None) -> list[Path]:
    """Both plots of a load, as `directory`/`prefix`NAME.png; the paths written. Raises OSError."""
    percentiles = directory / f"{prefix}latency_percentiles.png"
    timeline = directory / f"{prefix}token_timeline.png"
    _save(latency_percentiles(report), percentiles)
    _save(token_timeline(results, intruder), timeline)
    return [percentiles, timeline]


def _save(figure: Figure, path: Path) -> None:
    FigureCanvasAgg(figure)  # binds the figure to the backend that needs no display
    figure.savefig(path, format="png", dpi=110)


def latency_percentiles(report: Report) -> Figure:
    """One panel a latency, each with its own scale, as they differ by orders of magnitude."""
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    for axes, (title, name) in zip(figure.subplots(1, len(PANELS)), PANELS, strict=True):
        _percentile_panel(axes, title, getattr(report, name))
    figure.suptitle(f"{report.config['model']}, {report.config['load']}, {report.completed} requests")
    return figure


def _percentile_panel(axes: Axes, title: str, summary: Summary) -> None:
    values = [getattr(summary, name) or 0.0 for name in PERCENTILES]
    bars = axes.bar(PERCENTILES, values, color=DECODING)
    axes.bar_label(bars, fmt="%.3g", fontsize=8)
    axes.set_title(f"{title}, n = {summary.n}" + (" (few)" if summary.low_n else ""), fontsize=10)
    axes.set_ylabel("ms")
    axes.set_ylim(bottom=0)


def token_timeline(results: Sequence[Result], intruder: Result | None) -> Figure:
    """A line a request, in the order of their starts: waiting for the first token, then decoding, a tick a chunk."""
    lines = sorted([*results, *([intruder] if intruder else [])], key=lambda result: result.start)
    origin = lines[0].start if lines else 0.0
    figure = Figure(figsize=(12, min(40.0, 1.6 + 0.16 * len(lines))), layout="constrained")
    axes = figure.add_subplot()
    for row, result in enumerate(lines):
        _request_line(axes, row, result, origin)
        if result is intruder:
            axes.annotate(
                "intruder",
                (result.start - origin, row),
                fontsize=7,
                ha="right",
                va="center",
                xytext=(-3, 0),
                textcoords="offset points",
            )
    for label, colour in (
        ("queue and prefill", WAITING),
        ("decode", DECODING),
        ("rejected", REJECTED),
        ("hung up", HUNG_UP),
    ):
        axes.plot([], [], color=colour, linewidth=4, label=label)
    figure.legend(loc="outside upper center", ncols=4, fontsize=8)
    axes.set_xlabel("seconds since the first request")
    axes.set_ylabel("request")
    axes.set_ylim(-1, max(len(lines), 1))
    axes.invert_yaxis()
    return figure


def _request_line(axes: Axes, row: int, result: Result, origin: float) -> None:
    start, end = result.start - origin, result.end - origin
    tokens = [at - origin for at in result.token_times]
    first = tokens[0] if tokens else end
    axes.hlines(row, start, first, color=WAITING, linewidth=4)
    if tokens:
        axes.hlines(row, first, end, color=DECODING, linewidth=2)
        shown = tokens[:: max(1, -(-len(tokens) // MOST_TICKS))]
        axes.plot(shown, [row] * len(shown), "|", color=DECODING, markersize=5)
    if result.outcome is not Outcome.COMPLETED:
        axes.plot([end], [row], "x", color=REJECTED if result.outcome is Outcome.FAILED else HUNG_UP, markersize=6)
