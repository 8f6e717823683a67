"""The event loop: sessions begin, requests fall due, go through the router to a box, and end."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count
from typing import Literal

from bench import seeded
from bench.simulation.backend import Drawn, Sampling
from bench.simulation.boxes import Box, Done, ExactBox, Request
from bench.simulation.coarse import CoarseBox, Factors
from bench.simulation.costs import StepCosts
from bench.simulation.routing import Router
from bench.simulation.traffic import Session, Traffic, ids, starts

Event = tuple[float, int, Literal["start", "ask", "submit", "wake"], int, int]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One run. `rate` is of requests a second over all boxes, whose sessions begin as a gamma process; 0 is a closed loop of `clients`,
    each with a session at a time. Raises ValueError."""

    costs: StepCosts
    traffic: Traffic
    slots: int
    boxes: int = 1
    policy: str = "affinity-least"
    requests: int = 1000
    seed: int = 0
    rate: float = 0.0
    burstiness: float = 1.0
    clients: int = 8
    coarse: Factors | None = None  # None: every box is the real scheduler

    def __post_init__(self) -> None:
        if min(self.slots, self.boxes, self.requests, self.clients) < 1:
            raise ValueError("slots, boxes, requests and clients: below 1")


@dataclass
class Trail:
    """Everything that ended, in that order, and the boxes."""

    plan: Plan
    done: list[Done] = field(default_factory=list)
    boxes: list[Box] = field(default_factory=list)
    sent: int = 0
    mean_asks: float = 0.0


@dataclass
class _Live:
    """A session that is under way."""

    session: Session
    waits: list[int]  # for each request, ends it waits for
    children: dict[int, list[int]]
    left: int
    lengths: dict[int, int] = field(default_factory=dict)  # tokens of each thread
    history: dict[int, list[int]] = field(default_factory=dict)  # the same as ids


class _Loop:
    def __init__(self, plan: Plan, script: Iterable[Session] | None) -> None:
        self.plan = plan
        self.trail = Trail(plan)
        self._events: list[Event] = []
        self._order = count()
        self._router = Router(plan.policy, plan.boxes, plan.slots)
        self._boxes: list[Box] = [self._box(i) for i in range(plan.boxes)]
        self.trail.boxes = self._boxes
        self._versions = [0] * plan.boxes
        self._live: dict[int, _Live] = {}
        self._sessions = iter(script) if script is not None else (plan.traffic.session(plan.seed, i) for i in count())
        self._unplanned = plan.requests
        self._requests: dict[int, tuple[Request, int]] = {}  # on their way to a box, and which
        self._numbers: dict[int, tuple[int, int]] = {}  # request -> session and number within it
        self._apps: dict[int, list[int]] = {}

    def _box(self, number: int) -> Box:
        plan = self.plan
        if plan.coarse is not None:
            return CoarseBox(number, plan.slots, plan.costs, plan.costs.options(), plan.coarse)
        return ExactBox(number, plan.slots, plan.traffic.ctx, plan.costs)

    def run(self) -> Trail:
        plan = self.plan
        if plan.rate:
            self.trail.mean_asks = plan.traffic.mean_asks(plan.seed)
            self._starts = starts(plan.rate / self.trail.mean_asks, plan.burstiness, plan.seed)
            self._push(next(self._starts), "start")
        else:
            for client in range(plan.clients):
                self._push(10.0 * seeded.fraction(plan.seed, "client", client) if plan.clients > 1 else 0.0, "start")
        while self._events:
            now, _, kind, a, b = heapq.heappop(self._events)
            if kind == "start":
                self._start(now)
            elif kind == "ask":
                self._ask(now, a, b)
            elif kind == "submit":
                request, box = self._requests.pop(a)
                self._boxes[box].submit(request, now)
                self._wake(box)
            elif self._versions[a] == b:
                done = self._boxes[a].run(now)
                for one in done:
                    self._ended(one)
                self._wake(a)
        return self.trail

    def _push(self, at: float, kind: Literal["start", "ask", "submit", "wake"], a: int = 0, b: int = 0) -> None:
        heapq.heappush(self._events, (at, next(self._order), kind, a, b))

    def _wake(self, box: int) -> None:
        self._versions[box] += 1
        due = self._boxes[box].due()
        if due is not None:
            self._push(due, "wake", box, self._versions[box])

    def _start(self, now: float) -> None:
        session = next(self._sessions, None) if self._unplanned else None
        if session is None:
            return
        asks = session.asks[: self._unplanned]
        self._unplanned -= len(asks)
        children: dict[int, list[int]] = {}
        for number, ask in enumerate(asks):
            for parent in ask.after:
                children.setdefault(parent, []).append(number)
        self._live[session.id] = _Live(session, [len(ask.after) for ask in asks], children, len(asks))
        for number, ask in enumerate(asks):
            if not ask.after:
                self._push(now + ask.pause, "ask", session.id, number)
        if self.plan.rate:
            self._push(next(self._starts), "start")

    def _ask(self, now: float, session_id: int, number: int) -> None:
        live, plan = self._live[session_id], self.plan
        session, ask = live.session, live.session.asks[number]
        history = live.lengths.get(ask.thread, session.shared)
        tokens: list[int] | None = None
        sampling: Sampling = 0
        if ask.told is not None:
            tokens, sampling = list(ask.told.prompt), Drawn(len(ask.told.prompt), ask.told.drawn)
        elif plan.coarse is None:
            if session.app not in self._apps:
                self._apps[session.app] = ids(session.shared, plan.seed, "app", session.app)
            before = live.history.get(ask.thread, self._apps[session.app])
            tokens = before + ids(ask.fresh, plan.seed, session_id, number)
            sampling = seeded.below(1 << 31, plan.seed, "draw", session_id, number)
        request = Request(
            self.trail.sent, session_id, ask.thread, session.user, session.app, session.shared, now,
            history + ask.fresh if ask.told is None else len(ask.told.prompt), history, ask.answer, tokens, sampling,
            ask.told is not None and ask.told.stopped,
        )  # fmt: skip
        self.trail.sent += 1
        self._numbers[request.id] = (session_id, number)
        self._requests[request.id] = (request, self._router.choose(request))
        self._push(now + plan.costs.request, "submit", request.id)

    def _ended(self, done: Done) -> None:
        self._router.ended(done.box)
        request = done.request
        session_id, number = self._numbers.pop(request.id)
        live = self._live[session_id]
        live.lengths[request.thread] = request.prompt + request.answer
        if request.tokens is not None:
            live.history[request.thread] = request.tokens + (done.drawn or [])
        self.trail.done.append(done._replace(request=request._replace(tokens=None), drawn=None))
        live.left -= 1
        for child in live.children.get(number, ()):
            live.waits[child] -= 1
            if not live.waits[child]:
                self._push(done.end + live.session.asks[child].pause, "ask", session_id, child)
        if not live.left:
            del self._live[session_id]
            if not self.plan.rate:
                self._push(done.end + 1.0, "start")


def simulate(plan: Plan, script: Iterable[Session] | None = None) -> Trail:
    """Run it to its end. `script` replaces the sessions that the traffic would make."""
    return _Loop(plan, script).run()
