"""Whose state a checkpoint is: a fingerprint of everything that the bits of a session's state depend on.

A state is only ever given back to a server with the same fingerprint. Page size, slots and batch are not part of it, because no
bit depends on them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

FINGERPRINT_BYTES = 16
_OWN_IDS = 128  # model ids from here on are ours; smaller ones name particular models elsewhere
_SAMPLES = 64
_SAMPLE_BYTES = 64 << 10


@dataclass(frozen=True)
class Identity:
    """The server as its checkpoints see it."""

    fingerprint: bytes  # 16 bytes, of `fingerprint`
    quant_bits: int  # of the weights, 1..255: for the reader of a listing, since the fingerprint covers it
    ctx: int  # of every session

    def __post_init__(self) -> None:
        if len(self.fingerprint) != FINGERPRINT_BYTES:
            raise ValueError(f"fingerprint: {len(self.fingerprint)} bytes, not {FINGERPRINT_BYTES}")
        if not 0 < self.quant_bits < 256:
            raise ValueError(f"quant_bits: {self.quant_bits} is not in 1..255")
        if not 0 < self.ctx < 1 << 32:
            raise ValueError(f"ctx: {self.ctx} is not in 1..2^32-1")

    @property
    def model_id(self) -> int:
        """The header's model id, 128..255."""
        return _OWN_IDS + self.fingerprint[0] % (256 - _OWN_IDS)


def fingerprint(facts: Mapping[str, object]) -> bytes:
    """16 bytes over `facts`, whose values are strings, numbers, booleans, None, or lists and mappings of them.

    What belongs into it: `weights_identity`, the model's config, the types of weights and state, the kind of device, and a number that
    grows whenever the arithmetic changes. Raises TypeError for a value JSON has no form for.
    """
    canonical = json.dumps(facts, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=True)
    return hashlib.blake2b(canonical.encode(), digest_size=FINGERPRINT_BYTES).digest()


def weights_identity(files: Iterable[Path]) -> str:
    """Hex digest that changes when any of the weight files does, without reading them whole.

    Name, size, time of last change, and 64 samples of 64 KiB spread evenly over each file, its first and last bytes among them. The
    time is part of it because a patched tensor can lie between two samples; a false alarm costs a cold prefill, a miss a wrong
    answer. Raises OSError.
    """
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(files):
        status = path.stat()
        digest.update(f"{path.name}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
        with path.open("rb") as file:
            last = max(status.st_size - _SAMPLE_BYTES, 0)
            for offset in sorted({last * i // (_SAMPLES - 1) for i in range(_SAMPLES)}):
                file.seek(offset)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
