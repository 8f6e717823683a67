"""How glibc's allocator is to treat large blocks: apart while a model is loaded, on the heap while it serves.

By itself it learns from the first large block that is freed to keep all of that size on the heap. Then what a conversion or a probe
takes for a moment leaves holes between the weights, hundreds of MiB, over which the blocks of the forwards wander for hours: the
resident size creeps up with nothing leaking, and a leak does not show for as long as it fits into the holes. Blocks apart are given
back when they are freed. A forward's own, the same ones again and again, are kept on the heap, where their pages need not be made anew.
"""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt
_APART = 256 << 10  # bytes from which blocks lie apart while loading
_HIGHEST = 32 << 20  # that the allocator takes, and would come to by itself


def load() -> None:
    """A model is about to be loaded."""
    _set(_MMAP_THRESHOLD, _APART)


def serve() -> None:
    """It is loaded: give back what is free, and keep the forwards' blocks."""
    _set(_MMAP_THRESHOLD, _HIGHEST)
    _set(_TRIM_THRESHOLD, 2 * _HIGHEST)
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


def _set(parameter: int, value: int) -> None:
    """Nothing where the C library is another one."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(parameter, value)
