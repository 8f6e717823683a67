"""What steps are believed to cost, and that a long prompt's chunks keep to the budget of those who decode beside it.

The simulated devices have the figures of real ones; their time is virtual.
"""

import random

import pytest
from scheduler_rig import Rig, options

from scheduler.backend import CHAINED
from scheduler.cost import CostModel, Load, load_of
from scheduler.interleave import Interleaver, Rest
from scheduler.survey import Survey


def card(load: Load) -> float:
    """An H200 with an 8B model: a step of few rows waits for the weights (4.9 ms), others pay 22 us a row, and 0.8 ns for each
    position a prompt token attends to."""
    return max(4.9e-3, 2e-3 + 22e-6 * (load.decode_rows + load.tokens)) + 0.8e-9 * load.reach


def card_of_dear_attention(load: Load) -> float:
    """The same with the attention price of an 8,192-token prompt taken in one piece: 44 ms for its 33.5 million pairs."""
    return card(load) + 0.51e-9 * load.reach


def cpu(load: Load) -> float:
    """A small model on a few cores: 40 ms for the decoders, 2,100 prompt tokens a second at first, half that at position 1,100."""
    return (0.040 if load.decode_rows else 0.0) + load.tokens / 2100 + 4.3e-7 * load.reach


class Run:
    """Prompts prefilled one after another beside `rows` decoders, on a device whose steps differ by `noise`, part of their time."""

    def __init__(self, device, budget: float, cap: int, rows: int, noise: float = 0.0, survey: Survey | None = None) -> None:
        self.device, self.rows, self.noise = device, rows, noise
        self.random = random.Random(7)
        self.cost = CostModel(survey)
        self.turns = Interleaver(options(mixed_prefill_quantum=cap, idle_prefill_quantum=4096, itl_budget=budget), self.cost)
        for _ in range(20):
            self.step(Load(rows, 0, 0.0))

    def step(self, load: Load) -> float:
        seconds = self.device(load) * (1 + self.noise * self.random.uniform(-1, 1))
        self.cost.observe(load, seconds)
        return seconds

    def prompt(self, tokens: int) -> list[float]:
        """Seconds of each step until the prompt is evaluated."""
        at, steps = 0, []
        while at < tokens:
            (share,) = self.turns.shares([Rest(0, at, tokens - at)], self.rows)
            steps.append(self.step(load_of(self.rows, [(at, share.tokens)])))
            at += share.tokens
        return steps


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))]


@pytest.mark.parametrize("noise", [0.0, 0.03, 0.08])
@pytest.mark.parametrize("device", [card, card_of_dear_attention])
def test_a_16k_prompt_beside_15_decoders_on_a_card_is_quick_and_hardly_felt(device, noise):
    run = Run(device, 0.012, 1024, 15, noise)
    for _ in range(3):  # the first on a device that nobody knows
        steps = run.prompt(16384)
        assert quantile(steps, 0.99) <= 0.0122
        assert max(steps) <= 0.015
        assert sum(steps) <= 0.8
    assert sum(steps) / len(steps) >= 0.85 * 0.012  # most of the budget is used


@pytest.mark.parametrize("noise", [0.0, 0.03, 0.08])
def test_a_long_prompt_on_a_cpu_keeps_to_the_budget_however_deep_it_is(noise):
    run = Run(cpu, 0.1, 128, 4, noise)
    for _ in range(3):
        steps = run.prompt(3072)
        assert quantile(steps, 0.99) <= 0.1
        assert max(steps) <= 0.102
    assert sum(steps) / len(steps) >= 0.7 * 0.1  # in units of 16 tokens, which cost up to 29 ms there


def test_the_budget_is_kept_from_the_first_chunk_on_a_device_ten_times_slower_than_it_was_taken_for():
    steps = Run(lambda load: 0.02 + 5e-3 * load.tokens, 0.2, 128, 4).prompt(512)
    assert max(steps) <= 0.2


