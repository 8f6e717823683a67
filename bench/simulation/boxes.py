"""One box: the real scheduler on a simulated device. A Box is what the event loop drives, see bench.simulation.coarse for the other."""

from __future__ import annotations

from array import array
from collections import Counter
from typing import NamedTuple, Protocol

from bench.no_text import NoText
from bench.simulation.backend import STOP, Sampling, SimBackend
from bench.simulation.costs import StepCosts
from scheduler import Answered, Ended, Job, Routed, Sampled, Scheduler, StepDone, Verdict
from scheduler.fake import ManualClock


class Request(NamedTuple):
    """What the router gives to a box."""

    id: int
    session: int
    thread: int
    user: int
    app: int
    shared: int  # tokens of the prompt that its application's prompts begin with
    arrival: float
    prompt: int  # tokens
    history: int  # of those, that its thread held after its last answer
    answer: int  # tokens it will draw
    tokens: list[int] | None  # the prompt; None for a coarse box
    sampling: Sampling
    stops: bool = False  # behind `answer` it draws the end of its turn


class Done(NamedTuple):
    """A request that has ended."""

    request: Request
    box: int
    first_token: float
    end: float
    cached: int
    evicted: int  # tokens other conversations lost by it
    drawn: list[int] | None  # the answer
    failed: bool


class Box(Protocol):
    """A server, or a model of one. Time is the caller's and never goes back."""

    @property
    def busy_seconds(self) -> float:
        """Of the device."""

    def submit(self, request: Request, now: float) -> None:
        """Take a request."""

    def due(self) -> float | None:
        """When it wants to run next; None while it has nothing to do."""

    def run(self, now: float) -> list[Done]:
        """Go on by one event."""


class _Reader:
    """Reads one answer. Implements Output."""

    def __init__(self, clock: ManualClock, gaps: array[float], ends: array[float]) -> None:
        self._clock = clock
        self._gaps = gaps
        self._ends = ends
        self._last: float | None = None

    def push(self, sampled: Sampled) -> Verdict | None:
        """Note the gap."""
        if self._last is not None:
            self._gaps.append(self._clock.now - self._last)
            self._ends.append(self._clock.now)
        self._last = self._clock.now
        return None

    def finish(self, reason: Answered) -> Answered:
        """Nothing was held back."""
        return reason


class ExactBox:
    """scheduler.Scheduler, token by token."""

    def __init__(self, number: int, slots: int, ctx: int, costs: StepCosts) -> None:
        self._number = number
        self._clock = ManualClock()
        self._costs = costs
        self.backend = SimBackend(slots, ctx, costs, self._clock)
        self.scheduler = Scheduler(self.backend, NoText(), self._clock, slots=slots, options=costs.options())
        self.gaps = array("d")  # between tokens, of all answers
        self.gap_ends = array("d")  # when each ended
        self.steps = 0
        self.tiers: Counter[str] = Counter()  # requests
        self.reused: Counter[str] = Counter()  # tokens, by tier
        self.width = 0  # decode rows of all steps
        self.decode_steps = 0  # with decode rows
        self.decode_seconds = 0.0  # of those
        self._jobs: dict[int, tuple[Request, Job]] = {}
        self._evicted: dict[int, int] = {}

    @property
    def busy_seconds(self) -> float:
        """Of the device."""
        return self.backend.busy_seconds

    def submit(self, request: Request, now: float) -> None:
        """Hand it to the scheduler."""
        assert request.tokens is not None
        self._clock.now = max(self._clock.now, now)
        job = Job(
            id=request.id,
            tokens=request.tokens,
            text="",
            max_tokens=request.answer + request.stops,
            sampling=request.sampling,
            stop_tokens=frozenset({STOP} if request.stops else ()),
            api="completions",
            arrival=request.arrival,
            output=_Reader(self._clock, self.gaps, self.gap_ends),
            anchor=request.shared,
        )
        self._jobs[request.id] = (request, job)
        self.scheduler.submit(job)

    def due(self) -> float | None:
        """At once, while it is busy."""
        return self._clock.now if self.scheduler.busy else None

    def run(self, now: float) -> list[Done]:
        """One step."""
        self._clock.now = max(self._clock.now, now)
        done = []
        for event in self.scheduler.step():
            if isinstance(event, StepDone):
                self.steps += 1
                self.width += event.decode_rows
                self.decode_steps += event.decode_rows > 0
                self.decode_seconds += event.seconds if event.decode_rows else 0.0
            elif isinstance(event, Routed):
                self.tiers[event.tier] += 1
                self.reused[event.tier] += event.cached_tokens
                self._evicted[event.job] = event.evicted_tokens
            elif isinstance(event, Ended):
                done.append(self._done(event))
        return done

    def _done(self, event: Ended) -> Done:
        request, job = self._jobs.pop(event.job)
        first = request.arrival + event.ttft_seconds if event.ttft_seconds is not None else self._clock.now
        end = request.arrival + event.total_seconds
        failed = event.reason != ("stop" if request.stops else "length") or event.completion_tokens != request.answer
        return Done(
            request, self._number, first, end, event.cached_tokens, self._evicted.pop(event.job, 0), job.generated, failed
        )
