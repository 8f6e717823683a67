"""The series about drafts: how many were checked and right, and the prices by which it is decided whether there are any.

The engine counts its decisions from its start; the counter here goes on through its restarts.
"""

from __future__ import annotations

from ds4batch.messages import DraftStat, PriceStat, StepSample
from ds4batch.server.metric_series import Series
from ds4batch.settings import Settings
from scheduler.pricing import Decision


class DraftMetrics:
    """Fed with every forward and with the prices of every report."""

    def __init__(self, series: Series, settings: Settings) -> None:
        places = [str(i) for i in range(max(1, settings.drafts))]
        widths = _widths(settings.batched_session) if settings.drafts else []
        self._rows = series.counter("vllm:spec_decode_num_drafts", "Sessions' rows that were checked with drafts.").at()
        self._tokens = series.counter("vllm:spec_decode_num_draft_tokens", "Drafts checked.").at()
        self._accepted = series.counter("vllm:spec_decode_num_accepted_tokens", "Drafts that were right.").at()
        self._by_place = series.counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "Drafts that were right, by their place.", position=places
        )
        self._acceptance = series.gauge("ds4batch_spec_acceptance", "Drafts that are right, of those checked.", width=widths)
        self._gain = series.gauge("ds4batch_spec_tokens", "Tokens that a session commits in a cycle with drafts.", width=widths)
        self._costs = series.gauge(
            "ds4batch_spec_step_cost_seconds",
            "Time of a cycle, 0 while unknown: without drafts, with them.",
            width=widths,
            kind=("plain", "spec"),
        )
        self._policy = series.gauge("ds4batch_spec_policy", "1 where drafts are faster, as measured.", width=widths)
        self._decisions = series.counter(
            "ds4batch_spec_decisions", "Cycles by how it was decided whether they draft.", kind=[d.value for d in Decision]
        )
        self._known = set(widths)
        self._last: dict[str, int] = {}  # of this engine

    def step(self, sample: StepSample) -> None:
        """One forward."""
        if not sample.drafts:
            return
        self._rows.inc(sample.checked_rows)
        self._tokens.inc(sample.drafts)
        self._accepted.inc(sum(sample.accepted))
        for place, count in enumerate(sample.accepted):
            self._by_place.at(str(place)).inc(count)

    def stats(self, drafts: DraftStat) -> None:
        """The prices of one instant. A width that was not seen for a while has none."""
        prices = {_label(one.low, one.high): one for one in drafts.prices}
        for width in self._known | prices.keys():
            one = prices.get(width, PriceStat(0, 0, 0.0, 0.0, 0.0, 0.0, False))
            self._acceptance.at(width).set(one.acceptance)
            self._gain.at(width).set(one.tokens)
            self._costs.at(width, "plain").set(one.plain_seconds)
            self._costs.at(width, "spec").set(one.speculative_seconds)
            self._policy.at(width).set(one.drafting)
        for kind, total in drafts.decisions.items():
            self._decisions.at(kind).inc(total - self._last.get(kind, 0))
            self._last[kind] = total

    def engine_down(self) -> None:
        """The next engine knows no price and counts from nothing."""
        if self._known:
            self.stats(DraftStat(prices=[], decisions={}))
        self._last.clear()


def _label(low: int, high: int) -> str:
    return str(low) if low == high else f"{low}-{high}"


def _widths(sessions: int) -> list[str]:
    """The widths that prices are kept for."""
    labels, high = ["1"], 2
    while high // 2 < sessions:
        labels.append(_label(high // 2 + 1, high))
        high *= 2
    return labels
