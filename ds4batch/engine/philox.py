"""The counter-based random generator: Philox 4x32 with 10 rounds (Salmon et al., SC11), as Triton's and torch's generators are.

A draw is a function of (seed, position) and of nothing else, so a request draws the same numbers under any load.
"""

from __future__ import annotations

_MASK = 0xFFFFFFFF
_ROUNDS = 10


def philox4x32(seed: int, counter: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Four 32-bit words for a 64-bit seed and a 128-bit counter, least significant words first."""
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    c0, c1, c2, c3 = counter
    for _ in range(_ROUNDS):
        high = 0xD2511F53 * c0
        low = 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (low >> 32) ^ c1 ^ k0, low & _MASK, (high >> 32) ^ c3 ^ k1, high & _MASK
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, position: int) -> float:
    """A double in [0, 1) with 53 random bits, for the token at `position`."""
    low, high, _, _ = philox4x32(seed, (position & _MASK, (position >> 32) & _MASK, 0, 0))
    return ((high << 32 | low) >> 11) * 2.0**-53
