"""What the store did, by reason: numbers a metrics page can show. Owns the label values."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from ds4batch.kvstore.format import Reason, Verdict


class Skip(Enum):
    """Why a session was not saved."""

    TOO_SHORT = "too_short"
    TEXT = "text"  # no text, or one beyond 4 GiB
    FILE_CAP = "file_cap"  # larger than one checkpoint may be
    BUDGET = "budget"  # does not fit, whatever is evicted
    FREE_FLOOR = "free_floor"  # would leave too little free on the file system
    NO_SPACE = "no_space"  # the file system or a quota is full
    PERMISSION = "permission"
    DIRECTORY = "directory"  # the directory is gone
    IO = "io"  # any other error of the system
    LOST = "lost"  # the device lost it while it was being copied


class Phase(Enum):
    """When a checkpoint was evicted."""

    OPEN = "open"
    PRE_STORE = "pre_store"
    POST_STORE = "post_store"


class Outcome(Enum):
    """How an attempt to load ended."""

    HIT = "hit"
    MISS = "miss"
    CORRUPT = "corrupt"
    REFUSED = "refused"


STORED = tuple(r.name.lower() for r in (Reason.COLD, Reason.CONTINUED, Reason.EVICT, Reason.SHUTDOWN))
PREFILL_FAILED = "prefill_failed"


@dataclass(frozen=True)
class Stats:
    """All counters at one instant. Every known label is present."""

    stored: Mapping[str, int]  # by Reason, lower case: files written
    known: Mapping[str, int]  # by Reason: saves that found their checkpoint already there
    skipped: Mapping[str, int]  # by Skip
    loaded: Mapping[str, int]  # by Outcome
    evicted: Mapping[str, int]  # by Phase
    removed: Mapping[str, int]  # bad files: corrupt, prefill_failed
    left: Mapping[str, int]  # bad files still there, by Verdict; corrupt ones where the system let nobody remove them
    unrecorded_uses: int  # hits that could not be written into their file
    files: int
    bytes: int  # of all checkpoints in the directory


class Counters:
    """Counts from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, str]] = Counter()

    def add(self, what: str, label: str = "") -> None:
        """One more of `what`, a field of Stats."""
        with self._lock:
            self._counts[what, label] += 1

    def stats(self, files: int, size: int) -> Stats:
        """A snapshot."""
        with self._lock:
            counts = self._counts.copy()

        def by(what: str, labels: tuple[str, ...]) -> dict[str, int]:
            return {label: counts[what, label] for label in labels}

        left = (Verdict.FUTURE, Verdict.FOREIGN, Verdict.UNREADABLE, Verdict.CORRUPT)
        return Stats(
            stored=by("stored", STORED),
            known=by("known", STORED),
            skipped=by("skipped", tuple(s.value for s in Skip)),
            loaded=by("loaded", tuple(o.value for o in Outcome)),
            evicted=by("evicted", tuple(p.value for p in Phase)),
            removed=by("removed", (Verdict.CORRUPT.value, PREFILL_FAILED)),
            left=by("left", tuple(v.value for v in left)),
            unrecorded_uses=counts["unrecorded_uses", ""],
            files=files,
            bytes=size,
        )
