"""One run: batches of requests, and a look at the server behind each."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from bench.hostile.case import Case
from bench.hostile.client import Outcome, send
from bench.hostile.mix import Mix
from bench.hostile.oracle import Oracle
from bench.hostile.watch import Facts, Probe, Watch, get

HANG_ROUNDS = 600
"""Rounds of the probe, about a minute of a server that answers others, without a byte for the request."""
SPARE_FILES = 2
"""Files that the front may have open beyond those at the beginning: a probe's connection, and one that is being closed."""


@dataclass
class Record:
    """What happened to the requests of one kind."""

    sent: int = 0
    answers: Counter[str] = field(default_factory=Counter)
    slowest: tuple[float, str] = (0.0, "")  # seconds, and which
    failures: int = 0


class Attack:
    """A run against one server."""

    def __init__(self, url: str, seed: int, workers: int) -> None:
        """Raises OSError for a server that does not answer."""
        self.url = url
        self.seed = seed
        host, _, port = url.removeprefix("http://").rpartition(":")
        self._address = (host, int(port))
        _, description = get(self._address, "/openapi.json")
        self.mix = Mix(description, seed)
        self.oracle = Oracle(description)
        self.watch = Watch(self._address)
        self._workers = workers
        self._lock = threading.Lock()
        self._under_way: dict[int, str] = {}
        self.probe = Probe(self._address, lambda: list(self._under_way.values()))
        self.records: dict[str, Record] = {}
        self.failures: list[str] = []
        self.facts: list[tuple[int, Facts]] = []
        self.sent = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.probe.close()

    def run(self, requests: int, batch: int, minutes: float = math.inf) -> None:
        """Send so many in batches, fewer where the time is over before."""
        end = time.monotonic() + 60 * minutes
        self.failures += self.watch.same_answers()
        self.watch.fill()
        begun = self.watch.settled(0, 1.0)
        for cases in self.mix.batches(requests, batch):
            if time.monotonic() > end:
                return
            self.probe.slowest_in_batch = 0.0
            with ThreadPoolExecutor(self._workers) as pool:
                list(pool.map(self.one, cases))
            self._look(begun)
            last = self.facts[-1][1]
            print(
                f"hostile: {self.sent}/{requests}, {len(self.failures)} failures, front {last.front_bytes >> 20} MiB, engine "
                f"{last.engine_bytes >> 20} MiB, /health at most {self.probe.slowest_in_batch:.2f} s",
                file=sys.stderr,
                flush=True,
            )

    def one(self, case: Case) -> Outcome:
        """Send one, judge it and write it down."""
        me = threading.get_ident()
        self._under_way[me] = f"{case.kind} {case.name}"[:100]
        outcome = send(case, self._address, lambda: self.probe.rounds, HANG_ROUNDS)
        self._under_way.pop(me, None)
        with self._lock:
            problems = self.oracle.problems(case, outcome)
            record = self.records.setdefault(case.kind, Record())
            record.sent += 1
            self.sent += 1
            record.slowest = max(record.slowest, (outcome.seconds, case.name))
            record.answers.update([str(answer.status) for answer in outcome.answers] or [outcome.end])
            record.failures += bool(problems)
            self.failures += [
                f"{case.kind} {case.name}: {problem}\n    {case.reproduction(self.url, self.seed)}" for problem in problems
            ]
        return outcome

    def _look(self, begun: Facts) -> None:
        found = self.watch.same_answers()
        now = self.watch.settled(begun.front_files + SPARE_FILES)
        if now.status != "ok":
            found.append(f"/health says {now.status}")
        if (now.engine_pid, now.restarts) != (begun.engine_pid, begun.restarts):
            found.append(f"the engine restarted: {begun.restarts} to {now.restarts}")
        if now.running or now.waiting:
            found.append(f"{now.running} requests run and {now.waiting} wait, though none was left")
        if now.front_files > begun.front_files + SPARE_FILES:
            found.append(f"the front has {now.front_files} open files, {begun.front_files} at the beginning")
        if now.engine_files > begun.engine_files:
            found.append(f"the engine has {now.engine_files} open files, {begun.engine_files} at the beginning")
        self.facts.append((self.sent, now))
        self.failures += [f"after {self.sent} requests: {problem}" for problem in found]


def again(attack: Attack, only: str) -> int:
    """One request again, its answer printed."""
    group, _, number = only.partition(":")
    case = attack.mix.case(group, int(number))
    print(
        f"{case.kind} {case.name}: {case.size} bytes, {case.parts[0][:2000]!r}" if isinstance(case.parts[0], bytes) else case.name
    )
    outcome = attack.one(case)
    print(f"{outcome.end} after {outcome.seconds:.2f} s: {outcome.raw[:4000].decode(errors='replace')}")
    print("\n".join(attack.failures) or "no failure")
    return 1 if attack.failures else 0
