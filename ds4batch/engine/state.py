"""State of fixed size: what a recurrent layer keeps of a session instead of its tokens.

Owns, for each slot, the live state and one saved point, and decides where a session can go back to. Unlike pages it cannot be
shortened: from a state of n tokens none of fewer tokens can be made. So a session can be cut to nothing, to its saved point, or not
at all. A forward is the only one that advances a live state; a session that starts at position 0 is given zeros by it, so whatever
an emptied slot holds is never read.
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
    """`conv` is [layers, 2 * slots, conv_rows, channels], `matrix` [layers, 2 * slots, heads, key_dim, value_dim].

    Row s is the live state of slot s, row slots + s its saved point.
    """

    def __init__(self, shape: StateShape, slots: int, device: torch.device) -> None:
        self.shape = shape
        self.slots = slots
        rows = 2 * slots
        self.conv = torch.zeros(shape.layers, rows, shape.conv_rows, shape.channels, device=device)
        self.matrix = torch.zeros(shape.layers, rows, shape.heads, shape.key_dim, shape.value_dim, device=device)
        self._saved = [0] * slots  # the saved points' lengths; 0 is none

    @property
    def nbytes(self) -> int:
        """Bytes of all states and saved points."""
        return 2 * self.slots * self.shape.bytes

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

    def holds(self, slot: int, live: int, length: int) -> bool:
        """Whether the slot, whose live state is of `live` tokens, has or can make the state of its first `length`."""
        return length in (0, live, self._saved[slot])

    def truncate(self, slot: int, live: int, length: int) -> None:
        """Make the state of the first `length` tokens the live one. Raises ValueError, with nothing changed, where there is none.

        The saved point stays unless it has more tokens than are kept.
        """
        self._require(slot, live, length)
        if 0 < length < live:
            self._copy(self.slots + slot, slot)
        self._saved[slot] = min(self._saved[slot], length)

    def fork(self, source: int, live: int, target: int, length: int) -> None:
        """Make the state of `source`'s first `length` tokens the live one of `target`, whose saved point is dropped.

        `live` is of how many tokens the source's live state is. Raises ValueError, with nothing changed, where there is none.
        """
        self._copy(self._row(source, live, length), target)
        self._saved[target] = 0

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

    def _write(self, row: int, data: bytes) -> None:
        values = torch.frombuffer(bytearray(data), dtype=torch.float32)
        conv, matrix = self.conv[:, row], self.matrix[:, row]
        conv.copy_(values[: conv.numel()].view(conv.shape))
        matrix.copy_(values[conv.numel() :].view(matrix.shape))

    def _row(self, slot: int, live: int, length: int) -> int:
        self._require(slot, live, length)
        if not length:
            raise ValueError(f"slot {slot}: no tokens have no state")
        return slot if length == live else self.slots + slot

    def _require(self, slot: int, live: int, length: int) -> None:
        if not self.holds(slot, live, length):
            raise ValueError(f"slot {slot} has states of {live} and {self._saved[slot]} tokens, none of {length}")

    def _copy(self, source: int, target: int) -> None:
        self.conv[:, target] = self.conv[:, source]
        self.matrix[:, target] = self.matrix[:, source]
