"""Owners that keep a scheduler busy in closed loops, and what each of them got, counted by what was told of its jobs."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from scheduler_rig import Rig

from scheduler import Ended, Job, Progress, Routed

Lengths = Callable[[random.Random], int]


def about(low: int, high: int) -> Lengths:
    """Lengths between two, alike."""
    return lambda draws: draws.randint(low, high)


PROMPT, ANSWER = about(40, 80), about(10, 30)


@dataclass
class Owner:
    """Somebody with so many requests under way at all times, each begun when one ends; `present` says at what times of the clock."""

    name: str
    requests: int
    prompt: Lengths = PROMPT
    answer: Lengths = ANSWER
    weight: float = 1.0
    limit: int = 0
    present: Callable[[float], bool] = lambda now: True
    under_way: set[int] = field(default_factory=set)


class Crowd:
    """Owners before one scheduler whose steps take time: a step 5 ms, a decode row 0.5 ms, a prompt token 0.2 ms."""

    def __init__(self, *owners: Owner, slots: int = 4, named: bool = True, seed: int = 0, **changes) -> None:
        changes = {"max_queue": 1 << 20, "mixed_prefill_quantum": 64, "self_check": False} | changes
        self.rig = Rig(slots, 2048, price=_seconds, **changes)
        self.owners = {owner.name: owner for owner in owners}
        self.named = named
        self.draws = random.Random(seed)
        self.jobs: dict[int, tuple[str, Job]] = {}
        self.tokens: Counter[str] = Counter()  # by owner, computed for it
        self.starts: list[str] = []  # the owner of each job that got a slot, in order
        self.most: Counter[str] = Counter()  # by owner, jobs that ran at once
        self.slack = 0  # steps with a free slot while somebody waited
        self._done: Counter[int] = Counter()  # by job, prompt tokens told of
        self._read: Counter[int] = Counter()
        self._running: Counter[str] = Counter()

    def run(self, seconds: float) -> Counter[str]:
        """Let the clock go on; the tokens of each owner in that time."""
        before = self.tokens.copy()
        end = self.rig.clock() + seconds
        while self.rig.clock() < end:
            self._send()
            if not self.rig.scheduler.busy:
                self.rig.clock.advance(0.01)
                continue
            events = self.rig.step()
            for event in events:
                self._take(event)
            self._count_read()
            stats = self.rig.scheduler.stats()
            freed = sum(isinstance(event, Ended) for event in events)  # they are taken in the next step
            self.slack += bool(stats.waiting) and stats.running + freed < len(stats.slots)
        return self.tokens - before

    def _send(self) -> None:
        now = self.rig.clock()
        for owner in self.owners.values():
            while owner.present(now) and len(owner.under_way) < owner.requests:
                prompt = [self.draws.randint(4, 60) for _ in range(owner.prompt(self.draws))]
                job = self.rig.submit(
                    prompt, max_tokens=owner.answer(self.draws), ignore_eos=True, owner=owner.name if self.named else "",
                    owner_weight=owner.weight, owner_limit=owner.limit,
                )  # fmt: skip
                self.jobs[job.id] = owner.name, job
                owner.under_way.add(job.id)

    def _take(self, event) -> None:
        if not isinstance(event, Routed | Progress | Ended):
            return
        name, job = self.jobs[event.job]
        if isinstance(event, Routed):
            self.starts.append(name)
            self._done[job.id] = event.cached_tokens
            self._running[name] += 1
            self.most[name] = max(self.most[name], self._running[name])
        elif isinstance(event, Progress):
            self.tokens[name] += event.done - self._done[job.id]
            self._done[job.id] = event.done
        else:
            self._count(name, job)
            self.owners[name].under_way.discard(job.id)
            self._running[name] -= job.slot is not None

    def _count_read(self) -> None:
        for owner in self.owners.values():
            for job_id in owner.under_way:
                self._count(*self.jobs[job_id])

    def _count(self, name: str, job: Job) -> None:
        self.tokens[name] += len(job.output.tokens) - self._read[job.id]
        self._read[job.id] = len(job.output.tokens)


def _seconds(work) -> float:
    decoders = sum(len(row.tokens) == 1 for row in work)
    return 0.005 + 0.0005 * decoders + 0.0002 * (sum(len(row.tokens) for row in work) - decoders)
