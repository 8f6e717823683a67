from __future__ import annotations

from collections import Counter

import pytest

from ds4batch.server.status_window import COUNT, SECONDS, Window, median, observe


def test_a_count_goes_to_the_stretch_it_happened_in() -> None:
    window = Window(10.0)
    window.cell(10.0).generated += 1
    window.cell(10.0 + SECONDS - 0.01).generated += 1
    window.cell(10.0 + 2 * SECONDS).generated += 5
    assert [cell.generated for cell in window.whole(10.0 + 2 * SECONDS)] == [2, 0]
    assert [cell.generated for cell in window.whole(10.0 + 3 * SECONDS)] == [2, 0, 5]


def test_the_window_holds_so_many_stretches_and_no_more() -> None:
    window = Window(0.0)
    for i in range(3 * COUNT):
        window.cell(i * SECONDS).generated += i
    assert len(window.whole(3 * COUNT * SECONDS)) == COUNT
    window.cell(1e9)
    assert not any(cell.generated for cell in window.all(1e9))


def test_a_clock_that_jitters_back_counts_in_the_last_stretch() -> None:
    window = Window(0.0)
    window.cell(SECONDS).prompt += 1
    window.cell(SECONDS - 0.5).prompt += 1
    assert window.cell(SECONDS).prompt == 2


def test_a_rate_is_over_the_time_there_was() -> None:
    window = Window(0.0)
    assert window.recent(0.0)[1] == 1.0  # never a rate of a moment
    assert window.recent(2.0)[1] == 2.0
    cells, seconds = window.recent(10 * SECONDS + 1)
    assert (len(cells), seconds) == (3, pytest.approx(2 * SECONDS + 1))


@pytest.mark.parametrize(
    ("values", "middle"), [([], None), ([0.2], 0.2), ([0.001, 0.02, 7.0], 0.02), ([0.1, 0.3], 0.1), ([0.0], 1e-6)]
)
def test_the_median_is_within_three_percent(values: list[float], middle: float | None) -> None:
    counts: Counter[int] = Counter()
    for value in values:
        observe(counts, value)
    assert median(counts) == (None if middle is None else pytest.approx(middle, rel=0.03))


def test_what_came_several_times_counts_so_often() -> None:
    counts: Counter[int] = Counter()
    observe(counts, 1.0, 3)
    observe(counts, 5.0, 2)
    assert median(counts) == pytest.approx(1.0, rel=0.03)
