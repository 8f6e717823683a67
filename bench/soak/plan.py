"""What happens when: the lives of a run, and the faults and bursts of each. Fixed by the seed. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from bench import seeded
from bench.soak.faults import FaultKind

QUIET_SECONDS = 80.0  # between two quiet points, at most
BURST_SECONDS = 45.0  # between two bursts, on average
LEAST_GAP = 4.0  # seconds between the begins of two faults
STEADY = 2  # the life in which no engine is killed lasts so many times as long as another

_DRAFTS = (("--draft", "lookup", "--mtp-draft", "3"), ("--mtp",), ())
_FAULTS_A_MINUTE = {
    FaultKind.KILL: 0.5,
    FaultKind.PAUSE: 0.75,
    FaultKind.DISK_FULL: 0.5,
    FaultKind.CORRUPT: 1.0,
    FaultKind.CLOCK: 0.5,
}


@dataclass(frozen=True)
class Event:
    """One thing that happens, so many seconds after a life's load began."""

    at: float
    what: FaultKind | str  # a fault, or "burst" or "quiet"
    number: int


@dataclass(frozen=True)
class Life:
    """One server from its start to its SIGTERM."""

    number: int
    seconds: float  # of load
    drafts: tuple[str, ...]  # options
    steady: bool  # its engine is not killed, so that its memory can be judged
    faked_clock: bool
    events: tuple[Event, ...]


def plan(seed: int, seconds: float) -> list[Life]:
    """The lives of a run of so many seconds: at least two, one of them steady."""
    count = max(2, min(6, round(seconds / 300) + 1))
    steady = count - 2  # not the last, so that somebody starts on what it left
    share = seconds / (count - 1 + STEADY)
    return [_life(seed, number, share * (STEADY if number == steady else 1), number == steady) for number in range(count)]


def _life(seed: int, number: int, seconds: float, steady: bool) -> Life:
    rnd = seeded.generator(seed, "life", number)
    events = [Event(at, "quiet", i) for i, at in enumerate(_evenly(seconds, QUIET_SECONDS))]
    events += [Event(rnd.uniform(0.0, seconds), "burst", i) for i in range(max(1, round(seconds / BURST_SECONDS)))]
    for kind, rate in _FAULTS_A_MINUTE.items():
        if kind is FaultKind.KILL and steady:
            continue
        for i in range(max(1, round(rate * seconds / 60))):
            events.append(Event(rnd.uniform(0.1, 0.9) * seconds, kind, i))
    return Life(number, seconds, _DRAFTS[number % len(_DRAFTS)], steady, not steady, tuple(sorted(events, key=lambda e: e.at)))


def _evenly(seconds: float, gap: float) -> list[float]:
    """The times of the quiet points before the last, which is at the end."""
    parts = max(1, round(seconds / gap))
    return [seconds * i / parts for i in range(1, parts)]
