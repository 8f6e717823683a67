"""Holds the simulation of one box against measurements: figures of docs/benchmarks, and recorded loads.

    python -m bench.simulation.validate                                          # the pages' figures
    python -m bench.simulation.validate --sessions FILE --slots N --costs FILE   # --mode sessions --per-request --json FILE
    python -m bench.simulation.validate --agents TRACE -m MODEL --slots N --costs FILE   # bench.agents, a server with --trace

Exit status: 0 when every figure is within the tolerance, 1 when one is not.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from bench.serve_concurrency import PLAIN_WIDTH
from bench.simulation.boxes import Done, ExactBox
from bench.simulation.costs import DEFAULTS, StepCosts, load_costs
from bench.simulation.figures import figures_of
from bench.simulation.run import Plan, Trail, simulate
from bench.simulation.traced import Agents, measured, read_trace, simulated
from bench.simulation.traffic import Ask, Session, Traffic
from bench.stats import Summary, summarize
from ds4batch.tokenizer.load import load_tokenizer

TOLERANCE = 0.15
_LONG, _WARM = 16_373, 300  # tokens of the prompts that bench.on_card times
_ROUNDS = 6
_APART = 1000  # threads from here on are not the company


class Check(NamedTuple):
    """One figure."""

    name: str
    measured: float
    simulated: float

    @property
    def deviation(self) -> float:
        """Relative to the measurement."""
        if not self.measured:
            return math.inf if self.simulated else 0.0
        return self.simulated / self.measured - 1.0


def published() -> list[Check]:
    """What the pages of docs/benchmarks say of loads over HTTP."""
    return [*_on_h200(), *_on_cpu()]


def _on_h200() -> list[Check]:
    """The loads of bench.on_card."""
    checks = []
    costs = DEFAULTS["h200-qwen3-8b"]
    full = figures_of(_script(costs, [Ask(i, 384, 256, 0.0, ()) for i in range(16)]))
    assert full.itl_s is not None
    checks.append(Check("H200: p50 ITL of 16 sessions, ms", 4.72, 1e3 * (full.itl_s.p50 or 0.0)))
    for budget, gap, ttft, turn in ((14.0, 13.3, 1038.0, 27.6), (15.7, 16.1, 953.0, 28.5)):
        priced = replace(costs, itl_budget=budget / 1e3)
        trail = _script(priced, [*(Ask(i, 384, 768, 0.0, ()) for i in range(15)), Ask(_APART, _LONG, 2, 2.0, ())])
        (long,) = _apart(trail)
        checks.append(Check(f"TTFT of {_LONG} tokens beside 15, budget {budget:g}, ms", ttft, 1e3 * _ttft(long)))
        checks.append(Check("p99 ITL of the 15 meanwhile, ms", gap, 1e3 * (_meanwhile(trail, long).p99 or 0.0)))
        turns = [Ask(_APART, _WARM if i else 1024, 16, 0.0 if i else 1.0, (7 + i,) if i else ()) for i in range(8)]
        trail = _script(priced, [*(Ask(i, 256, 1500, 0.0, ()) for i in range(8)), *turns])
        warm = summarize([_ttft(one) for one in _apart(trail)[1:]]).p50 or 0.0
        checks.append(Check(f"TTFT of a {_WARM}-token turn beside 8, ms", turn, 1e3 * warm))
    return checks


def _on_cpu() -> list[Check]:
    """The loads of bench.with_server: 16 at a time and one, then 16 and a long prompt."""
    costs = DEFAULTS["cpu-demo"]
    checks = [
        Check(f"CPU: decode tok/s at {width}", rate, _decode_rate(_script(costs, _closed(width, requests, 64, 96))))
        for width, requests, rate in ((1, 8, 61.8), (16, 64, 354.0))
    ]
    trail = _script(costs, [*_closed(16, 64, 128, 64), Ask(_APART, 2977, 64, 3.0, ())])
    (long,) = _apart(trail)
    gaps = _meanwhile(trail, long)
    checks.append(Check("TTFT of 2977 tokens beside 16, s", 8.8, _ttft(long)))
    checks.append(Check("p50 ITL meanwhile, ms", 93.0, 1e3 * (gaps.p50 or 0.0)))
    checks.append(Check("p99 ITL meanwhile, ms", 261.0, 1e3 * (gaps.p99 or 0.0)))
    return checks


def _closed(width: int, requests: int, prompt: int, answer: int) -> list[Ask]:
    """Workers that ask again at once."""
    return [Ask(i, prompt, answer, 0.0, (i - width,) if i >= width else ()) for i in range(requests)]


def _decode_rate(trail: Trail) -> float:
    """Tokens behind the first ones, over the time in which anybody decoded."""
    seconds = until = 0.0
    for one in sorted(trail.done, key=lambda one: one.first_token):
        seconds += max(0.0, one.end - max(one.first_token, until))
        until = max(until, one.end)
    return sum(one.request.answer - 1 for one in trail.done) / seconds


def _meanwhile(trail: Trail, long: Done) -> Summary:
    """The others' gaps that overlap the wait for `long`."""
    ends = zip(_box(trail).gaps, _box(trail).gap_ends, strict=True)
    return summarize([gap for gap, end in ends if end > long.request.arrival and end - gap < long.first_token])


