"""The directory as one server sees it: the index, kept in step with the files, and what becomes of bad ones.

Other servers add and remove files meanwhile. Owns no payload and no policy.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from ds4batch.kvstore.counters import Counters
from ds4batch.kvstore.directory import Signature, checkpoints, remove_leftovers, signature
from ds4batch.kvstore.disk import Disk
from ds4batch.kvstore.format import BadFile, Verdict
from ds4batch.kvstore.index import Entry, Index, entry_of, name_in
from ds4batch.kvstore.reader import peek

log = logging.getLogger(__name__)

_SETTLED = 2.0  # seconds after which a directory's time of change tells every change


class Listing:
    """See the module. `lock` serialises whoever reads or changes the directory's names; it is never held while a payload moves."""

    def __init__(self, directory: Path, index: Index, disk: Disk, counters: Counters, now: Callable[[], float]) -> None:
        self.directory = directory
        self.index = index
        self.disk = disk
        self.lock = threading.RLock()
        self._counters = counters
        self._now = now
        self._seen: dict[str, Signature] = {}
        self._changed_ns = -1  # the directory's time of change when it was last read, -1 when that may miss something
        self._complaint = ""

    def open(self) -> None:
        """Create the directory if need be, remove what a crash left, and read all heads. Trouble is logged."""
        try:
            self.disk.make_directory(self.directory)
            leftovers = remove_leftovers(self.disk, self.directory)
            if leftovers:
                log.info("%s: removed %d unfinished checkpoints", self.directory, leftovers)
        except OSError as error:
            self.complain(error)
        self.refresh()

    def path(self, entry: Entry) -> Path:
        """Where the entry's file is."""
        return self.directory / entry.file_name

    def refresh(self) -> None:
        """Take note of what other processes added or removed. Costs one `stat` when nothing changed."""
        with self.lock:
            try:
                changed = self.directory.stat().st_mtime_ns
                if changed == self._changed_ns:
                    return
                found = dict(checkpoints(self.directory))
            except OSError as error:
                self.complain(error)
                found, changed = {}, -1
            settled = self._now() - changed / 1e9 > _SETTLED
            self._changed_ns = changed if settled else -1
            for gone in set(self._seen) - set(found):
                del self._seen[gone]
                self.index.remove(name_in(gone))
            for file_name, state in found.items():
                if self._seen.get(file_name) != state:
                    self._look_at(file_name, state)

    def _look_at(self, file_name: str, state: Signature) -> None:
        self._seen[file_name] = state
        try:
            head, _ = peek(self.disk, self.directory / file_name)
        except BadFile as error:
            self.dismiss(file_name, error, state)
        else:
            self.index.put(entry_of(file_name, head.header, head.tail.fingerprint, head.file_bytes))

    def stored(self, entry: Entry) -> None:
        """We just wrote this file."""
        with self.lock:
            self.index.put(entry)
            state = signature(self.path(entry))
            if state is not None:
                self._seen[entry.file_name] = state
            self._complaint = ""

    def changed(self, entry: Entry) -> None:
        """We just changed this file's header or trailer."""
        with self.lock:
            if self.index.get(entry.name) is not None:
                self.index.put(entry)

    def unlink(self, entry: Entry) -> bool:
        """Remove a file; False, said in the log, when the system does not let us."""
        with self.lock:
            try:
                self.disk.unlink(self.path(entry))
            except FileNotFoundError:
                pass  # a neighbour was faster
            except OSError as error:
                self.complain(error)
                return False
            self.index.remove(entry.name)
        return True

    def dismiss(self, file_name: str, error: BadFile, before: Signature | None) -> None:
        """Never use the file again in its present state, and remove it when it is of use to nobody.

        `before` is what it was when it was opened: one that was replaced since is another file, and stays.
        """
        path = self.directory / file_name
        verdict = error.verdict
        self.index.remove(name_in(file_name))
        if verdict is Verdict.VANISHED:
            return
        if verdict is Verdict.BUSY or (verdict is Verdict.CORRUPT and signature(path) != before):
            with self.lock:
                self._seen.pop(file_name, None)  # look at it again
                self._changed_ns = -1
            return
        if verdict is Verdict.CORRUPT and self._remove(path, error):
            return
        if verdict is not Verdict.CORRUPT:
            log.warning("%s: not used, left: %s", path, error)
        self._counters.add("left", verdict.value)

    def _remove(self, path: Path, error: BadFile) -> bool:
        try:
            self.disk.unlink(path)
        except FileNotFoundError:
            return True
        except OSError as failure:
            log.warning("%s: not used: %s; it cannot be removed: %s", path, error, failure.strerror)
            return False
        log.warning("%s: removed: %s", path, error)
        self._counters.add("removed", error.verdict.value)
        return True

    def complain(self, error: OSError) -> None:
        """One line a kind of trouble, not one a save."""
        message = error.strerror or str(error)
        if message != self._complaint:
            self._complaint = message
            log.warning("checkpoints in %s: %s", self.directory, message)
