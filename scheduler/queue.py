"""Jobs that wait for a slot: one bounded line, first come first served among those that can run."""

from __future__ import annotations

import math
from collections.abc import Iterator

from scheduler.job import Job

_WINDOW = 16  # jobs over which the service time is averaged


class QueueFull(Exception):
    """No room to wait. `retry_after` is a guess, in whole seconds, of when there will be."""

    def __init__(self, waiting: int, retry_after: int) -> None:
        super().__init__(f"{waiting} requests are waiting already; retry in {retry_after} s")
        self.retry_after = retry_after


class JobQueue:
    """Waiting jobs in the order they came. A job that cannot run yet keeps its place and holds up nobody."""

    def __init__(self, limit: int, slots: int) -> None:
        self._limit = limit
        self._slots = slots
        self._jobs: dict[int, Job] = {}  # by id; a dict keeps the order and gives up any member at once
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
        if len(self._jobs) >= self._limit + free_slots:
            raise QueueFull(len(self._jobs), self.retry_after())
        self._jobs[job.id] = job

    def remove(self, job: Job) -> None:
        """Take `job` out, wherever it stands."""
        del self._jobs[job.id]

    def record_service(self, seconds: float) -> None:
        """A job has left its slot after `seconds`."""
        self._served += 1
        self._service += (seconds - self._service) / min(self._served, _WINDOW)

    def retry_after(self) -> int:
        """Seconds until the line should be one place shorter, 1..60."""
        return max(1, min(60, math.ceil(self._service / self._slots)))
