"""The tables and the JSON of a soak: what was asked, what was done to the server, how it ended, what did not hold."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.environment import Environment
from bench.soak.books import Reading, total
from bench.soak.judge import Evidence, Finding
from bench.soak.ledger import Ending, Record
from bench.soak.reference import Comparison, Wrong
from bench.soak.wire import Manner

CLOCK_MOVED_SECONDS = 1800  # between the server's clock and ours: an answer of a time that was moved

EFFECTS = {
    "engine restarts": ("ds4batch_engine_ready_total", {}),
    "slow readers cut off": ("ds4batch_cancelled_total", {"cause": "slow_reader"}),
    "clients that left": ("ds4batch_cancelled_total", {"cause": "client"}),
    "saves skipped: no space": ("ds4batch_disk_skipped_total", {"reason": "no_space"}),
    "saves skipped: too little free": ("ds4batch_disk_skipped_total", {"reason": "free_floor"}),
    "saves skipped: budget": ("ds4batch_disk_skipped_total", {"reason": "budget"}),
    "saves skipped: I/O error": ("ds4batch_disk_skipped_total", {"reason": "io"}),
    "checkpoints evicted": ("ds4batch_disk_evicted_total", {}),
    "bad checkpoints removed": ("ds4batch_disk_removed_total", {}),
    "checkpoints written": ("ds4batch_disk_store_total", {}),
    "sessions restored from disk": ("ds4batch_disk_load_total", {"result": "hit"}),
    "forks": ("ds4batch_route_total", {"tier": "fork"}),
    "prompt tokens reused": ("vllm:prefix_cache_hits_total", {}),
    "prompt tokens": ("vllm:prefix_cache_queries_total", {}),
    "tokens generated": ("vllm:generation_tokens_total", {}),
    "draft tokens": ("vllm:spec_decode_num_draft_tokens_total", {}),
    "draft tokens accepted": ("vllm:spec_decode_num_accepted_tokens_total", {}),
}
"""What the server itself counted of the faults and of the load: that they arrived."""


def figures(
    evidence: Evidence, findings: Sequence[Finding], readings: dict[int, tuple[Reading, Reading]], methods: dict[str, str]
) -> dict[str, Any]:
    """Everything as plain values."""
    records = evidence.records
    return {
        "held": not findings,
        "findings": [asdict(finding) for finding in findings],
        "requests": len(records),
        "by_api": dict(Counter(record.api for record in records)),
        "by_kind": dict(Counter(record.kind for record in records)),
        "by_manner": dict(Counter(record.behaviour.manner.value for record in records)),
        "outcomes": {api: dict(Counter(r.ending.value for r in records if r.api == api)) for api in _apis(records)},
        "faults": dict(Counter(fault.kind.value for fault in evidence.faults)),
        "methods": methods,
        "fault_list": [asdict(fault) for fault in evidence.faults],
        "counted_by_the_server": {
            name: sum(total(after, series, **labels) - total(before, series, **labels) for before, after in readings.values())
            for name, (series, labels) in EFFECTS.items()
        },
        "answers": _answers(evidence.comparison),
        "lost_slots": sum(look.slots - look.at_rest for look in evidence.looks),
        "quiet_points": len(evidence.looks),
        "counters_off": sum(len(look.imbalances) + len(look.window) for look in evidence.looks),
        "unsure_requests": sum(len(record.fates) > 1 for record in records),
        "moved_clock": sum(_moved(record) for record in records),
        "restarts": evidence.restarts,
        "memory": [asdict(series) for series in evidence.series],
        "held_at_quiet_points": [
            {"life": look.life, "engine_pid": look.engine_pid, "front": _held(look.front), "engine": _held(look.engine)}
            for look in evidence.looks
        ],
        "stops": [
            {
                "life": end.life,
                "streams": len(end.streams),
                "decoding": end.running,
                "ended_properly": end.well_ended,
                "seconds": end.stopped.seconds,
                "status": end.stopped.code,
                "checkpoints": end.written,
            }
            for end in evidence.ends
        ],
    }


def _held(holdings: Any) -> dict[str, int] | None:
    return None if holdings is None else asdict(holdings)


def _answers(comparison: Comparison | None) -> dict[str, Any] | None:
    if comparison is None:
        return None
    return {
        "different_requests": comparison.different,
        "whole": comparison.whole,
        "beginnings": comparison.beginnings,
        "equal_with_history_as_sampled": comparison.as_sampled,
        "wrong": len(comparison.wrong),
        "not_compared": len(comparison.unanswered),
        "reference_was_warm": comparison.warm,
        "seconds": comparison.seconds,
        "wrong_answers": [_wrong(one) for one in comparison.wrong],
    }


def _wrong(one: Wrong) -> dict[str, Any]:
    ask = one.record.ask
    return {
        "life": one.record.life,
        "number": one.record.number,
        "began": one.record.began,
        "ended": one.record.ended,
        "ending": one.record.ending,
        "path": ask.path if ask else "",
        "body": ask.body if ask else {},
        "where": one.where,
        "said": asdict(one.record.said),
        "alone": asdict(one.alone),
    }


def _moved(record: Record) -> bool:
    """Whether the answer was given while the server's clock was elsewhere. Monotonic and wall clock run alike here."""
    return bool(record.said.created) and abs(record.said.created - record.wall) > CLOCK_MOVED_SECONDS


