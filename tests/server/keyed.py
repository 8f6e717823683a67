"""A front that checks keys, and its keys."""

from __future__ import annotations

import base64
import contextlib
import pathlib
from collections.abc import Iterator
from typing import Any

from harness import Server, running

from ds4batch.server.keys import Entry, KeyInfo, digest_of, new_key

USER, ADMIN = KeyInfo("alice", "user", 3, 0.5), KeyInfo("ops", "admin")


class Keyring:
    """A key file and the keys in it."""

    def __init__(self, path: pathlib.Path, *infos: KeyInfo) -> None:
        self.path = path
        self.keys = {info.name: new_key() for info in infos}
        self.infos = {info.name: info for info in infos}
        self.write()

    def write(self) -> None:
        """The file as `ds4batch keys` leaves it."""
        lines = [Entry(info, digest_of(self.keys[name])).line for name, info in self.infos.items()]
        fresh = self.path.with_suffix(".new")
        fresh.write_text("".join(line + "\n" for line in lines))
        fresh.chmod(0o600)
        fresh.replace(self.path)

    @property
    def user(self) -> str:
        return self.keys["alice"]

    @property
    def admin(self) -> str:
        return self.keys["ops"]


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def basic(key: str, user: str = "me") -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(f"{user}:{key}".encode()).decode()}


@contextlib.contextmanager
def guarded(folder: pathlib.Path, settings: dict[str, Any] | None = None, *engine_options: str) -> Iterator[tuple[Server, Keyring]]:
    """A front with a key of each scope."""
    ring = Keyring(folder / "keys", USER, ADMIN)
    with running({"api_key_file": str(ring.path), **(settings or {})}, *engine_options) as server:
        yield server, ring
