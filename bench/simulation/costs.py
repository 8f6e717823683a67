"""What a step of a box takes, as a table that was measured: the only physics of the simulation.

    seconds = decode(rows) + held * tokens that the decode rows hold + chunk(prompt tokens) + reach * the sum of their positions

`decode` and `chunk` are straight lines between the measured points, and go on beyond the last in proportion.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from scheduler import Options
from scheduler.survey import Survey

DEPTH = 8192  # of a survey's second column
Points = tuple[tuple[float, float], ...]


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """A box's prices and the options its server has there. Seconds. Raises ValueError for a table that is not ascending."""

    name: str
    source: str  # where the figures come from
    decode: Points  # (decode rows, a step of so many rows that hold nothing), ascending
    held: float  # for each token that a decode row attends to
    chunk: Points  # (prompt tokens of a step at the beginning of a prompt, what they add), ascending from (0, 0)
    reach: float  # for each token and each position before it
    request: float  # from the socket to the scheduler and back: HTTP, rendering, tokenising
    chains: bool  # the device takes the next step before the host has read this one
    surveyed: bool  # the scheduler is given the table; else it learns prices from its steps
    mixed_prefill_quantum: int
    idle_prefill_quantum: int
    itl_budget: float
    page_tokens: int
    slo_ttft: float  # what a request has to keep to count as good
    slo_tpot: float

    def __post_init__(self) -> None:
        for points in (self.decode, self.chunk):
            if list(points) != sorted(points) or len({x for x, _ in points}) < len(points) or not points:
                raise ValueError(f"{self.name}: a table of costs must ascend: {points}")

    def seconds(self, rows: int, held: int, tokens: int, reach: float) -> float:
        """One step. Without decoders it reads the weights as well, and costs no less than the narrowest one with them."""
        return _line(self.decode, max(rows, 1)) + self.held * held + self.prefill(tokens, reach)

    def prefill(self, tokens: int, reach: float) -> float:
        """What prompt tokens add to a step, `reach` being the sum of their positions."""
        return _line(self.chunk, tokens) + self.reach * reach if tokens else 0.0

    def base(self, rows: int, held: int) -> float:
        """A step without prompt tokens."""
        return _line(self.decode, max(rows, 1)) + self.held * held

    def options(self) -> Options:
        """The scheduler's. Nobody is turned away: a full line stands for clients that try again."""
        return Options(
            mixed_prefill_quantum=self.mixed_prefill_quantum,
            idle_prefill_quantum=self.idle_prefill_quantum,
            itl_budget=self.itl_budget,
            max_queue=1 << 40,
            overlap=self.chains,
        )

    def survey(self) -> Survey | None:
        """The chunk's table as the scheduler would have measured it."""
        if not self.surveyed:
            return None
        tokens = tuple(int(n) for n, _ in self.chunk if n)
        first = tuple(self.prefill(n, n * n / 2) for n in tokens)
        deep = tuple(seconds + self.reach * n * DEPTH for n, seconds in zip(tokens, first, strict=True))
        return Survey(tokens, (0, DEPTH), (first, deep))


def load_costs(name: str) -> StepCosts:
    """The costs of that name, or of that JSON file. Raises ValueError and OSError."""
    if name in DEFAULTS:
        return DEFAULTS[name]
    if not Path(name).exists():
        raise ValueError(f"{name} is no file and none of {', '.join(DEFAULTS)}")
    body = json.loads(Path(name).read_text(encoding="utf-8"))
    try:
        for key in ("decode", "chunk"):
            body[key] = tuple((float(x), float(y)) for x, y in body[key])
        return StepCosts(**body)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{name}: {error}") from None


def save_costs(costs: StepCosts, path: Path) -> None:
    """Write what `load_costs` reads."""
    path.write_text(json.dumps(asdict(costs), indent=1) + "\n", encoding="utf-8")


def _line(points: Sequence[tuple[float, float]], x: float) -> float:
    """The value at `x`: between two points, at the first one below it, in proportion to the last stretch beyond."""
    at = bisect_left(points, (x,))
    if at < len(points) and points[at][0] == x:
        return points[at][1]
    if not at:
        return points[0][1]
    if len(points) == 1:
        return points[0][1]
    at = min(at, len(points) - 1)
    (x0, y0), (x1, y1) = points[at - 1], points[at]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


DEFAULTS = {
    "h200-qwen3-8b": StepCosts(
        name="h200-qwen3-8b",
        source="docs/benchmarks/h200.md: decode at 1, 16 and 64 rows, chunks of 48 to 496 beside 15 decoders, 8,192 in chunks of 4,096",
        decode=((1, 4.244e-3), (16, 4.357e-3), (64, 4.878e-3)),
        held=32.1e-9,
        chunk=(
            (0, 0.0),
            (16, 0.4e-3),
            (48, 1.1e-3),
            (112, 1.7e-3),
            (240, 4.1e-3),
            (496, 9.2e-3),
            (1024, 20.6e-3),
            (4096, 87.8e-3),
        ),
        reach=1.85e-9,
        request=2.0e-3,
        chains=True,
        surveyed=True,
        mixed_prefill_quantum=1024,
        idle_prefill_quantum=4096,
        itl_budget=14e-3,
        page_tokens=256,
        slo_ttft=2.0,
        slo_tpot=50e-3,
    ),
    "cpu-demo": StepCosts(
        name="cpu-demo",
        source="docs/benchmarks/cpu.md: over HTTP at 1 and 16 rows, in process between them; prompts of 256 and 1,024 of a run of "
        "its own on a shared machine",
        decode=((1, 15.9e-3), (2, 16.5e-3), (4, 20e-3), (8, 24e-3), (16, 31e-3)),
        held=2.7e-6,
        chunk=((0, 0.0), (16, 6e-3), (256, 0.086), (2048, 0.69)),
        reach=0.6e-6,
        request=8e-3,
        chains=False,
        surveyed=False,
        mixed_prefill_quantum=128,
        idle_prefill_quantum=2048,
        itl_budget=0.1,
        page_tokens=256,
        slo_ttft=10.0,
        slo_tpot=0.25,
    ),
}
"""Costs by name."""
