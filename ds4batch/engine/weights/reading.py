"""Bytes of an open file into memory that is there already, or an error that says which tensor they belong to."""

from __future__ import annotations

from typing import Protocol

from ds4batch.engine.weights.config import ModelError


class Reader(Protocol):
    """An unbuffered binary file."""

    def readinto(self, target: memoryview, /) -> int | None: ...


def fill(file: Reader, path: str, name: str, target: memoryview, offset: int) -> None:
    """Read until `target` is full. `path`, the tensor's `name` and the `offset` of the first byte are for the message."""
    done = 0
    while done < len(target):
        got = file.readinto(target[done:])
        if not got:
            raise ModelError(
                f"{path}: tensor {name} ends at byte {offset + done}, {len(target) - done} bytes short: "
                "the file changed after it was opened"
            )
        done += got
