"""Evidence of a soak in which everything held, to be spoilt by tests one piece at a time."""

from __future__ import annotations

from typing import Any

from bench.soak.asks import Wish, ask_of
from bench.soak.faults import Fault, FaultKind
from bench.soak.judge import Evidence, judge
from bench.soak.ledger import Ending, Fate, Record
from bench.soak.memory import Series
from bench.soak.processes import Holdings
from bench.soak.quiet import Look
from bench.soak.reference import Comparison
from bench.soak.replies import Said
from bench.soak.stop import End
from bench.soak.subject import Stopped
from bench.soak.wire import PLAIN

SLOTS, QUEUE = 4, 8
ASK = ask_of(Wish("chat", ("Hi.",)))
SAID = Said("Hello there.", finish="stop", prompt_tokens=7, cached_tokens=3, tokens=4)


def record(number: int = 0, **other: Any) -> Record:
    """An answer that is as it should be."""
    values: dict[str, Any] = {
        "number": number, "life": 0, "api": "chat", "kind": "single", "behaviour": PLAIN, "began": 10.0, "ended": 11.0,
        "ending": Ending.ANSWERED, "fates": frozenset({Fate.STOP}), "status": 200, "said": SAID, "ask": ASK, "limit": 24,
    }  # fmt: skip
    return Record(**(values | other))


def refused(**other: Any) -> Record:
    """A 503 as it should be."""
    fates = frozenset({Fate.UNAVAILABLE, Fate.ERROR})
    return record(ending=Ending.UNAVAILABLE, fates=fates, status=503, said=Said(), retry_after="2", **other)


def look(**other: Any) -> Look:
    """A quiet point as it should be."""
    values: dict[str, Any] = {
        "life": 0, "at": 50.0, "drained": True, "running": 0, "waiting": 0, "slots": SLOTS, "at_rest": SLOTS, "widest": SLOTS,
        "front": Holdings(90 << 20, 11, 4), "engine": Holdings(900 << 20, 7, 8), "engine_pid": 100, "requests": 3,
    }  # fmt: skip
    return Look(**(values | other))


def end(**other: Any) -> End:
    """A SIGTERM as it should end."""
    streams = tuple(record(i, kind="stop", ending=Ending.FAILED, fates=frozenset({Fate.ERROR})) for i in range(SLOTS))
    values: dict[str, Any] = {
        "life": 0, "stopped": Stopped(1.5, 0, ()), "streams": streams, "running": SLOTS, "written": 3, "unsound": 0, "temporary": 0,
    }  # fmt: skip
    return End(**(values | other))


def series(**other: Any) -> Series:
    """A flat process."""
    values: dict[str, Any] = {
        "process": "engine", "pid": 100, "life": 0, "seconds": 300.0, "samples": 120, "first_mib": 900.0, "last_mib": 900.5,
        "slope_mib_h": 3.0,
    }  # fmt: skip
    return Series(**(values | other))


def fault(kind: FaultKind, began: float, ended: float, **other: Any) -> Fault:
    """One fault of life 0."""
    return Fault(**({"kind": kind, "life": 0, "began": began, "ended": ended, "detail": ""} | other))


def evidence(**other: Any) -> Evidence:
    """Everything held; `other` are the members to be spoilt."""
    values: dict[str, Any] = {
        "slots": SLOTS, "queue": QUEUE, "records": [record(i) for i in range(3)], "looks": [look(), look(at=90.0)], "ends": [end()],
        "series": [series(), series(process="front")], "restarts": {0: 0}, "comparison": Comparison(different=1, whole=3),
    }  # fmt: skip
    return Evidence(**(values | other))


def rules(found: Evidence) -> set[str]:
    """The rules that it breaks."""
    return {finding.rule for finding in judge(found)}
