"""The sampled text of calls that were made before this server, from the checkpoints on disk: their heads and trailers, nothing else.

Whose checkpoint it is does not matter: an id stands for one call, and whoever asks checks what the text says. A file is read again
only when it changed, or holds what is asked for. Changes and removes nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from ds4batch.kvstore.directory import Signature, checkpoints
from ds4batch.kvstore.disk import Disk
from ds4batch.kvstore.format import FLAG_TOOL_MAP, BadFile, Verdict
from ds4batch.kvstore.reader import peek
from ds4batch.kvstore.trailer import read_tool_map


class _Known(NamedTuple):
    """A file when it was last read."""

    state: Signature
    ids: frozenset[str]


class ToolTrailers:
    """One directory's. May be asked by several threads; takes as long as the disk."""

    def __init__(self, directory: Path, most: int) -> None:
        """`most` is how many ids the caller keeps."""
        self._directory = directory
        self._most = most
        self._known: dict[str, _Known] = {}
        self._lock = threading.Lock()

    def find(self, wanted: Collection[str]) -> dict[str, str]:
        """The texts of those of the `wanted` ids that are there; calls of one turn have one object. Looks at the newest files first."""
        missing, found = set(wanted), dict[str, str]()
        with self._lock:
            try:
                files = dict(checkpoints(self._directory))
            except OSError:
                return {}
            self._known = {name: known for name, known in self._known.items() if name in files}
            for name, state in sorted(files.items(), key=lambda file: -file[1].mtime_ns):
                if not missing:
                    break
                known = self._known.get(name)
                if known is None or known.state != state or not missing.isdisjoint(known.ids):
                    texts = self._read(name, state)
                    found.update((call_id, texts[call_id]) for call_id in missing & texts.keys())
                    missing -= texts.keys()
        return found

    def _read(self, name: str, state: Signature) -> dict[str, str]:
        """All calls of a file. One that is in another's hands is not remembered as read."""
        texts: dict[str, str] = {}
        try:
            head, trailer = peek(Disk(), self._directory / name, trailer=True)
        except BadFile as error:
            if error.verdict is Verdict.BUSY:
                return texts
        else:
            if head.header.flags & FLAG_TOOL_MAP and trailer:
                texts = read_tool_map(trailer, self._most).texts
        self._known[name] = _Known(state, frozenset(texts))
        return texts
