"""Sessions that outlive their slot: what the scheduler asks of a store, and when it asks.

A store saves a session while it goes on, and brings one back while others decode. The scheduler decides the moments: where a
prefill stops to be saved, that what a slot holds is saved before it is destroyed, and which job waits for it. How a session is
copied and where it is kept is the store's.

Everything here is called from the scheduler's thread and returns at once. The store works on threads of its own, and wakes the
scheduler's owner when something it was asked for is done.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum
from typing import Literal, NamedTuple, Protocol

from scheduler.backend import Backend, Text
from scheduler.events import Ended
from scheduler.job import Job, JobState
from scheduler.publish import text_at
from scheduler.reuse import Reuse
from scheduler.slots import Slot

Why = Literal["cold", "continued", "evict", "shutdown"]


class Key(NamedTuple):
    """What a session is found by again."""

    text: str  # empty when nobody knows it
    shows_less: bool = False  # it is what a client sees of the session, not the text of its tokens


class Restored(NamedTuple):
    """How a restore ended. Without tokens it failed: the slot is empty and the job starts cold."""

    source: str = ""  # the checkpoint's name
    tokens: int = 0  # that the slot holds now
    text: int = 0  # characters of the job's text that they stand for
    answered: bool = False  # it ends where a turn ended
    shows_less: bool = False  # that text is what a client sees of the session, not all of it
    seconds: float = 0.0  # from the request to the last byte in its place


NOT_RESTORED = Restored()


class Checkpoints(Protocol):
    """A store of sessions. Nothing here raises for a disk's or a file's sake, and nothing waits for one."""

    def find(self, text: str) -> int:
        """Tokens of the longest checkpoint whose text `text` begins with, 0 without one. Pure: nothing is read."""

    def save(self, slot: int, key: Key, why: Why) -> None:
        """Begin to save the slot's session. It may be extended meanwhile; see `busy`.

        What is too short, has no text or finds no room is not saved, which the store counts.
        """

    def replace(self, slot: int, leaving: Key | None, coming: str | None) -> None:
        """Begin to save the slot's session as `leaving`, as `save` does with "evict", and to read the best checkpoint for
        the text `coming`; None leaves either out. The checkpoint to be read is safe from what the save has to evict.
        """

    def busy(self, slot: int) -> bool:
        """Whether the slot's session, or one before it, is still being copied, or filled for a job that has gone.

        Until then it may be extended, but not cut and then extended, and its pages do not come free.
        """

    def finished(self) -> bool:
        """Whether anything that was begun has ended since this was last asked."""

    def lacking(self, slot: int) -> int:
        """Pages that must come free before what was read for the slot finds room; 0 while nothing was. Empties the slot as soon as
        something was read and the slot is not `busy`; until the end it then holds nothing.
        """

    def restored(self, slot: int) -> Restored | None:
        """How the reading that `replace` began has ended, or None while it has not. Asked after `lacking`. The end is told once."""

    def abandon(self, slot: int) -> None:
        """Nobody waits for what is being read for the slot. Nothing is told of it any more."""

    def discard(self, slot: int) -> None:
        """The prefill that followed the slot's last restore failed: its checkpoint must not be met again."""

    def start(self, slot: int, prompt: int, kept: int, anchor: int) -> None:
        """A prompt of `prompt` tokens begins in the slot, `kept` of which are there. `anchor` is as in `Job`."""

    def next_stop(self, slot: int, position: int) -> int | None:
        """The next position after `position` at which the session is to be saved, or None."""

    def due(self, slot: int, position: int) -> Why | None:
        """Why the session is to be saved now that it holds `position` tokens, or None. Asked once a position."""


class NoCheckpoints:
    """Implements Checkpoints: nothing is saved, nothing is found."""

    def find(self, text: str) -> int:
        return 0

    def save(self, slot: int, key: Key, why: Why) -> None:
        pass

    def replace(self, slot: int, leaving: Key | None, coming: str | None) -> None:
        pass

    def busy(self, slot: int) -> bool:
        return False

    def finished(self) -> bool:
        return False

    def lacking(self, slot: int) -> int:
        return 0

    def restored(self, slot: int) -> Restored | None:
        return NOT_RESTORED

    def abandon(self, slot: int) -> None:
        pass

    def discard(self, slot: int) -> None:
        pass

    def start(self, slot: int, prompt: int, kept: int, anchor: int) -> None:
        pass

    def next_stop(self, slot: int, position: int) -> int | None:
        return None

    def due(self, slot: int, position: int) -> Why | None:
        return None


class Step(Enum):
    """What a job that was given a slot does next."""

    BEGIN = "begin"
    FETCH = "fetch"  # wait in the slot until its session has come from the store
    WAIT = "wait"  # stay in the queue until the slot's session has been saved


