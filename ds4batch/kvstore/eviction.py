"""Which checkpoints make room for a new one. Pure functions over what a listing knows; they touch no file.

    first    the abandoned: nobody saved or used them for three days
    then     by score, the lowest first: (hits + 1) * tokens / bytes, half of it for every six hours without use
    last     the live, by their last use: sessions that left their slot, and what was restored, within the hour

A save counts as a use, so a checkpoint that was never used ages as well: what differs by a few per cent in tokens a byte differs by
minutes in time, twice the tokens a byte or twice the uses outweigh six hours. Because all age alike, time alone changes no order by
score. The live are a class of their own because no score is fair to them: what was saved a moment ago had no time to be used, and
a short session has fewer tokens a byte than a long one, for what does not grow with the tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from ds4batch.kvstore.format import Reason
from ds4batch.kvstore.index import Entry

LEFT = (Reason.EVICT, Reason.SHUTDOWN)  # sessions that left their slot
HALF_LIFE = 6 * 3600  # seconds after which a use counts half
LIVE_FOR = 3600  # seconds; as long as a slot's session is protected
ABANDONED_AFTER = 72 * 3600  # seconds without use after which a checkpoint goes first, whatever its score
_LEAST_HITS = 0.01  # decayed hits below this are none
_ANCHORS = (Reason.COLD, *LEFT)
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
    hits = entry.header.hits * _decay(entry, now)
    return hits if hits >= _LEAST_HITS else 0.0


def score(entry: Entry, now: float, covered: bool = False) -> float:
    """What a checkpoint is worth: tokens a byte, times its decayed uses, times two where conversations part.

    `covered` says that the incoming text begins with this one's. It makes a periodic checkpoint worth less: whoever goes on from here
    will rather go on from there.
    """
    value = (entry.header.hits + 1) * _decay(entry, now) * entry.header.tokens / entry.file_bytes
    if entry.header.reason in _ANCHORS:
        value *= _ANCHOR_FACTOR
    if covered and entry.header.reason is Reason.CONTINUED:
        hits = decayed_hits(entry, now)
        value *= 0.05 + 0.45 * hits / (hits + 1.0)
    return value


def is_live(entry: Entry, now: float, covered: bool = False) -> bool:
    """Whether somebody may be about to go on from here: never from a periodic one that is `covered`. A time far ahead says nothing."""
    reason = entry.header.reason
    if reason not in LEFT and (not entry.header.hits or (covered and reason is Reason.CONTINUED)):
        return False
    return abs(now - _touched(entry)) < LIVE_FOR


def _touched(entry: Entry) -> int:
    """When it was last saved or used. Saved at the end of a server it was last used before that."""
    return max(entry.header.created, entry.header.last_used)


def _decay(entry: Entry, now: float) -> float:
    last = entry.header.last_used or entry.header.created
    return float(2.0 ** (-max(now - last, 0.0) / HALF_LIFE))


def covered_by(entries: Iterable[Entry], incoming: Incoming) -> set[str]:
    """Names of the checkpoints whose text `incoming` goes on from, and in whose stead it could be used. Cold ones are not among them:
    other conversations go on from them as well."""
    old = sorted(
        (
            e
            for e in entries
            if e.header.reason in (Reason.CONTINUED, *LEFT)
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

    They go as the module says. Among the live those that `incoming` covers go before the others. Names in `protected` stay.
    """
    total = sum(e.file_bytes for e in entries)
    if room is None or total + wanted <= room:
        return Plan((), True)
    if wanted > room:
        return Plan((), False)
    covered = covered_by(entries, incoming) if incoming else set()

    def rank(entry: Entry) -> tuple[bool, bool, float, bool, int, str]:
        known = entry.name in covered
        live = is_live(entry, now, known)
        return (
            now - _touched(entry) < ABANDONED_AFTER,
            live,
            0.0 if live else score(entry, now, known),
            live and not known,
            entry.header.last_used or entry.header.created,
            entry.name,
        )

    victims = []
    for entry in sorted((e for e in entries if e.name not in protected), key=rank):
        if total + wanted <= room:
            break
        victims.append(entry)
        total -= entry.file_bytes
    fits = total + wanted <= room
    return Plan(tuple(victims) if fits else (), fits)
