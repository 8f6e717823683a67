"""Cycles of any kind, widths that come and go and pauses: what pricing says stays within its bounds and its counts add up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from scheduler.fake import ManualClock
from scheduler.pricing import Decision, Pricing

UNUSED = 10.0


@dataclass
class Known:
    """What a bucket must have seen, told without its prices."""

    used: float
    cycles: int = 0
    timed: int = 0
    speculated: int = 0
    declined: int = 0
    plain: int = 0  # samples
    speculative: int = 0
    calm: int = 0  # plain cycles in a row


class Machine(RuleBasedStateMachine):
    legacy: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.pricing = Pricing(self.clock, legacy=self.legacy)
        self.known: dict[tuple[int, int], Known] = {}
        self.history: list[tuple[str, Any]] = []
        self.asked = 0
        self.width = 1
        self.verified = False  # drafts are there to be verified
        self.reasons: set[Decision] = set()

    @initialize(width=st.integers(1, 20))
    def begin(self, width: int) -> None:
        self.width = width

    def use(self, width: int) -> Known:
        if self.legacy:
            key = (width, width)
            self.known = {key: self.known[key]} if key in self.known else {}
        else:
            high = next(high for high in (1, 2, 4, 8, 16, 32) if width <= high)
            key = (high // 2 + 1, high)
            self.forget()
        known = self.known.setdefault(key, Known(self.clock()))
        known.used = self.clock()
        return known

    def forget(self) -> None:
        if not self.legacy:
            self.known = {key: known for key, known in self.known.items() if known.used >= self.clock() - UNUSED}

    def ask(self) -> bool:
        known = self.use(self.width)
        before = self.pricing.stats().decisions
        drafts = self.pricing.next_drafts(self.width)
        after = self.pricing.stats().decisions
        (reason,) = (kind for kind in Decision if after[kind] != before[kind])
        self.reasons.add(reason)
        self.asked += 1
        self.history.append(("ask", (self.clock(), self.width, drafts)))
        known.speculated += drafts
        known.declined += not drafts
        explored = min(known.plain, known.speculative) >= (1 if self.legacy else 4)
        assert (reason is Decision.EXPLORE) is not explored
        if reason is Decision.EXPLORE:
            assert drafts is (known.cycles % 32 < 8 if self.legacy else known.timed % 32 < 5)
        else:
            assert drafts is (reason in (Decision.SPECULATE, Decision.PROBE_SPECULATE))
        return drafts

    def cycle(self, accept: float, seconds: float, drafted: float, room: bool) -> None:
        made = self.ask() and room
        drafts = round(drafted * self.width) * self.verified
        accepted = round(accept * drafts)
        self.clock.advance(seconds)
        counts: dict[str, Any] = {
            "verified": self.verified, "made": made, "seconds": seconds, "drafts": drafts, "accepted": accepted,
            "tokens": self.width + accepted,
        }  # fmt: skip
        self.pricing.observe(self.width, **counts)
        self.history.append(("observe", (self.clock(), self.width, counts)))
        known = self.use(self.width)
        known.cycles += 1
        known.timed += seconds > 0
        steady = seconds > 0 and self.verified == made
        known.plain += steady and not made and (self.legacy or known.calm >= 2)
        known.speculative += steady and made
        known.calm = known.calm + 1 if steady and not made else 0
        self.verified = made

    @rule(
        count=st.sampled_from([1, 3, 20, 150]),
        accept=st.sampled_from([0.0, 0.3, 0.8, 1.0]),
        dearness=st.sampled_from([0.9, 1.2, 1.6, 3.0]),
        drafted=st.sampled_from([0.0, 0.5, 1.0, 3.0]),
        room=st.sampled_from([True, True, True, False]),
    )
    def cycles(self, count: int, accept: float, dearness: float, drafted: float, room: bool) -> None:
        for _ in range(count):
            self.cycle(accept, 0.010 * (dearness if self.verified else 1.0), drafted, room)

    @rule(seconds=st.floats(0.0, 1.0), accept=st.floats(0.0, 1.0), drafted=st.floats(0.0, 4.0))
    def odd_cycle(self, seconds: float, accept: float, drafted: float) -> None:
        self.cycle(accept, seconds, drafted, True)

    @rule(width=st.integers(1, 32))
    def come_and_go(self, width: int) -> None:
        self.width = width

    @rule()
    def finish(self) -> None:
        self.width = max(self.width - 1, 1)

    @rule(seconds=st.sampled_from([0.5, 4.0, 9.0, 11.0]))
    def pause(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.verified = False

    @rule()
    def ask_again(self) -> None:
        assert self.ask() is self.ask()

    @invariant()
    def figures_are_within_their_bounds(self) -> None:
        for bucket in self.pricing.stats().buckets:
            assert 0.0 <= bucket.acceptance <= 1.0
            assert bucket.tokens >= 1.0
            for seconds in (bucket.plain_seconds, bucket.speculative_seconds):
                assert seconds is None or seconds > 0.0
            assert bucket.window in (32, 64, 128, 256, 512, 1024, 2048, 4096)
            assert bucket.window == 32 or not self.legacy

    @invariant()
    def counts_add_up_and_nothing_unused_is_kept(self) -> None:
        self.forget()
        stats = self.pricing.stats()
        assert sum(stats.decisions.values()) == self.asked
        assert [(one.low, one.high) for one in stats.buckets] == sorted(self.known)
        for bucket in stats.buckets:
            known = self.known[bucket.low, bucket.high]
            assert (bucket.cycles, bucket.speculated, bucket.declined) == (known.cycles, known.speculated, known.declined)
            assert (bucket.plain_seconds is None) == (not known.plain)
            assert (bucket.speculative_seconds is None) == (not known.speculative)

    def teardown(self) -> None:
        """The same history gives the same decisions, and the same figures."""
        clock = ManualClock()
        again = Pricing(clock, legacy=self.legacy)
        for kind, (now, width, what) in self.history:
            clock.now = now
            if kind == "ask":
                assert again.next_drafts(width) is what
            else:
                again.observe(width, **what)
        clock.now = self.clock.now
        assert again.stats() == self.pricing.stats()


class LegacyMachine(Machine):
    legacy: ClassVar[bool] = True


for machine in (Machine, LegacyMachine):
    machine.TestCase.settings = settings(max_examples=80, stateful_step_count=25, deadline=None, derandomize=True)
TestAnyCycles = Machine.TestCase
TestAnyCyclesLegacy = LegacyMachine.TestCase


def test_the_machine_meets_every_decision() -> None:
    """Its rules reach all kinds, or it would show nothing of them."""
    met: set[Decision] = set()

    class Seen(Machine):
        def teardown(self) -> None:
            met.update(self.reasons)

    run_state_machine_as_test(Seen, settings=settings(Machine.TestCase.settings, max_examples=60))
    assert met == set(Decision)
