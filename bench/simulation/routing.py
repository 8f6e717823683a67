"""Which box a request goes to: what a router in front of several servers can know, which is its own memory and their loads."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from bench import seeded
from bench.simulation.boxes import Request

REMEMBERED = 1 << 20  # threads whose box the router keeps in mind


class Router:
    """Chooses by `policy`, a key of POLICIES. Told of every end, it knows how many requests each box has."""

    def __init__(self, policy: str, boxes: int, slots: int) -> None:
        self.loads = [0] * boxes
        self._slots = slots
        self._turn = 0
        self._homes: OrderedDict[tuple[int, int], int] = OrderedDict()  # thread -> box
        self._choose = POLICIES[policy]

    def choose(self, request: Request) -> int:
        """The box, which has one request more from now on."""
        box = self._choose(self, request) if len(self.loads) > 1 else 0
        self.loads[box] += 1
        return box

    def ended(self, box: int) -> None:
        """One of its requests has ended."""
        self.loads[box] -= 1

    def round_robin(self, request: Request) -> int:
        """Each in turn."""
        self._turn = (self._turn + 1) % len(self.loads)
        return self._turn

    def least_loaded(self, request: Request) -> int:
        """The box with the fewest requests; of several, each in turn."""
        least = min(self.loads)
        start = (self._turn + 1) % len(self.loads)
        try:
            self._turn = self.loads.index(least, start)
        except ValueError:
            self._turn = self.loads.index(least)
        return self._turn

    def prefix_hash(self, request: Request) -> int:
        """By the system prompt: all that begin alike meet on one box."""
        return seeded.below(len(self.loads), "prefix", request.app)

    def affinity(self, request: Request) -> int:
        """By the session, sub-agents and all."""
        return seeded.below(len(self.loads), "session", request.session)

    def affinity_least(self, request: Request) -> int:
        """Where its thread was last, or its session's main thread; if every slot there is taken while another box has one free, or it is
        new, the least loaded."""
        home = self._homes.get((request.session, request.thread))
        if home is None:
            home = self._homes.get((request.session, 0))
        if home is None or (self.loads[home] >= self._slots and min(self.loads) < self._slots):
            home = self.least_loaded(request)
        self._homes[request.session, request.thread] = home
        self._homes.move_to_end((request.session, request.thread))
        if len(self._homes) > REMEMBERED:
            self._homes.popitem(last=False)
        return home


POLICIES: dict[str, Callable[[Router, Request], int]] = {
    "round-robin": Router.round_robin,
    "least-loaded": Router.least_loaded,
    "prefix-hash": Router.prefix_hash,
    "affinity": Router.affinity,
    "affinity-least": Router.affinity_least,
}
"""By name."""
