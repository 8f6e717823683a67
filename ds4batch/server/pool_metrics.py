"""The series about the KV pool: what the sessions hold with and without sharing, and who had to give way.

The engine counts from its start; the counters here go on through its restarts.
"""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import Counter, Gauge

from ds4batch.messages import PoolStat, SlotStat
from ds4batch.server.metric_series import SESSION_MEMORY, Labelled, Series

_COUNTED = ("parks", "resumes", "evicted_stale", "evicted_protected")


class PoolMetrics:
    """Fed with the pool's figures of every report."""

    def __init__(self, series: Series, slots: Sequence[str], memory: Labelled[Gauge], evicted: Labelled[Counter]) -> None:
        """`memory` takes the sessions' bytes by kind, `evicted` the tokens of those that gave way by class."""
        self._memory = memory
        self._slots = series.gauge(
            "ds4batch_slot_kv_bytes",
            "KV pages of a slot's session; own are those nobody shares.",
            slot=slots,
            kind=("all", "own"),
        )
        self._preemptions = series.counter(
            "vllm:num_preemptions", "Running sessions parked in host memory; none is recomputed."
        ).at()
        parks = series.counter("ds4batch_parks", "Running sessions parked in host memory.").at()
        resumes = series.counter("ds4batch_resumes", "Parked sessions brought back, bit for bit.").at()
        self._counters: dict[str, Sequence[Counter]] = {
            "parks": (parks, self._preemptions),
            "resumes": (resumes,),
            "evicted_stale": (evicted.at("stale"),),
            "evicted_protected": (evicted.at("protected"),),
        }
        self._last = dict.fromkeys(_COUNTED, 0)  # of this engine

    def stats(self, pool: PoolStat, slots: Sequence[SlotStat]) -> None:
        """The figures of one instant."""
        for kind, pages in zip(SESSION_MEMORY, (pool.used, pool.unshared, pool.parked), strict=True):
            self._memory.at(kind).set(pages * pool.page_bytes)
        for i, slot in enumerate(slots):
            self._slots.at(str(i), "all").set(slot.pages * pool.page_bytes)
            self._slots.at(str(i), "own").set(slot.own_pages * pool.page_bytes)
        for name, counters in self._counters.items():
            total = getattr(pool, name)
            for counter in counters:
                counter.inc(total - self._last[name])
            self._last[name] = total

    def engine_down(self, slots: Sequence[str]) -> None:
        """No session is left, and the next engine counts from nothing."""
        for kind in SESSION_MEMORY:
            self._memory.at(kind).set(0)
        for slot in slots:
            self._slots.at(slot, "all").set(0)
            self._slots.at(slot, "own").set(0)
        self._last = dict.fromkeys(_COUNTED, 0)