def test_the_whole_loop_over_a_device_that_works_on_its_own_keeps_the_budget_too():
    def price(work):
        long = [row for row in work if row.tokens is not CHAINED and len(row.tokens) > 1]
        chunks = [(len(rig.backend.tokens(row.slot)), len(row.tokens)) for row in long]
        return card(load_of(len(work) - len(long), chunks))

    rig = Rig(
        slots=16, ctx=20000, price=price, chains=True, itl_budget=0.012, mixed_prefill_quantum=1024, idle_prefill_quantum=4096,
        self_check=False,
    )  # fmt: skip
    for i in range(15):
        rig.submit(f"talker {i}", max_tokens=2000, ignore_eos=True)
    for _ in range(20):
        rig.step()
    rig.events.clear()
    job = rig.submit([7] * 16384, max_tokens=4, ignore_eos=True)
    while job.times.first_token is None:
        rig.step()
    mixed = [step.seconds for step in rig.steps() if step.prefill_tokens]
    assert all(step.decode_rows == 15 for step in rig.steps())
    assert quantile(mixed, 0.99) <= 0.012
    assert job.times.ttft_seconds <= 0.8


def test_a_decode_step_is_learnt_by_its_width():
    cost = CostModel()
    for rows, seconds in ((1, 0.004), (8, 0.010)):
        for _ in range(20):
            cost.observe(Load(rows, 0, 0.0), seconds)
    assert cost.decode_seconds(1) == pytest.approx(0.004)
    assert cost.decode_seconds(5) == cost.decode_seconds(8) == pytest.approx(0.010)
    assert cost.decode_seconds(16) == pytest.approx(0.010)  # the nearest that was seen
    assert cost.decode_seconds(0) == 0.0


def test_prices_are_found_by_chunks_of_any_size_at_any_depth():
    run = Run(card, 0.012, 1024, 15)
    for i in range(300):
        run.step(load_of(15, [(997 * i % 16384, 256 + 64 * (i % 5))]))
    for at, tokens in ((0, 512), (8000, 300), (16000, 200), (0, 64)):
        load = load_of(15, [(at, tokens)])
        assert run.cost.expected(load) == pytest.approx(card(load), rel=0.03)


def test_one_hiccup_does_not_stop_the_prefill():
    run = Run(card, 0.012, 1024, 15)
    run.prompt(16384)
    usual = run.turns.shares([Rest(0, 8000, 8000)], 15)[0].tokens
    run.cost.observe(load_of(15, [(8000, usual)]), 0.5)
    assert run.turns.shares([Rest(0, 8000, 8000)], 15)[0].tokens >= usual / 2


def test_a_device_that_became_twice_as_slow_is_believed_within_a_few_steps():
    run = Run(cpu, 0.15, 128, 4)
    run.prompt(3072)
    run.device = lambda load: 2 * cpu(load)
    for _ in range(20):
        run.step(Load(4, 0, 0.0))
    steps = run.prompt(1024)
    assert max(steps[4:]) <= 0.15


def test_a_step_that_returned_early_is_priced_with_the_next_that_is_complete():
    early, whole = CostModel(), CostModel()
    for i in range(40):
        at = 1000 * (i % 4)
        early.observe(load_of(0, [(at, 500)]), 0.0001, complete=False)
        early.observe(load_of(0, [(at + 500, 500)]), 0.1999)
        whole.observe(load_of(0, [(at, 1000)]), 0.2)
    assert early.prices == pytest.approx(whole.prices)


def test_a_slow_step_is_believed_before_one_is_complete():
    cost = CostModel()
    for _ in range(5):
        cost.observe(load_of(0, [(0, 128)]), 1.28, complete=False)
    assert cost.expected(load_of(0, [(0, 128)])) > 1.0


def test_a_decode_step_behind_unfinished_prefill_teaches_nothing_about_decoding():
    cost = CostModel()
    cost.observe(load_of(0, [(0, 512)]), 0.0001, complete=False)
    cost.observe(Load(1, 0, 0.0), 0.9)
    assert cost.decode_seconds(1) == 0.0
    assert cost.expected(load_of(0, [(0, 512)])) > 0.5


def test_a_prompt_given_up_while_the_device_was_busy_does_not_make_the_next_look_cheap():
    run = Run(cpu, 0.1, 128, 4)
    run.prompt(3072)
    before = run.cost.expected(load_of(0, [(0, 100)]))
    run.cost.observe(load_of(0, [(0, 50_000)]), 0.0001, complete=False)
    run.cost.pause()
    run.cost.observe(load_of(0, [(0, 100)]), before)
    assert run.cost.expected(load_of(0, [(0, 100)])) == pytest.approx(before, rel=0.05)


