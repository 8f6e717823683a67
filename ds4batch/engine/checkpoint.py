"""The scheduler's store of sessions over the page pool and a directory of checkpoints.

Implements scheduler.checkpoints.Checkpoints. Two threads of its own do the work: one writes checkpoints, one reads them, so that
a restore does not wait behind saves. The engine's thread owns all books: it captures a session, hands out and takes back pages,
and makes a restored session a slot's. The others see only what they were given, and wake the engine when they are done.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from ds4batch.engine.engine import Engine
from ds4batch.engine.session_state import Snapshot, Spoilt, adopt, arrays_of, capture, fill_pages, problem
from ds4batch.engine.tool_blocks import ToolBlocks
from ds4batch.kvstore.counters import Skip
from ds4batch.kvstore.format import FLAG_RESPONSES_KEY, FLAG_THINKING_KEY, FLAG_TOOL_MAP, Reason
from ds4batch.kvstore.index import Entry
from ds4batch.kvstore.store import Claim, KVStore
from ds4batch.kvstore.store import Restored as Contents
from ds4batch.kvstore.trailer import read_tool_map
from ds4batch.kvstore.triggers import Schedule, cold_length, worth_saving
from scheduler.checkpoints import Key, Restored, Why

log = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0  # at the least between two looks at what other servers did to the directory

_WRITER_NICENESS = 10

_REASONS: dict[Why, Reason] = {
    "cold": Reason.COLD,
    "continued": Reason.CONTINUED,
    "evict": Reason.EVICT,
    "shutdown": Reason.SHUTDOWN,
}
_SHOWS_LESS = FLAG_RESPONSES_KEY | FLAG_THINKING_KEY
_WHY = {reason: why for why, reason in _REASONS.items()}


def _step_back() -> None:
    """Let every other thread go first: on a CPU the forward's threads wait for each other, and for none of them a save is urgent."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _WRITER_NICENESS)


class Transfer(NamedTuple):
    """One checkpoint that went to the disk or came from it."""

    load: bool
    seconds: float
    size: int  # bytes of the file


class _Stage(Enum):
    READING = "reading"
    READ = "read"  # `contents` are there, or None
    FILLING = "filling"
    FILLED = "filled"


@dataclass(eq=False)
class _Coming:
    """A session on its way from the disk."""

    slot: int
    text: bytes
    began: float
    stage: _Stage = _Stage.READING
    contents: Contents | None = None
    pages: list[int] = field(default_factory=list)  # nobody else's
    failed: bool = False
    wanted: bool = True


@dataclass(eq=False)
class _Going:
    """A session on its way to the disk."""

    key: Key
    snapshot: Snapshot
    copied: bool = False  # its pages are not looked at any more


