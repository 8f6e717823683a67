"""When a batch drafts: the rule, decision by decision."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.fake import ManualClock
from scheduler.pricing import BucketStats, Decision, Pricing

EXPLORED = "S" * 5 + "P" * 7
"""Four samples of each: a cycle in which drafting starts, one in which it ends, and two plain ones that do not count."""

either_rule = pytest.mark.parametrize("legacy", [False, True], ids=["rule", "legacy"])


class Batch:
    """A batch of 100 sessions with a draft each, whose cycles cost and accept what they are told, drafting as it is priced."""

    def __init__(
        self, plain: float = 0.010, speculative: float = 0.014, p: float = 0.0, *, legacy: bool = False, width: int = 100
    ) -> None:  # fmt: skip
        self.clock = ManualClock()
        self.pricing = Pricing(self.clock, legacy=legacy)
        self.plain, self.speculative, self.p, self.width = plain, speculative, p, width
        self.verified = False
        self.room = True  # to make drafts
        self.timed = True
        self.made: list[bool] = []

    def cycle(self) -> str:
        """S where the decision was to draft, P where not."""
        wanted = self.pricing.next_drafts(self.width)
        made, verified = wanted and self.room, self.verified
        seconds = self.plain + (self.speculative - self.plain) * (0.7 * verified + 0.3 * made)
        drafts = self.width * verified
        accepted = round(drafts * self.p)
        self.clock.advance(seconds)
        self.pricing.observe(
            self.width, verified=verified, made=made, seconds=seconds * self.timed, drafts=drafts, accepted=accepted,
            tokens=self.width + accepted,
        )  # fmt: skip
        self.verified = made
        return "S" if wanted else "P"

    def cycles(self, count: int) -> str:
        return "".join(self.cycle() for _ in range(count))

    @property
    def bucket(self) -> BucketStats:
        (bucket,) = self.pricing.stats().buckets
        return bucket

    def explored(self) -> "Batch":
        """Until it is priced."""
        assert self.cycles(12) == EXPLORED
        return self


def observe(
    pricing: Pricing, width: int = 100, *, verified: bool = False, made: bool = False, seconds: float = 0.01,
    p: float | None = None, draft: int = 1,
) -> None:  # fmt: skip
    """One cycle whose sessions had `draft` drafts each, of which the part `p` was accepted; none with None."""
    drafts = 0 if p is None else draft * width
    accepted = round(drafts * (p or 0.0))
    pricing.observe(
        width, verified=verified, made=made, seconds=seconds, drafts=drafts, accepted=accepted, tokens=width + accepted
    )  # fmt: skip


def priced(plain: float, speculative: float, p: float, legacy: bool) -> Pricing:
    """Both costs known, of as many samples as the rule wants."""
    pricing = Pricing(ManualClock(), legacy=legacy)
    for _ in range(4):
        observe(pricing, verified=True, made=True, seconds=speculative, p=p)
    for _ in range(6):
        observe(pricing, seconds=plain)
    return pricing


@pytest.mark.parametrize(("legacy", "share"), [(False, 5), (True, 8)], ids=["rule", "legacy"])
def test_an_unpriced_batch_drafts_in_some_of_32_cycles(legacy: bool, share: int) -> None:
    pricing = Pricing(ManualClock(), legacy=legacy)
    decisions = ""
    for i in range(96):
        decisions += "S" if pricing.next_drafts(8) else "P"
        observe(pricing, 8, verified=bool(i % 2), made=not i % 2)  # never steady
    assert decisions == 3 * ("S" * share + "P" * (32 - share))
    assert pricing.stats().decisions == {kind: 96 if kind is Decision.EXPLORE else 0 for kind in Decision}


@either_rule
@pytest.mark.parametrize(("p", "drafts"), [(0.62, True), (0.3, False), (0.4, False), (0.41, True)])
def test_a_batch_drafts_while_that_is_worth_its_cycle(p: float, drafts: bool, legacy: bool) -> None:
    pricing = priced(0.010, 0.014, p, legacy)
    bucket = pricing.stats().buckets[0]
    assert bucket[2:6] == pytest.approx((p, 1 + p, 0.010, 0.014))
    assert pricing.next_drafts(100) is drafts


@either_rule
def test_cycles_in_which_drafting_starts_or_ends_are_no_samples(legacy: bool) -> None:
    pricing = priced(0.010, 0.014, 0.62, legacy)
    before = pricing.stats().buckets[0]
    observe(pricing, verified=False, made=True, seconds=9.0)
    observe(pricing, verified=True, made=False, seconds=9.0, p=0.62)
    after = pricing.stats().buckets[0]
    assert (after.plain_seconds, after.speculative_seconds) == (before.plain_seconds, before.speculative_seconds)
    assert after.cycles == before.cycles + 2


@either_rule
def test_nor_are_cycles_that_were_not_timed(legacy: bool) -> None:
    pricing = Pricing(ManualClock(), legacy=legacy)
    for _ in range(10):
        observe(pricing, seconds=0.0)
        observe(pricing, verified=True, made=True, seconds=0.0, p=0.5)
    bucket = pricing.stats().buckets[0]
    assert (bucket.plain_seconds, bucket.speculative_seconds) == (None, None)
    assert bucket.acceptance == 0.5


def test_the_first_plain_cycles_in_a_row_do_not_count() -> None:
    pricing = Pricing(ManualClock())
    for _ in range(2):
        observe(pricing, seconds=0.5)
        assert pricing.stats().buckets[0].plain_seconds is None
    observe(pricing, seconds=0.016)
    assert pricing.stats().buckets[0].plain_seconds == 0.016


def test_by_the_legacy_rule_the_first_sample_is_the_cost_and_later_ones_weigh_a_sixteenth() -> None:
    pricing = Pricing(ManualClock(), legacy=True)
    for seconds in (0.016, 0.032):
        observe(pricing, seconds=seconds)
    assert pricing.stats().buckets[0].plain_seconds == pytest.approx(0.017)


def test_a_cost_is_the_median_of_its_last_15_samples_and_of_two_the_lower() -> None:
    pricing = Pricing(ManualClock())
    costs = []
    for seconds in (3.0, 1.0, 2.0, 6.0, 5.0, *[7.0] * 10, *[8.0] * 8):
        observe(pricing, verified=True, made=True, seconds=seconds, p=0.5)
        costs.append(pricing.stats().buckets[0].speculative_seconds)
    assert costs == [3.0, 1.0, 2.0, 2.0, 3.0, 3.0, 5.0, 5.0, 6.0, 6.0, *[7.0] * 12, 8.0]


@given(
    true=st.lists(st.floats(0.009, 0.011), min_size=30, max_size=30),
    odd=st.dictionaries(st.integers(0, 29), st.sampled_from([1e-5, 0.002, 0.03, 2.0]), max_size=7),
    verified=st.booleans(),
)
def test_no_seven_odd_cycles_in_15_move_a_cost_away_from_the_others(
    true: list[float], odd: dict[int, float], verified: bool
) -> None:
    """Short ones, when the host was late to look at the one before; long ones, as the first launch of a shape."""
    pricing = Pricing(ManualClock())
    for _ in range(0 if verified else 2):
        observe(pricing)
    for i, seconds in enumerate(true):
        observe(pricing, verified=verified, made=verified, seconds=odd.get(i, seconds), p=0.5 if verified else None)
        bucket = pricing.stats().buckets[0]
        cost = bucket.speculative_seconds if verified else bucket.plain_seconds
        assert cost is not None
        if 2 * sum(at <= i for at in odd) < min(i + 1, 15):
            assert 0.009 <= cost <= 0.011


def test_a_plain_cycle_that_seems_to_take_nothing_does_not_stop_a_batch_that_gains() -> None:
    """Every third round of plain probes has one sample, as all have, and it follows a cycle that the host was late for."""
    batch = Batch(plain=0.0008, speculative=0.0010, p=0.5).explored()
    batch.cycles(256 - 12)
    for round_ in range(8):
        batch.plain = 0.0002 if round_ % 3 == 0 else 0.0008
        probes = batch.cycles(4)
        assert probes == "PPPP"
        assert batch.bucket.plain_seconds == 0.0008
        batch.plain = 0.0008
        assert batch.cycles(252) == "S" * 252


@either_rule
def test_acceptance_is_averaged_over_16_cycles(legacy: bool) -> None:
    pricing = Pricing(ManualClock(), legacy=legacy)
    for i in range(16):
        observe(pricing, verified=True, p=float(i % 2))
    bucket = pricing.stats().buckets[0]
    assert (bucket.acceptance, bucket.tokens) == pytest.approx((0.5, 1.5))  # a plain mean so far
    observe(pricing, verified=True, p=1.0)
    bucket = pricing.stats().buckets[0]
    assert (bucket.acceptance, bucket.tokens) == pytest.approx((0.5 + 0.5 / 16, 1.5 + 0.5 / 16))


@pytest.mark.parametrize(("legacy", "gain"), [(False, 1.3), (True, 1.6)])
def test_a_cycle_without_a_draft_says_nothing_of_acceptance(legacy: bool, gain: float) -> None:
    """But it was a cycle that meant to verify: what it committed counts, except in the legacy rule."""
    pricing = Pricing(ManualClock(), legacy=legacy)
    observe(pricing, verified=True, p=0.6)
    observe(pricing, verified=True, p=None)
    bucket = pricing.stats().buckets[0]
    assert (bucket.acceptance, bucket.tokens) == pytest.approx((0.6, gain))


def test_several_drafts_a_session_are_worth_the_tokens_they_commit() -> None:
    pricing = Pricing(ManualClock())
    observe(pricing, verified=True, p=0.5, draft=3)
    assert pricing.stats().buckets[0][2:4] == (0.5, 2.5)
    pricing.observe(4, verified=True, made=True, seconds=0.01, drafts=1, accepted=1, tokens=5)  # three sessions without one
    assert pricing.stats().buckets[0][2:4] == (1.0, 1.25)


def test_exploration_waits_for_cycles_that_say_something() -> None:
    pricing = Pricing(ManualClock())
    for _ in range(40):  # prompts ride along
        assert not pricing.next_drafts(8, timed=False)
        observe(pricing, 8, seconds=0.0)
    assert pricing.next_drafts(8)
    assert Pricing(ManualClock(), legacy=True).next_drafts(8, timed=False)


def test_the_legacy_rule_forgets_everything_when_the_width_changes() -> None:
    batch = Batch(p=0.62, legacy=True, width=8)
    assert batch.cycles(24) == "S" * 8 + "PP" + "S" * 14  # priced by its first steady plain cycle
    batch.width = 7
    assert batch.cycles(12) == "S" * 8 + "PPSS"
    batch.width = 8
    assert batch.cycle() == "S"
    assert batch.bucket[:2] == (8, 8)
    assert (batch.bucket.plain_seconds, batch.bucket.cycles) == (None, 1)


def test_a_width_in_the_same_bucket_keeps_the_prices_and_another_has_its_own() -> None:
    batch = Batch(p=0.62, width=8)
    assert batch.cycles(24) == EXPLORED + "S" * 12
    batch.width = 5
    assert batch.cycles(10) == "S" * 10
    batch.width = 9
    assert batch.cycles(12) == EXPLORED
    batch.width = 7
    assert batch.cycle() == "S"
    assert [(bucket.low, bucket.high, bucket.cycles) for bucket in batch.pricing.stats().buckets] == [(5, 8, 35), (9, 16, 12)]


@pytest.mark.parametrize(
    ("width", "low", "high"),
    [(1, 1, 1), (2, 2, 2), (3, 3, 4), (4, 3, 4), (5, 5, 8), (8, 5, 8), (9, 9, 16), (17, 17, 32), (32, 17, 32), (33, 33, 64)],
)
def test_widths_are_kept_in_powers_of_two(width: int, low: int, high: int) -> None:
    pricing = Pricing(ManualClock())
    pricing.next_drafts(width)
    assert pricing.stats().buckets[0][:2] == (low, high)


@pytest.mark.parametrize(
    ("legacy", "probes", "window", "explored"), [(False, 4, 256, 12), (True, 2, 128, 10)], ids=["rule", "legacy"]
)
def test_a_batch_that_wins_probes_plain(legacy: bool, probes: int, window: int, explored: int) -> None:
    batch = Batch(p=0.8, speculative=0.012, legacy=legacy)
    batch.cycles(window)
    for _ in range(3):
        assert batch.cycles(window) == "P" * probes + "S" * (window - probes)
    decisions = batch.pricing.stats().decisions
    assert decisions[Decision.EXPLORE] == explored
    assert (decisions[Decision.SPECULATE], decisions[Decision.PROBE_PLAIN]) == (4 * window - explored - 3 * probes, 3 * probes)


def test_a_batch_that_loses_probes_in_2_of_32_cycles_for_ever_by_the_legacy_rule() -> None:
    batch = Batch(speculative=0.030, legacy=True)
    batch.cycles(32)
    for _ in range(20):
        assert batch.cycles(32) == "SS" + "P" * 30
    decisions = batch.pricing.stats().decisions
    assert (decisions[Decision.PROBE_SPECULATE], decisions[Decision.PLAIN]) == (40, 672 - 40 - 10)


def test_a_batch_that_loses_probes_more_and_more_rarely() -> None:
    batch = Batch(speculative=0.020).explored()  # two probes lose two plain cycles: 0.5 % of 400
    for window in (32, 64, 128, 256, 512, 512, 512):
        assert batch.bucket.window == window
        assert batch.cycles(window) == "P" * (window - 2) + "SS"
    assert batch.pricing.stats().decisions[Decision.PROBE_SPECULATE] == 14


@pytest.mark.parametrize(("speculative", "longest"), [(0.0109, 32), (0.0112, 64), (0.013, 128), (0.030, 1024), (0.3, 4096)])
def test_the_window_is_as_long_as_its_probes_are_dear(speculative: float, longest: int) -> None:
    batch = Batch(speculative=speculative).explored()
    batch.cycles(9000)
    assert batch.bucket.window == longest


def test_a_price_near_break_even_is_probed_often_again_and_at_once() -> None:
    batch = Batch(speculative=0.020).explored()
    batch.cycles(32 + 64 + 128 + 256 + 100)
    batch.plain = 0.0195  # other work slows every cycle
    cycles = batch.cycles(40)
    assert batch.bucket.window == 32
    soon = cycles.index("S")
    assert soon < 40 - 2
    assert cycles[soon : soon + 3] == "SSP"
    batch.cycles(300)
    assert batch.bucket.window == 32


def test_a_batch_that_wins_and_loses_again_begins_with_a_short_window() -> None:
    batch = Batch(speculative=0.020).explored()
    batch.cycles(32 + 64 + 128)
    batch.speculative, batch.p = 0.009, 1.0
    batch.cycles(256 + 6 * 32)  # the first sample of the new price makes the windows short, until half the samples are new
    assert batch.pricing.next_drafts(100)
    batch.speculative, batch.p = 0.030, 0.0
    while batch.cycle() == "S":
        pass
    assert batch.bucket.window == 32


def test_windows_whose_probes_could_not_be_made_confirm_nothing() -> None:
    batch = Batch(speculative=0.020).explored()
    batch.room = False
    assert batch.cycles(96) == 3 * ("P" * 30 + "SS")
    assert batch.bucket.window == 32
    batch.room = True
    batch.cycles(32)
    assert batch.bucket.window == 64


def test_slow_launches_do_not_keep_a_batch_from_drafting() -> None:
    """Two of the first four samples, and two later."""
    pricing = Pricing(ManualClock())
    for seconds in (2.0, 1.0, 0.012, 0.012):
        observe(pricing, verified=True, made=True, seconds=seconds, p=0.8)
    for seconds in (0.012, 2.0, 0.012, 2.0, 0.012):
        assert pricing.stats().buckets[0].speculative_seconds == 0.012
        observe(pricing, verified=True, made=True, seconds=seconds, p=0.8)


def test_a_bucket_is_dropped_after_10_s_without_use() -> None:
    batch = Batch(p=0.62, width=8).explored()
    cycles = batch.bucket.cycles
    batch.clock.advance(9.9)
    assert batch.pricing.next_drafts(8)  # uses it
    batch.clock.advance(9.9)
    assert batch.bucket.cycles == cycles
    batch.clock.advance(0.2)
    assert batch.pricing.stats().buckets == ()
    assert batch.pricing.stats().decisions[Decision.EXPLORE] == cycles  # what was counted stays
    assert batch.cycles(12) == EXPLORED


def test_a_dropped_bucket_takes_its_window_with_it_and_leaves_the_others() -> None:
    batch = Batch(speculative=0.020, width=8).explored()
    batch.cycles(32 + 64)
    batch.width = 2
    for _ in range(12):
        batch.clock.advance(1.0)
        batch.cycle()
    assert [bucket.low for bucket in batch.pricing.stats().buckets] == [2]
    batch.width = 8
    batch.explored()
    assert [bucket.window for bucket in batch.pricing.stats().buckets] == [32, 32]


def test_the_legacy_rule_does_not_age() -> None:
    batch = Batch(legacy=True)
    batch.cycles(10)
    batch.clock.advance(1000.0)
    assert batch.bucket.plain_seconds is not None


@pytest.mark.parametrize(
    "counts",
    [
        {"drafts": 1, "accepted": 2, "tokens": 3},
        {"drafts": 1, "accepted": -1, "tokens": 1},
        {"drafts": 0, "accepted": 0, "tokens": -1},
        {"drafts": 1, "accepted": 1, "tokens": 2, "verified": False},
        {"drafts": 0, "accepted": 0, "tokens": 0, "width": 0},
    ],
)
def test_counts_that_no_cycle_has_are_refused(counts: dict[str, Any]) -> None:
    pricing = Pricing(ManualClock())
    with pytest.raises(ValueError, match=r"width|accepted"):
        pricing.observe(**{"width": 1, "verified": True, "made": True, "seconds": 0.1} | counts)
    assert pricing.stats().buckets == ()
