"""State of fixed size: what a recurrent layer keeps of a session instead of its tokens.

Owns, for each slot, the live state, one saved point, and the states before each draft of its last forward, and decides where a session
can go back to. Unlike pages it cannot be shortened: from a state of n tokens none of fewer tokens can be made. So a session can be cut
to nothing, to its saved point, to where its drafts were wrong, or not at all. A forward is the only one that advances a live state; a
session that starts at position 0 is given zeros by it, so whatever an emptied slot holds is never read.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class StateShape(NamedTuple):
    """One session's state: for each layer the inputs the convolution still sees, and a matrix for each head. All fp32."""

    layers: int
    conv_rows: int  # positions before the next one that its convolution sees
    channels: int
    heads: int
    key_dim: int
    value_dim: int

    @property
    def bytes(self) -> int:
        """Bytes of one state."""
        return 4 * self.layers * (self.conv_rows * self.channels + self.heads * self.key_dim * self.value_dim)


class StatePool:
    """`conv` is [layers, (2 + drafts) * slots, conv_rows, channels], `matrix` [layers, (2 + drafts) * slots, heads, key_dim, value_dim].

    Row s is the live state of slot s, row slots + s its saved point, row (2 + i) * slots + s the state before its i-th draft, from 0.
    """

    def __init__(self, shape: StateShape, slots: int, device: torch.device, drafts: int = 0) -> None:
        """`drafts`: the most that a forward checks for a slot."""
        self.shape = shape
        self.slots = slots
        self.drafts = drafts
        rows = (2 + drafts) * slots
        self.conv = torch.zeros(shape.layers, rows, shape.conv_rows, shape.channels, device=device)
        self.matrix = torch.zeros(shape.layers, rows, shape.heads, shape.key_dim, shape.value_dim, device=device)
        self._saved = [0] * slots  # the saved points' lengths; 0 is none
        self._before = [range(0)] * slots  # the lengths of the states before drafts

    @property
    def nbytes(self) -> int:
        """Bytes of all states, saved points and states before drafts."""
        return (2 + self.drafts) * self.slots * self.shape.bytes

    def begin(self, slot: int) -> None:
        """The state of no tokens."""
        self.conv[:, slot] = 0
        self.matrix[:, slot] = 0

    def saved(self, slot: int) -> int:
        """Tokens of the slot's saved point; 0 is none."""
        return self._saved[slot]

    def mark(self, slot: int, length: int) -> None:
        """Make the live state, of `length` tokens, the saved point. An earlier one is replaced."""
        self._copy(slot, self.slots + slot)
        self._saved[slot] = length

    def before(self, drafts: int, slot: int, sessions: int) -> list[slice]:
        """The rows that the states before each of `drafts` drafts belong in, for slots slot .. slot + sessions - 1."""
        return [slice(at := (2 + i) * self.slots + slot, at + sessions) for i in range(drafts)]

    def keep(self, slot: int, draft: int) -> None:
        """Make the live state the one before the slot's draft of this number."""
        self._copy(slot, (2 + draft) * self.slots + slot)

    def advanced(self, slot: int, live: int, drafts: int) -> None:
        """A forward made the live state one of `live` tokens, of which the last `drafts` are drafts; the states before them are kept."""
        self._before[slot] = range(live - drafts, live)

    def lengths(self, slot: int, live: int) -> set[int]:
        """Of how many tokens the slot has a state, none apart."""
        return {live, self._saved[slot], *self._before[slot]} - {0}

    def holds(self, slot: int, live: int, length: int) -> bool:
        """Whether the slot, whose live state is of `live` tokens, has or can make the state of its first `length`."""
        return length in (0, live, self._saved[slot]) or length in self._before[slot]

    def truncate(self, slot: int, live: int, length: int) -> None:
        """Make the state of the first `length` tokens the live one. Raises ValueError, with nothing changed, where there is none.

        What is saved of fewer tokens stays.
        """
        self._require(slot, live, length)
        if 0 < length < live:
            self._copy(self._row(slot, live, length), slot)
        if self._saved[slot] > length:
            self._saved[slot] = 0
        before = self._before[slot]
        self._before[slot] = range(before.start, max(before.start, min(before.stop, length)))

    def fork(self, source: int, live: int, target: int, length: int) -> None:
        """Make the state of `source`'s first `length` tokens the live one of `target`, whose saved point is dropped.

        `live` is of how many tokens the source's live state is. Raises ValueError, with nothing changed, where there is none.
        """
        self._copy(self._row(source, live, length), target)
        self._saved[target] = 0
        self._before[target] = range(0)

    def snapshot(self, slot: int, live: int, length: int) -> bytes:
        """The state of the slot's first `length` tokens, for `restore`. Raises ValueError where there is none."""
        row = self._row(slot, live, length)
        parts = (self.conv[:, row], self.matrix[:, row])
        return b"".join(part.cpu().contiguous().numpy().tobytes() for part in parts)

    def restore(self, slot: int, data: bytes, saved: int = 0, saved_data: bytes = b"") -> None:
        """Make a snapshot the live state, and another one, of `saved` tokens, the saved point; without one there is none.

        Raises ValueError, with nothing changed, when a size is not this shape's.
        """
        for one in (data, saved_data) if saved else (data,):
            if len(one) != self.shape.bytes:
                raise ValueError(f"a state of {self.shape.bytes} bytes is expected, not of {len(one)}")
        self._write(slot, data)
        if saved:
            self._write(self.slots + slot, saved_data)
        self._saved[slot] = saved
        self._before[slot] = range(0)

    def _write(self, row: int, data: bytes) -> None:
        values = torch.frombuffer(bytearray(data), dtype=torch.float32)
        conv, matrix = self.conv[:, row], self.matrix[:, row]
        conv.copy_(values[: conv.numel()].view(conv.shape))
        matrix.copy_(values[conv.numel() :].view(matrix.shape))

    def _row(self, slot: int, live: int, length: int) -> int:
        self._require(slot, live, length)
        if not length:
            raise ValueError(f"slot {slot}: no tokens have no state")
        if length == live:
            return slot
        before = self._before[slot]
        return (2 + before.index(length)) * self.slots + slot if length in before else self.slots + slot

    def _require(self, slot: int, live: int, length: int) -> None:
        if not self.holds(slot, live, length):
            raise ValueError(f"slot {slot} has states of {sorted(self.lengths(slot, live))} tokens, none of {length}")

    def _copy(self, source: int, target: int) -> None:
        self.conv[:, target] = self.conv[:, source]
        self.matrix[:, target] = self.matrix[:, source]
