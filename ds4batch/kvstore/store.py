"""The checkpoints of one server in one directory: save, find, load, make room.

Owns the directory as far as this process goes; other servers may use it too. It knows no device and no scheduler: what to save
and when is triggers.py's answer to the caller, and the arrays come and go as numpy. No file, disk or neighbour makes `save`, `claim` or
`load` raise: what cannot be done is counted, said in one log line, and left out.

Threads: `find` and `stats` wait for no disk. All else may take as long as its file, and belongs on a thread of its own; any number
of them may run at once.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ds4batch.kvstore.counters import PREFILL_FAILED, Counters, Outcome, Phase, Skip, Stats
from ds4batch.kvstore.directory import signature
from ds4batch.kvstore.disk import Disk
from ds4batch.kvstore.eviction import LEFT, Incoming, plan_eviction
from ds4batch.kvstore.format import (
    FLAG_TOOL_MAP,
    HEAD_BYTES,
    MAX_TEXT,
    SUFFIX,
    TRAILER_FLAGS,
    BadFile,
    Header,
    Reason,
    Verdict,
)
from ds4batch.kvstore.identity import Identity
from ds4batch.kvstore.index import Entry, Index, entry_of
from ds4batch.kvstore.listing import Listing
from ds4batch.kvstore.options import Options
from ds4batch.kvstore.payload import ArraySpec, StateArray, lay_out
from ds4batch.kvstore.reader import Head, name_of, peek, read_checkpoint, read_text
from ds4batch.kvstore.triggers import continued_step
from ds4batch.kvstore.writer import Content, count_use, renew, write_checkpoint

log = logging.getLogger(__name__)


class Saved(NamedTuple):
    """What became of a save."""

    entry: Entry | None  # None: skipped
    skip: Skip | None
    written: bool  # False with an entry: it was there already
    seconds: float


class Restored(NamedTuple):
    """A verified checkpoint, ready to become a session."""

    entry: Entry
    tokens: np.ndarray  # u32 [tokens]: exactly those whose state this is
    text_bytes: int  # of the request's text that they stand for; the rest is tokenised by itself
    arrays: dict[tuple[str, int], np.ndarray]  # by name and position, read-only, in carrier types (see payload.py)
    specs: tuple[ArraySpec, ...]
    trailer: bytes  # b"" where it is damaged
    seconds: float


class Claim:
    """A checkpoint that stays until `release`: no save of ours evicts it in the meantime."""

    def __init__(self, entry: Entry, text: bytes, release: Callable[[str], None]) -> None:
        self.entry = entry
        self.text = text
        self._release: Callable[[str], None] | None = release

    def release(self) -> None:
        """Give it up. May be called again."""
        release, self._release = self._release, None
        if release is not None:
            release(self.entry.name)

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class KVStore:
    """See the module."""

    def __init__(
        self,
        directory: Path,
        identity: Identity,
        options: Options,
        now: Callable[[], float] = time.time,
        disk: Disk | None = None,
    ) -> None:
        """Open a directory, creating it if need be: leftovers of a crash go, heads are read, the budget is kept.

        `now` gives Unix seconds. Raises ValueError when `directory` is something else; one that we may not use is logged, and every
        save into it a counted skip.
        """
        self.directory = directory
        self.identity = identity
        self.options = options
        if os.path.exists(directory) and not os.path.isdir(directory):  # unlike Path's, they ask without raising
            raise ValueError(f"{directory} is not a directory")
        self._now = now
        self._disk = disk or Disk()
        self._counters = Counters()
        self._index = Index(identity, options.min_tokens)
        self._listing = Listing(directory, self._index, self._disk, self._counters, now)
        self._holding = threading.Lock()
        self._held: Counter[str] = Counter()  # names that must not be evicted
        self._at_shutdown: set[str] = set()  # nor these: what this server saved at its end
        self._last_stamp = math.inf  # the time of last use that the last of those was given
        self._listing.open()
        self._make_room(0, Phase.OPEN)

    # asking

    def find(self, text: bytes) -> Entry | None:
        """The longest usable checkpoint whose text `text` begins with, as far as is known here. Pure; asks no disk."""
        return self._index.find(text)

    def stats(self) -> Stats:
        """All counters."""
        return self._counters.stats(len(self._index), self._index.total_bytes)

    def entries(self) -> list[Entry]:
        """All checkpoints with a good head, other models' included."""
        return self._index.entries()

    def describe(self) -> str:
        """One line for the start of a server: what is here, and what will be stored when."""
        o = self.options
        step = continued_step(o)
        limit = f" of {_mib(o.budget_bytes)}" if o.budget_bytes else ", no limit"
        when = [f"cold prompts of {o.min_tokens} to {o.cold_max_tokens} tokens"] if o.cold_max_tokens else []
        when += [f"every {step} tokens"] if step else []
        return (
            f"checkpoints in {self.directory}: {len(self._index)} files, {_mib(self._index.total_bytes)}{limit}; stored: "
            f"{', '.join([*when, 'sessions that give way, and all at shutdown'])}; none below {o.min_tokens} tokens"
        )

    # loading

    def claim(self, text: bytes) -> Claim | None:
        """`find`, after a look at the directory, with the checkpoint kept from eviction. None is counted as a miss.

        Claim before anything is saved to make room for the load.
        """
        self.refresh()
        with self._holding:
            entry = self._index.find(text)
            if entry is None:
                self._counters.add("loaded", Outcome.MISS.value)
                return None
            self._held[entry.name] += 1
        return Claim(entry, text, self._drop)

    def load(self, claim: Claim) -> Restored | None:
        """Verify and map a claimed checkpoint, and release the claim. None: it must not be used; claim again for the next best.

        Every byte of the file is verified before the first is returned. A damaged trailer is logged and left out.
        """
        start = time.perf_counter()
        entry = claim.entry
        path = self._listing.path(entry)
        before = signature(path)
        try:
            found = read_checkpoint(self._disk, path, self._require_own)
            if not claim.text.startswith(found.text):
                raise BadFile(Verdict.CORRUPT, "the text is another one")
        except BadFile as error:
            self._counters.add("loaded", _OUTCOMES[error.verdict].value)
            self._listing.dismiss(entry.file_name, error, before)
            return None
        finally:
            claim.release()
        self._counters.add("loaded", Outcome.HIT.value)
        seconds = time.perf_counter() - start
        entry = _entry(entry.file_name, found.head)
        if found.trailer is None:
            log.warning("%s: its trailer is damaged, and not used", path)
        return Restored(entry, found.tokens, len(found.text), found.arrays, found.specs, found.trailer or b"", seconds)

    def used(self, entry: Entry) -> None:
        """A restore succeeded: one hit more. Not urgent; call it when the request is on its way."""
        try:
            header = count_use(self._disk, self._listing.path(entry), int(self._now()))
        except (OSError, BadFile) as error:
            log.debug("%s: use not recorded: %s", entry.file_name, error)
            self._counters.add("unrecorded_uses")
            return
        self._listing.changed(entry._replace(header=header))

    def discard(self, entry: Entry, why: str) -> None:
        """Remove a checkpoint after which a prefill failed, so that no retry meets it again."""
        log.warning("%s: removed: %s", entry.file_name, why)
        self._counters.add("removed", PREFILL_FAILED)
        self._listing.unlink(entry)

    def trailers(self, flag: int = FLAG_TOOL_MAP) -> Iterator[tuple[Entry, bytes]]:
        """The trailers of that kind, of this server's model, the last used last. Damaged ones are left out."""
        for entry in sorted(self._index.entries(), key=lambda entry: entry.header.last_used):
            if entry.header.flags & flag and entry.fingerprint == self.identity.fingerprint:
                before = signature(self._listing.path(entry))
                try:
                    _, trailer = peek(self._disk, self._listing.path(entry), trailer=True)
                except BadFile as error:
                    self._listing.dismiss(entry.file_name, error, before)
                else:
                    if trailer is not None:
                        yield entry, trailer

    # saving

    def save(
        self,
        text: bytes,
        tokens: Sequence[int] | np.ndarray,
        arrays: Sequence[StateArray],
        reason: Reason,
        *,
        flags: int = 0,
        trailer: bytes = b"",
    ) -> Saved:
        """Store the state after `tokens` under `text`; see `Saved` for what became of it.

        At a shutdown save the session that was used last first: a later save of the same shutdown makes no room of an earlier one, and
        is skipped for the budget when there is no other. Their times of last use go down from now by a second each, so that
        the directory keeps their order.

        The arrays must not change until this returns. Raises ValueError for arrays that are not the state of `tokens`, and whatever a
        `chunks` raises, with nothing left behind; of the disk it raises nothing.
        """
        start = time.perf_counter()
        entry, skip, written = None, None, False
        flags = flags if trailer else flags & ~TRAILER_FLAGS
        try:
            used = self._stamp(reason)
            entry = self._known(text, flags, trailer, used, reason)
            if entry is None:
                entry, skip = self._store(text, tokens, arrays, reason, flags, trailer, used)
                written = entry is not None
            if entry is not None and reason is Reason.SHUTDOWN:
                with self._holding:
                    self._at_shutdown.add(entry.name)
        except OSError as error:
            skip = _skip_of(error)
            self._listing.complain(error)
        if skip is not None:
            self._counters.add("skipped", skip.value)
            if reason is Reason.SHUTDOWN and skip in _NO_ROOM:  # nobody will ask for the counters any more
                log.warning("a session of %d tokens is not saved: %s", len(tokens), _NO_ROOM[skip])
        else:
            self._counters.add("stored" if written else "known", reason.name.lower())
        return Saved(entry, skip, written, time.perf_counter() - start)

    def skip(self, why: Skip) -> None:
        """Count a session that its owner found not worth a `save`, or could not copy."""
        self._counters.add("skipped", why.value)

    def _stamp(self, reason: Reason) -> int:
        """The time of last use that a session saved now is given."""
        now = int(self._now())
        if reason is not Reason.SHUTDOWN:
            return now
        with self._holding:
            self._last_stamp = max(min(now, self._last_stamp - 1), 0)
            return int(self._last_stamp)

    def _known(self, text: bytes, flags: int, trailer: bytes, used: int, reason: Reason) -> Entry | None:
        """The checkpoint of this very text, brought up to date, when it is there and ours to use.

        It keeps its reason, unless it is now all that is left of a session: then it counts as one that left its slot.
        """
        self.refresh()
        entry = self._index.get(name_of(text))
        if entry is None or not self._index.usable(entry):
            return None
        path = self._listing.path(entry)
        before = signature(path)
        try:
            if read_text(path, entry.header) != text:
                raise BadFile(Verdict.CORRUPT, "the text is another one")
            header = renew(self._disk, path, trailer, flags, used, reason if reason in LEFT else None)
        except BadFile as error:
            self._listing.dismiss(entry.file_name, error, before)
            return None
        except FileNotFoundError:
            self._index.remove(entry.name)
            return None
        entry = entry._replace(header=header, file_bytes=header.payload_end + len(trailer))
        self._listing.changed(entry)
        return entry

    def _store(
        self,
        text: bytes,
        tokens: Sequence[int] | np.ndarray,
        arrays: Sequence[StateArray],
        reason: Reason,
        flags: int,
        trailer: bytes,
        used: int,
    ) -> tuple[Entry | None, Skip | None]:
        if len(tokens) < self.options.min_tokens:
            return None, Skip.TOO_SHORT
        if not 0 < len(text) <= MAX_TEXT:
            return None, Skip.TEXT
        layout = lay_out(HEAD_BYTES + len(text), tokens, [array.spec for array in arrays])
        identity = self.identity
        header = Header(
            quant_bits=identity.quant_bits,
            reason=reason,
            flags=flags,
            model_id=identity.model_id,
            tokens=len(tokens),
            hits=0,
            ctx=identity.ctx,
            created=int(self._now()),
            last_used=used,
            payload_bytes=layout.size,
            text_bytes=len(text),
        )
        size = layout.end + len(trailer)
        if self.options.max_file_bytes and size > self.options.max_file_bytes:
            return None, Skip.FILE_CAP
        name = name_of(text)
        with self._holds(name):
            skip = self._make_room(size, Phase.PRE_STORE, Incoming(text, identity.fingerprint, identity.ctx), name)
            if skip is not None:
                return None, skip
            content = Content(header, identity.fingerprint, text, layout, arrays, trailer)
            write_checkpoint(self._disk, self.directory, name, content)
            entry = entry_of(name + SUFFIX, header, identity.fingerprint, size)
            self._listing.stored(entry)
            self.refresh()  # a neighbour may have stored as well
            self._make_room(0, Phase.POST_STORE)
        return entry, None

    # making room

    def _make_room(self, size: int, phase: Phase, incoming: Incoming | None = None, name: str = "") -> Skip | None:
        """Evict until `size` more bytes fit; why they cannot, with nothing evicted, otherwise.

        `name` is about to be replaced, so what it takes now does not count.
        """
        with self._listing.lock:
            entries = [e for e in self._index.entries() if e.name != name]
            total = sum(e.file_bytes for e in entries)
            budget = self.options.budget_bytes
            if budget and size + -(-size // 100) > budget:
                return Skip.BUDGET
            room = budget or None
            tight = Skip.BUDGET
            if size:
                on_disk = total + self._disk.free_bytes(self.directory) - self.options.min_free_bytes
                if room is None or on_disk < room:
                    room, tight = max(on_disk, 0), Skip.FREE_FLOOR
            with self._holding:
                protected = self._at_shutdown | set(self._held)
            plan = plan_eviction(entries, size, room, self._now(), incoming, protected)
            if not plan.fits:
                return tight
            for entry in plan.victims:
                if not self._listing.unlink(entry):
                    return Skip.PERMISSION
                log.info("%s: evicted (%d tokens, %s)", entry.file_name, entry.header.tokens, _mib(entry.file_bytes))
                self._counters.add("evicted", phase.value)
        return None

    @contextmanager
    def _holds(self, name: str) -> Iterator[None]:
        with self._holding:
            self._held[name] += 1
        try:
            yield
        finally:
            self._drop(name)

    def _drop(self, name: str) -> None:
        with self._holding:
            self._held[name] -= 1
            if self._held[name] <= 0:
                del self._held[name]

    def refresh(self) -> None:
        """Take note of what other processes added to the directory or removed from it. Costs one `stat` when nothing changed."""
        self._listing.refresh()

    def _require_own(self, head: Head) -> None:
        if head.tail.fingerprint != self.identity.fingerprint:
            raise BadFile(Verdict.FOREIGN, "another model's, or another type of state")
        if head.header.ctx > self.identity.ctx:
            raise BadFile(Verdict.FOREIGN, f"of a context of {head.header.ctx}, here it is {self.identity.ctx}")


_OUTCOMES = {
    Verdict.CORRUPT: Outcome.CORRUPT,
    Verdict.VANISHED: Outcome.MISS,
    Verdict.FOREIGN: Outcome.REFUSED,
    Verdict.FUTURE: Outcome.REFUSED,
    Verdict.UNREADABLE: Outcome.REFUSED,
    Verdict.BUSY: Outcome.REFUSED,
}

_NO_ROOM = {
    Skip.BUDGET: "the budget has no room for it",
    Skip.FILE_CAP: "it is larger than one checkpoint may be",
    Skip.FREE_FLOOR: "the file system has no room for it beside what is to stay free",
}


def _skip_of(error: OSError) -> Skip:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return Skip.NO_SPACE
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return Skip.PERMISSION
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return Skip.DIRECTORY
    return Skip.IO


def _entry(file_name: str, head: Head) -> Entry:
    return entry_of(file_name, head.header, head.tail.fingerprint, head.file_bytes)


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.1f} MiB"
