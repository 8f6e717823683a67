"""The series about checkpoints on disk. The engine counts from its start; these go on through its restarts."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import Counter

from ds4batch.kvstore.counters import PREFILL_FAILED, STORED, Outcome, Phase, Skip
from ds4batch.kvstore.format import Verdict
from ds4batch.messages import DiskStat, Transfer
from ds4batch.server.metric_series import Labelled, Series

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


class DiskMetrics:
    """Fed with the store's totals and with every transfer."""

    def __init__(self, series: Series) -> None:
        self._files = series.gauge("ds4batch_disk_files", "Checkpoints in the directory.").at()
        self._bytes = series.gauge("ds4batch_disk_bytes", "Bytes of all checkpoints in the directory.").at()
        self._counters: dict[str, Labelled[Counter]] = {
            "stored": series.counter("ds4batch_disk_store", "Checkpoints written.", reason=STORED),
            "known": series.counter("ds4batch_disk_known", "Saves that found their checkpoint already there.", reason=STORED),
            "skipped": series.counter("ds4batch_disk_skipped", "Sessions not saved.", reason=[s.value for s in Skip]),
            "loaded": series.counter("ds4batch_disk_load", "Attempts to load.", result=[o.value for o in Outcome]),
            "evicted": series.counter("ds4batch_disk_evicted", "Checkpoints that made room.", phase=[p.value for p in Phase]),
            "removed": series.counter(
                "ds4batch_disk_removed", "Bad checkpoints removed.", reason=(Verdict.CORRUPT.value, PREFILL_FAILED)
            ),
            "left": series.counter(
                "ds4batch_disk_left",
                "Checkpoints not used and left where they are.",
                reason=[v.value for v in (Verdict.FUTURE, Verdict.FOREIGN, Verdict.UNREADABLE, Verdict.CORRUPT)],
            ),
        }
        self._seconds = {
            True: series.histogram("ds4batch_disk_load_seconds", "Time to read and verify a checkpoint.", SECONDS).at(),
            False: series.histogram("ds4batch_disk_store_seconds", "Time to write a checkpoint.", SECONDS).at(),
        }
        self._moved = {
            True: series.counter("ds4batch_disk_load_bytes", "Bytes of the checkpoints that were loaded.").at(),
            False: series.counter("ds4batch_disk_store_bytes", "Bytes of the checkpoints that were written.").at(),
        }
        self._last: dict[tuple[str, str], int] = {}  # of this engine

    def stats(self, disk: DiskStat) -> None:
        """The totals of the engine that runs."""
        self._files.set(disk.files)
        self._bytes.set(disk.bytes)
        for what, counter in self._counters.items():
            totals: Mapping[str, int] = getattr(disk, what)
            for label, total in totals.items():
                before = self._last.get((what, label), 0)
                if total > before:
                    counter.at(label).inc(total - before)
                    self._last[what, label] = total

    def transfer(self, transfer: Transfer) -> None:
        """One checkpoint came or went."""
        self._seconds[transfer.load].observe(transfer.seconds)
        self._moved[transfer.load].inc(transfer.size)

    def engine_down(self) -> None:
        """The next engine counts from nothing."""
        self._last.clear()