def replayed(path: Path, costs: StepCosts, slots: int) -> list[Check]:
    """The sessions of a result of bench.serve_concurrency, asked again with the same lengths. Raises KeyError for another kind.

    Where the result has the server's metrics, all prices are stretched by the one factor that makes the mean step with decode rows
    what the server reported.
    """
    result = json.loads(path.read_text(encoding="utf-8"))
    session = _recorded(result["per_request"], result["config"])
    reported = _step_seconds(result.get("server_delta") or {})
    factor = 1.0
    trail = _again(session, costs, slots)
    for _ in range(_ROUNDS if reported else 0):
        box = _box(trail)
        factor *= reported / (box.decode_seconds / box.decode_steps)
        trail = _again(session, _stretched(costs, factor), slots)
    seen = figures_of(replace(trail, done=[one for one in trail.done if one.request.thread != _APART]))
    assert seen.itl_s is not None
    return [
        Check("TTFT mean, ms", result["ttft_ms"]["mean"], 1e3 * (seen.ttft_s.mean or 0.0)),
        Check("ITL mean, ms", result["itl_ms"]["mean"], 1e3 * (seen.itl_s.mean or 0.0)),
        Check("E2E mean, ms", result["e2el_ms"]["mean"], 1e3 * (seen.e2e_s.mean or 0.0)),
        Check("output tokens/s", result["output_throughput"], seen.output_throughput),
        Check("duration, s", result["duration_s"], seen.duration_s),
        Check("cached share", result["cached_tokens"] / result["prompt_tokens"], seen.cached_share),
    ]


def of_agents(real: Agents, model: Agents) -> list[Check]:
    """The same run twice. Tiers that reused nothing in both are left out."""

    def mean(values: Iterable[float]) -> float:
        return 1e3 * (summarize(list(values)).mean or 0.0)

    def median(values: Iterable[float]) -> float:
        return 1e3 * (summarize(list(values)).p50 or 0.0)

    shares = [sum(one.reused.values()) / one.prompt_tokens for one in (real, model)]
    return [
        Check("TTFT mean, ms", mean(real.ttft.values()), mean(model.ttft.values())),
        Check("TTFT p50, ms", median(real.ttft.values()), median(model.ttft.values())),
        Check("E2E mean, ms", mean(real.e2e.values()), mean(model.e2e.values())),
        Check("a token behind the first, ms", 1e3 * real.token, 1e3 * model.token),
        Check("from first to last, s", real.makespan, model.makespan),
        Check("output tokens/s", real.output_tokens / real.makespan, model.output_tokens / model.makespan),
        Check("cached share", *shares),
        *(
            Check(f"tokens reused, {tier}", real.reused[tier], model.reused[tier])
            for tier in sorted({*real.reused, *model.reused})
        ),
    ]


def _again(session: Session, costs: StepCosts, slots: int) -> Trail:
    traffic = Traffic(kind="chat", ctx=1 << 17)
    return simulate(Plan(costs=costs, traffic=traffic, slots=slots, requests=len(session.asks), clients=1), [session])


def _step_seconds(metrics: dict[str, float]) -> float:
    """The mean step with decode rows, as the server counted it; 0 where it did not."""
    total, steps = (
        sum(value for name, value in metrics.items() if name.startswith(f"ds4batch_decode_step_seconds_{part}"))
        for part in ("sum", "count")
    )
    return total / steps if steps else 0.0


def _stretched(costs: StepCosts, factor: float) -> StepCosts:
    return replace(
        costs,
        decode=tuple((x, y * factor) for x, y in costs.decode),
        chunk=tuple((x, y * factor) for x, y in costs.chunk),
        held=costs.held * factor,
        reach=costs.reach * factor,
        request=costs.request * factor,
    )