class Keeper:
    """Saves and restores at the right moments."""

    def __init__(self, store: Checkpoints, backend: Backend, text: Text) -> None:
        self._store = store
        self._backend = backend
        self._text = text
        self._fetching: dict[int, Job] = {}  # slot -> who waits there for a checkpoint
        self._given: dict[int, int] = {}  # slot -> generation of the session that was given to the store before it goes
        self._began_with: dict[int, int] = {}  # job -> slot, of jobs that began with a restored session
        self._held_up = False  # somebody has to wait for the store, which has ended nothing since

    # before a session goes

    def on_disk(self, job: Job) -> int:
        """Tokens the store holds for `job`. A checkpoint says nothing of images, so there is none for a job that has some."""
        return self._store.find(job.text) if job.text and not job.images and not job.needs_live_state else 0

    def prepare(self, job: Job, slot: Slot, reuse: Reuse, destroys: bool, on_disk: int) -> Step:
        """Before `job` takes `slot` to reuse what was found there: fetch what the store has when that is nothing, and save what the job
        `destroys`."""
        if on_disk and not reuse.tokens:
            self._store.replace(slot.id, self._leaving(slot), job.text)
            self._fetching[slot.id] = job
            return Step.FETCH
        ready = self.may_empty(slot) if destroys else not self._store.busy(slot.id)
        if ready:
            return Step.BEGIN
        self.wait()
        return Step.WAIT

    def may_empty(self, slot: Slot) -> bool:
        """Whether what the idle `slot` holds may be destroyed now. If not it is being saved: ask again later."""
        key = self._leaving(slot)
        if key is not None:
            self._store.replace(slot.id, key, None)
        return not self._store.busy(slot.id)

    def copying(self, slot: Slot) -> bool:
        """Whether the slot's pages would not come free now: the store is reading them."""
        return self._store.busy(slot.id)

    def _leaving(self, slot: Slot) -> Key | None:
        """As what to save an idle slot's session before it goes; None when there is nothing to save any more."""
        if self._given.get(slot.id) == slot.generation:
            return None
        self._given[slot.id] = slot.generation
        return _key_of(slot)

    # while a job waits

    def wait(self) -> None:
        """Somebody cannot go on before the store has ended something."""
        self._held_up = True

    @property
    def waits(self) -> bool:
        """Whether somebody waits for the store."""
        return self._held_up or bool(self._fetching)

    def finished(self) -> bool:
        """Whether waiting jobs should be looked at again. Gives up what was fetched for jobs that have gone."""
        for slot, job in list(self._fetching.items()):
            if job.state is JobState.FINISHED:
                del self._fetching[slot]
                self._store.abandon(slot)
        if not self._store.finished():
            return False
        self._held_up = False
        return True

    def lacking(self, slot: Slot) -> int:
        """Pages to be freed before what was fetched for the slot's job finds room. The slot's own session has been given up then."""
        return self._store.lacking(slot.id)

    def fetched(self, slot: Slot) -> Restored | None:
        """How the fetching for the slot's job ended, or None while it has not."""
        restored = self._store.restored(slot.id)
        if restored is not None:
            job = self._fetching.pop(slot.id)
            if restored.tokens:
                self._began_with[job.id] = slot.id
        return restored

    # while a session grows

    def start(self, slot: Slot, job: Job) -> None:
        """The job's prompt is known, and what of it is in the slot."""
        self._store.start(slot.id, len(job.prompt), job.cached, job.anchor)

    def stop(self, slot: Slot, job: Job) -> int:
        """How far the job's prompt may be evaluated before the session has to be looked at."""
        stop = self._store.next_stop(slot.id, job.done)
        return len(job.prompt) if stop is None else min(stop, len(job.prompt))

    def reached(self, slot: Slot, job: Job) -> None:
        """The job's session has grown: save it if that is due."""
        position = len(self._backend.tokens(slot.id))
        why = self._store.due(slot.id, position)
        if why is not None and not job.images:
            self._store.save(slot.id, Key(text_at(self._text, job, position) or ""), why)

    def ended(self, event: Ended) -> None:
        """A job has ended: if it failed before its first token, on a restored session, that is never used again."""
        slot = self._began_with.pop(event.job, None)
        if slot is not None and event.phase == "prefill" and event.reason == "error" and event.status == 500:
            self._store.discard(slot)

    # at the end

    def save_all(self, slots: Sequence[Slot]) -> None:
        """Begin to save every session, that of the last job first: where there is no room for all, those used longest ago are lost.

        No job runs any more.
        """
        for slot in sorted(slots, key=lambda slot: -math.inf if slot.last_used is None else slot.last_used, reverse=True):
            key = _key_of(slot)
            if key is not None:
                self._store.save(slot.id, key, "shutdown")


def _key_of(slot: Slot) -> Key | None:
    """What the next request of an idle slot's session will begin with; None when there is no session that could be saved."""
    if not slot.checkpoint.length or slot.checkpoint.images:
        return None
    visible = slot.bound.keys.visible if slot.bound is not None else None
    return Key(visible, shows_less=True) if visible else Key(slot.checkpoint.text or "")
