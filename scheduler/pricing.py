"""Whether the batch drafts: all of it or nobody, by what cycles were seen to cost.

What a cycle costs is not linear in its rows: one row too many opens another tile in every product, the rows after it are
nearly free. So no session is gated by itself. Drafts are worth their cycle while

    gain * c_plain > c_spec

gain       tokens that a session commits in a cycle that verifies: 1 + p where every session has one draft
c_plain    seconds of a cycle that neither verifies nor makes drafts
c_spec     seconds of a cycle that verifies drafts and makes the next
p          drafts accepted, of those checked; reported, it decides nothing

Averages. avg += (x - avg) / (n < 15 ? n + 1 : 16) with n the samples before x, for p (cycles that checked a draft) and gain
(cycles that verified, among them those in which no session had a draft: they cost as well).

Costs are the median of the last 15 samples, of an even number the lower of the two in the middle. Cycles end when their tokens are
known, so one that the host was late to look at is followed by one that takes next to nothing, and the first launch of a shape takes
hundreds of times as long as the next: an average moves with either, a median with no seven of 15. Only steady cycles are
samples, those with drafts verified == drafts made; those in which drafting starts or ends change neither cost, and of plain cycles
the first two in a row do not count: a pipeline that chains steps fills up again in them.

Decision, with `cycles` those that the bucket has seen:

    explore            either cost has fewer than 4 samples     drafts if timed cycles mod 32 < 5
    win                gain * c_plain > c_spec                  drafts unless cycles mod 256 < 4: plain probes
    lose               otherwise                                plain, but the last two cycles of each window draft: probes

Two cycles in a row, because a probe starts and ends drafting: of the cycles it touches the second is steady. A window has 32
cycles and begins when the batch begins to lose, or where the last one ends. If at its end the batch still loses, though drafts were
made in it, the next is twice as long, up to 4096, unless what the probes are going to lose is small already:

    2 * (c_spec - gain * c_plain) / (window * c_plain) <= 0.5 %

Whenever c_spec, or the last of its samples, is <= 1.1 * gain * c_plain it has 32 cycles again, and its probes are next if more have
gone by: so a price that has fallen is confirmed soon.

Exploring, a cycle that is not going to be timed, because prompts ride along, does not draft: it would cost and tell nothing.

All of this is kept apart for widths of 1, 2, 3-4, 5-8, 9-16, ... sessions, so that a width that changes with every request does not
leave the batch unpriced. A bucket that is neither asked for nor observed for 10 s is dropped: its prices were of other prompts.

The legacy rule keeps one width, and forgets everything when another is asked for or observed. It explores with 8 cycles of 32 until
each cost has one sample, two cycles of 128 are its plain probes, all steady cycles are samples, of the costs the first sample is the
value and each later one weighs 1/16, a cycle without a draft does not change gain, and where it loses, cycles mod 32 < 2 draft.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from statistics import median_low
from typing import NamedTuple

from scheduler.backend import Clock

_SAMPLES = 16  # over which averages run
_COSTS = 15  # samples of which a cost is the median
_EXPLORATION = 32  # cycles of a round


class _Rule(NamedTuple):
    """Where the two rules differ in numbers."""

    samples: int  # of either cost that end the exploration
    exploring: int  # cycles of a round that draft
    win_window: int
    plain_probes: int  # of each such window
    calm: int  # plain cycles in a row before one counts


_LEGACY, _RULE = _Rule(1, 8, 128, 2, 0), _Rule(4, 5, 256, 4, 2)
_LOSE_WINDOW, _LONGEST_WINDOW = 32, 4096
_PROBES = 2  # cycles that draft of each window in which drafts lose
_LOSS = 0.005  # of plain speed, that probes may cost
_NEAR = 1.1  # times break-even
_UNUSED = 10.0  # seconds


class Decision(Enum):
    """Why the next cycle drafts or not."""

    SPECULATE = "speculate"
    PLAIN = "plain"
    PROBE_SPECULATE = "probe_speculate"  # drafts where they lose
    PROBE_PLAIN = "probe_plain"  # no drafts where they win
    EXPLORE = "explore"  # either, nothing is known


class BucketStats(NamedTuple):
    """What is known of the widths from `low` to `high`."""

    low: int
    high: int
    acceptance: float  # p, 0 before the first draft
    tokens: float  # gain, 1 before the first verified cycle
    plain_seconds: float | None  # c_plain, None before the first sample
    speculative_seconds: float | None  # c_spec
    window: int  # cycles of which two probe, while drafts lose
    cycles: int
    speculated: int  # decisions to draft
    declined: int  # decisions not to


class PricingStats(NamedTuple):
    """The buckets that are in use, by width, and all decisions so far."""

    buckets: tuple[BucketStats, ...]
    decisions: Mapping[Decision, int]


@dataclass(slots=True)
class _Average:
    value: float
    samples: int = 0

    def add(self, sample: float) -> None:
        self.samples += 1
        self.value += (sample - self.value) / min(self.samples, _SAMPLES)


@dataclass(slots=True)
class _Cost:
    """Seconds of one kind of cycle; 0 before the first sample."""

    seconds: float = 0.0
    samples: int = 0
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=_COSTS))

    def add(self, seconds: float) -> None:
        self.samples += 1
        self.recent.append(seconds)
        self.seconds = median_low(self.recent)


@dataclass(slots=True)
class _LegacyCost(_Cost):
    def add(self, seconds: float) -> None:
        self.samples += 1
        self.seconds += (seconds - self.seconds) / (1 if self.samples == 1 else _SAMPLES)


@dataclass(slots=True)
class _Bucket:
    low: int
    high: int
    used: float  # when
    plain: _Cost
    speculative: _Cost
    cycles: int = 0
    timed: int = 0  # of those
    acceptance: _Average = field(default_factory=lambda: _Average(0.0))
    gain: _Average = field(default_factory=lambda: _Average(1.0))
    speculated: int = 0
    declined: int = 0
    window: int = _LOSE_WINDOW
    at: int | None = None  # cycles of the window so far, None while drafts do not lose
    probed: bool = False  # drafts were made in this window
    calm: int = 0  # plain cycles in a row

    def priced(self, samples: int) -> bool:
        return self.plain.samples >= samples and self.speculative.samples >= samples

    @property
    def worth(self) -> float:
        """Seconds that plain cycles take for what a speculative one commits."""
        return self.gain.value * self.plain.seconds

    def wins(self) -> bool:
        return self.worth > self.speculative.seconds

    def ends(self) -> bool:
        """Whether the window is at its probes."""
        return self.at is not None and self.at >= self.window - _PROBES

    def move_window(self) -> None:
        """After a cycle of a batch that is priced and loses."""
        if self.at is None:
            self.at, self.window, self.probed = 0, _LOSE_WINDOW, False
            return
        self.at += 1
        near = min(self.speculative.seconds, self.speculative.recent[-1]) <= _NEAR * self.worth
        if near and self.window > _LOSE_WINDOW:
            self.window, self.at = _LOSE_WINDOW, min(self.at, _LOSE_WINDOW - _PROBES)
        elif self.at >= self.window:
            lost = _PROBES * (self.speculative.seconds - self.worth)
            if self.probed and not near and lost > _LOSS * self.window * self.plain.seconds:
                self.window = min(2 * self.window, _LONGEST_WINDOW)
            self.at, self.probed = 0, False


class Pricing:
    """Decides for each cycle whether drafts are made in it. Ask once a cycle, observe every cycle."""

    def __init__(self, clock: Clock, *, legacy: bool = False) -> None:
        self._clock = clock
        self._legacy = legacy
        self._rule = _LEGACY if legacy else _RULE
        self._buckets: dict[int, _Bucket] = {}  # by width in the legacy rule, else by its logarithm
        self._decisions = dict.fromkeys(Decision, 0)

    def next_drafts(self, width: int, timed: bool = True) -> bool:
        """Whether drafts are made for the next cycle, in which `width` >= 1 sessions decode. Asking counts, and changes no answer.

        `timed`: whether its duration is going to say what such a cycle costs.
        """
        bucket = self._bucket(width)
        decision, drafts = self._decide(bucket, timed)
        self._decisions[decision] += 1
        if drafts:
            bucket.speculated += 1
        else:
            bucket.declined += 1
        return drafts

    def observe(
        self, width: int, *, verified: bool, made: bool, seconds: float, drafts: int, accepted: int, tokens: int
    ) -> None:  # fmt: skip
        """One finished cycle of `width` sessions.

        verified  drafts made in the cycle before were to be checked in it; made: drafts were made for the next
        seconds   how long it took; 0 where that says nothing of its cost, for instance because it prefilled as well
        drafts    checked, accepted: of those, tokens: committed; each over all sessions
        Raises ValueError when no cycle can have these counts.
        """
        if not 0 <= accepted <= drafts or tokens < 0 or (drafts and not verified):
            raise ValueError(f"{accepted} of {drafts} drafts accepted, {tokens} tokens, {verified=}")
        bucket = self._bucket(width)
        bucket.cycles += 1
        bucket.timed += seconds > 0.0
        if drafts:
            bucket.acceptance.add(accepted / drafts)
        if drafts or (verified and not self._legacy):
            bucket.gain.add(tokens / width)
        steady = verified == made and seconds > 0.0
        if steady and (verified or bucket.calm >= self._rule.calm):
            (bucket.speculative if verified else bucket.plain).add(seconds)
        bucket.calm = bucket.calm + 1 if steady and not verified else 0
        bucket.probed |= made
        if self._legacy or not bucket.priced(self._rule.samples) or bucket.wins():
            bucket.at, bucket.window = None, _LOSE_WINDOW
        else:
            bucket.move_window()

    def stats(self) -> PricingStats:
        """How things stand."""
        self._drop_unused()
        return PricingStats(
            tuple(
                BucketStats(
                    bucket.low, bucket.high, bucket.acceptance.value, bucket.gain.value,
                    bucket.plain.seconds or None, bucket.speculative.seconds or None,
                    bucket.window, bucket.cycles, bucket.speculated, bucket.declined,
                )
                for _, bucket in sorted(self._buckets.items())
            ),
            dict(self._decisions),
        )  # fmt: skip

    def _decide(self, bucket: _Bucket, timed: bool) -> tuple[Decision, bool]:
        if not bucket.priced(self._rule.samples):
            if self._legacy:
                return Decision.EXPLORE, bucket.cycles % _EXPLORATION < self._rule.exploring
            return Decision.EXPLORE, timed and bucket.timed % _EXPLORATION < self._rule.exploring
        if bucket.wins():
            probes = bucket.cycles % self._rule.win_window < self._rule.plain_probes
            return (Decision.PROBE_PLAIN, False) if probes else (Decision.SPECULATE, True)
        probes = bucket.cycles % _LOSE_WINDOW < _PROBES if self._legacy else bucket.ends()
        return (Decision.PROBE_SPECULATE, True) if probes else (Decision.PLAIN, False)

    def _bucket(self, width: int) -> _Bucket:
        """That of `width`, in use from now on."""
        if width < 1:
            raise ValueError(f"a width of {width}")
        self._drop_unused()
        key = width if self._legacy else (width - 1).bit_length()
        if key not in self._buckets:
            if self._legacy:
                self._buckets.clear()
            low, high = (width, width) if self._legacy else ((1 << key) // 2 + 1, 1 << key)
            cost = _LegacyCost if self._legacy else _Cost
            self._buckets[key] = _Bucket(low, high, self._clock(), cost(), cost())
        bucket = self._buckets[key]
        bucket.used = self._clock()
        return bucket

    def _drop_unused(self) -> None:
        if not self._legacy:
            oldest = self._clock() - _UNUSED
            self._buckets = {key: bucket for key, bucket in self._buckets.items() if bucket.used >= oldest}
