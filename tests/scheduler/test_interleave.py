"""How large a prefill quantum is, and whose turn it is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduler_rig import Rig, options

from scheduler import Work
from scheduler.interleave import CostModel, Interleaver, Share


def interleaver(cost: CostModel | None = None, **changes) -> Interleaver:
    return Interleaver(options(**({"mixed_prefill_quantum": 128, "idle_prefill_quantum": 2048} | changes)), cost or CostModel())


def learnt(decode: float, token: float, rows: int = 4) -> CostModel:
    """A model that has seen steps of `rows` rows take `decode`, and prompt tokens `token` each."""
    cost = CostModel()
    for _ in range(40):
        cost.observe(rows, 0, decode, True)
        cost.observe(rows, 100, decode + 100 * token, True)
    return cost


def test_a_decode_step_is_learnt_by_its_width():
    cost = CostModel()
    for rows, seconds in ((1, 0.004), (8, 0.010)):
        for _ in range(20):
            cost.observe(rows, 0, seconds, True)
    assert cost.decode_seconds(1) == pytest.approx(0.004)
    assert cost.decode_seconds(5) == cost.decode_seconds(8) == pytest.approx(0.010)
    assert cost.decode_seconds(16) == pytest.approx(0.010)  # the nearest that was seen
    assert cost.decode_seconds(0) == 0.0


def test_the_price_of_a_prompt_token_is_what_it_adds_to_the_decoders():
    assert learnt(0.006, 0.0002).token_seconds == pytest.approx(0.0002)


def test_a_step_that_returned_early_is_priced_with_the_next_that_was_sampled():
    cost = CostModel()
    for _ in range(40):
        cost.observe(0, 1000, 0.0001, False)
        cost.observe(0, 1000, 0.4, True)
    assert cost.token_seconds == pytest.approx(0.4001 / 2000, rel=1e-3)


def test_a_slow_step_is_believed_before_anything_was_sampled():
    cost = CostModel()
    cost.observe(0, 128, 1.28, False)
    assert cost.token_seconds == pytest.approx(0.01)


def test_a_decode_step_behind_unfinished_prefill_teaches_nothing_about_decoding():
    cost = CostModel()
    cost.observe(0, 512, 0.0001, False)
    cost.observe(1, 0, 0.2, True)
    assert cost.decode_seconds(1) == 0.0
    assert cost.token_seconds > 0.2 / 512 * 0.9


def test_a_prompt_given_up_while_the_device_was_busy_does_not_make_the_next_look_cheap():
    cost = learnt(0.001, 0.001, rows=1)
    cost.observe(0, 50_000, 0.0001, False)
    cost.pause()
    cost.observe(0, 100, 0.1, True)
    assert cost.token_seconds == pytest.approx(0.001, rel=0.05)


def test_a_step_without_work_pauses_the_pricing():
    rig = Rig(price=lambda work: 0.0)
    job = rig.submit([7] * 3000)
    rig.step()
    rig.scheduler.cancel(job.id, "client")
    rig.step()
    rig.backend._price = lambda work: 0.001 * sum(len(row.tokens) for row in work)
    rig.submit([8] * 100, max_tokens=1)
    rig.run()
    assert rig.scheduler._cost.token_seconds == pytest.approx(0.001)


def test_the_quantum_beside_decoders_fits_the_itl_budget():
    assert interleaver(learnt(0.010, 0.001), itl_budget=0.1).quantum(4) == 80  # 90 tokens fit, 80 is the multiple of 16


@pytest.mark.parametrize(
    ("decode", "token", "budget", "expected"),
    [
        (0.010, 0.00001, 0.1, 128),  # never above the option
        (0.010, 0.0, 0.1, 128),  # prompt tokens that cost nothing
        (0.200, 0.001, 0.1, 16),  # never nothing, even when the decoders alone exceed the budget
        (0.010, 1.0, 0.1, 16),
        (0.010, 0.001, 0.058, 48),
    ],
)
def test_the_quantum_beside_decoders_is_bounded(decode, token, budget, expected):
    assert interleaver(learnt(decode, token), itl_budget=budget).quantum(4) == expected


@pytest.mark.parametrize(("token", "expected"), [(0.00001, 2048), (0.00025, 992), (0.01, 128)])
def test_the_quantum_without_decoders_leaves_the_loop_every_quarter_second(token, expected):
    assert interleaver(learnt(0.001, token * 1.0001)).quantum(0) == expected


def test_an_option_below_the_floor_is_obeyed():
    assert interleaver(learnt(0.001, 0.01), idle_prefill_quantum=40).quantum(0) == 32


def test_the_first_chunk_is_cautious():
    assert interleaver().quantum(0) <= 512


@given(
    st.integers(0, 64),
    st.lists(st.tuples(st.integers(0, 32), st.integers(0, 4096), st.floats(0, 10), st.booleans()), max_size=30),
)
def test_whatever_was_measured_a_quantum_is_a_multiple_of_16_within_its_bounds(rows, steps):
    cost = CostModel()
    for step in steps:
        cost.observe(*step)
    quantum = interleaver(cost).quantum(rows)
    assert quantum % 16 == 0
    assert 16 <= quantum <= (128 if rows else 2048)


def test_slots_are_served_in_turn_after_the_last_one():
    turns = interleaver(learnt(0.001, 0.01), itl_budget=0.0001)  # 16 tokens a step
    waiting = [(0, 500), (2, 500), (5, 500)]
    assert [turns.shares(waiting, 4)[0].slot for _ in range(5)] == [0, 2, 5, 0, 2]
    assert turns.shares([(1, 500), (2, 500)], 4) == [Share(1, 16)]  # 5 has left; after 2 comes 1


def test_what_a_short_prompt_leaves_over_goes_to_the_next():
    turns = interleaver(learnt(0.001, 0.0))
    assert turns.shares([(0, 30), (1, 500), (2, 500)], 1) == [Share(0, 30), Share(1, 96)]
    assert turns.shares([(1, 404), (2, 500)], 1) == [Share(2, 128)]


def test_long_prompts_share_the_quanta_equally():
    rig = Rig(slots=3)
    jobs = [rig.submit([i] * 640) for i in (7, 8, 9)]
    for _ in range(9):
        rig.step()
    assert max(job.done for job in jobs) - min(job.done for job in jobs) <= 128


def test_each_step_decodes_every_ready_row_and_takes_a_quantum():
    rig = Rig(slots=4)
    talkers = [rig.submit(f"talker {i}", max_tokens=50, ignore_eos=True) for i in range(3)]
    rig.step()
    reader = rig.submit([7] * 900)
    for _ in range(20):
        before = [len(job.generated) for job in talkers], reader.done
        rig.step()
        assert [len(job.generated) for job in talkers] == [count + 1 for count in before[0]]
        assert reader.done == before[1] + 32
        assert (rig.steps()[-1].decode_rows, rig.steps()[-1].prefill_tokens) == (3, 32)


def test_decoders_on_a_slow_device_keep_their_budget():
    def price(work: list[Work]) -> float:
        prompt = sum(len(row.tokens) for row in work if len(row.tokens) > 1)
        return 0.010 + 0.001 * prompt

    rig = Rig(slots=2, price=price, mixed_prefill_quantum=512, itl_budget=0.1)
    rig.submit("talker", max_tokens=400, ignore_eos=True)
    for _ in range(10):
        rig.step()
    rig.submit([7] * 3000, max_tokens=1)
    rig.step()
    rig.events.clear()
    for _ in range(30):
        rig.step()
    assert max(step.seconds for step in rig.steps()) <= 0.1
    assert min(step.prefill_tokens for step in rig.steps()) >= 64


def test_chunking_does_not_change_an_answer():
    answers = set()
    for quantum in (16, 32, 128, 512):
        rig = Rig(idle_prefill_quantum=quantum)
        answers.add(tuple(rig.answer([5, 6, 7] * 300, max_tokens=20).generated))
    assert len(answers) == 1
