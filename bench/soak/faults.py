"""The faults that are injected while requests run, and the times in which they excuse a refusal.

Owns what is done to a server and the record of it. Which fault comes when is the plan's (plan.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from dataclasses import dataclass
from enum import StrEnum
from random import Random

from bench.soak.clock import SETTLE_SECONDS, Clock
from bench.soak.disk import DiskRoom, damage
from bench.soak.subject import Subject

RESTART_SECONDS = 90.0  # until a killed engine must serve again
GRACE_SECONDS = 1.0  # an answer may be on its way when a fault ends


class FaultKind(StrEnum):
    """What can be done to a server."""

    KILL = "engine killed"
    PAUSE = "engine paused"
    DISK_FULL = "disk full"
    CORRUPT = "checkpoints damaged"
    CLOCK = "clock jumps"
    STOP = "SIGTERM during streams"


@dataclass(frozen=True)
class Fault:
    """One fault as it was. Times are `time.monotonic()`."""

    kind: FaultKind
    life: int
    began: float
    ended: float
    detail: str
    failed: bool = False  # the server did not recover

    def overlaps(self, began: float, ended: float) -> bool:
        """Whether any of it falls between two times."""
        return began <= self.ended + GRACE_SECONDS and ended >= self.began


class Saboteur:
    """Injects faults into one life of a server."""

    def __init__(self, life: int, subject: Subject, room: DiskRoom, clock: Clock) -> None:
        self._life = life
        self._subject = subject
        self._room = room
        self._clock = clock
        self._paused: int | None = None
        self.faults: list[Fault] = []

    async def inject(self, kind: FaultKind, rnd: Random) -> Fault:
        """Do it, wait until it is over, and note it."""
        act = {
            FaultKind.KILL: self._kill,
            FaultKind.PAUSE: self._pause,
            FaultKind.DISK_FULL: self._disk_full,
            FaultKind.CORRUPT: self._corrupt,
            FaultKind.CLOCK: self._jump,
        }[kind]
        began = time.monotonic()
        try:
            detail, failed = await act(rnd)
        finally:
            self.undo()
        fault = Fault(kind, self._life, began, time.monotonic(), detail, failed)
        self.faults.append(fault)
        return fault

    def undo(self) -> None:
        """Whatever is still done to the server, end it."""
        self._room.clear()
        if self._paused is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._paused, signal.SIGCONT)
            self._paused = None

    async def _kill(self, rnd: Random) -> tuple[str, bool]:
        health = await self._subject.health()
        os.kill(int(health["engine_pid"]), signal.SIGKILL)
        back = await self._subject.until_up(health["restarts"] + 1, RESTART_SECONDS)
        return ("SIGKILL", False) if back else (f"no engine {RESTART_SECONDS:g} s after SIGKILL", True)

    async def _pause(self, rnd: Random) -> tuple[str, bool]:
        seconds = rnd.choice((0.5, 2.0, 6.5))  # the last is longer than a stream is silent without a sign of life
        self._paused = await self._subject.engine()
        os.kill(self._paused, signal.SIGSTOP)
        await asyncio.sleep(seconds)
        return f"SIGSTOP, SIGCONT after {seconds:g} s", False

    async def _disk_full(self, rnd: Random) -> tuple[str, bool]:
        engine = await self._subject.engine()
        done = self._room.fill(engine)
        kept = rnd.random() < 0.5  # what the server evicts to make room is taken as well, also while it writes
        end = time.monotonic() + rnd.uniform(6.0, 12.0)
        while time.monotonic() < end:
            await asyncio.sleep(0.1)
            if kept:
                done = self._room.fill(engine)
        return done + (", again and again" if kept else ""), False

    async def _corrupt(self, rnd: Random) -> tuple[str, bool]:
        engine = await self._subject.engine()
        files = self._room.files()
        chosen = rnd.sample(files, min(len(files), 12))
        done = [damage(path, rnd, engine) for path in chosen]
        return " ".join(f"{how}:{done.count(how)}" for how in sorted(set(done))) or "no checkpoint was there", False

    async def _jump(self, rnd: Random) -> tuple[str, bool]:
        steps = []
        for hours in (rnd.choice((3, 30, 100)), -rnd.choice((2, 25)), 0):
            steps.append(self._clock.jump(hours, self._room.files()))
            await asyncio.sleep(SETTLE_SECONDS)
        return ", ".join(steps), False
