"""Sampling: the order of its stages, its ties, and that a draw depends on logits, request and position alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4batch.engine.philox import philox4x32, uniform
from ds4batch.engine.sampler import Draw, draw
from ds4batch.messages import Sampling
from scheduler.backend import Sampled

VOCAB = 500
LOGITS = np.random.default_rng(1).normal(0, 3, VOCAB).astype(np.float32)


def pick(
    logits: np.ndarray,
    position: int = 7,
    prompt: list[int] | None = None,
    drawn: tuple[int, ...] = (),
    stop: tuple[int, ...] = (),
    **sampling: object,
) -> Sampled:
    state = Draw(Sampling(**sampling), prompt or [0], stop)  # type: ignore[arg-type]
    for token in drawn:
        state.note(token)
    return draw(np.asarray(logits, np.float32), state, position)


def drawn_set(count: int = 3000, **sampling: object) -> dict[int, int]:
    found: dict[int, int] = {}
    for position in range(count):
        token = pick(LOGITS, position, seed=5, **sampling).token
        found[token] = found.get(token, 0) + 1
    return found


def test_philox_gives_the_published_words() -> None:
    # Known-answer vectors of the Random123 library.
    assert philox4x32(0, (0, 0, 0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    ones = 0xFFFFFFFF
    assert philox4x32(ones << 32 | ones, (ones,) * 4) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    assert philox4x32(0x299F31D0A4093822, pi) == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)


def test_uniform_numbers_are_uniform_and_differ_by_seed_and_position() -> None:
    numbers = [uniform(seed, position) for seed in (0, 1, 2**63) for position in range(4000)]
    assert len(set(numbers)) == len(numbers)
    assert all(0 <= x < 1 for x in numbers)
    counts, _ = np.histogram(numbers, 20, (0, 1))
    assert abs(counts - 600).max() < 120


def test_greedy_takes_the_highest_and_ties_go_to_the_lowest_id() -> None:
    logits = np.zeros(VOCAB, np.float32)
    logits[[77, 300, 450]] = 4.5
    assert pick(logits, temperature=0.0).token == 77
    assert pick(-np.ones(VOCAB), temperature=0.0).token == 0


def test_draws_follow_the_softmax() -> None:
    logits = np.log(np.array([0.5, 0.25, 0.125, 0.125]))
    counts = np.bincount([pick(logits, p, seed=9).token for p in range(8000)], minlength=4) / 8000
    assert np.abs(counts - [0.5, 0.25, 0.125, 0.125]).max() < 0.02


def test_a_low_temperature_sharpens_and_a_high_one_flattens() -> None:
    cold, hot = drawn_set(temperature=0.1), drawn_set(temperature=5.0)
    assert cold[int(LOGITS.argmax())] > 2500
    assert len(hot) > 4 * len(cold)


def test_top_k_keeps_k_tokens_and_breaks_ties_to_the_lowest_ids() -> None:
    best = set(np.argsort(-LOGITS)[:5].tolist())
    assert set(drawn_set(temperature=9.0, top_k=5)) == best
    flat = np.zeros(VOCAB)
    assert {pick(flat, p, top_k=3, seed=1).token for p in range(200)} == {0, 1, 2}
    assert pick(LOGITS, top_k=1, seed=3).token == int(LOGITS.argmax())


def test_top_p_keeps_the_smallest_set_that_holds_p() -> None:
    order = np.argsort(-LOGITS)
    weights = np.exp(LOGITS[order].astype(np.float64))
    cumulative = np.cumsum(weights / weights.sum())
    kept = set(order[: int(np.searchsorted(cumulative, 0.6)) + 1].tolist())
    found = set(drawn_set(20000, top_p=0.6))
    assert found <= kept
    assert len(found) > 0.8 * len(kept)
    assert pick(LOGITS, top_p=1e-9, seed=1).token == int(LOGITS.argmax())


def test_top_p_over_a_wide_flat_distribution_looks_far_enough() -> None:
    flat = np.zeros(5000)
    found = {pick(flat, p, top_p=0.5, seed=2).token for p in range(3000)}
    assert max(found) < 2500
    assert max(found) > 2000


def test_min_p_is_relative_to_the_most_likely_token() -> None:
    kept = set(np.flatnonzero(LOGITS.max() + math.log(0.05) <= LOGITS).tolist())
    assert set(drawn_set(min_p=0.05)) <= kept
    assert set(drawn_set(temperature=3.0, min_p=1.0)) == {int(LOGITS.argmax())}


@given(
    st.integers(0, 2**64 - 1),
    st.integers(0, 10**6),
    st.floats(1e-300, 1e30),
    st.integers(0, 50),
    st.floats(1e-300, 1),
    st.floats(0, 1),
)
def test_the_same_request_at_the_same_position_draws_the_same_token(
    seed: int, position: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    knobs = {"seed": seed, "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    first = pick(LOGITS, position, **knobs)
    assert pick(LOGITS.copy(), position, **knobs) == first
    assert 0 <= first.token < VOCAB


def test_logit_bias_adds_and_can_forbid() -> None:
    best = int(LOGITS.argmax())
    assert pick(LOGITS, temperature=0.0, logit_bias={3: 100.0}).token == 3
    assert pick(LOGITS, temperature=0.0, logit_bias={best: -100.0}).token == int(np.argsort(-LOGITS)[1])


def test_repetition_penalty_reaches_the_prompt_and_the_answer() -> None:
    logits = np.array([3.0, 2.9, -1.0, -1.1])
    assert pick(logits, temperature=0.0, prompt=[0], repetition_penalty=1.2).token == 1
    assert pick(logits, temperature=0.0, prompt=[2], drawn=(0,), repetition_penalty=1.2).token == 1
    negative = np.array([-1.0, -1.1])
    assert pick(negative, temperature=0.0, prompt=[0], repetition_penalty=1.2).token == 1


def test_presence_and_frequency_count_the_answer_only() -> None:
    logits = np.array([3.0, 2.5, 0.0])
    assert pick(logits, temperature=0.0, prompt=[0, 0, 0], presence_penalty=2.0, frequency_penalty=2.0).token == 0
    assert pick(logits, temperature=0.0, drawn=(0,), presence_penalty=0.6).token == 1
    assert pick(logits, temperature=0.0, drawn=(0,), frequency_penalty=0.3).token == 0
    assert pick(logits, temperature=0.0, drawn=(0, 0), frequency_penalty=0.3).token == 1


def test_ignore_eos_never_draws_a_stop_token() -> None:
    logits = np.array([9.0, 8.0, 1.0])
    assert pick(logits, temperature=0.0, stop=(0, 1), ignore_eos=True).token == 2
    assert pick(logits, temperature=0.0, stop=(0, 1)).token == 0


def test_logprobs_are_the_models_own_before_bias_and_temperature() -> None:
    one = pick(LOGITS, temperature=0.0, logprobs=3, logit_bias={5: 100.0})
    exact = LOGITS.astype(np.float64)
    expected = exact - np.log(np.exp(exact).sum())
    assert one.token == 5
    assert one.logprob == pytest.approx(expected[5])
    assert [t for t, _ in one.top] == np.argsort(-LOGITS)[:3].tolist()
    assert [p for _, p in one.top] == pytest.approx(sorted(expected, reverse=True)[:3])
    assert pick(LOGITS, temperature=0.0, logprobs=0).top == ()
    assert pick(LOGITS, temperature=0.0).logprob is None


@pytest.mark.parametrize("penalty", [5e-324, 1e-45, 1e-38, 1e-20])
@pytest.mark.parametrize("temperature", [0.0, 5e-324, 1.0])
def test_a_repetition_penalty_next_to_nothing_repeats_what_was_seen(penalty: float, temperature: float) -> None:
    logits = np.array([2.0, -3.0, 0.0, 30.0], np.float32)
    sampling = {"temperature": temperature, "repetition_penalty": penalty, "min_p": 0.0, "top_p": 1.0}
    assert pick(logits, prompt=[0, 1, 2], **sampling).token == 0  # the only positive one that was seen


def test_of_two_tokens_that_a_penalty_makes_huge_the_higher_is_drawn() -> None:
    logits = np.array([2.0, 3.0, 30.0], np.float32)
    drawn = {pick(logits, at, prompt=[0, 1], repetition_penalty=5e-324, seed=3, temperature=100.0).token for at in range(50)}
    assert drawn == {1}  # 3e30 against 2e30
