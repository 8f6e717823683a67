"""Which session, busy or not, holds the longest beginning of a prompt.

Every session is cut into blocks of BLOCK tokens, and a block is named by a hash of its tokens and of the name before it, so that
equal names mean equal beginnings. A prompt is looked up block by block until nobody follows: O(prompt) for all sessions
together. Names are hints: what is returned was compared token by token.

BLOCK is independent of the pages. Whole pages are what a fork shares, but with a page a session, as on a CPU, a fork is still
worth its copy from the first few dozen tokens on.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from scheduler.job import TOKEN_BYTES, Job

BLOCK = 64
"""Tokens in a block, and the shortest beginning that is worth a fork."""

_BYTES = BLOCK * TOKEN_BYTES


class Donor(NamedTuple):
    """A session that a prompt can begin with."""

    slot: int
    tokens: int  # of the prompt, that it can give


class PrefixIndex:
    """The blocks of all sessions. `update` tells it what a session holds; it never asks."""

    def __init__(self, slots: int) -> None:
        self._names: list[list[int]] = [[] for _ in range(slots)]  # of each session's whole blocks
        self._holders: dict[int, set[int]] = {}  # name -> slots

    def update(self, slot: int, tokens: Sequence[int]) -> None:
        """The slot holds `tokens`. Growth may be told late; a session that was cut, before it grows again, or with `replace`.
        Costs what is new, or what is gone. The last block known before is compared, so that a cut nobody told of is mostly
        found out."""
        names = self._names[slot]
        whole = len(tokens) // BLOCK
        while len(names) > whole:
            self._forget(slot, names.pop())
        if names and names[-1] != _name(names, len(names) - 1, tokens):
            while names:
                self._forget(slot, names.pop())
        while len(names) < whole:
            names.append(_name(names, len(names), tokens))
            self._holders.setdefault(names[-1], set()).add(slot)

    def replace(self, slot: int, tokens: Sequence[int]) -> None:
        """The slot holds `tokens`, which need not begin like what it held."""
        self.update(slot, ())
        self.update(slot, tokens)

    def donors(self, job: Job, tokens_of: Callable[[int], Sequence[int]], fork_point: Callable[[int, int], int]) -> list[Donor]:
        """The two best donors for a job's prompt, best first; at least one token is left to evaluate.

        Two, because the best may hold the very slot that is to be filled. `fork_point(slot, most)` says how much of a session can
        be taken. Of equals the lowest slot comes first. Pure.
        """
        most = len(job.tokens) - 1
        likely: list[Donor] = []
        for depth, slots in self._levels(job):
            if len(likely) > 1 and sorted(one.tokens for one in likely)[-2] >= min((depth + 1) * BLOCK - 1, most):
                break  # nobody at this depth shares more
            for slot in slots:
                shared = _beyond(tokens_of(slot), job.tokens, depth * BLOCK)
                likely.append(Donor(slot, fork_point(slot, min(shared, most))))
        likely.sort(key=lambda donor: (-donor.tokens, donor.slot))
        found: list[Donor] = []
        for donor in likely:
            if len(found) == 2 or donor.tokens < BLOCK:
                break
            if list(tokens_of(donor.slot)[: donor.tokens]) == job.tokens[: donor.tokens]:
                found.append(donor)
        return found

    def shared(self, slot: int, job: Job) -> int:
        """Tokens that the slot's session and the prompt surely begin with alike, in whole blocks by their names alone."""
        names, mine = self._names[slot], names_of(job)
        low, high = 0, min(len(names), len(mine))
        while low < high:  # names are chained: once they differ, they all do
            middle = (low + high + 1) // 2
            low, high = (middle, high) if names[middle - 1] == mine[middle - 1] else (low, middle - 1)
        return low * BLOCK

    def _levels(self, job: Job) -> Iterator[tuple[int, list[int]]]:
        """Slots by how many leading blocks they share with the prompt, most first."""
        reached: list[set[int]] = []
        for name in names_of(job):
            holders = self._holders.get(name)
            if not holders:
                break
            reached.append(holders)
        deeper: set[int] = set()
        for depth in range(len(reached), 0, -1):
            here = reached[depth - 1] - deeper
            if here:
                yield depth, sorted(here)
                deeper |= here

    def _forget(self, slot: int, name: int) -> None:
        holders = self._holders[name]
        holders.discard(slot)
        if not holders:
            del self._holders[name]


def _name(names: Sequence[int], i: int, tokens: Sequence[int]) -> int:
    """The name of block `i` of `tokens`, from those of the blocks before it."""
    return hash((names[i - 1] if i else 0, array("I", tokens[i * BLOCK : (i + 1) * BLOCK]).tobytes()))


def names_of(job: Job) -> list[int]:
    """The names of a prompt's whole blocks, worked out once."""
    if job.blocks is None:
        job.blocks = []
        for at in range(0, len(job.packed) - _BYTES + 1, _BYTES):
            job.blocks.append(hash((job.blocks[-1] if job.blocks else 0, job.packed[at : at + _BYTES])))
    return job.blocks


def _beyond(tokens: Sequence[int], prompt: Sequence[int], alike: int) -> int:
    """Where a session and a prompt part ways that are alike for `alike` tokens."""
    end = min(len(tokens), len(prompt))
    while alike < end and tokens[alike] == prompt[alike]:
        alike += 1
    return alike
