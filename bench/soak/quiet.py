"""What is looked at when the load is held: that everything is as it was before anybody came.

Owns the order of a quiet point. What it sees becomes a `Look`; whether that is right is judge.py's.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import astuple, dataclass, field

from bench.soak import asks
from bench.soak.books import RUNNING, WAITING, Imbalance, Reading, ambiguous, imbalances, total
from bench.soak.load import Load, within
from bench.soak.processes import Holdings, holdings
from bench.soak.subject import Subject

DRAIN_SECONDS = 250.0  # longer than a request may hang
SETTLE_SECONDS = 30.0  # until the server has noticed that its clients are gone, and ended what they left
WIDTH_TOKENS = 64  # of each of the requests that must run side by side
HOLD_LOOKS = 8
WIDTH_TRIES = 3  # a look may come too late to see all of them at once
SLOTS = "ds4batch_slots"
AT_REST = ("empty", "idle", "stale")


@dataclass(frozen=True)
class Look:
    """One quiet point of a server's life."""

    life: int
    at: float  # monotonic seconds
    drained: bool  # every request ended
    running: float
    waiting: float
    slots: int  # that there are
    at_rest: float  # slots without a request
    widest: int  # sessions that decoded at once when as many requests as slots were sent
    imbalances: tuple[Imbalance, ...] = ()  # of all requests since the life began
    window: tuple[Imbalance, ...] = ()  # of those of the width alone, where all must be exact
    zombies: tuple[int, ...] = ()
    front: Holdings | None = None
    engine: Holdings | None = None
    engine_pid: int = 0
    requests: int = 0  # since the life began
    unsure: int = 0  # of them, those that may have been counted in more than one way
    reading: Reading = field(default_factory=dict)


async def look(life: int, subject: Subject, load: Load, seed: int, slots: int, before: Reading) -> Look:
    """Hold the load, look, and let it go on. `before` is the reading at the life's beginning."""
    load.hold()
    try:
        drained = await load.drained(DRAIN_SECONDS)
        reading = await _settled(subject)
        states = await subject.slots()
        first = len(load.records)
        unbalanced = imbalances(before, reading, load.records)
        widest, last = 0, reading
        for _ in range(WIDTH_TRIES):
            widest = max(widest, await _width(load, subject, seed, slots))
            last = await _settled(subject)
            if widest == slots:
                break
        engine = await subject.engine()
        front_holds, engine_holds = await _held(subject.front, engine)
        return Look(
            life=life,
            at=time.monotonic(),
            drained=drained,
            running=total(reading, RUNNING),
            waiting=total(reading, WAITING),
            slots=slots,
            at_rest=sum(state in AT_REST for state in states),
            widest=widest,
            imbalances=tuple(unbalanced),
            window=tuple(imbalances(reading, last, within(load.records, first))),
            zombies=tuple(subject.zombies()),
            front=front_holds,
            engine=engine_holds,
            engine_pid=engine,
            requests=first,
            unsure=ambiguous(load.records[:first]),
            reading=last,
        )
    finally:
        load.go_on()


async def _settled(subject: Subject) -> Reading:
    """The figures once nothing runs or waits, or as they are after SETTLE_SECONDS."""
    end = time.monotonic() + SETTLE_SECONDS
    while True:
        reading = await subject.metrics()
        if total(reading, RUNNING) + total(reading, WAITING) == 0 or time.monotonic() > end:
            await asyncio.sleep(0.3)  # what ended last may still be on its way from the engine
            return await subject.metrics()
        await asyncio.sleep(0.1)


async def _held(*pids: int) -> list[Holdings | None]:
    """What processes hold once connections that are being closed are: the least of a few looks."""
    looks: list[list[Holdings]] = [[] for _ in pids]
    for _ in range(HOLD_LOOKS):
        for seen, pid in zip(looks, pids, strict=True):
            held = holdings(pid)
            if held is not None:
                seen.append(held)
        await asyncio.sleep(0.3)
    return [Holdings(*(min(values) for values in zip(*map(astuple, seen), strict=True))) if seen else None for seen in looks]


async def _width(load: Load, subject: Subject, seed: int, slots: int) -> int:
    """Sessions that decode at once when as many requests as slots are sent together."""
    sent = [
        asyncio.create_task(load.send(asks.endless(seed, "width", i, limit=WIDTH_TOKENS, stream=bool(i % 2)), kind="width"))
        for i in range(slots)
    ]
    widest = 0
    while not all(task.done() for task in sent):
        widest = max(widest, sum(state == "decode" for state in await subject.slots()))
        await asyncio.sleep(0.02)
    await asyncio.gather(*sent)
    return widest