def _apis(records: Sequence[Record]) -> list[str]:
    return sorted({record.api for record in records})


def write_json(path: Path, environment: Environment, options: dict[str, Any], values: dict[str, Any]) -> None:
    """Everything, with where and how it was taken."""
    document = {"environment": asdict(environment), "options": options, **values}
    path.write_text(json.dumps(document, indent=1, default=str) + "\n", encoding="utf-8")


def show(console: Console, values: dict[str, Any]) -> None:
    """The tables that a person reads."""
    endings = [ending.value for ending in Ending if any(ending.value in counts for counts in values["outcomes"].values())]
    table = Table("API", "requests", *endings, title="Requests by API and by how they ended")
    for api, counts in values["outcomes"].items():
        table.add_row("hostile" if api == "-" else api, str(sum(counts.values())), *(str(counts.get(e, 0)) for e in endings))
    console.print(table)
    manners = values["by_manner"]
    _pairs(console, "Clients", {manner.value: manners.get(manner.value, 0) for manner in Manner})
    _pairs(console, "Faults injected", values["faults"] | {"": ""} | values["methods"])
    _pairs(console, "Counted by the server", {name: f"{value:.0f}" for name, value in values["counted_by_the_server"].items()})
    table = Table("process", "life", "seconds", "MiB first", "MiB last", "MiB/h", title="Memory behind the warm-up")
    for series in values["memory"]:
        slope = "too short" if series["slope_mib_h"] is None else f"{series['slope_mib_h']:+.1f}"
        ends = f"{series['first_mib']:.1f}", f"{series['last_mib']:.1f}"
        table.add_row(series["process"], str(series["life"]), f"{series['seconds']:.0f}", *ends, slope)
    console.print(table)
    table = Table(
        "life", "streams", "ended properly", "seconds", "status", "checkpoints", title="SIGTERM in the middle of streams"
    )
    for stop in values["stops"]:
        seconds = f"{stop['seconds']:.1f}"
        names = ("life", "streams", "ended_properly")
        table.add_row(*(str(stop[name]) for name in names), seconds, str(stop["status"]), str(stop["checkpoints"]))
    console.print(table)
    answers = values["answers"] or {}
    held = {
        "quiet points": values["quiet_points"],
        "lost slots": f"{values['lost_slots']:g}",
        "counters off": values["counters_off"],
        "requests that may count in more than one way": values["unsure_requests"],
        "answers under a moved clock": values["moved_clock"],
        "restarts of the engine": sum(values["restarts"].values()),
        **{name.replace("_", " "): value for name, value in answers.items() if name not in ("wrong_answers", "seconds")},
    }
    _pairs(console, "What held", held)
    for finding in values["findings"]:
        console.print(f"NOT HELD: {finding['rule']}: {finding['detail']}", style="bold red", markup=False)
    console.print("everything held" if values["held"] else f"{len(values['findings'])} findings", style="bold")


def _pairs(console: Console, title: str, pairs: dict[str, Any]) -> None:
    table = Table("what", "", title=title)
    for name, value in pairs.items():
        table.add_row(name, str(value))
    console.print(table)
