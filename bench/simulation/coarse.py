"""A box as a fluid: no tokens, no steps, a few events a request. For large numbers; it stands in for the scheduler and is not it.

What runs shares the device evenly: decode rows advance at one token a step, prompts at what a step's budget leaves, divided among
them. Sessions are lengths. A thread goes on with its own, a new one begins with its application's prompt where any session has
it, and what gives way is the stale one most idle or else the shortest, as with the scheduler. Two factors, fitted to the scheduler on
one box (see bench.simulation.calibrate), stretch the time of decoding and of prompts.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import NamedTuple

from bench.simulation.boxes import Done, Request
from bench.simulation.costs import StepCosts
from scheduler import Options
from scheduler.interleave import QUANTUM_UNIT


class Factors(NamedTuple):
    """By how much the fluid is slower than its prices."""

    prefill: float = 1.0
    decode: float = 1.0


@dataclass(slots=True)
class _Resident:
    """A session."""

    app: int
    length: int
    used: float
    running: bool


@dataclass(slots=True, order=True)
class _Running:
    """A request in a slot, ordered by where its virtual clock ends its stage."""

    ends: float
    id: int
    request: Request = field(compare=False)
    cached: int = field(compare=False)
    evicted: int = field(compare=False)
    first_token: float = field(compare=False, default=0.0)


class CoarseBox:
    """Implements Box."""

    def __init__(self, number: int, slots: int, costs: StepCosts, options: Options, factors: Factors) -> None:
        self._busy_seconds = 0.0
        self._number = number
        self._slots = slots
        self._costs = costs
        self._options = options
        self._factors = factors
        self._now = 0.0
        self._queue: deque[Request] = deque()
        self._prefill: list[_Running] = []
        self._decode: list[_Running] = []
        self._prompt_clock = 0.0  # seconds of prompt work that each request in prefill was given
        self._token_clock = 0.0  # tokens that each request in decode has drawn
        self._held = 0.0  # tokens of all in decode
        self._resident: dict[tuple[int, int], _Resident] = {}
        self._apps: Counter[int] = Counter()  # sessions

    @property
    def busy_seconds(self) -> float:
        """In which anything ran."""
        return self._busy_seconds

    def submit(self, request: Request, now: float) -> None:
        """Queue it, and give it a slot if one is free."""
        self._advance(now)
        self._queue.append(request)
        self._admit()

    def due(self) -> float | None:
        """When the next stage ends."""
        prompts, tokens = self._rates()
        times = []
        if self._prefill:
            times.append((self._prefill[0].ends - self._prompt_clock) / prompts)
        if self._decode:
            times.append((self._decode[0].ends - self._token_clock) / tokens)
        return self._now + max(0.0, min(times)) if times else None

    def run(self, now: float) -> list[Done]:
        """End the stages that are over."""
        tick = 1e-9
        self._advance(now)
        done = []
        while self._prefill and self._prefill[0].ends <= self._prompt_clock + tick:
            one = heapq.heappop(self._prefill)
            one.first_token = self._now
            one.ends = self._token_clock + one.request.answer - 1
            self._held += one.request.prompt
            heapq.heappush(self._decode, one)
        while self._decode and self._decode[0].ends <= self._token_clock + tick:
            one = heapq.heappop(self._decode)
            request = one.request
            self._held -= request.prompt + request.answer - 1
            session = self._resident[request.session, request.thread]
            session.length, session.used, session.running = request.prompt + request.answer - 1, self._now, False
            done.append(Done(request, self._number, one.first_token, self._now, one.cached, one.evicted, None, False))
        self._admit()
        return done

    def _advance(self, now: float) -> None:
        seconds = now - self._now
        if seconds > 0.0 and (self._prefill or self._decode):
            prompts, tokens = self._rates()
            self._prompt_clock += prompts * seconds
            self._token_clock += tokens * seconds
            self._held += len(self._decode) * tokens * seconds
            self._busy_seconds += seconds
        self._now = max(self._now, now)

    def _rates(self) -> tuple[float, float]:
        """Seconds of work that each prompt, and tokens that each answer, is given in a second."""
        rows, prompts, costs, options = len(self._decode), len(self._prefill), self._costs, self._options
        base = costs.base(rows, max(0, round(self._held))) * self._factors.decode
        if not prompts:
            return 0.0, 1.0 / base
        if rows:
            work = min(options.itl_budget - base, costs.prefill(options.mixed_prefill_quantum, 0.0))
            work = max(work, costs.prefill(QUANTUM_UNIT, 0.0))
        else:
            work = min(options.idle_budget, costs.prefill(options.idle_prefill_quantum, 0.0))
        return work / (base + work) / prompts, 1.0 / (base + work)

    def _admit(self) -> None:
        while self._queue and len(self._prefill) + len(self._decode) < self._slots:
            request = self._queue.popleft()
            cached, evicted = self._seat(request)
            work = self._work(request.prompt - cached, cached) * self._factors.prefill
            heapq.heappush(self._prefill, _Running(self._prompt_clock + work, request.id, request, cached, evicted))

    def _work(self, tokens: int, position: int) -> float:
        """Seconds of prompt work."""
        quantum = self._options.mixed_prefill_quantum
        whole, rest = divmod(tokens, quantum)
        first = whole * self._costs.prefill(quantum, 0.0) + (self._costs.prefill(rest, 0.0) if rest else 0.0)
        step = self._costs.base(1, 0)  # it waits for the one under way, and draws from one of its own
        return step + first + self._costs.reach * tokens * (position + (tokens - 1) / 2)

    def _seat(self, request: Request) -> tuple[int, int]:
        """What is cached for the request in its slot, and what others lost for it."""
        key = (request.session, request.thread)
        mine = self._resident.get(key)
        if mine is not None:
            mine.running = True
            return min(mine.length, request.prompt - 1), 0
        shared = min(request.shared, request.prompt - 1) if self._apps[request.app] else 0
        evicted = 0
        if len(self._resident) >= self._slots:
            evicted = self._evict()
        self._resident[key] = _Resident(request.app, request.prompt, self._now, running=True)
        self._apps[request.app] += 1
        return shared, evicted

    def _evict(self) -> int:
        stale_after, now = self._options.stale_after, self._now
        idle = [(key, one) for key, one in self._resident.items() if not one.running]
        stale = [(key, one) for key, one in idle if now - one.used >= stale_after]
        key, victim = min(stale, key=lambda pair: pair[1].used) if stale else min(idle, key=lambda pair: pair[1].length)
        del self._resident[key]
        self._apps[victim.app] -= 1
        return victim.length
