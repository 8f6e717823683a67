"""Whether a soak held. Pure: evidence in, findings out; no finding means that everything held.

Each rule is one function, and says in its findings what was seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from bench.soak.faults import Fault, FaultKind
from bench.soak.ledger import BAD_ENDINGS, Ending, Record
from bench.soak.memory import LIMIT_MIB_H, Series
from bench.soak.quiet import Look
from bench.soak.reference import Comparison
from bench.soak.stop import LIMIT_SECONDS, End

POOL_THREADS = 2  # that a process may start late: a pool makes them when it first needs them
SHOWN = 5  # findings of one kind that are spelled out

T = TypeVar("T")


@dataclass(frozen=True)
class Finding:
    """Something that must not be."""

    rule: str
    detail: str


@dataclass
class Evidence:
    """All that was seen."""

    slots: int
    queue: int  # requests that may wait
    records: list[Record] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    looks: list[Look] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)
    series: list[Series] = field(default_factory=list)
    restarts: dict[int, int] = field(default_factory=dict)  # by life, as the server counts its engine's
    comparison: Comparison | None = None
    broken_off: str = ""  # why the run ended before its time


def judge(evidence: Evidence) -> list[Finding]:
    """Everything that did not hold."""
    return [finding for rule in RULES for finding in rule(evidence)]


def answers_are_solo_answers(evidence: Evidence) -> Iterator[Finding]:
    """Every answer and every beginning of one is what the same request gets alone; and all were compared."""
    comparison = evidence.comparison
    if comparison is None:
        yield Finding("answers", "none was compared")
        return
    yield from _few("answers", comparison.wrong, lambda w: f"life {w.record.life}, {_named(w.record)}: {w.where}")
    if comparison.unanswered:
        yield Finding("answers", f"{len(comparison.unanswered)} requests got no answer alone")


def answers_end_properly(evidence: Evidence) -> Iterator[Finding]:
    """No answer is unreadable, cut, endless or an internal error."""
    bad = [record for record in evidence.records if record.ending in BAD_ENDINGS]
    yield from _few("endings", bad, lambda r: f"life {r.life}, {_named(r)}: {r.ending}: {r.detail}")


def refusals_have_a_reason(evidence: Evidence) -> Iterator[Finding]:
    """A 503 or an error event has a fault that explains it, a 429 a full queue; and each says when to come back."""
    for record in evidence.records:
        what = f"life {record.life}, {_named(record)}: {record.ending}: {record.detail}"
        if record.ending in (Ending.UNAVAILABLE, Ending.FAILED):
            if not _explained(record, evidence.faults):
                yield Finding("unexplained", what)
            elif record.ending is Ending.UNAVAILABLE and not record.retry_after and not _stopping(record, evidence.faults):
                yield Finding("retry-after", what)
        if record.ending is Ending.BUSY:
            if record.others < evidence.queue // 2:
                yield Finding("unexplained", f"{what}, with {record.others} others in flight")
            if not record.retry_after:
                yield Finding("retry-after", what)


def counters_balance(evidence: Evidence) -> Iterator[Finding]:
    """The server counted what its clients saw."""
    for look in evidence.looks:
        for one in look.imbalances:
            yield Finding("counters", f"life {look.life}, {look.requests} requests: {one}")
        for one in look.window:
            yield Finding("counters", f"life {look.life}, {look.slots} requests alone: {one}")


def no_slot_is_lost(evidence: Evidence) -> Iterator[Finding]:
    """When nobody asks, nothing runs and every slot is free; and all can work at once."""
    for look in evidence.looks:
        if not look.drained:
            yield Finding("slots", f"life {look.life}: requests did not end")
        if look.running or look.waiting:
            yield Finding("slots", f"life {look.life}: {look.running:g} run and {look.waiting:g} wait with nobody there")
        if look.at_rest != look.slots:
            yield Finding("slots", f"life {look.life}: {look.at_rest:g} of {look.slots} slots are at rest")
        if look.widest != look.slots:
            yield Finding("slots", f"life {look.life}: {look.slots} requests at once decoded {look.widest} wide")


def nothing_piles_up(evidence: Evidence) -> Iterator[Finding]:
    """Memory is flat; no descriptor, thread or dead child is left over."""
    for series in evidence.series:
        if not series.flat:
            yield Finding(
                "memory",
                f"{series.process} of life {series.life}: {series.slope_mib_h:.1f} MiB/h over {series.seconds:.0f} s, "
                f"more than {LIMIT_MIB_H:g}",
            )
    for life in sorted({look.life for look in evidence.looks}):
        looks = [look for look in evidence.looks if look.life == life]
        for look in looks:
            if look.zombies:
                yield Finding("processes", f"life {life}: zombies {look.zombies}")
        yield from _held("front", [look for look in looks if look.front is not None])
        for pid in sorted({look.engine_pid for look in looks}):
            yield from _held("engine", [look for look in looks if look.engine_pid == pid and look.engine is not None])


def _held(process: str, looks: Sequence[Look]) -> Iterator[Finding]:
    """What a process held at its first quiet point bounds what it holds at the later ones."""
    for look in looks[1:]:
        first, later = getattr(looks[0], process), getattr(look, process)
        for what, spare in (("descriptors", 0), ("threads", POOL_THREADS)):
            if getattr(later, what) > getattr(first, what) + spare:
                grown = f"{getattr(first, what)} {what} became {getattr(later, what)}"
                yield Finding("processes", f"{process} of life {look.life}: {grown}")


def faults_are_survived(evidence: Evidence) -> Iterator[Finding]:
    """The server recovers from each fault, and its engine ends only where it was killed."""
    for fault in evidence.faults:
        if fault.failed:
            yield Finding("recovery", f"life {fault.life}, {fault.kind}: {fault.detail}")
    for life, restarts in evidence.restarts.items():
        kills = sum(fault.life == life and fault.kind is FaultKind.KILL for fault in evidence.faults)
        if restarts != kills:
            yield Finding("recovery", f"life {life}: {restarts} restarts of the engine after {kills} kills")


def the_end_is_in_order(evidence: Evidence) -> Iterator[Finding]:
    """SIGTERM ends every stream properly, saves the sessions, and leaves nothing, in time."""
    for end in evidence.ends:
        where = f"life {end.life}"
        if end.running < evidence.slots:
            yield Finding("stop", f"{where}: only {end.running} streams had begun")
        if end.well_ended != len(end.streams):
            yield Finding("stop", f"{where}: {end.well_ended} of {len(end.streams)} streams ended properly")
        if end.stopped.code != 0:
            yield Finding("stop", f"{where}: exit status {end.stopped.code}")
        if end.stopped.seconds > LIMIT_SECONDS:
            yield Finding("stop", f"{where}: it took {end.stopped.seconds:.1f} s")
        if end.stopped.left_over:
            yield Finding("stop", f"{where}: processes {end.stopped.left_over} outlived it")
        if end.unsound or not end.written:
            yield Finding("stop", f"{where}: {end.written} checkpoints were written, and {end.unsound} are unsound")
        if end.temporary:
            yield Finding("stop", f"{where}: {end.temporary} half-written files")


def the_run_was_whole(evidence: Evidence) -> Iterator[Finding]:
    """It was not broken off, and every life has its quiet points and its end."""
    if evidence.broken_off:
        yield Finding("run", evidence.broken_off)
    lives = set(evidence.restarts)
    for what, seen in (("quiet point", {look.life for look in evidence.looks}), ("end", {end.life for end in evidence.ends})):
        for life in sorted(lives - seen):
            yield Finding("run", f"life {life} has no {what}")
    if not evidence.records:
        yield Finding("run", "nothing was asked")


RULES: tuple[Callable[[Evidence], Iterator[Finding]], ...] = (
    the_run_was_whole,
    answers_are_solo_answers,
    answers_end_properly,
    refusals_have_a_reason,
    counters_balance,
    no_slot_is_lost,
    nothing_piles_up,
    faults_are_survived,
    the_end_is_in_order,
)


def _explained(record: Record, faults: Sequence[Fault]) -> bool:
    """Whether a fault in the record's own life excuses that it was refused or broken off."""
    for fault in faults:
        if fault.life == record.life and fault.overlaps(record.began, record.ended):
            if fault.kind in (FaultKind.KILL, FaultKind.STOP):
                return True
            if fault.kind is FaultKind.PAUSE and record.ending is Ending.UNAVAILABLE:
                return True  # an engine that takes nothing is not asked for more
    return False


def _stopping(record: Record, faults: Sequence[Fault]) -> bool:
    """Whether the server was leaving: nobody needs to come back to it."""
    return any(f.kind is FaultKind.STOP and f.life == record.life and f.overlaps(record.began, record.ended) for f in faults)


def _named(record: Record) -> str:
    key = "" if record.ask is None else f" {record.ask.key}"
    return f"request {record.number} ({record.kind}, {record.api}{key})"


def _few(rule: str, items: Sequence[T], spell: Callable[[T], str]) -> Iterator[Finding]:
    for item in items[:SHOWN]:
        yield Finding(rule, spell(item))
    if len(items) > SHOWN:
        yield Finding(rule, f"and {len(items) - SHOWN} more")