def _recorded(requests: Sequence[dict[str, Any]], config: dict[str, Any]) -> Session:
    """All conversations as threads of one session: each turn follows the one before."""
    threads: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for one in requests:
        threads[one["index"] - one["turn"]].append(one)
    shared, firsts = 0, [turns[0] for turns in threads.values()]
    if config.get("shared_prefix"):  # what the prompts have in common is what a later thread found of an earlier one
        shared = max((one["cached_tokens"] for one in firsts), default=0)
    warm = shared and min(one["cached_tokens"] for one in firsts) > 0  # a request before the load had left it there
    asks: list[Ask] = [Ask(_APART, 1, 1, 0.0, ())] if warm else []
    for thread, turns in threads.items():
        held, last = shared, len(asks[:1]) - 1 if warm else -1
        for turn in sorted(turns, key=lambda one: one["turn"]):
            fresh = max(1, turn["prompt_tokens"] - held)
            asks.append(Ask(thread, fresh, turn["output_tokens"], 0.0, (last,) if last >= 0 else ()))
            last, held = len(asks) - 1, held + fresh + turn["output_tokens"]
    return Session(0, 0, 0, shared, tuple(asks))


def _script(costs: StepCosts, asks: Sequence[Ask]) -> Trail:
    return simulate(
        Plan(costs=costs, traffic=Traffic(), slots=16, requests=len(asks), clients=1), [Session(0, 0, 0, 0, tuple(asks))]
    )


def _box(trail: Trail) -> ExactBox:
    (box,) = trail.boxes
    assert isinstance(box, ExactBox)
    return box


def _apart(trail: Trail) -> list[Done]:
    return [one for one in trail.done if one.request.thread == _APART]


def _ttft(done: Done) -> float:
    return done.first_token - done.request.arrival


def print_checks(out: Console, checks: Sequence[Check]) -> bool:
    """The table; whether all are within the tolerance."""
    table = Table()
    for name in ("figure", "measured", "simulated", "deviation"):
        table.add_column(name, justify="left" if name == "figure" else "right")
    for check in checks:
        wrong = "" if abs(check.deviation) <= TOLERANCE else " !"
        table.add_row(check.name, f"{check.measured:.4g}", f"{check.simulated:.4g}", f"{check.deviation:+.1%}{wrong}")
    out.print(table)
    return all(abs(check.deviation) <= TOLERANCE for check in checks)


def _checks(options: argparse.Namespace) -> list[Check]:
    """What the options name. Raises OSError and ValueError."""
    if options.sessions is not None:
        return replayed(options.sessions, load_costs(options.costs), options.slots)
    if options.agents is None:
        return published()
    tokenizer = load_tokenizer(options.model)
    lines = read_trace(options.agents, tokenizer)
    real = measured(lines)
    model = simulated(lines, tokenizer, load_costs(options.costs), options.slots, options.ctx)
    if options.plot is not None:
        from bench.simulation.plots import plot_requests  # matplotlib is an extra

        plot_requests(options.plot, real, model)
    return of_agents(real, model)


def main(argv: Sequence[str] | None = None) -> int:
    """Compare and print."""
    parser = argparse.ArgumentParser(prog="validate", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--sessions", type=Path, default=None, help="result of bench.serve_concurrency --mode sessions --per-request"
    )
    parser.add_argument("--agents", type=Path, default=None, help="trace of a server that bench.agents --base-url asked")
    parser.add_argument("-m", "--model", default="", help="of that server, whose tokenizer is needed: GGUF file or directory")
    parser.add_argument("--slots", type=int, default=16, help="of that server (default: %(default)s)")
    parser.add_argument("--ctx", type=int, default=4096, help="of that server (default: %(default)s)")
    parser.add_argument("--costs", default="cpu-demo", help="of that server, a name or a JSON file (default: %(default)s)")
    parser.add_argument("--plot", type=Path, default=None, metavar="FILE", help="with --agents: every request's times, PNG")
    options = parser.parse_args(argv)
    if options.agents is not None and not options.model:
        parser.error("--agents needs the server's --model")
    try:
        checks = _checks(options)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return 0 if print_checks(Console() if sys.stdout.isatty() else Console(width=PLAIN_WIDTH, soft_wrap=True), checks) else 1


if __name__ == "__main__":
    sys.exit(main())
