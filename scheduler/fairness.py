"""Whose job is next when owners share the slots. Owns what each owner was served and the order in which waiting jobs are
tried; whether a job can be placed is not its business.

The discipline is start-time fair queueing over service tokens. A job's service is what was computed for it: prompt tokens
that were evaluated (not those found in a session, a fork or on disk) and tokens that were drawn, one for one, because that is
what both sides can count. Each owner has a virtual time, its service over its weight, and the next slot goes to the
competitor whose virtual time is the least, its running jobs counted as if they were complete: the rest of their prompts is known, the
rest of an answer is guessed from the owner's last ones. So who has much under way yields to who has little, and many
long answers that were begun at once are not taken for nothing. Within an owner, and where there is only one, jobs go first come
first served.

A slot is held until its job ends, so service is never even at an instant: two competitors of equal weight drift apart by no more than
what the running jobs may take to their ends, however often each of them sends.

Nobody saves up: an owner that begins to compete (it has a job waiting, and may run one more) starts at the virtual time of the
system. That is the least among those that competed already, and at least that of whoever was last given a slot, so that one who waits
for a slot of its own does not hold it back. What was served beyond it is kept as a debt. When nobody competed there was enough for
all, and all start level. Who still has jobs running may have fallen behind by one job of its own a slot: else who keeps just as many under
way as its share would lose a little whenever none of them waits, and never get it back.

Nobody starves: who competes keeps its virtual time until it gets a slot, and every job that gets one before adds at least a token to
another's; whoever comes anew starts no lower than the system's, but for what was said, which is bounded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence

from scheduler.events import OwnerStats
from scheduler.job import RUNNING, Job
from scheduler.queue import JobQueue
from scheduler.slots import Slot

_ANSWER = 256.0  # tokens: guessed of an owner's answers while none is known
_WINDOW = 16  # jobs over which their length is averaged
_QUIET = 32  # times that `stats` may tell nothing though tokens were served


class _Account:
    """What is known of one owner."""

    __slots__ = ("_ended", "answer", "job", "tokens", "virtual")

    def __init__(self) -> None:
        self.tokens = 0  # served to jobs that have ended
        self.virtual = 0.0  # the same over their weights, and what was forgotten
        self.answer = _ANSWER  # tokens an answer takes, averaged
        self.job = 0.0  # virtual time a job takes, averaged
        self._ended = 0

    def close(self, job: Job) -> None:
        """A job has left its slot."""
        tokens = max(1, served(job))
        self.tokens += tokens
        self.virtual += tokens / job.owner_weight
        if not job.generated:  # cut short: it says nothing of how long one is
            return
        self._ended = min(self._ended + 1, _WINDOW)
        self.job += (tokens / job.owner_weight - self.job) / self._ended
        self.answer += (len(job.generated) - self.answer) / self._ended


class _Standing:
    """One owner's running jobs."""

    __slots__ = ("promised", "running", "served")

    def __init__(self, virtual: float) -> None:
        self.running = 0
        self.served = virtual  # virtual time, with the running jobs' service so far
        self.promised = 0.0  # what they are still worth

    def add(self, job: Job, answer: float) -> None:
        """One more, of an owner whose answers are expected to be so long."""
        self.running += 1
        self.served += served(job) / job.owner_weight
        self.promised += _rest(job, answer) / job.owner_weight

    @property
    def key(self) -> float:
        """The least is next."""
        return self.served + self.promised


