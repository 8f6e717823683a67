"""What the pool's figures become in /metrics."""

from __future__ import annotations

from test_metrics import fresh, samples

from ds4batch.messages import PoolStat, SlotStat, Stats


def stats(**changes: int) -> Stats:
    pool = {"pages": 10, "page_bytes": 100, "used": 4, "unshared": 7, "parked": 2, "parks": 0, "resumes": 0,
            "evicted_stale": 0, "evicted_protected": 0}  # fmt: skip
    slots = [SlotStat("idle", 60, 0, 0, 4, 1), SlotStat("parked", 50, 0, 0, 3, 0)]
    return Stats(running=1, waiting=0, kv_usage=0.4, slots=slots, pool=PoolStat(**(pool | changes)))


def test_memory_is_told_with_and_without_sharing_in_all_and_by_slot() -> None:
    metrics = fresh()
    metrics.stats(stats())
    got = samples(metrics)
    kinds = {kind: got[f'ds4batch_memory_bytes{{kind="sessions_{kind}"}}'] for kind in ("shared", "unshared", "parked")}
    assert kinds == {"shared": 400, "unshared": 700, "parked": 200}
    assert got['ds4batch_slot_kv_bytes{kind="all",slot="0"}'] == 400
    assert got['ds4batch_slot_kv_bytes{kind="own",slot="0"}'] == 100
    assert got['ds4batch_slots{state="parked"}'] == 1
    metrics.engine_down()
    assert samples(metrics)['ds4batch_memory_bytes{kind="sessions_shared"}'] == 0


def test_parks_and_evictions_are_counted_on_through_a_restart_of_the_engine() -> None:
    metrics = fresh()
    metrics.stats(stats(parks=2, resumes=1, evicted_stale=30))
    metrics.stats(stats(parks=3, resumes=3, evicted_stale=30, evicted_protected=9))
    metrics.engine_down()
    metrics.stats(stats(parks=1))
    got = samples(metrics)
    assert (got["ds4batch_parks_total"], got["vllm:num_preemptions_total"], got["ds4batch_resumes_total"]) == (4, 4, 3)
    assert got['ds4batch_evicted_tokens_total{class="stale"}'] == 30
    assert got['ds4batch_evicted_tokens_total{class="protected"}'] == 9
