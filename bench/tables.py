"""Prints the result of a load for a person to read.

Owns the layout of the final tables. It computes nothing: every figure comes from a report.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bench.report import LAG_WARNING_MS, Report, SweepRow
from bench.stats import Summary

LATENCIES = (("TTFT", "ttft_ms"), ("TPOT", "tpot_ms"), ("ITL", "itl_ms"), ("E2EL", "e2el_ms"))


def print_report(console: Console, report: Report) -> None:
    """One load: what was done, how fast, and how long it took."""
    config = report.config
    lengths = f"prompt {config['prompt_tokens']}, answer {config['max_tokens']} tokens"
    title = f"{config['model']}  {config['mode']}  {config['load']}  {lengths}"
    console.print(f"\n[bold]{escape(title)}[/bold]", highlight=False)
    console.print(_totals(report))
    console.print(_latencies(report))
    for turn in report.turns:
        share = turn.cached_tokens / turn.prompt_tokens if turn.prompt_tokens else 0.0
        console.print(
            f"turn {turn.turn}: TTFT p50 {_figure(turn.ttft_ms.p50)} ms, prompt {turn.prompt_tokens} tokens, "
            f"{share:.0%} of them cached",
            highlight=False,
        )
    _print_intruder(console, report)
    _print_server(console, report)
    for warning in warnings(report):
        console.print(f"[yellow]warning:[/yellow] {warning}", highlight=False)
    for failure in report.failures:
        console.print(f"[red]rejected[/red] {failure.count} x {failure.reason}: ", end="", highlight=False)
        console.print(failure.example, markup=False, highlight=False)


def _totals(report: Report) -> Table:
    table = Table(show_header=False, box=None)
    counts = f"{report.completed} completed, {report.failed} failed"
    if report.disconnected:
        counts += f", {report.disconnected} hung up on purpose"
    if report.interrupted:
        counts += " (interrupted)"
    decode, full_width = report.decode_rate, report.full_width_decode_rate
    rows = [
        ("requests", counts),
        (
            "duration",
            f"{report.duration_s:.2f} s, {report.request_throughput:.2f} requests/s, at most {report.peak_concurrency} at once",
        ),
        ("prompt tokens", f"{report.prompt_tokens}, of them cached {report.cached_tokens}"),
        (
            "output tokens",
            f"{report.output_tokens}, {report.output_throughput:.1f} tokens/s, "
            f"in the best second {report.peak_output_tokens_per_s:.0f}",
        ),
        ("all tokens", f"{report.total_token_throughput:.1f} tokens/s"),
        (
            "decode rate",
            f"{_figure(decode.tokens_per_s)} tokens/s over {decode.seconds:.2f} s of decoding",
        ),
        (
            "  at full width",
            f"{_figure(full_width.tokens_per_s)} tokens/s over {full_width.seconds:.2f} s",
        ),
    ]
    if report.goodput is not None:
        goals = ", ".join(f"{name} <= {limit:g} ms" for name, limit in report.goodput.goals_ms.items())
        rows.append(("goodput", f"{report.goodput.requests_per_s:.2f} requests/s, {report.goodput.fraction:.0%} within {goals}"))
    for row in rows:
        table.add_row(*row)
    return table


def _latencies(report: Report) -> Table:
    table = Table()
    for name in ("ms", "mean", "std", "p50", "p75", "p90", "p95", "p99", "max", "n"):
        table.add_column(name, justify="left" if name == "ms" else "right")
    rows = [(name, getattr(report, attribute)) for name, attribute in LATENCIES]
    if report.dispatch_lag_ms.n:
        rows.append(("lag", report.dispatch_lag_ms))
    for name, summary in rows:
        table.add_row(name, *summary_cells(summary))
    if any(summary.low_n and summary.n for _, summary in rows):
        table.caption = "* fewer than 100 values: p99 is close to the largest of them"
    return table


def summary_cells(summary: Summary) -> list[str]:
    """mean, std, p50 to p99, max and n of a summary as text; p99 carries a star where it rests on few values."""
    figures = [summary.mean, summary.std, summary.p50, summary.p75, summary.p90, summary.p95, summary.p99, summary.max]
    cells = [_figure(figure) for figure in figures]
    if summary.low_n and summary.n:
        cells[6] += "*"
    return [*cells, str(summary.n)]


def _print_intruder(console: Console, report: Report) -> None:
    intruder = report.intruder
    if intruder is None or intruder.at_s is None:
        return
    during, outside = intruder.itl_during_ms, intruder.itl_outside_ms
    console.print(
        f"intruder: {intruder.prompt_tokens} prompt tokens at {intruder.at_s:.2f} s, "
        f"TTFT {_figure(intruder.ttft_ms)} ms; {intruder.decoders} others decoded meanwhile\n"
        f"  their ITL until its first token: {_brief(during)}\n"
        f"  their ITL at other times:        {_brief(outside)}",
        highlight=False,
    )


def _brief(summary: Summary) -> str:
    return f"p50 {_figure(summary.p50)}, p99 {_figure(summary.p99)}, max {_figure(summary.max)} ms, n {summary.n}"


def _print_server(console: Console, report: Report) -> None:
    server = report.server
    if server is None:
        return
    if server.running_after is not None:
        console.print(
            f"server afterwards: {server.running_after:g} running, {server.waiting_after or 0:g} waiting",
            highlight=False,
        )
    if server.queue_ms is not None:
        console.print(
            f"server queue: mean {_figure(server.queue_ms.mean)}, p99 {_figure(server.queue_ms.p99)} ms",
            highlight=False,
        )
    if server.spec is not None:
        drafts = f"drafts: {server.spec.drafts}, accepted {server.spec.rate or 0:.0%}"
        console.print(f"{drafts}, {_figure(server.spec.mean_len)} tokens a step", highlight=False)


def warnings(report: Report) -> list[str]:
    """What a reader should know before believing the figures."""
    found = []
    lag = report.dispatch_lag_ms.p99
    if lag is not None and lag > LAG_WARNING_MS:
        cause = (
            "waiting for --max-concurrency counts" if report.config["max_concurrency"] else "this client is too slow for the rate"
        )
        found.append(f"p99 dispatch lag is {lag:.1f} ms, above {LAG_WARNING_MS:g}: {cause}")
    if report.completed and report.itl_ms.n + report.completed < 0.9 * report.output_tokens:
        found.append("chunks carry several tokens each, so ITL is not a time per token; compare TPOT")
    return found


def print_sweep(console: Console, rows: Sequence[SweepRow]) -> None:
    """A sweep, one line a concurrency."""
    table = Table(title=f"against concurrency {rows[0].concurrency}")
    for name in (
        "concurrency",
        "requests",
        "failed",
        "decode tok/s",
        "ratio",
        "full width tok/s",
        "ratio",
        "output tok/s",
        "ratio",
    ):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            str(row.concurrency),
            str(row.requests),
            str(row.failed),
            _figure(row.decode_tokens_per_s),
            _figure(row.decode_ratio),
            _figure(row.full_width_tokens_per_s),
            _figure(row.full_width_ratio),
            _figure(row.output_throughput),
            _figure(row.throughput_ratio),
        )
    console.print(table)


def _figure(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if abs(value) < 1000 else f"{value:.0f}"
