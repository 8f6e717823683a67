"""How large a prefill quantum is, and whose turn it is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduler_rig import Rig, options

from scheduler.cost import CostModel, Load, load_of
from scheduler.interleave import Interleaver, Rest, Share


def interleaver(cost: CostModel | None = None, **changes) -> Interleaver:
    return Interleaver(options(**({"mixed_prefill_quantum": 128, "idle_prefill_quantum": 2048} | changes)), cost or CostModel())


def learnt(decode: float, token: float, rows: int = 4) -> CostModel:
    """A model that has seen steps of `rows` rows take `decode`, and prompt tokens `token` each wherever they lie."""
    cost = CostModel()
    for i in range(200):
        cost.observe(Load(rows, 0, 0.0), decode)
        chunk = load_of(rows, [(500 * (i % 5), 64 + 16 * (i % 7))])
        cost.observe(chunk, decode + chunk.tokens * token)
    return cost


def quantum(turns: Interleaver, rows: int, position: int = 0) -> int:
    """Prompt tokens of a step with `rows` decode rows, for one long prompt evaluated up to `position`."""
    (share,) = turns.shares([Rest(0, position, 1 << 20)], rows)
    return share.tokens


def test_the_quantum_beside_decoders_fits_the_itl_budget():
    assert quantum(interleaver(learnt(0.010, 0.001), itl_budget=0.1), 4) == 80  # 90 fit, 88 with the margin; a multiple of 16


@pytest.mark.parametrize(
    ("decode", "token", "budget", "expected"),
    [
        (0.010, 0.00001, 0.1, 128),  # never above the option
        (0.010, 0.0, 0.1, 128),  # prompt tokens that cost nothing
        (0.200, 0.001, 0.1, 16),  # never nothing, even when the decoders alone exceed the budget
        (0.010, 1.0, 0.1, 16),
        (0.010, 0.001, 0.0615, 48),
    ],
)
def test_the_quantum_beside_decoders_is_bounded(decode, token, budget, expected):
    assert quantum(interleaver(learnt(decode, token), itl_budget=budget), 4) == expected


@pytest.mark.parametrize(("token", "expected"), [(0.00001, 2048), (0.00025, 976), (0.01, 128)])
def test_the_quantum_without_decoders_leaves_the_loop_every_quarter_second(token, expected):
    assert quantum(interleaver(learnt(0.001, token)), 0) == expected


def test_an_option_below_the_floor_is_obeyed():
    assert quantum(interleaver(learnt(0.001, 0.01), idle_prefill_quantum=40), 0) == 32


def test_the_first_chunk_is_cautious():
    assert quantum(interleaver(), 0) <= 512
    assert quantum(interleaver(), 1) <= 32


def test_a_chunk_beside_decoders_grows_at_once_where_its_tokens_are_free_and_gently_where_not():
    free, dear = CostModel(), CostModel()
    for cost, seconds in ((free, 0.005), (dear, 0.008)):
        cost.observe(Load(4, 0, 0.0), 0.005)
        cost.observe(load_of(4, [(0, 64)]), seconds)
    assert (free.limit, dear.limit) == (128, 80)


@given(
    st.integers(0, 64),
    st.lists(
        st.tuples(st.integers(0, 32), st.integers(0, 4096), st.integers(0, 1 << 20), st.floats(0, 10), st.booleans()), max_size=30
    ),
    st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(1, 5000)), min_size=1, max_size=4),
)
def test_whatever_was_measured_a_quantum_is_within_its_bounds_and_cut_at_multiples_of_16(rows, steps, prompts):
    cost = CostModel()
    for decode, tokens, position, seconds, complete in steps:
        cost.observe(load_of(decode, [(position, tokens)] if tokens else []), seconds, complete)
    rests = [Rest(slot, at, tokens) for slot, (at, tokens) in enumerate(prompts)]
    shares = interleaver(cost).shares(rests, rows)
    assert min(16, prompts[0][1]) <= sum(share.tokens for share in shares) <= (128 if rows else 2048)
    assert all(share.tokens % 16 == 0 or share.tokens == rests[share.slot].tokens for share in shares)


def test_slots_are_served_in_turn_after_the_last_one():
    turns = interleaver(learnt(0.001, 0.01), itl_budget=0.0001)  # 16 tokens a step
    waiting = [Rest(0, 0, 500), Rest(2, 0, 500), Rest(5, 0, 500)]
    assert [turns.shares(waiting, 4)[0].slot for _ in range(5)] == [0, 2, 5, 0, 2]
    assert turns.shares([Rest(1, 0, 500), Rest(2, 0, 500)], 4) == [Share(1, 16)]  # 5 has left; after 2 comes 1


def test_what_a_short_prompt_leaves_over_goes_to_the_next():
    turns = interleaver(learnt(0.001, 0.0))
    assert turns.shares([Rest(0, 0, 30), Rest(1, 0, 500), Rest(2, 0, 500)], 1) == [Share(0, 30), Share(1, 96)]
    assert turns.shares([Rest(1, 96, 404), Rest(2, 0, 500)], 1) == [Share(2, 128)]


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
    def price(work):
        return 0.010 + 0.001 * sum(len(row.tokens) for row in work if len(row.tokens) > 1)

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
    assert min(step.prefill_tokens for step in rig.steps()[5:]) >= 64


def test_chunking_does_not_change_an_answer():
    answers = set()
    for quantum in (16, 32, 128, 512):
        rig = Rig(idle_prefill_quantum=quantum)
        answers.add(tuple(rig.answer([5, 6, 7] * 300, max_tokens=20).generated))
    assert len(answers) == 1
