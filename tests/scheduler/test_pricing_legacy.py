"""The legacy rule against its formulas, written down once more as plainly as they are."""

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.fake import ManualClock
from scheduler.pricing import Pricing


def ema(average: float, sample: float, seen: int) -> float:
    return average + (sample - average) / (seen + 1 if seen < 15 else 16)


class Plainly:
    def __init__(self) -> None:
        self.width = 0

    def turn(self, width: int) -> None:
        if width != self.width:
            self.width, self.cycles, self.drafted = width, 0, 0
            self.p = self.plain = self.speculative = 0.0

    def next_drafts(self) -> bool:
        if self.plain <= 0 or self.speculative <= 0:
            return self.cycles % 32 < 8
        if (1 + self.p) * self.plain > self.speculative:
            return self.cycles % 128 >= 2
        return self.cycles % 32 < 2

    def observe(self, verified: bool, made: bool, seconds: float, drafts: int, accepted: int) -> None:
        if drafts:
            self.p = ema(self.p, accepted / drafts, self.drafted)
            self.drafted += 1
        if verified == made:
            name = "speculative" if verified else "plain"
            before = getattr(self, name)
            setattr(self, name, ema(before, seconds, 16) if before > 0 else seconds)
        self.cycles += 1


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([7, 8]), st.integers(1, 200), st.floats(0, 1), st.floats(0.7, 3), st.sampled_from([0, 1, 1, 1]),
            st.sampled_from([False, True, True, True]),
        ),
        min_size=1, max_size=8,
    )
)  # fmt: skip
def test_it_decides_as_its_formulas_do_whatever_the_cycles_were(
    stretches: list[tuple[int, int, float, float, int, bool]],
) -> None:
    clock, plainly = ManualClock(), Plainly()
    pricing = Pricing(clock, legacy=True)
    verified = False
    for width, cycles, accept, dearness, draft, room in stretches:
        plainly.turn(width)
        for i in range(cycles):
            clock.advance(20.0)
            drafts = draft * width * verified
            accepted = min(drafts, int(accept * drafts + i % 2))
            seconds = 0.01 * (dearness if verified else 1.0) * (1 + i % 3)
            expected = plainly.next_drafts()
            assert pricing.next_drafts(width) is expected
            made = expected and room
            pricing.observe(
                width, verified=verified, made=made, seconds=seconds, drafts=drafts, accepted=accepted, tokens=width + accepted
            )  # fmt: skip
            plainly.observe(verified, made, seconds, drafts, accepted)
            verified = made
