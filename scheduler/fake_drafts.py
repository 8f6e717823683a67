"""The fake backend's drafts: guesses that are right or wrong as a test says, and what of them lies behind a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

Guesses = Callable[[Sequence[int], int], Sequence[bool]]
"""From a history and how many drafts are asked for: for each draft that is made whether it is right."""


class Proposal(NamedTuple):
    """Drafts that wait for a launch."""

    position: int  # the checkpoint's length when they were made
    parent: int  # the token they follow, which stands there
    values: tuple[int, ...]


class Ahead(NamedTuple):
    """Drafts that the slot's last launch evaluated, and where they lie."""

    base: int  # the checkpoint's length without any of them
    values: tuple[int, ...]


def always(right: bool = True) -> Guesses:
    """As many drafts as are asked for, all right or all wrong."""
    return lambda history, count: [right] * count


def pattern(*rights: Sequence[bool]) -> Guesses:
    """For a history of n tokens the drafts of `rights[n % len(rights)]`, as far as they are asked for."""
    return lambda history, count: rights[len(history) % len(rights)][:count]
