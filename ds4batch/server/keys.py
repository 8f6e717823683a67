"""The file of API keys: its format, what may read it, and the keys that hold now.

A line a key: `NAME SCOPE sha256:HEX [concurrency=N] [weight=W]`. Blank lines and lines that begin with `#` are passed over.

What is kept of a key is its SHA-256. A slow password hash would add nothing: it makes guessing what people choose dear, and a key
is 256 random bits that nobody chose and nobody can guess; and it would cost every request what it costs a guesser. No salt for the
same reason: no two keys are alike. Messages name the file, the line and the field, never what stands there: it could be a key.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import math
import os
import re
import secrets
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from ds4batch.server.files import stamp

log = logging.getLogger(__name__)

Scope = Literal["user", "admin"]
SCOPES: tuple[str, ...] = get_args(Scope)
PREFIX = "ds4b_"
"""What every key begins with, so that one that has leaked into a repository is found."""
LONGEST_KEY = 512
MAX_KEYS = 1000
"""Every key is compared with each presented one: a thousand take some 40 microseconds."""
MAX_CONCURRENCY = 1_000_000
MAX_WEIGHT = 1e6
_MAX_FILE_BYTES = 1 << 20
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_HASH = re.compile(r"sha256:([0-9a-f]{64})")


class KeyFileError(Exception):
    """A key file cannot be used; the message names it, and the line."""


@dataclass(frozen=True)
class KeyInfo:
    """Whose request it is."""

    name: str = ""  # "" where no keys are set
    scope: Scope = "admin"
    concurrency: int = 0  # most requests of the key that run at once, more wait; 0 is no limit
    weight: float = 1.0  # its share of the engine beside other keys


ANYBODY = KeyInfo()
"""Who sends a request to a server without keys: everybody may do everything."""
STRANGER = KeyInfo(scope="user")
"""Who asks for what is open to all, and shows no key that holds."""


@dataclass(frozen=True)
class Entry:
    """One line: a key's owner and the SHA-256 of the key."""

    info: KeyInfo
    digest: bytes

    @property
    def line(self) -> str:
        """As it stands in the file."""
        info = self.info
        more = f" concurrency={info.concurrency}" if info.concurrency else ""
        more += f" weight={info.weight!r}" if info.weight != 1.0 else ""
        return f"{info.name} {info.scope} sha256:{self.digest.hex()}{more}"


def new_key() -> str:
    """A fresh key of 256 random bits."""
    return PREFIX + secrets.token_urlsafe(32)


def digest_of(key: str) -> bytes:
    """What is kept of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def parse(text: str, where: str) -> list[Entry]:
    """The entries of a key file. Raises KeyFileError with `where` and the line's number."""
    entries: list[Entry] = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            entry = _entry(line.split())
            if any(entry.info.name == other.info.name for other in entries):
                raise ValueError("the name stands in the file twice")
            if any(entry.digest == other.digest for other in entries):
                raise ValueError("the hash stands in the file twice")
        except ValueError as error:
            raise KeyFileError(f"{where}:{number}: {error}") from None
        entries.append(entry)
        if len(entries) > MAX_KEYS:
            raise KeyFileError(f"{where}:{number}: more than {MAX_KEYS} keys")
    return entries


def _entry(words: Sequence[str]) -> Entry:
    if len(words) < 3:
        raise ValueError("expected NAME SCOPE sha256:HEX [concurrency=N] [weight=W]")
    name, scope, hashed, *options = words
    concurrency, weight = 0, 1.0
    seen: set[str] = set()
    for option in options:
        what, _, value = option.partition("=")
        if what in seen:
            raise ValueError(f"{what} is given twice")
        if what == "concurrency":
            concurrency = read_concurrency(value)
        elif what == "weight":
            weight = read_weight(value)
        else:
            raise ValueError("behind the hash only concurrency=N and weight=W are known")
        seen.add(what)
    found = _HASH.fullmatch(hashed)
    if found is None:
        raise ValueError("the hash must be sha256: and 64 digits of 0-9a-f; `ds4batch keys add` makes it")
    return Entry(KeyInfo(read_name(name), read_scope(scope), concurrency, weight), bytes.fromhex(found[1]))