class Fairness:
    """The accounts of all owners over one line and its slots."""

    def __init__(self, slots: Sequence[Slot], queue: JobQueue) -> None:
        self._slots = slots
        self._queue = queue
        self._accounts: dict[str, _Account] = {}
        self._virtual = 0.0  # of the system
        self._most = 0.0  # of all accounts' virtual times
        self._competing: frozenset[str] = frozenset()  # when it was last looked
        self._held: Job | None = None
        self._named = False  # somebody has a name
        self._told: dict[str, None] = {}  # owners that have had a job here since `stats` last told anything
        self._quiet = 0  # times it told nothing

    def enter(self, job: Job) -> None:
        """A job has been put in the line."""
        if job.owner not in self._accounts:
            self._accounts[job.owner] = _Account()
            self._named = self._named or bool(job.owner)
        self._quiet = _QUIET

    def leave(self, job: Job) -> None:
        """A job ends. In the line it cost nothing."""
        self._told[job.owner] = None
        self._quiet = _QUIET
        if job.slot is not None:
            account = self._accounts[job.owner]
            account.close(job)
            self._most = max(self._most, account.virtual)

    def hold(self, job: Job) -> None:
        """`job` could have a slot and waits for pages: until it has gone its owner is first, so that nobody overtakes it."""
        self._held = job

    def order(self) -> Iterator[Job]:
        """The waiting jobs in the order in which they are to be tried. Looks after each what became of it.

        An owner at its limit is left out, and from a job that is at its limit on so is all that the same owner sent after it: else the
        others could keep it waiting for ever.
        """
        lines = self._queue.lines()
        standings = self._standings(lines)
        open_ = {owner: iter(jobs) for owner, jobs in lines.items()}
        heads = {owner: next(jobs) for owner, jobs in open_.items()}
        self._compete(frozenset(owner for owner, job in heads.items() if not _at_limit(job, standings[owner])), standings)
        if self._held is not None and self._held not in self._queue:
            self._held = None
        held = None if self._held is None else self._held.owner
        while heads:
            owner = held if held is not None and held in heads else min(heads, key=lambda one: standings[one].key)
            job = heads[owner]
            if not _at_limit(job, standings[owner]):
                yield job
                if job.state in RUNNING:
                    self._virtual = max(self._virtual, standings[owner].served)
                    standings[owner].add(job, self._accounts[owner].answer)
                    self._quiet = _QUIET
                following = next(open_[owner], None)
                if following is not None:
                    heads[owner] = following
                    continue
            del heads[owner]

    def stats(self) -> tuple[OwnerStats, ...]:
        """The owners that have a job here or had one when anything was last told, so that the last figures of each are told too.

        Nobody, while nobody has a name, and where only tokens were served since: to be asked in every step. Then at times.
        """
        if not self._named:
            return ()
        self._quiet += 1
        if self._quiet <= _QUIET:
            return ()
        self._quiet = 0
        running: dict[str, list[Job]] = {}
        for slot in self._slots:
            if slot.job is not None:
                running.setdefault(slot.job.owner, []).append(slot.job)
        now = dict.fromkeys((*running, *self._queue.owners))
        told, self._told = self._told | now, now
        return tuple(
            OwnerStats(owner, self._queue.waiting(owner), len(jobs), self._accounts[owner].tokens + sum(map(served, jobs)))
            for owner in told
            for jobs in (running.get(owner, []),)
        )

    def _standings(self, waiting: Iterable[str]) -> dict[str, _Standing]:
        """Of the owners that have a job here."""
        standings = {owner: _Standing(self._accounts[owner].virtual) for owner in waiting}
        for slot in self._slots:
            if slot.job is not None:
                account = self._accounts[slot.job.owner]
                standing = standings.get(slot.job.owner)
                if standing is None:
                    standing = standings[slot.job.owner] = _Standing(account.virtual)
                standing.add(slot.job, account.answer)
        return standings

    def _compete(self, owners: frozenset[str], standings: dict[str, _Standing]) -> None:
        """Move the system's time on, and bring those up to it that begin to compete."""
        rivals = [standings[owner].served for owner in owners & self._competing]
        level = min(rivals) if rivals else max([self._most, *(one.served for one in standings.values())])
        self._virtual = max(self._virtual, level)
        for owner in owners - self._competing:
            account, standing = self._accounts[owner], standings[owner]
            credit = account.job * len(self._slots) if standing.running else 0.0
            behind = self._virtual - credit - standing.key
            if behind > 0.0:
                account.virtual += behind
                standing.served += behind
                self._most = max(self._most, account.virtual)
        self._competing = owners


def spared(slots: Sequence[Slot], amount: Callable[[Slot], int], total: int, asks: str | None = None) -> frozenset[int]:
    """The idle slots whose sessions are spared: those of owners that hold no more than their share of `total`.

    `amount` says how much of it a slot holds, which counts for who runs there or was the last to; who `asks` is about to hold one more.
    Without that a flood of new conversations would drive out everybody's sessions, the shortest first, though it does not come back
    to its own. A session that is spared still goes when only such are left, and a stale one goes before any other. With one owner none
    is spared.
    """
    held: dict[str, int] = {} if asks is None else {asks: 1}
    for slot in slots:
        owner = slot.holder
        if owner is not None:
            held[owner] = held.get(owner, 0) + amount(slot)
    if len(held) < 2:
        return frozenset()
    most = total / len(held)
    return frozenset(slot.id for slot in slots if slot.job is None and slot.holder is not None and held[slot.holder] <= most)


def served(job: Job) -> int:
    """Tokens that were computed for a job."""
    return max(0, job.done - job.cached) + len(job.generated)


def _rest(job: Job, answer: float) -> float:
    """Tokens that a running job is believed to take yet. Of a session that is being fetched little but the answer is left."""
    most = job.limit or job.max_tokens
    return max(0, len(job.prompt) - job.done) + max(0.0, min(float(most), answer) - len(job.generated))


def _at_limit(job: Job, standing: _Standing) -> bool:
    return standing.running >= (job.owner_limit or sys.maxsize)
