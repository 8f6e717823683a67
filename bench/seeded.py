"""Random choices that are the same in every process: each is a function of a seed and of what is being chosen.

Python's own hash() differs between processes, so nothing here uses it.
"""

from __future__ import annotations

import hashlib
import random


def digest(seed: int | str, *what: object) -> int:
    """256 bits that depend on all arguments and on nothing else."""
    text = "\0".join(str(part) for part in (seed, *what))
    return int.from_bytes(hashlib.sha256(text.encode()).digest(), "big")


def below(limit: int, seed: int | str, *what: object) -> int:
    """A whole number in [0, limit). The bias of the modulus is below 2**-200."""
    return digest(seed, *what) % limit


def fraction(seed: int | str, *what: object) -> float:
    """A number in [0, 1)."""
    return (digest(seed, *what) >> 203) / (1 << 53)


def generator(seed: int | str, *what: object) -> random.Random:
    """A generator whose whole sequence is fixed by the arguments."""
    return random.Random(digest(seed, *what))
