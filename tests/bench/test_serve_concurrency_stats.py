"""The arithmetic of the load benchmark: percentiles, rates, arrivals."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import seeded
from bench.arrivals import arrival_offsets
from bench.http_stream import Outcome, Result
from bench.rates import Coverage, decode_rate, peak_overlap, peak_tokens_per_second, where_overlapping
from bench.stats import nearest_rank, summarize

ROOT = Path(__file__).resolve().parents[2]
FINITE = st.floats(-1e6, 1e6)


def result(token_times: list[float], end: float, tokens: int, start: float = 0.0) -> Result:
    return Result(
        index=0,
        turn=0,
        outcome=Outcome.COMPLETED,
        start=start,
        sent=start,
        end=end,
        token_times=tuple(token_times),
        output_tokens=tokens,
    )


@given(st.lists(FINITE, min_size=1, max_size=300))
def test_every_linear_figure_equals_numpys(values: list[float]) -> None:
    summary = summarize(values)
    assert summary.n == len(values)
    assert summary.mean == pytest.approx(np.mean(values), rel=1e-9, abs=1e-6)
    assert summary.std == pytest.approx(np.std(values), rel=1e-9, abs=1e-6)
    assert summary.median == pytest.approx(np.median(values), rel=1e-9, abs=1e-6)
    for percent in (50, 75, 90, 95, 99):
        assert getattr(summary, f"p{percent}") == pytest.approx(np.percentile(values, percent), rel=1e-9, abs=1e-6)
    assert (summary.min, summary.max) == (min(values), max(values))


def test_nearest_rank_takes_a_value_of_the_list() -> None:
    values = [float(k) for k in range(1, 11)]
    assert [nearest_rank(values, f) for f in (0.5, 0.9, 0.95, 0.99)] == [6.0, 10.0, 10.0, 10.0]
    summary = summarize(values)
    assert (summary.p50, summary.p50_nr) == (5.5, 6.0)
    assert summarize([3.0]).p99_nr == 3.0  # the index is clipped to the list


def test_p99_of_few_values_is_marked() -> None:
    assert summarize([1.0] * 99).low_n
    assert not summarize([1.0] * 100).low_n


def test_an_empty_list_has_no_figures_and_no_error() -> None:
    summary = summarize([])
    assert (summary.n, summary.low_n, summary.mean, summary.p99, summary.max) == (0, True, None, None, None)


def test_tpot_leaves_out_the_first_token_and_needs_a_second() -> None:
    assert result([2.0, 3.0, 4.0], end=6.0, tokens=5, start=1.0).tpot == pytest.approx(1.0)
    assert result([2.0], end=2.5, tokens=1).tpot is None


def test_decode_rate_of_one_request_at_a_time_is_the_inverse_of_tpot() -> None:
    requests = [result([1.0, 2.0, 3.0], 3.0, 3), result([11.0, 12.0], 13.0, 3, start=10.0)]
    rate = decode_rate(requests)
    assert [rate.tokens, rate.seconds, rate.tokens_per_s] == pytest.approx([4.0, 4.0, 1.0])


def test_decode_rate_counts_shared_time_once_and_waiting_for_first_tokens_never() -> None:
    requests = [result([5.0, 6.0, 7.0, 8.0], 8.0, 4), result([5.0, 6.0, 7.0, 8.0], 8.0, 4)]
    rate = decode_rate(requests)
    assert rate.seconds == pytest.approx(3.0)
    assert rate.tokens_per_s == pytest.approx(2.0)


def test_full_width_rate_sees_only_the_time_when_all_decode() -> None:
    first = result([0.0, 1.0, 2.0, 3.0, 4.0], 4.0, 5)
    second = result([2.0, 3.0, 4.0, 5.0, 6.0], 6.0, 5)
    rate = decode_rate([first, second], width=2)
    assert [rate.seconds, rate.tokens] == pytest.approx([2.0, 4.0])
    alone = decode_rate([first], width=2)
    assert (alone.tokens_per_s, alone.seconds) == (None, 0.0)


@given(
    st.lists(
        st.tuples(st.integers(0, 20), st.lists(st.integers(0, 3), max_size=8), st.integers(1, 4)),
        min_size=1,
        max_size=6,
    )
)
def test_no_decoded_token_is_lost_or_counted_twice(shapes: list[tuple[int, list[int], int]]) -> None:
    requests = []
    for first, gaps, tail in shapes:  # a gap of 0: two chunks came in one read
        times = [float(at) for at in itertools.accumulate(gaps, initial=first)]
        requests.append(result(times, times[-1] + tail, 2 * len(times)))
    rate = decode_rate(requests)
    assert rate.tokens == pytest.approx(sum(request.output_tokens - 1 for request in requests))
    assert decode_rate(requests, width=2).tokens <= rate.tokens + 1e-9


def test_a_gap_across_a_border_counts_by_its_share() -> None:
    long_gap = result([0.0, 10.0], 10.0, 2)
    neighbour = result([5.0, 7.5], 7.5, 2)
    assert decode_rate([long_gap, neighbour], width=2).tokens == pytest.approx(0.25 + 1.0)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20)), max_size=12), st.integers(1, 4))
def test_overlaps_agree_with_counting_instants(spans: list[tuple[int, int]], width: int) -> None:
    intervals = [(float(start), float(start + length)) for start, length in spans]
    stretches = where_overlapping(intervals, width)
    for second in range(64):  # borders are whole numbers, so a half stands for its whole second
        depth = sum(start < second + 0.5 < end for start, end in intervals)
        inside = any(start < second + 0.5 < end for start, end in stretches)
        assert inside == (depth >= width)
        assert Coverage(stretches).share(second, second + 1) == float(inside)
    depths = [sum(start < second + 0.5 < end for start, end in intervals) for second in range(64)]
    assert peak_overlap(intervals) == max(depths)


def test_peak_tokens_spread_usage_over_the_chunks() -> None:
    # Two chunks of four tokens by usage: two tokens each.
    requests = [result([0.5, 1.5], 2.0, 4), result([1.1, 1.9], 2.0, 2)]
    assert peak_tokens_per_second(requests) == pytest.approx(2 + 1 + 1)
    assert peak_tokens_per_second([]) == 0.0


@pytest.mark.parametrize("burstiness", [0.05, 0.5, 1.0, 20.0])
def test_arrivals_are_reproducible_and_rescaled_to_the_rate(burstiness: float) -> None:
    offsets = arrival_offsets(200, 4.0, burstiness, seed=7)
    assert offsets == arrival_offsets(200, 4.0, burstiness, seed=7)
    assert offsets != arrival_offsets(200, 4.0, burstiness, seed=8)
    assert offsets == sorted(offsets)
    assert offsets[0] >= 0.0
    assert offsets[-1] == pytest.approx(200 / 4.0)


def test_gaps_of_burstiness_one_are_exponential_and_burstiness_shapes_them() -> None:
    def variation(burstiness: float) -> float:
        gaps = np.diff([0.0, *arrival_offsets(4000, 1.0, burstiness, seed=1)])
        return float(np.std(gaps) / np.mean(gaps))

    assert variation(1.0) == pytest.approx(1.0, abs=0.1)  # the coefficient of variation of a gamma is shape ** -0.5
    assert variation(4.0) == pytest.approx(0.5, abs=0.05)
    assert variation(0.25) == pytest.approx(2.0, abs=0.3)


def test_seeded_choices_are_the_same_in_another_process() -> None:
    program = "from bench import seeded; print([seeded.below(1000003, 5, 'offset', k) for k in range(20)])"
    runs = {
        subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            check=True,
            cwd=ROOT,
            env={"PYTHONHASHSEED": salt},
        ).stdout
        for salt in ("1", "2")
    }
    assert runs == {f"{[seeded.below(1000003, 5, 'offset', k) for k in range(20)]}\n"}


def test_seeded_fractions_fill_the_unit_interval() -> None:
    values = [seeded.fraction(0, k) for k in range(2000)]
    assert all(0.0 <= value < 1.0 for value in values)
    assert np.mean(values) == pytest.approx(0.5, abs=0.03)
    assert all(a != b for a, b in itertools.pairwise(values))
