"""Who may hold pages when the pool is smaller than all sessions' contexts together.

Owns the decision, not the pages: who is admitted, which idle session gives its pages, which running one is parked in host memory
and when it comes back. A session takes what it uses. A job is admitted when the pool can hold it with its prompt and a
little of its answer, and all running ones with theirs. When a step needs pages and none are free, in this order: parked
sessions move what only they still hold; idle sessions go, by the ladder of victims, each saved first if it is to be; the
youngest running session is parked. A parked one comes back before any job is admitted, the oldest first.

Why nothing stands still: the pool holds one whole context. While a step lacks pages, idle sessions and then the youngest
running ones go, so at worst the oldest alone is on the device. What parked sessions still hold there are whole pages that it holds
too and will not write again. So it finds all other pages free and can finish. Then the next one is the oldest. Nobody else
is waited for, but the store of checkpoints, while it copies a session whose pages are wanted. And nothing is evaluated twice:
what is parked comes back bit for bit.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from enum import Enum

from scheduler.backend import Backend, Clock
from scheduler.checkpoints import Keeper
from scheduler.events import PoolStats
from scheduler.fairness import spared
from scheduler.job import Job, JobState
from scheduler.options import Options
from scheduler.reuse import NOT_FOUND
from scheduler.roster import Roster
from scheduler.router import FORK, Placement
from scheduler.slots import Slot, SlotState
from scheduler.victims import score

log = logging.getLogger(__name__)


class Reclaimed(Enum):
    """How asking for pages ended."""

    FREE = "free"  # they are there
    LATER = "later"  # the store has to save a session first
    TOO_FEW = "too few"  # only running sessions hold pages


class Pool:
    """Divides the pages among the sessions. With room for everybody (`elastic` is false) it never says no."""

    def __init__(self, roster: Roster, backend: Backend, clock: Clock, options: Options, keeper: Keeper) -> None:
        """Raises ValueError when the pool could not hold one session of the context's length."""
        self._roster = roster
        self._backend = backend
        self._clock = clock
        self._options = options
        self._keeper = keeper
        room = backend.room()
        self._size = room.page_tokens
        one = self._pages(backend.ctx)
        if room.pages < one:
            raise ValueError(
                f"the pool's {room.pages} pages of {self._size} tokens cannot hold one context: {backend.ctx} take {one}"
            )
        self.elastic = room.pages < one * len(roster.slots)
        self._parks = 0
        self._resumes = 0
        self._evicted = {"stale": 0, "protected": 0}  # tokens

    def admits(self, job: Job, placement: Placement) -> bool:
        """Whether the pool can hold `job` beside those that run. Nobody is admitted while one of them is parked."""
        if not self.elastic:
            return True
        if self._parked():
            return False
        if not self._running():
            return True
        reuse = placement.found.reuse
        source = placement.donor.id if reuse.tier == FORK and placement.donor is not None else placement.slot.id
        return self._fits(self._wanted(job), reuse.tokens, source)

    def reclaim(self, pages: int, spare: Collection[int] = ()) -> Reclaimed:
        """Have `pages` free, at the cost of parked and idle sessions, those in the slots `spare` apart."""
        backend = self._backend
        for slot in self._parked() if backend.room().free < pages else ():
            backend.park(slot.id)
        while backend.room().free < pages:
            idle = [slot for slot in self._roster.slots if slot.job is None and slot.checkpoint.length and slot.id not in spare]
            if not idle:
                return Reclaimed.TOO_FEW
            now = self._clock()
            keep = spared(self._roster.slots, self._claim, backend.room().pages)
            worst = max(idle, key=lambda slot: (backend.held(slot.id).own > 0, self._score(slot, now, slot.id in keep)))
            if not self._keeper.may_empty(worst):
                self._keeper.wait()
                return Reclaimed.LATER
            self._evict(worst, now)
        return Reclaimed.FREE

    def park_youngest(self) -> bool:
        """Park the running session that came last. False when it is the only one, or is being copied."""
        running = sorted((slot for slot in self._running() if _state(slot) is not JobState.RESTORE), key=_age)
        if len(running) < 2:
            return False
        slot = running[-1]
        if self._keeper.copying(slot):
            self._keeper.wait()
            return False
        assert slot.job is not None
        self._backend.park(slot.id)
        slot.job.parked = True
        self._parks += 1
        log.info("slot %d: parked in host memory (%d tokens)", slot.id, len(self._backend.tokens(slot.id)))
        return True

    def resume(self) -> None:
        """Bring parked sessions back as far as there is room, the oldest first."""
        for slot in sorted(self._parked(), key=_age):
            job, held = slot.job, self._backend.held(slot.id)
            assert job is not None
            live = len(self._backend.tokens(slot.id))
            wanted = max(self._wanted(job), min(live + self._options.lookahead, self._backend.ctx))
            if self._running() and not self._fits(wanted, held.pages * self._size, slot.id):
                return
            if self.reclaim(held.parked) is not Reclaimed.FREE or not self._backend.resume(slot.id):
                return
            job.parked = False
            self._resumes += 1
            self._roster.changed = True

    def leave(self, job: Job) -> None:
        """A job ends. If it is parked, its session stays when there is room without driving anybody out."""
        if not job.parked or job.slot is None:
            return
        job.parked = False
        if not self._backend.resume(job.slot):
            self._backend.truncate(job.slot, 0)

    def stats(self) -> PoolStats:
        """Pages now, and counts since the start."""
        room = self._backend.room()
        held = [self._backend.held(slot.id) for slot in self._roster.slots]
        return PoolStats(
            pages=room.pages,
            page_bytes=room.page_bytes,
            used=room.pages - room.free,
            unshared=sum(one.pages for one in held),
            parked=sum(one.parked for one in held),
            parks=self._parks,
            resumes=self._resumes,
            evicted_stale=self._evicted["stale"],
            evicted_protected=self._evicted["protected"],
        )

    def _fits(self, tokens: int, kept: int, source: int) -> bool:
        """Whether a session of `tokens`, of which the first `kept` are in the slot `source`, fits beside the running ones grown
        to what they were admitted for."""
        backend, running = self._backend, self._running()
        parts = {slot.id: len(backend.tokens(slot.id)) for slot in running}
        parts[source] = max(parts.get(source, 0), kept)
        promised = 0
        for slot in running:
            assert slot.job is not None
            promised += max(0, self._pages(self._wanted(slot.job)) - backend.held(slot.id).pages)
        fresh = self._pages(tokens) - kept // self._size
        return backend.distinct(parts) + promised + fresh <= backend.room().pages

    def _evict(self, slot: Slot, now: float) -> None:
        stale = slot.state(now, self._options.stale_after) is SlotState.STALE
        log.info("slot %d: evicting checkpoint for its pages (%d tokens)", slot.id, slot.checkpoint.length)
        self._evicted["stale" if stale else "protected"] += slot.checkpoint.length
        self._backend.truncate(slot.id, 0)
        self._roster.forget(slot)

    def _claim(self, slot: Slot) -> int:
        """Pages that a session holds, or that a running one was admitted for."""
        held = self._backend.held(slot.id).pages
        return held if slot.job is None else max(held, self._pages(self._wanted(slot.job)))

    def _score(self, slot: Slot, now: float, spared: bool) -> int:
        return score(slot, NOT_FOUND.reuse, now, self._options.stale_after, spared)

    def _running(self) -> list[Slot]:
        return [slot for slot in self._roster.slots if slot.job is not None and not slot.job.parked]

    def _parked(self) -> list[Slot]:
        return [slot for slot in self._roster.slots if slot.job is not None and slot.job.parked]

    def _wanted(self, job: Job) -> int:
        """Tokens that a job's admission counts on."""
        return min(len(job.prompt or job.tokens) + min(job.max_tokens, self._options.lookahead), self._backend.ctx)

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self._size)


def _state(slot: Slot) -> JobState | None:
    return None if slot.job is None else slot.job.state


def _age(slot: Slot) -> tuple[float, int]:
    """Earlier is older."""
    assert slot.job is not None
    return slot.job.times.scheduled or 0.0, slot.job.id
