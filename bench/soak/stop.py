"""The end of a life: SIGTERM in the middle of as many streams as there are slots."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path

from bench.soak import asks
from bench.soak.disk import DiskRoom
from bench.soak.ledger import Ending, Record
from bench.soak.load import Load
from bench.soak.subject import Stopped, Subject
from ds4batch.kvstore.disk import Disk
from ds4batch.kvstore.format import BadFile, Reason
from ds4batch.kvstore.reader import peek

LIMIT_SECONDS = 10.0  # that the end may take, checkpoints and all
PATIENCE = 60.0  # until it is killed
BEGUN_SECONDS = 120.0  # until all streams must have begun
STREAM_TOKENS = 700
PADDING = 8  # sentences of a prompt: enough for a checkpoint


@dataclass(frozen=True)
class End:
    """How one life ended."""

    life: int
    stopped: Stopped
    streams: tuple[Record, ...]
    running: int  # streams that were in a slot and decoding at the signal
    written: int  # sound checkpoints that say the end wrote them
    unsound: int  # new ones that cannot be read
    temporary: int  # half-written files that were left
    signalled: float = 0.0  # monotonic seconds of the SIGTERM

    @property
    def well_ended(self) -> int:
        """Streams that ended as their API ends one: with an answer's end or an error event."""
        return sum(r.ending in (Ending.ANSWERED, Ending.FAILED) for r in self.streams)


async def stop(life: int, subject: Subject, load: Load, room: DiskRoom, seed: int, slots: int) -> End:
    """Begin a stream in every slot, end the server in the middle of them, and look at what is left."""
    sent = [
        asyncio.create_task(
            load.send(asks.endless(seed, "stop", i, limit=STREAM_TOKENS, stream=True, padding=PADDING), kind="stop")
        )
        for i in range(slots)
    ]
    running, patience = 0, time.monotonic() + BEGUN_SECONDS
    while running < slots and time.monotonic() < patience and not all(task.done() for task in sent):
        await asyncio.sleep(0.05)
        running = sum(state == "decode" for state in await subject.slots())
    before = {path.name for path in room.files()}
    signalled = time.monotonic()
    subject.terminate()
    stopped = await subject.stopped(PATIENCE)
    streams = await asyncio.gather(*sent)
    new = [_reason(path) for path in room.files() if path.name not in before]
    return End(
        life=life,
        stopped=stopped,
        streams=tuple(streams),
        running=running,
        written=new.count(Reason.SHUTDOWN),
        unsound=new.count(None),
        temporary=len(list(room.checkpoints.glob("*.tmp.*"))),
        signalled=signalled,
    )


def _reason(path: Path) -> Reason | None:
    """Why a checkpoint was written; None where its head is not in order."""
    try:
        head, _ = peek(Disk(), path)
    except BadFile:
        return None
    return head.header.reason
