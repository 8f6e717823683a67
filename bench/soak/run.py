"""The course of a soak: one server's life after another on the same directory, then the reference.

Owns the order of everything and the tasks that do it. What is seen goes into `Evidence`; nothing is judged here.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench import seeded
from bench.soak import processes
from bench.soak.asks import Pool
from bench.soak.books import Reading
from bench.soak.clock import Clock
from bench.soak.disk import DiskRoom
from bench.soak.faults import Fault, FaultKind, Saboteur
from bench.soak.judge import Evidence
from bench.soak.load import Load
from bench.soak.memory import Sample, series_of
from bench.soak.plan import LEAST_GAP, Event, Life, plan
from bench.soak.quiet import look
from bench.soak.reference import Comparison, Reference
from bench.soak.stop import stop
from bench.soak.subject import Subject, SubjectError

SAMPLE_SECONDS = 2.5
SMALL_CHECKPOINTS = (
    "--kv-cache-min-tokens", "64", "--kv-cache-boundary-align-tokens", "64", "--kv-cache-boundary-trim-tokens", "8",
    "--kv-cache-continued-interval-tokens", "256", "--kv-disk-min-free-mb", "0",
)  # fmt: skip


@dataclass(frozen=True)
class Options:
    """What a user chose."""

    model: str
    minutes: float
    seed: int = 0
    slots: int = 16
    ctx: int = 1024
    queue: int = 48
    clients: int = 10
    threads: int = 1
    disk_mb: int = 768

    @property
    def burst_limit(self) -> int:
        """More requests than a burst has: slots and queue are full before it is reached."""
        return self.slots + self.queue + 16

    @property
    def arithmetic(self) -> list[str]:
        """The server's options that may change an answer's bits."""
        return ["-m", self.model, "--ctx", str(self.ctx), "-t", str(self.threads), "--device", "cpu"]


class Run:
    """One soak."""

    def __init__(self, options: Options, directory: Path, logs: Path, say: Callable[[str], None]) -> None:
        """`directory` is empty and takes what the servers keep, `logs` what they print; `say` gets a line when something happens."""
        self._options = options
        self._directory = directory
        self._logs = logs
        self._say = say
        minutes = max(1, round(options.minutes))
        self._pool = Pool(options.seed, singles=40 + 3 * minutes, scripts=12 + minutes)
        self._stop = asyncio.Event()
        self.interrupted = False
        self._life: asyncio.Task[None] | None = None
        self.evidence = Evidence(options.slots, options.queue)
        self.readings: dict[int, tuple[Reading, Reading]] = {}  # of each life, at its begin and at its last quiet point
        self.methods: dict[str, str] = {}  # how a fault was made, where there is more than one way

    def interrupt(self) -> None:
        """Come to an end soon, in order."""
        if not self._stop.is_set():
            self._say("interrupted; ending in order")
        self.interrupted = True
        self.evidence.broken_off = "interrupted"
        self._stop.set()
        if self._life is not None:
            self._life.cancel()

    async def go(self) -> Evidence:
        """Everything, in its order."""
        with DiskRoom(self._directory, self._options.disk_mb) as room:
            self.methods["how the disk is full"] = room.method
            for life in plan(self._options.seed, 60 * self._options.minutes):
                if self._stop.is_set():
                    break
                self._life = asyncio.create_task(self._live(life, room))
                try:
                    await self._life
                except asyncio.CancelledError:
                    break
                except SubjectError as error:
                    self.evidence.broken_off = f"life {life.number}: {error}"
                    break
        self.evidence.comparison = await self._compare()
        return self.evidence

    # one life

    async def _live(self, life: Life, room: DiskRoom) -> None:
        options = self._options
        clock = Clock(self._directory, life.faked_clock)
        self.methods[f"what jumps in life {life.number}"] = clock.method
        self._say(f"life {life.number}: {life.seconds:.0f} s, {' '.join(life.drafts) or 'no drafts'}")
        subject = Subject(
            [
                *options.arithmetic, "--batched-session", str(options.slots), "--max-queue", str(options.queue),
                "--kv-disk-dir", str(room.checkpoints), "--kv-disk-space-mb", str(options.disk_mb * 3 // 4),
                *SMALL_CHECKPOINTS, *life.drafts,
            ],
            self._logs / f"life-{life.number}.log",
            clock.environment,
        )  # fmt: skip
        watching: asyncio.Task[None] | None = None
        samples: dict[str, list[Sample]] = {"front": [], "engine": []}
        saboteur = Saboteur(life.number, subject, room, clock)
        load: Load | None = None
        filled = math.inf
        try:
            await subject.ready()
            load = Load(life.number, subject.address, self._pool, options.seed, options.ctx)
            self.evidence.restarts[life.number] = 0
            watching = asyncio.create_task(_watch(subject, samples))
            before = await subject.metrics()
            began = time.monotonic()
            await load.fill(options.slots, options.burst_limit - 1)
            filled = time.monotonic()
            self._say(f"life {life.number}: filled by {len(load.records)} requests in {filled - began:.1f} s")
            await self._load(life, subject, load, saboteur, before)
            self.evidence.restarts[life.number] = (await subject.health())["restarts"]
            end = await stop(life.number, subject, load, room, options.seed, options.slots)
            detail = f"{end.running} streams, {end.stopped.seconds:.1f} s, {end.written} checkpoints"
            self.evidence.ends.append(end)
            self.evidence.faults.append(Fault(FaultKind.STOP, life.number, end.signalled, time.monotonic(), detail))
            self._say(f"life {life.number}: SIGTERM: {detail}")
        finally:
            saboteur.undo()
            if watching is not None:
                watching.cancel()
            subject.kill()
            self.evidence.faults += saboteur.faults
            if load is not None:
                self.evidence.records += load.records
            for process, taken in samples.items():
                self.evidence.series += series_of(process, life.number, taken, filled)

    async def _load(self, life: Life, subject: Subject, load: Load, saboteur: Saboteur, before: Reading) -> None:
        """Clients, faults and quiet points, until the life's time is over."""
        began = time.monotonic()
        load.start(self._options.clients)
        bursts: list[asyncio.Task[None]] = []
        try:
            for event in life.events:
                await _until(began + event.at)
                if time.monotonic() - began > life.seconds:
                    break
                await self._event(life, event, subject, load, saboteur, bursts, before)
            await _until(began + life.seconds)
            await asyncio.gather(*bursts)
            await self._quiet(life, subject, load, before)
        finally:
            for burst in bursts:
                burst.cancel()
            await load.end(at_once=self._stop.is_set())

    async def _event(
        self,
        life: Life,
        event: Event,
        subject: Subject,
        load: Load,
        saboteur: Saboteur,
        bursts: list[asyncio.Task[None]],
        before: Reading,
    ) -> None:
        rnd = seeded.generator(self._options.seed, "event", life.number, event.what, event.number)
        if event.what == "quiet":
            await asyncio.gather(*bursts)
            bursts.clear()
            await self._quiet(life, subject, load, before)
        elif isinstance(event.what, FaultKind):
            fault = await saboteur.inject(event.what, rnd)
            self._say(f"life {life.number}: {fault.kind}: {fault.detail}")
            await asyncio.sleep(LEAST_GAP)
        else:
            size = rnd.randrange(self._options.slots, self._options.burst_limit)
            bursts.append(asyncio.create_task(load.burst(event.number, size)))

    async def _quiet(self, life: Life, subject: Subject, load: Load, before: Reading) -> None:
        seen = await look(life.number, subject, load, self._options.seed, self._options.slots, before)
        self.evidence.looks.append(seen)
        self.readings[life.number] = before, seen.reading
        self._say(
            f"life {life.number}: quiet: {seen.requests} requests, {seen.at_rest:g} of {seen.slots} slots at rest, {seen.widest} wide, "
            f"{len(seen.imbalances) + len(seen.window)} counters off"
        )

    # the reference

    async def _compare(self) -> Comparison | None:
        """Hold all answers against solo ones; None when the run was interrupted."""
        if self._stop.is_set() or not self.evidence.records:
            return None
        options = self._options
        subject = Subject([*options.arithmetic, "--batched-session", "1"], self._logs / "reference.log")
        try:
            await subject.ready()
            said = 0

            def note(done: int, all_: int) -> None:
                nonlocal said
                if done * 10 // all_ > said:
                    said = done * 10 // all_
                    self._say(f"reference: {done} of {all_} requests asked alone")

            return await Reference(subject.address, note).compare(self.evidence.records, self._stop.is_set)
        finally:
            subject.kill()


async def _until(moment: float) -> None:
    """Sleep until `time.monotonic()` says so."""
    await asyncio.sleep(max(0.0, moment - time.monotonic()))


async def _watch(subject: Subject, samples: dict[str, list[Sample]]) -> None:
    """Sample the sizes of both processes until cancelled."""
    while True:
        for process in processes.session(subject.front):
            held = processes.holdings(process.pid)
            name = "front" if process.pid == subject.front else "engine" if process.parent == subject.front else ""
            if held is not None and name:
                samples[name].append(Sample(time.monotonic(), process.pid, held.resident))
        await asyncio.sleep(SAMPLE_SECONDS)
