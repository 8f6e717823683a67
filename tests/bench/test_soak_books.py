"""The soak's books: whatever clients saw of a server that counts well balances, and a counter that is off by one does not."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.soak import books
from bench.soak.ledger import ANSWERED, ENDED, REFUSED, SUBMITTED, Ending, Fate, Record
from bench.soak.memory import LIMIT_MIB_H, MIB, Sample, series_of, theil_sen
from tests.bench.soak_evidence import record

Happened = tuple[Fate, frozenset[Fate]]  # what became of a request, and what its client can tell


def told(fates: frozenset[Fate]) -> st.SearchStrategy[Happened]:
    return st.sampled_from(sorted(fates)).map(lambda fate: (fate, fates))


HAPPENED = st.one_of(
    st.sampled_from(sorted(ANSWERED)).map(lambda fate: (fate, frozenset({fate}))),
    told(ENDED),
    told(frozenset(Fate)),
    told(frozenset({Fate.UNAVAILABLE, Fate.ERROR})),
    st.sampled_from(sorted(REFUSED | {Fate.QUEUE_FULL})).map(lambda fate: (fate, frozenset({fate}))),
)


def records_of(happened: list[Happened]) -> list[Record]:
    return [
        record(i, fates=fates, ending=Ending.ANSWERED if fates <= ANSWERED else Ending.LEFT)
        for i, (_, fates) in enumerate(happened)
    ]


def reading(happened: list[Happened], **off: float) -> dict[str, float]:
    """What a server that counts well shows after that, with `off` added to some counters."""
    counts = Counter(fate for fate, _ in happened)
    answered = sum(counts[fate] for fate in ANSWERED)
    ended = sum(counts[fate] for fate in ENDED)
    page = {f'{books.SUCCESS}{{finished_reason="{fate}"}}': counts[fate] for fate in ENDED}
    page |= {f'{books.REJECTS}{{reason="{fate}"}}': counts[fate] for fate in REFUSED | {Fate.QUEUE_FULL}}
    page |= {
        books.SUBMITS: sum(counts[fate] for fate in SUBMITTED),
        f'{books.CANCELS}{{cause="client",phase="decode"}}': counts[Fate.ABORT],
        books.GENERATED: 4 * answered,
        books.PROMPTS: 7 * answered,
        books.QUERIES: 7 * answered,
        books.HITS: 3 * answered,
        'ds4batch_reused_tokens_total{tier="fork"}': 3 * answered,
        books.E2E: ended,
        books.ROUTED: ended,
        books.RUNNING: 0,
        books.WAITING: 0,
    }
    return {series: float(value) + off.get(series.split("{")[0], 0) for series, value in page.items()}


NOTHING = reading([])


@given(st.lists(HAPPENED, max_size=30))
def test_a_server_that_counts_well_balances_whatever_its_clients_saw(happened: list[Happened]) -> None:
    assert books.imbalances(NOTHING, reading(happened), records_of(happened)) == []


@given(
    st.lists(st.sampled_from(sorted(ANSWERED)), min_size=1, max_size=10),
    st.sampled_from(sorted({name.split("{")[0] for name in NOTHING})),
)
def test_any_counter_that_is_off_by_one_shows_when_all_is_certain(fates: list[Fate], name: str) -> None:
    happened = [(fate, frozenset({fate})) for fate in fates]
    assert books.imbalances(NOTHING, reading(happened, **{name: 1}), records_of(happened))


def test_a_request_that_was_counted_nowhere_shows_though_others_are_uncertain() -> None:
    happened: list[Happened] = [(Fate.ABORT, ENDED)] * 5 + [(Fate.STOP, frozenset({Fate.STOP}))]
    found = books.imbalances(NOTHING, reading(happened[:-1]), records_of(happened))
    assert any("stop" in str(one) for one in found)


def test_tokens_of_uncertain_requests_are_bounded_by_their_limits() -> None:
    left = [record(i, fates=ENDED, ending=Ending.LEFT, limit=10) for i in range(2)]
    page = reading([(Fate.ABORT, ENDED)] * 2)
    assert books.imbalances(NOTHING, page | {books.GENERATED: 20.0}, left) == []
    assert books.imbalances(NOTHING, page | {books.GENERATED: 21.0}, left)


def test_a_record_that_ends_before_its_fate_is_known_is_counted_as_unsure() -> None:
    assert books.ambiguous([record(), record(fates=ENDED)]) == 1


# memory


def taken(growth: float, noise: float = 0.0, pid: int = 1, start: float = 0.0) -> list[Sample]:
    """A process that grows by so many MiB an hour, looked at every 2.5 s for ten minutes."""
    return [Sample(start + 2.5 * i, pid, int((900 + growth * 2.5 * i / 3600 + noise * (-1) ** i) * MIB)) for i in range(240)]


@pytest.mark.parametrize(("growth", "flat"), [(0.0, True), (LIMIT_MIB_H * 0.8, True), (LIMIT_MIB_H * 1.2, False)])
def test_growth_above_the_limit_is_found_through_noise(growth: float, flat: bool) -> None:
    (series,) = series_of("engine", 0, taken(growth, noise=0.2))
    assert series.flat is flat


def test_a_single_step_is_no_slope() -> None:
    samples = [replace(s, resident=s.resident + (4 * MIB if i > 200 else 0)) for i, s in enumerate(taken(0.0))]
    (series,) = series_of("engine", 0, samples)
    assert series.flat


def test_what_happens_in_the_warm_up_does_not_count() -> None:
    samples = [replace(s, resident=s.resident // 2) if s.at < 50 else s for s in taken(0.0)]
    (series,) = series_of("engine", 0, samples)
    assert series.slope_mib_h == pytest.approx(0.0)


def test_what_happens_until_the_fill_has_ended_does_not_count_nor_does_a_life_whose_fill_never_ends() -> None:
    samples = [replace(s, resident=s.resident // 2) if s.at < 200 else s for s in taken(0.0)]
    (series,) = series_of("engine", 0, samples, filled=200.0)
    assert series.slope_mib_h == pytest.approx(0.0)
    assert series.seconds == pytest.approx(597.5 - 200.0)
    (early,) = series_of("engine", 0, samples, filled=20.0)
    assert early.seconds == pytest.approx(597.5 - 60.0)
    (never,) = series_of("engine", 0, samples, filled=inf)
    assert never.slope_mib_h is None


def test_a_restarted_engine_begins_a_series_and_a_short_one_is_not_judged() -> None:
    first, second = series_of("engine", 0, taken(0.0) + taken(900.0, pid=2, start=1000.0)[:40])
    assert (first.pid, second.pid) == (1, 2)
    assert first.slope_mib_h is not None
    assert second.slope_mib_h is None


def test_the_slope_is_the_median_of_all_slopes() -> None:
    assert theil_sen([(0, 0), (1, 2), (2, 4), (3, 100)]) == pytest.approx((2 + 100 / 3) / 2)
