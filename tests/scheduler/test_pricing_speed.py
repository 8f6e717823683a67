"""What drafting by price gains and loses against batches that always draft and that never do. Time is simulated."""

import random
from collections.abc import Callable, Iterable
from typing import NamedTuple

import pytest

from scheduler.fake import ManualClock
from scheduler.pricing import Decision, Pricing


class Device(NamedTuple):
    """Seconds of a cycle that does not draft and of one that checks drafts and makes new ones, by width, and what is accepted."""

    plain: Callable[[int], float]
    speculative: Callable[[int], float]
    p: float
    making: float = 0.3  # of what speculation adds
    noise: float = 0.0
    late: float = 0.0  # of the cycles, which the host looks at late by three quarters of one; the next is shorter by as much


def device(dearness: float, p: float, **changes: float) -> Device:
    """A plain cycle takes 10 ms, a speculative one `dearness` times as long."""
    return Device(lambda width: 0.010, lambda width: 0.010 * dearness, p, **changes)


class Result(NamedTuple):
    seconds: float
    plain_seconds: float  # that the same tokens take without drafts

    @property
    def speed(self) -> float:
        """Times plain speed."""
        return self.plain_seconds / self.seconds


def run(pricing: Pricing, clock: ManualClock, device: Device, widths: Iterable[int], seed: int = 7) -> Result:
    """One cycle of each of `widths`, every session with one draft where drafts were made."""
    chance = random.Random(seed)
    verified, total, plain, owed = False, 0.0, 0.0, 0.0
    for width in widths:
        made = pricing.next_drafts(width)
        base = device.plain(width)
        share = verified * (1 - device.making) + made * device.making
        seconds = base + share * (device.speculative(width) - base)
        seconds *= 1 + device.noise * chance.uniform(-1, 1)
        if device.late:
            seconds -= owed
            owed = 0.75 * base if chance.random() < device.late else 0.0
            seconds += owed
        drafts = width * verified
        accepted = sum(chance.random() < device.p for _ in range(drafts))
        clock.advance(seconds)
        pricing.observe(
            width, verified=verified, made=made, seconds=seconds, drafts=drafts, accepted=accepted, tokens=width + accepted
        )  # fmt: skip
        total += seconds
        plain += base * (1 + accepted / width)
        verified = made
    return Result(total, plain)


def explored(device: Device, width: int, legacy: bool = False) -> tuple[Pricing, ManualClock]:
    """Pricing that has just priced `width`."""
    clock = ManualClock()
    pricing = Pricing(clock, legacy=legacy)
    run(pricing, clock, device, [width] * 13)
    return pricing, clock


@pytest.mark.parametrize("making", [0.1, 0.5])
@pytest.mark.parametrize("dearness", [1.05, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0, 2.5, 3.0])
def test_drafts_that_are_never_accepted_cost_a_batch_no_more_than_2_percent(dearness: float, making: float) -> None:
    here = device(dearness, 0.0, making=making)
    result = run(*explored(here, 8), here, [8] * 5000)
    assert result.seconds <= 1.02 * 5000 * 0.010
    assert result.speed >= 0.985


@pytest.mark.parametrize(("dearness", "p"), [(1.5, 0.2), (1.8, 0.5), (2.0, 0.9), (3.0, 0.6), (1.3, 0.25)])
@pytest.mark.parametrize("width", [1, 6, 16])
def test_nor_do_drafts_that_are_sometimes_accepted(dearness: float, p: float, width: int) -> None:
    here = device(dearness, p, noise=0.05)
    assert run(*explored(here, width), here, [width] * 5000).speed >= 0.98


def test_the_exploration_costs_few_cycles_too() -> None:
    here, clock = device(3.0, 0.0), ManualClock()
    assert run(Pricing(clock), clock, here, [8] * 5000).speed >= 0.98


def test_the_legacy_rule_costs_more() -> None:
    here = device(3.0, 0.0)
    assert run(*explored(here, 8, legacy=True), here, [8] * 5000).speed < 0.90


