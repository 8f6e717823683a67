"""Fits the coarse box to the scheduler, on one box of the same traffic, and says how far they are apart on other traffic."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from bench.simulation.coarse import Factors
from bench.simulation.figures import Figures, figures_of
from bench.simulation.run import Plan, simulate

REQUESTS = 600
_ROUNDS = 4
_RANGE = (0.3, 4.0)


@dataclass(frozen=True)
class Calibration:
    """The factors, and both models' figures on the box's traffic of another seed, which they were not fitted to."""

    factors: Factors
    exact: Figures
    coarse: Figures


def calibrate(plan: Plan) -> Calibration:
    """Fit one box under a box's share of the plan's load."""
    one = replace(
        plan, boxes=1, requests=min(plan.requests, REQUESTS), rate=plan.rate / plan.boxes,
        clients=max(1, round(plan.clients / plan.boxes)), coarse=None,
    )  # fmt: skip
    target = figures_of(simulate(one))
    factors = Factors()
    for _ in range(_ROUNDS):
        seen = figures_of(simulate(replace(one, coarse=factors)))
        factors = Factors(
            _step(factors.prefill, target.ttft_s.mean, seen.ttft_s.mean),
            _step(factors.decode, target.tpot_s.mean, seen.tpot_s.mean),
        )
    other = replace(one, seed=one.seed + 1)
    return Calibration(factors, figures_of(simulate(other)), figures_of(simulate(replace(other, coarse=factors))))


def _step(factor: float, wanted: float | None, seen: float | None) -> float:
    if not wanted or not seen:
        return factor
    return min(max(factor * math.pow(wanted / seen, 0.7), _RANGE[0]), _RANGE[1])
