"""What users and owners would see of a run, in numbers."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

from bench.simulation.boxes import ExactBox
from bench.simulation.run import Trail
from bench.stats import Summary, summarize


@dataclass(frozen=True)
class Figures:
    """One run. Seconds and tokens."""

    model: str  # "scheduler": every box ran it; "coarse": none did
    boxes: int
    policy: str
    sent: int
    completed: int
    failed: int
    duration_s: float  # first arrival to last end
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    cached_share: float
    repeated_share: float  # of the tokens that a thread's earlier requests had put there, those that were still cached
    request_throughput: float
    output_throughput: float
    ttft_s: Summary
    e2e_s: Summary
    tpot_s: Summary
    itl_s: Summary | None  # None of a coarse run, which has no tokens
    goodput: float  # requests a second that kept the goals
    good_share: float
    fairness: float  # Jain's index over users' mean tokens a second, 1 / users to 1
    utilisation: float  # of all devices over the duration
    busiest: float  # requests of the busiest box over the mean
    evictions: int  # requests that drove out another conversation
    evicted_tokens: int
    steps: int  # of the scheduler
    mean_width: float  # decode rows of a step


def figures_of(trail: Trail) -> Figures:
    """All of them."""
    done, plan = trail.done, trail.plan
    good = [one for one in done if not one.failed]
    start = min((one.request.arrival for one in done), default=0.0)
    duration = max((one.end for one in done), default=0.0) - start
    span = duration or math.inf
    ttft = [one.first_token - one.request.arrival for one in good]
    e2e = [one.end - one.request.arrival for one in good]
    tpot = [(one.end - one.first_token) / (one.request.answer - 1) for one in good if one.request.answer > 1]
    kept = sum(
        one.first_token - one.request.arrival <= plan.costs.slo_ttft
        and one.end - one.first_token <= plan.costs.slo_tpot * max(one.request.answer - 1, 1)
        for one in good
    )
    prompt, cached = sum(one.request.prompt for one in good), sum(one.cached for one in good)
    output = sum(one.request.answer for one in good)
    again = [one for one in good if one.request.history > one.request.shared]
    repeated = sum(one.request.history - 1 for one in again)
    speeds: dict[int, list[float]] = defaultdict(list)
    per_box: dict[int, int] = defaultdict(int)
    for one, seconds in zip(good, e2e, strict=True):
        speeds[one.request.user].append(one.request.answer / seconds)
        per_box[one.box] += 1
    exact = [box for box in trail.boxes if isinstance(box, ExactBox)]
    steps = sum(box.steps for box in exact)
    return Figures(
        model="scheduler" if plan.coarse is None else "coarse",
        boxes=plan.boxes,
        policy=plan.policy if plan.boxes > 1 else "-",
        sent=trail.sent,
        completed=len(good),
        failed=len(done) - len(good),
        duration_s=duration,
        prompt_tokens=prompt,
        cached_tokens=cached,
        output_tokens=output,
        cached_share=cached / prompt if prompt else 0.0,
        repeated_share=sum(min(one.cached, one.request.history - 1) for one in again) / repeated if repeated else 0.0,
        request_throughput=len(good) / span,
        output_throughput=output / span,
        ttft_s=summarize(ttft),
        e2e_s=summarize(e2e),
        tpot_s=summarize(tpot),
        itl_s=summarize([gap for box in exact for gap in box.gaps]) if exact else None,
        goodput=kept / span,
        good_share=kept / len(done) if done else 0.0,
        fairness=jain([math.fsum(values) / len(values) for values in speeds.values()]),
        utilisation=sum(box.busy_seconds for box in trail.boxes) / plan.boxes / span,
        busiest=max(per_box.values(), default=0) * plan.boxes / len(good) if good else 0.0,
        evictions=sum(one.evicted > 0 for one in good),
        evicted_tokens=sum(one.evicted for one in good),
        steps=steps,
        mean_width=sum(box.width for box in exact) / steps if steps else 0.0,
    )


def jain(values: list[float]) -> float:
    """Jain's fairness index: 1 when all are equal, 1 / n when one has everything."""
    squares = math.fsum(value * value for value in values)
    return math.fsum(values) ** 2 / (len(values) * squares) if squares else 1.0
