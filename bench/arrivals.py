"""When the requests of an open loop are due.

Owns the arrival process: gamma-distributed gaps, of which exponential ones (a Poisson process) are the case of
burstiness 1. Smaller burstiness clusters the arrivals, larger makes them more even.
"""

from __future__ import annotations

from itertools import accumulate

from bench import seeded


def arrival_offsets(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds from the start of the load to each of `count` arrivals, ascending.

    The gaps are rescaled so that the last arrival is due at exactly count / rate: the offered load is then the one
    asked for whatever the draw, as in `vllm bench serve`.
    """
    draw = seeded.generator(seed, "arrivals")
    due = list(accumulate(draw.gammavariate(burstiness, 1.0 / (rate * burstiness)) for _ in range(count)))
    total = count / rate
    # A tiny burstiness may draw nothing but zeros in double precision; evenly spaced arrivals are then as good as any.
    if due[-1] <= 0.0:
        return [total * (k + 1) / count for k in range(count)]
    return [offset * total / due[-1] for offset in due]
