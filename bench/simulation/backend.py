"""Sessions that are lists of ids, and a device that takes the time its table says. Implements scheduler.backend for one box.

Holds as much as the scheduler looks at. There are pages for every session's whole context, so nothing is ever parked, and
nothing is drafted. The token drawn at a position is a function of the request's `sampling` and of the position.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bench.simulation.costs import StepCosts
from scheduler import CHAINED, Pick, Sampled, Work
from scheduler.backend import Held, Room
from scheduler.fake import ManualClock
from scheduler.survey import Survey

IDS = 0xFFFFFFFF
STOP = IDS  # ends a turn; no prompt holds it


class Drawn(NamedTuple):
    """The sampling of a request whose answer is known: `tokens` from the position `start` on, then the end of the turn."""

    start: int
    tokens: list[int]


Sampling = int | Drawn  # a number: an answer of ids that no other request has


class SimDraws:
    """Tokens on their way. Implements Draws."""

    def __init__(self, backend: SimBackend, drawn: dict[int, int], ready: float) -> None:
        self._backend = backend
        self.drawn = drawn  # by slot
        self.ready = ready

    def wait(self) -> Sequence[Sampled]:
        """The tokens, not before the device has them."""
        return self._backend.finish(self)


class SimBackend:
    """The sessions of one box."""

    def __init__(self, slots: int, ctx: int, costs: StepCosts, clock: ManualClock) -> None:
        self._ctx = ctx
        self._costs = costs
        self._clock = clock
        self._survey = costs.survey()
        self._tokens: list[list[int]] = [[] for _ in range(slots)]
        self._flying: dict[int, int] = {}  # slot -> a token that is evaluated and that nobody has read
        self._draws: deque[SimDraws] = deque()
        self._free_at = 0.0
        self.busy_seconds = 0.0
        self.launches = 0
        self.evaluated = 0  # tokens

    @property
    def ctx(self) -> int:
        """Positions a session can hold."""
        return self._ctx

    @property
    def survey(self) -> Survey | None:
        """The chunk's table, where the real device is surveyed."""
        return self._survey

    @property
    def needs_marks(self) -> bool:
        """It is a pure attention model."""
        return False

    def tokens(self, slot: int) -> Sequence[int]:
        """The checkpoint."""
        return self._tokens[slot]

    def can_truncate(self, slot: int, length: int) -> bool:
        """Any prefix will do."""
        return 0 <= length <= len(self._tokens[slot])

    def truncate(self, slot: int, length: int) -> bool:
        """Cut at once."""
        if not self.can_truncate(slot, length):
            return False
        del self._tokens[slot][length:]
        return True

    def mark(self, slot: int) -> None:
        """Nothing to remember."""

    def fork_point(self, source: int, most: int) -> int:
        """Any prefix."""
        return max(0, min(len(self._tokens[source]), most))

    def can_fork(self, source: int, length: int) -> bool:
        """Any prefix that is there."""
        return 0 < length <= len(self._tokens[source])

    def fork(self, source: int, target: int, length: int) -> bool:
        """A copy that takes no time."""
        if source == target or not self.can_fork(source, length):
            return False
        self._tokens[target] = self._tokens[source][:length]
        self._flying.pop(target, None)
        return True

    def room(self) -> Room:
        """Pages for everybody."""
        size = self._costs.page_tokens
        pages = len(self._tokens) * -(-self._ctx // size)
        return Room(pages, pages - self.distinct({slot: len(held) for slot, held in enumerate(self._tokens)}), size, 1)

    def held(self, slot: int) -> Held:
        """Pages of one session."""
        pages = -(-len(self._tokens[slot]) // self._costs.page_tokens)
        return Held(pages, pages, 0)

    def distinct(self, parts: Mapping[int, int]) -> int:
        """As if nothing were shared."""
        return sum(-(-tokens // self._costs.page_tokens) for tokens in parts.values())

    def shortage(self, work: Sequence[Work]) -> int:
        """Never any."""
        return 0

    def park(self, slot: int) -> None:
        """Raises RuntimeError: there is room for everybody."""
        raise RuntimeError(f"slot {slot} was parked in a pool that holds all")

    def resume(self, slot: int) -> bool:
        """Nothing is parked."""
        return True

    def can_chain(self, slot: int, sampling: Any) -> bool:
        """As the device does."""
        return self._costs.chains

    def independent(self, sampling: Any) -> bool:
        """Always."""
        return True

    def can_draft(self, slot: int) -> bool:
        """Never."""
        return False

    def propose(self, wants: Sequence[tuple[int, int]], count: int) -> Sequence[int]:
        """None."""
        return [0] * len(wants)

    def expect(self, slots: Sequence[int]) -> None:
        """Nothing to begin."""

    def drafts(self, slot: int) -> Sequence[int]:
        """None."""
        return ()

    def accept(self, slot: int, count: int) -> None:
        """Nothing to accept."""

    def launch(self, work: Sequence[Work]) -> None:
        """Evaluate all rows: the device is busy for what the table says."""
        rows = held = tokens = 0
        reach = 0.0
        for row in work:
            mine = self._tokens[row.slot]
            if row.tokens is CHAINED:
                self._flying[row.slot] = self._draws[-1].drawn[row.slot]
                rows, held = rows + 1, held + len(mine) + 1
                continue
            count, at = len(row.tokens), len(mine)
            mine.extend(row.tokens)
            if len(mine) > self._ctx:
                raise ValueError(f"slot {row.slot}: no room")
            if count == 1 and row.wants_logits:
                rows, held = rows + 1, held + at + 1
            else:
                tokens, reach = tokens + count, reach + count * (at + (count - 1) / 2)
        seconds = self._costs.seconds(rows, held, tokens, reach)
        self._free_at = max(self._clock.now, self._free_at) + seconds
        self.busy_seconds += seconds
        self.launches += 1
        self.evaluated += rows + tokens
        if not self._costs.chains:
            self._clock.now = self._free_at

    def sample(self, picks: Sequence[Pick]) -> SimDraws:
        """One token for each pick."""
        drawn = {}
        for slot, sampling, _ in picks:
            drawn[slot] = _token(sampling, len(self._tokens[slot]) + (slot in self._flying))
        draws = SimDraws(self, drawn, self._free_at)
        self._draws.append(draws)
        return draws

    def finish(self, draws: SimDraws) -> Sequence[Sampled]:
        """Let the time pass, and take in what was chained to these draws."""
        if self._draws.popleft() is not draws:
            raise RuntimeError("draws are waited for in their order")
        self._clock.now = max(self._clock.now, draws.ready)
        for slot in draws.drawn.keys() & self._flying.keys():
            self._tokens[slot].append(self._flying.pop(slot))
        return [Sampled(token, None, ()) for token in draws.drawn.values()]


def _token(sampling: Sampling, position: int) -> int:
    if not isinstance(sampling, Drawn):
        return (sampling + position) % STOP
    at = position - sampling.start
    return sampling.tokens[at] if at < len(sampling.tokens) else STOP