@pytest.mark.parametrize("legacy", [False, True], ids=["rule", "legacy"])
@pytest.mark.parametrize("width", [1, 8, 16])
def test_a_batch_that_gains_has_nearly_all_of_it(width: int, legacy: bool) -> None:
    here = device(1.2, 0.8, noise=0.05)
    clock = ManualClock()
    assert run(Pricing(clock, legacy=legacy), clock, here, [width] * 5000).speed >= 0.97 * 1.8 / 1.2


@pytest.mark.parametrize("late", [0.05, 0.2, 0.3])
def test_a_host_that_is_often_late_changes_no_decision(late: float) -> None:
    """Cycles of a quarter of their cost, each behind one that is as much too long: nothing is slower for them, and nothing cheaper."""
    clock, gains, loses = ManualClock(), device(1.25, 0.6, late=late), device(1.75, 0.4, late=late)
    pricing = Pricing(clock)
    assert run(pricing, clock, gains, [8] * 5000).speed >= 0.97 * 1.6 / 1.25
    (bucket,) = pricing.stats().buckets
    assert bucket.plain_seconds == pytest.approx(0.010, rel=0.01)
    assert bucket.speculated > 0.97 * bucket.cycles
    assert run(*explored(loses, 8), loses, [8] * 5000).speed >= 0.98


def test_text_that_becomes_predictable_is_drafted_again() -> None:
    here = device(1.5, 0.0)
    pricing, clock = explored(here, 8)
    run(pricing, clock, here, [8] * 3000)
    run(pricing, clock, here._replace(p=0.95), [8] * 2000)
    assert run(pricing, clock, here._replace(p=0.95), [8] * 1000).speed >= 0.97 * 1.95 / 1.5


def wandering(count: int, low: int, high: int) -> list[int]:
    """Sessions come and go every few cycles."""
    chance, widths = random.Random(3), [low]
    while len(widths) < count:
        step = chance.choice((-1, 1)) if chance.random() < 0.3 else 0
        widths.append(min(max(widths[-1] + step, low), high))
    return widths


def tiles(width: int) -> float:
    """Eight rows to a tile: two for each session do not fit where one does, from the fifth on."""
    return 0.010 + 0.004 * ((width - 1) // 8)


def test_a_width_that_wanders_stays_priced() -> None:
    here = Device(tiles, lambda width: tiles(2 * width) + 0.001, 0.8)
    clock = ManualClock()
    pricing = Pricing(clock)
    widths = wandering(4000, 3, 12)
    run(pricing, clock, here, widths[:1000])
    result = run(pricing, clock, here, widths[1000:])
    assert pricing.stats().decisions[Decision.EXPLORE] <= 100  # each bucket once, and when it was away for 10 s
    assert {bucket.low for bucket in pricing.stats().buckets} == {3, 5, 9}
    ideal = sum(1.8 * here.plain(width) / here.speculative(width) for width in widths[1000:]) / 3000
    assert result.speed >= 0.95 * ideal


@pytest.mark.parametrize("every", [1, 2, 5])
def test_a_width_that_goes_to_and_fro_between_buckets_loses_no_more(every: int) -> None:
    """Their probes seldom meet, which leaves them without samples and costs the same."""
    here, clock = device(3.0, 0.0), ManualClock()
    pricing = Pricing(clock)
    widths = ([8] * every + [9] * every) * (5200 // every // 2)
    run(pricing, clock, here, widths[:200])
    assert run(pricing, clock, here, widths[200:]).speed >= 0.98


def test_by_the_legacy_rule_it_is_explored_again_and_again() -> None:
    here = Device(tiles, lambda width: tiles(2 * width) + 0.001, 0.8)
    clock = ManualClock()
    pricing = Pricing(clock, legacy=True)
    run(pricing, clock, here, wandering(4000, 3, 12))
    assert pricing.stats().decisions[Decision.EXPLORE] > 2000


def test_a_width_where_drafts_lose_does_not_keep_one_where_they_win_from_drafting() -> None:
    here = Device(lambda width: 0.010, lambda width: 0.012 if width <= 8 else 0.030, 0.8)
    clock = ManualClock()
    pricing = Pricing(clock)
    run(pricing, clock, here, ([8] * 50 + [9] * 50) * 30)
    narrow, wide = pricing.stats().buckets
    assert narrow.speculated > 0.95 * narrow.cycles
    assert wide.speculated < 0.05 * wide.cycles
