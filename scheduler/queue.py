"""Jobs that wait for a slot: one bounded line in the order they came. Who is next in it is scheduler.fairness's business.

The limit is for all together as long as that does for everybody. Who finds the line full all the same gets in while it has less
than its share there, the limit over the owners in the line: nobody is turned away because of how much another sends. So with n owners the
line may get longer than the limit, at most 1 + 1/2 + ... + 1/n times as long.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from scheduler.job import Job

_WINDOW = 16  # jobs over which the service time is averaged


class QueueFull(Exception):
    """No room to wait. `retry_after` is a guess, in whole seconds, of when there will be."""

    def __init__(self, waiting: int, retry_after: int) -> None:
        super().__init__(f"{waiting} requests are waiting already; retry in {retry_after} s")
        self.retry_after = retry_after


class JobQueue:
    """Waiting jobs in the order they came. A job that cannot run yet keeps its place and holds up no other owner's."""

    def __init__(self, limit: int, slots: int) -> None:
        self._limit = limit
        self._slots = slots
        self._jobs: dict[int, Job] = {}  # by id; a dict keeps the order and gives up any member at once
        self._owners: dict[str, int] = {}  # with jobs in the line -> how many
        self._service = 0.0  # seconds a job holds its slot, averaged
        self._served = 0

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(self._jobs.values())

    def __contains__(self, job: Job) -> bool:
        return self._jobs.get(job.id) is job

    def push(self, job: Job, free_slots: int) -> None:
        """Put `job` last. Jobs that free slots are about to take do not count as waiting. Raises QueueFull."""
        own = self.waiting(job.owner)
        owners = len(self._owners) + (not own)
        if len(self._jobs) >= self._limit + free_slots and own >= -(-self._limit // owners):
            raise QueueFull(len(self._jobs), self.retry_after(owners))
        self._jobs[job.id] = job
        self._owners[job.owner] = own + 1

    def remove(self, job: Job) -> None:
        """Take `job` out, wherever it stands."""
        del self._jobs[job.id]
        self._owners[job.owner] -= 1
        if not self._owners[job.owner]:
            del self._owners[job.owner]

    def waiting(self, owner: str) -> int:
        """How many jobs of `owner` are in the line."""
        return self._owners.get(owner, 0)

    @property
    def owners(self) -> Iterable[str]:
        """Those that have jobs in the line."""
        return self._owners

    def lines(self) -> dict[str, list[Job]]:
        """Each owner's waiting jobs in the order they came. Owners are in the order of their first."""
        lines: dict[str, list[Job]] = {}
        for job in self._jobs.values():
            lines.setdefault(job.owner, []).append(job)
        return lines

    def record_service(self, seconds: float) -> None:
        """A job has left its slot after `seconds`."""
        self._served += 1
        self._service += (seconds - self._service) / min(self._served, _WINDOW)

    def retry_after(self, owners: int = 1) -> int:
        """Seconds until one of so many owners in turn should have one job less in the line, 1..60."""
        return max(1, min(60, math.ceil(self._service * owners / self._slots)))