def read_name(text: str) -> str:
    """A key's name. Raises ValueError."""
    if not _NAME.fullmatch(text) or text.startswith(PREFIX):
        raise ValueError("a name is 1 to 64 letters, digits and ._@- and begins with a letter or a digit")
    return text


def read_scope(text: str) -> Scope:
    """A key's scope. Raises ValueError."""
    if text == "user":
        return "user"
    if text == "admin":
        return "admin"
    raise ValueError("the scope must be user or admin")


def read_concurrency(text: str) -> int:
    """The most requests of a key that run at once; 0 is no limit. Raises ValueError."""
    if not (text.isascii() and text.isdigit() and len(text) < 8 and int(text) <= MAX_CONCURRENCY):
        raise ValueError(f"concurrency must be a whole number from 0 to {MAX_CONCURRENCY}")
    return int(text)


def read_weight(text: str) -> float:
    """A key's share beside others. Raises ValueError."""
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not 1 / MAX_WEIGHT <= weight <= MAX_WEIGHT:
        raise ValueError(f"weight must be a number above 0, at most {MAX_WEIGHT:g}")
    return weight


def read_file(path: str) -> list[Entry]:
    """The entries of the file at `path`. Raises KeyFileError, also for one that others may read or change."""
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            check_status(status, path)
            data = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise KeyFileError(f"{path}: {error.strerror}") from None
    if len(data) > _MAX_FILE_BYTES:
        raise KeyFileError(f"{path}: larger than {_MAX_FILE_BYTES} bytes")
    try:
        return parse(data.decode(), path)
    except UnicodeDecodeError as error:
        raise KeyFileError(f"{path}:{data[: error.start].count(10) + 1}: not UTF-8") from None


def check_status(status: os.stat_result, path: str) -> None:
    """Raise KeyFileError for a file that strangers could read or change. The group may read: so root can own what the service reads."""
    if not stat.S_ISREG(status.st_mode):
        raise KeyFileError(f"{path}: no regular file")
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o027:
        raise KeyFileError(f"{path}: mode {mode:04o} lets others read or change it; chmod 600 {path}")
    if status.st_uid not in (0, os.geteuid()):
        raise KeyFileError(f"{path}: it belongs to another user (uid {status.st_uid}), who could change it")


class Keys:
    """The keys that hold now. `poll` takes what the file has become; a file that cannot be used leaves them as they are."""

    def __init__(self, path: str) -> None:
        """Raises KeyFileError for a file that cannot be used or holds no key."""
        self._path = path
        self._seen = stamp(path)
        self._entries = read_file(path)
        if not self._entries:
            raise KeyFileError(f"{path}: it holds no key; ds4batch keys add --file {path} NAME")

    @property
    def names(self) -> list[str]:
        """Of all keys, in the order of the file."""
        return [entry.info.name for entry in self._entries]

    def find(self, key: str) -> KeyInfo | None:
        """Whose key it is. Takes the same time whichever key matches, if any."""
        if len(key) > LONGEST_KEY:
            return None
        digest, found = digest_of(key), None
        for entry in self._entries:
            if hmac.compare_digest(entry.digest, digest):
                found = entry.info
        return found

    def holds(self, info: KeyInfo) -> bool:
        """Whether a key that was found still is one, with what it may do; for answers without an end."""
        return any(entry.info == info for entry in self._entries)

    def poll(self) -> None:
        """Read the file again when it has changed. What is wrong with it is logged, once for each change."""
        seen = stamp(self._path)
        if seen == self._seen:
            return
        self._seen = seen
        try:
            entries = read_file(self._path)
        except KeyFileError as error:
            log.error("the keys stay as they were: %s", error)
            return
        self._entries = entries
        if entries:
            log.info("%d keys of %s hold now", len(entries), self._path)
        else:
            log.warning("%s holds no key any more: nobody is let in", self._path)
