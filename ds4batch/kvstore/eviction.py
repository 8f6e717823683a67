"""Which checkpoints make room for a new one. Pure functions over what a listing knows; they touch no file."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from ds4batch.kvstore.format import Reason
from ds4batch.kvstore.index import Entry

HALF_LIFE = 6 * 3600  # seconds after which a hit counts half
ABANDONED_AFTER = 72 * 3600  # seconds without use after which a checkpoint goes first, whatever its score
_LEAST_HITS = 0.01  # decayed hits below this are none
_ANCHORS = (Reason.COLD, Reason.EVICT, Reason.SHUTDOWN)
_ANCHOR_FACTOR = 2.0


class Incoming(NamedTuple):
    """The checkpoint that wants room."""

    text: bytes
    fingerprint: bytes
    ctx: int


class Plan(NamedTuple):
    """What to remove, first to last, so that the wanted bytes fit."""

    victims: tuple[Entry, ...]
    fits: bool  # False: they cannot, and nothing is to be removed


def decayed_hits(entry: Entry, now: float) -> float:
    """Hits, halved every six hours since the last use. A time that lies ahead decays nothing."""
    last = entry.header.last_used or entry.header.created
    if not last:
        return 0.0
    hits = float(entry.header.hits * 2.0 ** (-max(now - last, 0.0) / HALF_LIFE))
    return hits if hits >= _LEAST_HITS else 0.0


def score(entry: Entry, now: float, superseded: bool = False) -> float:
    """What a checkpoint is worth: tokens a byte, times its hits, times two where conversations part, less when superseded.

    `superseded` says that the incoming text begins with this one's: whoever goes on from here will rather go on from there.
    """
    hits = decayed_hits(entry, now)
    value = (hits + 1.0) * entry.header.tokens / entry.file_bytes
    if entry.header.reason in _ANCHORS:
        value *= _ANCHOR_FACTOR
    if superseded:
        value *= 0.05 + 0.45 * hits / (hits + 1.0)
    return value


def superseded_by(entries: Iterable[Entry], incoming: Incoming) -> set[str]:
    """Names of the periodic checkpoints of the same conversation that `incoming` covers."""
    old = sorted(
        (
            e
            for e in entries
            if e.header.reason is Reason.CONTINUED
            and e.header.text_bytes < len(incoming.text)
            and e.fingerprint == incoming.fingerprint
            and incoming.ctx <= e.header.ctx
        ),
        key=lambda e: e.header.text_bytes,
    )
    digest, at, found = hashlib.sha1(usedforsecurity=False), 0, set()
    for entry in old:
        digest.update(incoming.text[at : entry.header.text_bytes])
        at = entry.header.text_bytes
        if digest.hexdigest() == entry.name:
            found.add(entry.name)
    return found


def plan_eviction(
    entries: Sequence[Entry],
    wanted: int,
    room: int | None,
    now: float,
    incoming: Incoming | None = None,
    protected: Collection[str] = (),
) -> Plan:
    """Bring the entries down to `room` - `wanted` bytes. `room` None is no limit.

    The abandoned go first, then the lowest score, then the longest unused. Names in `protected` stay.
    """
    total = sum(e.file_bytes for e in entries)
    if room is None or total + wanted <= room:
        return Plan((), True)
    if wanted > room:
        return Plan((), False)
    covered = superseded_by(entries, incoming) if incoming else set()

    def rank(entry: Entry) -> tuple[bool, float, int, str]:
        last = entry.header.last_used or entry.header.created
        alive = now - last < ABANDONED_AFTER
        return alive, score(entry, now, entry.name in covered), last, entry.name

    victims = []
    for entry in sorted((e for e in entries if e.name not in protected), key=rank):
        if total + wanted <= room:
            break
        victims.append(entry)
        total -= entry.file_bytes
    fits = total + wanted <= room
    return Plan(tuple(victims) if fits else (), fits)