class DiskCheckpoints:
    """See the module. `wake` is called from any thread when something has ended."""

    def __init__(
        self,
        engine: Engine,
        store: KVStore,
        wake: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        most_calls: int = 0,
    ) -> None:
        """`most_calls`: ids of calls of which the sampled text is known, to be stored with the sessions they were made in."""
        self.store = store
        self.tool_blocks = ToolBlocks(most_calls)
        if most_calls:
            for _, trailer in store.trailers():
                self.tool_blocks.learn(read_tool_map(trailer, most_calls).texts)
        self._engine = engine
        self._wake = wake
        self._clock = clock
        slots = range(len(engine.sessions))
        self._schedules = [Schedule() for _ in slots]
        self._going: list[list[_Going]] = [[] for _ in slots]
        self._coming: dict[int, _Coming] = {}
        self._unwanted: list[_Coming] = []
        self._last: dict[int, Entry] = {}  # slot -> the checkpoint it was last restored from
        self._transfers: deque[Transfer] = deque()
        self._look_at = 0.0
        self._finished = False
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-save", initializer=_step_back)
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-load")

    # the engine's thread

    def find(self, text: str) -> int:
        """See scheduler.checkpoints."""
        entry = self.store.find(text.encode())
        if entry is not None:
            return entry.header.tokens
        if self._clock() >= self._look_at:  # another server may have added to the directory: the next one to ask finds that
            self._look_at = self._clock() + _LOOK_SECONDS
            self._submit(self._reader, self.store.refresh)
        return 0

    def save(self, slot: int, key: Key, why: Why) -> None:
        """See scheduler.checkpoints."""
        going = self._capture(slot, key)
        if going is not None:
            self._submit(self._writer, lambda: self._write(going, why))

    def replace(self, slot: int, leaving: Key | None, coming: str | None) -> None:
        """See scheduler.checkpoints."""
        going = None if leaving is None else self._capture(slot, leaving)
        arriving = None if coming is None else _Coming(slot, coming.encode(), self._clock())
        if arriving is not None:
            self._coming[slot] = arriving
        if going is None and arriving is not None:
            self._submit(self._reader, lambda: self._read(arriving, None))
        elif going is not None and arriving is None:
            self._submit(self._writer, lambda: self._write(going, "evict"))
        elif going is not None and arriving is not None:
            self._submit(self._writer, lambda: self._exchange(going, arriving))

    def busy(self, slot: int) -> bool:
        """See scheduler.checkpoints."""
        self._collect()
        return bool(self._going[slot]) or any(coming.slot == slot for coming in self._unwanted)

    def finished(self) -> bool:
        """See scheduler.checkpoints."""
        finished, self._finished = self._finished, False
        if finished:
            self._collect()
        return finished

    def lacking(self, slot: int) -> int:
        """See scheduler.checkpoints."""
        coming, pool = self._coming[slot], self._engine.pool
        if coming.stage is not _Stage.READ or coming.contents is None or self.busy(slot):
            return 0
        self._engine.truncate(slot, 0)
        return max(0, -(-len(coming.contents.tokens) // pool.shape.page_tokens) - pool.free)

    def restored(self, slot: int) -> Restored | None:
        """See scheduler.checkpoints."""
        coming = self._coming[slot]
        contents = coming.contents
        if coming.stage is _Stage.READ and not self.busy(slot):
            if contents is None:
                return self._give_up(coming)
            if not self.lacking(slot):
                coming.pages = self._engine.pool.take(-(-len(contents.tokens) // self._engine.pool.shape.page_tokens))
                coming.stage = _Stage.FILLING
                self._submit(self._reader, lambda: self._fill(coming, contents))
        if coming.stage is not _Stage.FILLED or contents is None:
            return None
        return self._give_up(coming) if coming.failed else self._adopt(coming, contents)

    def abandon(self, slot: int) -> None:
        """See scheduler.checkpoints."""
        coming = self._coming.pop(slot)
        coming.wanted = False
        self._unwanted.append(coming)
        self._collect()

    def discard(self, slot: int) -> None:
        """See scheduler.checkpoints."""
        entry = self._last.pop(slot, None)
        if entry is not None:
            self._submit(self._writer, lambda: self.store.discard(entry, "the prefill after it failed"))

    def start(self, slot: int, prompt: int, kept: int, anchor: int) -> None:
        """See scheduler.checkpoints."""
        cold = 0 if kept else cold_length(prompt, anchor, self.store.options)
        self._schedules[slot] = Schedule(cold_at=cold, last_store=kept)

    def next_stop(self, slot: int, position: int) -> int | None:
        """See scheduler.checkpoints."""
        return self._schedules[slot].next_stop(position, self.store.options)

    def due(self, slot: int, position: int) -> Why | None:
        """See scheduler.checkpoints."""
        schedule = self._schedules[slot]
        reason = schedule.due(position, self.store.options)
        if reason is None:
            return None
        self._schedules[slot] = schedule.after(reason, position, stored=True)
        return _WHY[reason]

    @property
    def told(self) -> bool:
        """Whether something has ended that nobody has asked for yet."""
        return self._finished

    def transfers(self) -> list[Transfer]:
        """What was stored and loaded since this was last asked."""
        return [self._transfers.popleft() for _ in range(len(self._transfers))]

    def close(self) -> None:
        """Wait for everything that was begun."""
        self._writer.shutdown()
        self._reader.shutdown()
        self._collect()

    def _capture(self, slot: int, key: Key) -> _Going | None:
        """The slot's session, to be written; None, which is counted, when it will not be."""
        short = not worth_saving(len(self._engine.sessions[slot].tokens), self.store.options)
        if short or not key.text or not self._engine.resume(slot):
            self.store.skip(Skip.TOO_SHORT if short else Skip.LOST if key.text else Skip.TEXT)
            return None
        going = _Going(key, capture(self._engine, slot))
        self._going[slot].append(going)
        return going

    def _collect(self) -> None:
        """Take back the pages of what has ended."""
        for slot, all_going in enumerate(self._going):
            for going in [going for going in all_going if going.copied]:
                all_going.remove(going)
                self._engine.pool.drop(going.snapshot.hold)
            self._going[slot] = all_going
        for coming in [coming for coming in self._unwanted if coming.stage is not _Stage.FILLING]:
            self._unwanted.remove(coming)
            self._release(coming)

    def _give_up(self, coming: _Coming) -> Restored:
        del self._coming[coming.slot]
        self._release(coming)
        return Restored(seconds=self._clock() - coming.began)

    def _adopt(self, coming: _Coming, contents: Contents) -> Restored:
        slot, entry = coming.slot, contents.entry
        del self._coming[slot]
        adopt(self._engine, slot, contents, coming.pages)
        self._last[slot] = entry
        self._submit(self._writer, lambda: self.store.used(entry))
        return Restored(
            source=entry.name,
            tokens=len(contents.tokens),
            text=len(coming.text[: contents.text_bytes].decode()),
            answered=entry.header.reason in (Reason.EVICT, Reason.SHUTDOWN),
            shows_less=bool(entry.header.flags & _SHOWS_LESS),
            seconds=self._clock() - coming.began,
        )

    def _release(self, coming: _Coming) -> None:
        self._engine.pool.release(coming.pages)
        coming.pages = []

    # the other threads

    def _submit(self, pool: ThreadPoolExecutor, work: Callable[[], None]) -> None:
        pool.submit(work).add_done_callback(self._end)

    def _end(self, future: Future[None]) -> None:
        if future.exception() is not None:
            log.error("checkpoints: unexpected", exc_info=future.exception())
        self._finished = True
        self._wake()

    def _write(self, going: _Going, why: Why) -> None:
        snapshot = going.snapshot
        try:
            arrays = arrays_of(self._engine.pool, snapshot, lambda: self._let_go(going))
            flags = FLAG_TOOL_MAP | (FLAG_THINKING_KEY if going.key.shows_less else 0)
            text, trailer = going.key.text, self.tool_blocks.trailer(going.key.text)
            saved = self.store.save(text.encode(), snapshot.tokens, arrays, _REASONS[why], flags=flags, trailer=trailer)
            if saved.written and saved.entry is not None:
                self._transfers.append(Transfer(False, saved.seconds, saved.entry.file_bytes))
        except Spoilt:
            self.store.skip(Skip.LOST)
        finally:
            self._let_go(going)

    def _let_go(self, going: _Going) -> None:
        if not going.copied:
            going.copied = True
            self._finished = True
            self._wake()

    def _exchange(self, going: _Going, coming: _Coming) -> None:
        """Claim what is to come before anything is evicted for what goes; it is read while that is written."""
        claim = self.store.claim(coming.text)
        self._submit(self._reader, lambda: self._read(coming, claim))
        self._write(going, "evict")

    def _read(self, coming: _Coming, claim: Claim | None) -> None:
        """Load the best checkpoint that can be used, beginning with the one that was claimed already."""
        try:
            claim = claim or self.store.claim(coming.text)
            while claim is not None and coming.wanted:
                start = time.perf_counter()
                contents = self.store.load(claim)
                if contents is not None:
                    why = problem(self._engine, contents)
                    if not why:
                        if contents.entry.header.flags & FLAG_TOOL_MAP:  # it may be a neighbour's, and new
                            self.tool_blocks.learn(read_tool_map(contents.trailer, self.tool_blocks.most).texts)
                        coming.contents = contents
                        self._transfers.append(Transfer(True, time.perf_counter() - start, contents.entry.file_bytes))
                        return
                    self.store.discard(contents.entry, why)
                claim = self.store.claim(coming.text)
        finally:
            if claim is not None:
                claim.release()
            coming.stage = _Stage.READ

    def _fill(self, coming: _Coming, contents: Contents) -> None:
        try:
            fill_pages(self._engine.pool, contents, coming.pages)
        except BaseException:
            coming.failed = True
            raise
        finally:
            coming.stage = _Stage.FILLED