def test_a_step_without_work_pauses_the_pricing():
    rig = Rig(price=lambda work: 0.0)
    job = rig.submit([7] * 3000)
    rig.step()
    rig.scheduler.cancel(job.id, "client")
    rig.step()
    cost = rig.scheduler._cost
    before = cost.prices
    cost.observe(load_of(0, [(0, 128)]), cost.expected(load_of(0, [(0, 128)])))
    assert cost.prices == pytest.approx(before, rel=0.01)  # the tokens that were given up are not counted with these


def staircase(load: Load) -> float:
    """An H200 with an 8B model as it is: rows in tiles, so that 320 of them take as long as 512; attention as deep as it goes."""
    total = load.decode_rows + load.tokens
    steps = ((16, 4.6e-3), (64, 6.0e-3), (128, 6.2e-3), (256, 8.8e-3), (512, 14e-3), (1 << 30, 28e-3))
    products = next(seconds for rows, seconds in steps if total <= rows)
    return products + 1.9e-9 * load.reach


SIZES = tuple(range(16, 1009, 16))
DEPTH = 8192


def surveyed(factor: float = 1.0) -> Survey:
    """What `staircase` shows before the first request, on a machine that was `factor` times as slow then."""

    def added(tokens: int, position: int) -> float:
        return factor * (staircase(load_of(15, [(position, tokens)])) - staircase(Load(15, 0, 0.0)))

    return Survey(SIZES, (0, DEPTH), tuple(tuple(added(n, at) for n in SIZES) for at in (0, DEPTH)))


@pytest.mark.parametrize("noise", [0.0, 0.03])
def test_a_surveyed_device_is_used_to_its_budget_from_the_first_prompt_on(noise):
    run = Run(staircase, 0.014, 1024, 15, noise, surveyed())
    steps = run.prompt(16384)
    assert quantile(steps, 0.99) <= 0.0145
    assert sum(steps) <= 0.95 + noise
    unknown = Run(staircase, 0.014, 1024, 15, noise).prompt(16384)
    assert sum(steps) <= 0.85 * sum(unknown)


@pytest.mark.parametrize("factor", [0.6, 1.6])
def test_a_survey_that_was_wrong_is_corrected(factor):
    run = Run(staircase, 0.014, 1024, 15, 0.02, surveyed(factor))
    run.prompt(16384)
    steps = run.prompt(16384)
    assert quantile(steps, 0.99) <= 0.015
    assert sum(steps) <= 1.05


def test_a_survey_tells_how_many_tokens_fit() -> None:
    survey = Survey((16, 48, 112), (0, 1000), ((0.001, 0.002, 0.004), (0.003, 0.004, 0.008)))
    base = 0.005
    assert [survey.most(seconds, 0, 0, 0.0, base) for seconds in (0.0005, 0.0015, 0.0021, 0.004)] == [0, 16, 48, 48]
    assert 112 <= survey.most(0.0043, 0, 0, 0.0, base) <= 116  # its tokens lie 55 deep on average, which costs a little
    assert survey.most(0.0043, 1000, 0, 0.0, base) == 48
    assert 12 <= survey.most(0.0043, 0, 100, 4950.0, base) <= 16
    assert survey.most(1.0, 0, 0, 0.0, base) > 112
    assert survey.seconds(224, 0) == pytest.approx(0.008)
    assert survey.seconds(0, 500) == 0.0


def test_a_survey_passes_over_sizes_that_cost_more_a_token() -> None:
    survey = Survey((112, 144, 176), (0, 1000), ((0.004, 0.0075, 0.0078),) * 2)
    assert survey.most(0.0077, 0, 0, 0.0, 0.005) == 112  # 144 fit, in a step that is half as long again
    assert survey.most(0.00781, 0, 0, 0.0, 0.005) == 176
    assert survey.most(0.0077, 0, 0, 0.0, 0.05) == 144  # where the decoders take most of the step
    assert survey.most(0.0077, 0, 40, 0.0, 0.005) == 72


def test_a_survey_is_read_between_its_depths_and_beyond_them() -> None:
    survey = Survey((100,), (0, 1000, 3000), ((0.001,), (0.003,), (0.005,)))
    assert [survey.seconds(100, at) for at in (0, 500, 1000, 2000, 3000, 4000)] == pytest.approx(
        [0.001, 0.002, 0.003, 0.004, 0.005, 0.006]
    )
