"""What is told of each key's owner in /metrics."""

from __future__ import annotations

import pytest
from test_metrics import fresh, samples

from ds4batch.messages import OwnerStat, Stats
from ds4batch.server import key_metrics


def stats(*owners: OwnerStat) -> Stats:
    return Stats(running=0, waiting=0, kv_usage=0.0, slots=[], owners=list(owners))


def keys(metrics) -> dict[str, float]:
    """The series by key that come from the engine."""
    names = ("ds4batch_key_requests_waiting", "ds4batch_key_requests_running", "ds4batch_key_computed_tokens_total")
    return {name.removeprefix("ds4batch_key_"): value for name, value in samples(metrics).items() if name.startswith(names)}


def test_without_keys_there_are_no_series_by_key() -> None:
    metrics = fresh()
    metrics.stats(stats(OwnerStat("", 3, 2, 100)))
    assert keys(metrics) == {}


def test_queue_slots_and_computed_tokens_are_told_by_key_and_counted_on_through_a_restart() -> None:
    metrics = fresh()
    metrics.stats(stats(OwnerStat("a", 5, 2, 100), OwnerStat("b", 0, 1, 30)))
    metrics.stats(stats(OwnerStat("a", 4, 2, 130)))  # nothing new of the other
    expected = {
        'requests_waiting{key="a"}': 4, 'requests_waiting{key="b"}': 0, 'requests_running{key="a"}': 2,
        'requests_running{key="b"}': 1, 'computed_tokens_total{key="a"}': 130, 'computed_tokens_total{key="b"}': 30,
    }  # fmt: skip
    assert keys(metrics) == expected
    metrics.stats(stats(OwnerStat("a", 4, 2, 128)))  # two lay behind a stop string
    metrics.stats(stats(OwnerStat("a", 4, 2, 131)))
    assert keys(metrics)['computed_tokens_total{key="a"}'] == 131
    metrics.engine_down()
    assert {name: value for name, value in keys(metrics).items() if value} == {
        'computed_tokens_total{key="a"}': 131, 'computed_tokens_total{key="b"}': 30,
    }  # fmt: skip
    metrics.stats(stats(OwnerStat("a", 0, 1, 10)))
    assert keys(metrics)['computed_tokens_total{key="a"}'] == 141


def test_more_keys_than_can_be_told_apart_are_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_metrics, "MOST_NAMES", 1)
    metrics = fresh()
    metrics.stats(stats(OwnerStat("a", 1, 1, 10), OwnerStat("b", 2, 1, 20), OwnerStat("c", 3, 1, 30)))
    metrics.stats(stats(OwnerStat("b", 1, 0, 25)))
    got = keys(metrics)
    assert got['requests_waiting{key="(other)"}'] == 4
    assert got['requests_running{key="(other)"}'] == 1
    assert got['computed_tokens_total{key="(other)"}'] == 55
