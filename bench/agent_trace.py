"""What a server's trace and metrics say about a scenario: where each prompt came from, and who was driven out for it.

Owns the names that are looked for there. A server that reports less yields None or nothing, never an error.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.server_metrics import Reading, total

STALE_SECONDS = 3600.0  # an idle session this old is the first victim
AT_ONCE_SECONDS = 0.001  # the trace's times do not tell the order of what was routed in one step
PROMPT_TOKENS, REUSED, MEMORY = "vllm:prompt_tokens_total", "ds4batch_reused_tokens_total", "ds4batch_memory_bytes"
SHARED, UNSHARED = "sessions_shared", "sessions_unshared"  # kinds of MEMORY: what the sessions hold, and would hold alone
LOAD_SECONDS, LOAD_BYTES = "ds4batch_disk_load_seconds_sum", "ds4batch_disk_load_bytes_total"
_NOTABLE = re.compile(r"park|resum|disk|fork|evicted|materialise")


@dataclass(frozen=True)
class Placed:
    """One request's place, from the trace."""

    request: str
    slot: int
    tier: str
    cached_tokens: int
    evicted_tokens: int
    routed_at: float  # seconds, wall clock
    ended_at: float


@dataclass(frozen=True)
class Loss:
    """A session that lost tokens to another conversation's request."""

    request: str  # whose
    slot: int
    tokens: int
    better: int  # slots at that moment that were empty, or idle and stale


def read_trace(path: Path) -> list[Placed]:
    """Every request that was routed, in the order of routing. Lines that cannot be read are left out."""
    placed = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            placed.append(_placed(json.loads(line)))
        except (ValueError, KeyError, TypeError):
            continue  # never routed, or the line was cut short by a kill
    return sorted(placed, key=lambda p: p.routed_at)


def _placed(record: Mapping[str, Any]) -> Placed:
    routed, seconds = record["routed"], record["seconds"]
    return Placed(
        request=record["request"],
        slot=routed["slot"],
        tier=routed["tier"],
        cached_tokens=routed["cached_tokens"],
        evicted_tokens=routed["evicted_tokens"],
        routed_at=record["time"] + seconds["routed"],
        ended_at=record["time"] + seconds["end"],
    )


def losses(placed: Sequence[Placed], slots: int, is_owner: Callable[[str], bool]) -> list[Loss]:
    """When the session of the requests that `is_owner` names lost tokens to another's request.

    A slot that somebody else got in the same step is no better choice that was left.
    """
    first = {place.slot: place.routed_at for place in reversed(placed)}
    last: dict[int, Placed] = {}
    home: int | None = None
    found = []
    for place in placed:
        owner = is_owner(place.request)
        if not owner and place.slot == home and place.evicted_tokens:
            others = [slot for slot in range(slots) if slot != home]
            empty = sum(first.get(slot, math.inf) > place.routed_at + AT_ONCE_SECONDS for slot in others)
            stale = sum(slot in last and place.routed_at - last[slot].ended_at >= STALE_SECONDS for slot in others)
            found.append(Loss(place.request, place.slot, place.evicted_tokens, empty + stale))
            home = None
        if owner:
            home = place.slot
        last[place.slot] = place
    return found


def by_tier(delta: Reading) -> dict[str, int]:
    """Reused tokens of each tier that had any."""
    tiers: dict[str, int] = {}
    for series, value in delta.items():
        label = re.search(r'tier="([^"]*)"', series)
        if series.startswith(REUSED + "{") and label and value:
            tiers[label[1]] = tiers.get(label[1], 0) + int(value)
    return tiers


def prefilled(delta: Reading) -> int | None:
    """Prompt tokens that were evaluated, those of requests given up included; None where the server does not say."""
    evaluated_or_reused, reused = total(delta, PROMPT_TOKENS), total(delta, REUSED)
    return None if evaluated_or_reused is None or reused is None else int(evaluated_or_reused - reused)


def notable(delta: Reading) -> dict[str, float]:
    """The series about parking, resuming, forks, the disk and evictions that moved."""
    return {series: value for series, value in delta.items() if value and _NOTABLE.search(series) and "_bucket{" not in series}


def memory(reading: Reading, kind: str) -> float | None:
    """Bytes of one kind of the server's memory; None where it has no such figure."""
    marked = f'kind="{kind}"'
    values = [value for series, value in reading.items() if series.startswith(MEMORY + "{") and marked in series]
    return sum(values) if values else None


def widest(readings: Iterable[Reading]) -> tuple[float, float] | None:
    """The sessions' bytes with and without sharing, at the moment when they would have been most without."""
    pairs = [(memory(reading, SHARED), memory(reading, UNSHARED)) for reading in readings]
    known = [(shared, unshared) for shared, unshared in pairs if shared is not None and unshared]
    return max(known, key=lambda pair: pair[1], default=None)


def load_rate(delta: Reading) -> float | None:
    """Bytes a second that checkpoints were read with; None where the server does not say."""
    seconds, size = total(delta, LOAD_SECONDS), total(delta, LOAD_BYTES)
    return size / seconds if seconds and size else None
