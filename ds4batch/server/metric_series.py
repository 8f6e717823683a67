"""How a metric series is made: label values, buckets, and every combination of labels present from the start."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

M = TypeVar("M", Counter, Gauge, Histogram)

COMMON = ("model_name", "engine")
ENGINE = "0"

TIERS = (
    "responses-visible",
    "responses-tool-output",
    "anthropic-tool-output",
    "chat-tool-output",
    "memory-rewind",
    "memory-token",
    "thinking-visible",
    "memory-text",
    "rewind-point",
    "fork",
    "disk-text",
    "none",
)
VICTIMS = ("none", "empty", "stale", "protected")
FINISHED = ("stop", "length", "abort", "error")
PHASES = ("queue", "restore", "prefill", "decode")
CAUSES = ("client", "shutdown", "slow_reader", "stall", "deadline")
SLOT_STATES = ("empty", "idle", "stale", "prefill", "restore", "decode", "parked")
REJECTIONS = ("invalid", "context_length", "queue_full", "unavailable", "too_large", "timeout")
LOGIN_REFUSALS = ("missing", "unknown", "scope")
PLANNED_MEMORY = ("weights", "kv_per_session", "kv_total", "kv_pool", "scratch", "naive_total", "shared_total")
SESSION_MEMORY = ("sessions_shared", "sessions_unshared", "sessions_parked")
MEMORY_KINDS = (*PLANNED_MEMORY, *SESSION_MEMORY)

# Seconds. The first and third are vLLM's; the second puts finer steps below its first, so that a 4 ms step is resolved.
TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
ITL = (
    0.001,
    0.002,
    0.003,
    0.004,
    0.005,
    0.006,
    0.008,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
)
REQUEST = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
SHORT_REQUEST = (0.001, 0.005, 0.01, 0.05, 0.1, *REQUEST)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 32)
CHUNK = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


def one_two_five(most: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20 ... up to and including the first bucket that holds `most`."""
    buckets: list[int] = []
    scale = 1
    while not buckets or buckets[-1] < most:
        buckets += [scale, 2 * scale, 5 * scale]
        scale *= 10
    return tuple(b for i, b in enumerate(buckets) if i == 0 or buckets[i - 1] < most)


class Labelled(Generic[M]):
    """A metric whose own labels take known values, beside model_name and engine; all their combinations exist at once."""

    def __init__(self, metric: M, model: str, labels: Mapping[str, Iterable[str]]) -> None:
        self._metric: M = metric
        self._model = model
        self._children: dict[tuple[str, ...], M] = {}
        for values in itertools.product(*labels.values()):
            self.at(*values)

    def at(self, *values: str) -> M:
        """The series with these label values, in the order of the declaration."""
        child = self._children.get(values)
        if child is None:
            child = self._children[values] = self._metric.labels(self._model, ENGINE, *values)
        return child


class Series:
    """Makes metrics in one registry that all carry model_name and engine."""

    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        self._registry = registry
        self._model = model

    def counter(self, name: str, text: str, **labels: Iterable[str]) -> Labelled[Counter]:
        """A counter; the exposition adds `_total`."""
        return Labelled(Counter(name, text, (*COMMON, *labels), registry=self._registry), self._model, labels)

    def gauge(self, name: str, text: str, **labels: Iterable[str]) -> Labelled[Gauge]:
        """A gauge."""
        return Labelled(Gauge(name, text, (*COMMON, *labels), registry=self._registry), self._model, labels)

    def histogram(self, name: str, text: str, buckets: Iterable[float], **labels: Iterable[str]) -> Labelled[Histogram]:
        """A histogram; `buckets` are upper bounds."""
        metric = Histogram(name, text, (*COMMON, *labels), registry=self._registry, buckets=tuple(buckets))
        return Labelled(metric, self._model, labels)
