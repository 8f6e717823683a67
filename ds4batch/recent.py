"""Keeps what was used last, within a total weight. Thread-safe; what is made twice at the same time is made twice."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Recent(Generic[K, V]):
    """A cache bounded by weight, so that a few large values do not take what many small ones may."""

    def __init__(self, most: int) -> None:
        """`most`: the sum of the weights that are kept."""
        self._most = most
        self._weight = 0
        self._kept: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: K, make: Callable[[], V], weight: int = 1) -> V:
        """The value of `key`, made where it is not kept. What `make` raises is raised, and nothing is kept then."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key][0]
        made = make()
        with self._lock:
            if key not in self._kept and weight <= self._most:
                self._kept[key] = (made, weight)
                self._weight += weight
                while self._weight > self._most:
                    self._weight -= self._kept.popitem(last=False)[1][1]
        return made

    @property
    def weight(self) -> int:
        """Of all that is kept."""
        return self._weight
