"""From a place in a file to a device, through one small buffer.

A tensor's bytes are never in the host's memory as a whole unless the host is the device: pieces are read into pinned memory, two
in turn, so that reading one overlaps with copying the other.
"""

from __future__ import annotations

import torch

from ds4batch.engine.weights.config import ModelError
from ds4batch.engine.weights.reading import fill

PIECE = 32 << 20
"""Bytes of each of the two staging buffers."""


class Staging:
    """Reads onto one device. Its buffers are taken with the first tensor and go with it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._turns: list[tuple[torch.Tensor, torch.cuda.Event]] = []
        if device.type == "cuda":
            for _ in range(2):
                event = torch.cuda.Event()
                self._turns.append((torch.empty(PIECE, dtype=torch.uint8, pin_memory=True), event))

    def read(self, path: str, name: str, offset: int, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes] on the device: the bytes from `offset`. Raises ModelError, naming file and tensor, when they are not there."""
        out = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        try:
            with open(path, "rb", buffering=0) as file:
                file.seek(offset)
                if not self._turns:
                    fill(file, path, name, out.numpy().data, offset)
                    return out
                for turn, at in enumerate(range(0, nbytes, PIECE)):
                    host, copied = self._turns[turn % 2]
                    part = host[: min(PIECE, nbytes - at)]
                    copied.synchronize()
                    fill(file, path, name, part.numpy().data, offset + at)
                    out[at : at + len(part)].copy_(part, non_blocking=True)
                    copied.record()
        except OSError as error:
            raise ModelError(f"{path}: cannot read tensor {name}: {error.strerror}") from error
        return out
