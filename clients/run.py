"""Runs the agents and the SDKs against scripted servers, and prints a table of how they did.

    python -m clients.run [--dialects NAME,...] [--crowd N] [--keep DIR] [--no-agents] [--no-sdks]

Every agent does a task of three turns alone, once a dialect, then N of them at once in the first dialect; the SDKs run once a
dialect. The exit status is 1 when anything failed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from clients.agents import AGENTS, FOLDER, Agent
from clients.dialects import DIALECTS
from clients.sdks import SDKS, run_sdk, sdk_answers
from clients.server import Server, serving
from clients.tool_loop import Instance, Outcome

CROWD_STEP_SECONDS = 0.004  # slow enough that the conversations meet
SETTLED = ("vllm:num_requests_running", "vllm:num_requests_waiting")  # 0 when everybody is gone


class Report:
    """The rows of the table, and whether all is well."""

    def __init__(self) -> None:
        self.console = Console()
        self.failed = False
        self._table = Table("what", "dialect", "result", "s", "cached/held, turns 2 and 3", box=box.SIMPLE)
        self._problems: list[str] = []

    def add(self, what: str, dialect: str, seconds: float, detail: str, problems: Sequence[str]) -> None:
        """One thing that was tried."""
        self._table.add_row(what, dialect, "FAILED" if problems else "ok", f"{seconds:.1f}", detail)
        self._problems += [f"{what}, {dialect}: {problem}" for problem in problems]
        self.failed = self.failed or bool(problems)
        self.console.print(f"{what}, {dialect}: {'FAILED' if problems else 'ok'}", markup=False, highlight=False)

    def add_outcome(self, what: str, dialect: str, outcome: Outcome) -> None:
        """One agent."""
        pairs = zip(outcome.cached[1:], outcome.frontiers, strict=False)
        self.add(what, dialect, outcome.seconds, " ".join(f"{cached}/{held}" for cached, held in pairs), outcome.problems)

    def end(self) -> None:
        """Print the table, and what went wrong."""
        self.console.print(self._table)
        for problem in self._problems:
            self.console.print(problem, markup=False, highlight=False, soft_wrap=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(prog="clients", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dialects", default=",".join(DIALECTS), help="of the scripted model (default: %(default)s)")
    parser.add_argument("--crowd", type=int, default=16, help="agents at once; 0 leaves that out (default: %(default)s)")
    parser.add_argument("--keep", type=Path, help="leave scripts, traces, homes and outputs in this new folder")
    parser.add_argument("--no-agents", action="store_true", help="leave the agents out")
    parser.add_argument("--no-sdks", action="store_true", help="leave the SDKs out")
    options = parser.parse_args(argv)
    dialects = options.dialects.split(",")
    if unknown := set(dialects) - set(DIALECTS):
        parser.error(f"--dialects: unknown {', '.join(sorted(unknown))}; there are {', '.join(DIALECTS)}")
    folder = options.keep or Path(tempfile.mkdtemp(prefix="clients-"))
    folder.mkdir(parents=True, exist_ok=True)
    report = Report()
    try:
        for dialect in dialects:
            if not options.no_agents:
                _alone(report, dialect, folder / f"{dialect}-alone")
            if not options.no_sdks:
                _sdks(report, dialect, folder / f"{dialect}-sdks")
        if options.crowd and not options.no_agents:
            _crowd(report, dialects[0], options.crowd, folder / "crowd")
    finally:
        if not options.keep:
            shutil.rmtree(folder, ignore_errors=True)
    report.end()
    return int(report.failed)


def _alone(report: Report, dialect: str, folder: Path) -> None:
    instances = [Instance(agent, 1, folder / "agents") for agent in AGENTS]
    with serving(_script(dialect, instances), folder / "server", sum(agent.sessions for agent in AGENTS)) as server:
        for instance in instances:
            report.add_outcome(_titled(instance.agent), dialect, instance.run(server))
        report.add("server afterwards", dialect, 0, "", _settled(server))


def _crowd(report: Report, dialect: str, size: int, folder: Path) -> None:
    """All at once, each kind of agent as often as the others."""
    instances = [Instance(AGENTS[i % len(AGENTS)], 1 + i // len(AGENTS), folder / "agents") for i in range(size)]
    script = _script(dialect, instances) | {"step_seconds": CROWD_STEP_SECONDS}
    slots = sum(instance.agent.sessions for instance in instances)
    with serving(script, folder / "server", slots) as server:
        with ThreadPoolExecutor(size) as pool:
            outcomes = list(pool.map(lambda instance: instance.run(server), instances))
        for instance, outcome in zip(instances, outcomes, strict=True):
            report.add_outcome(f"{instance.name} of {size}", dialect, outcome)
        met = _most_at_once(outcomes)
        report.add("server afterwards", dialect, 0, f"{met} conversations at once, {slots} slots", _settled(server))


def _sdks(report: Report, dialect: str, folder: Path) -> None:
    with serving({"dialect": dialect, "answers": sdk_answers(dialect)}, folder / "server") as server:
        for sdk in SDKS:
            seconds, passed, problems = run_sdk(sdk, server)
            report.add(sdk.name, dialect, seconds, f"{passed} checks", problems)
        report.add("server afterwards", dialect, 0, "", _settled(server))


def _script(dialect: str, instances: Sequence[Instance]) -> dict[str, object]:
    return {"dialect": dialect, "answers": [one for instance in instances for one in instance.answers(dialect)]}


def _titled(agent: Agent) -> str:
    version = json.loads((FOLDER / "node_modules" / agent.package / "package.json").read_text())["version"]
    return f"{agent.name} {version}"


def _settled(server: Server) -> list[str]:
    """What the server still does though nobody asks, and what it counted otherwise than its trace."""
    problems = [f"{name} is {server.metric(name):g}" for name in SETTLED if server.metric(name)]
    traced = sum(one["routed"]["cached_tokens"] for one in server.requests() if one["routed"])
    counted = server.metric("vllm:prefix_cache_hits_total")
    return problems if counted == traced else [*problems, f"the metrics count {counted:g} cached tokens, the trace {traced}"]


def _most_at_once(outcomes: Sequence[Outcome]) -> int:
    """How many conversations were under way at the busiest moment."""
    borders = sorted([(outcome.span[0], 1) for outcome in outcomes] + [(outcome.span[1], -1) for outcome in outcomes])
    most = now = 0
    for _, step in borders:
        now += step
        most = max(most, now)
    return most


if __name__ == "__main__":
    sys.exit(main())
