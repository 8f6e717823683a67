"""One request on its way through the scheduler: what it asks for, where it stands, and when it got there.

A job is moved by the scheduler alone. It knows nothing of slots' contents, of the device or of the other jobs.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal

from scheduler.bindings import Continuation, Image, Keys, Point, masked

if TYPE_CHECKING:
    from scheduler.backend import Output, Sampled
    from scheduler.reuse import Found

TOKEN_BYTES = 4  # a packed token id: unsigned, 32 bits, native order


class JobState(Enum):
    """Where a job stands. `QUEUED` waits for a slot; `RESTORE` holds one that is not ready for it, `PREFILL` and `DECODE` run in one."""

    NEW = "new"
    QUEUED = "queue"
    RESTORE = "restore"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


MOVES: dict[JobState, frozenset[JobState]] = {
    JobState.NEW: frozenset({JobState.QUEUED}),
    JobState.QUEUED: frozenset({JobState.RESTORE, JobState.PREFILL, JobState.FINISHED}),
    JobState.RESTORE: frozenset({JobState.PREFILL, JobState.FINISHED}),
    JobState.PREFILL: frozenset({JobState.DECODE, JobState.FINISHED}),
    JobState.DECODE: frozenset({JobState.FINISHED}),
    JobState.FINISHED: frozenset(),
}
"""The moves a job may make. A job that ends before a token was drawn goes straight to `FINISHED`."""

RUNNING = frozenset({JobState.RESTORE, JobState.PREFILL, JobState.DECODE})


@dataclass(slots=True)
class Times:
    """When a job reached each point, in the clock's seconds; None while it has not."""

    arrival: float  # the front read the request
    queued: float | None = None
    scheduled: float | None = None  # it got a slot
    first_token: float | None = None  # drawn, not delivered
    last_token: float | None = None
    finished: float | None = None

    @property
    def queue_seconds(self) -> float | None:
        """From the queue to the slot."""
        return _span(self.queued, self.scheduled)

    @property
    def prefill_seconds(self) -> float | None:
        """From the slot to the first token."""
        return _span(self.scheduled, self.first_token)

    @property
    def decode_seconds(self) -> float | None:
        """From the first token to the last."""
        return _span(self.first_token, self.last_token)

    @property
    def ttft_seconds(self) -> float | None:
        """From the arrival to the first token."""
        return _span(self.arrival, self.first_token)


@dataclass(slots=True, eq=False)
class Job:
    """A request to continue `tokens`. The fields up to `owner_weight` are the caller's, the others the scheduler's.

    What a request continues besides its own tokens and text depends on its API, of which four names mean something here:
    `responses`, `anthropic` and `chat` are conversations, anything else is a raw text. `continues` and `keys` are two ends of
    the same thing: a turn that made calls gives their ids as `keys`, and the request that brings their results names them in
    `continues`. `keys` is asked once, when the answer ended by itself and its output was finished; the keys must describe
    exactly the tokens that were kept, so an answer cut inside a token has none.

    Raises ValueError when the tokens are none or not ids, `max_tokens` is below 1, `arrival` is not a time, a place in
    the text lies outside it, or an owner's limit or weight is none.
    """

    id: int
    tokens: list[int]  # the prompt
    text: str  # what `tokens` was made from; empty when the request came as ids
    max_tokens: int
    sampling: Any  # handed to the backend's `sample` as it is
    stop_tokens: frozenset[int]  # ids that end the answer; empty when it must run to its limit
    api: str
    arrival: float
    output: Output
    required_slot: int | None = None  # the one slot that may take it, see `needs_live_state`
    needs_live_state: bool = False  # it carries no history: what it continues is in a slot or lost, and a miss is status 409
    continues: Continuation | None = None  # the tool results at its end
    generation_from: int | None = None  # where in `text` the opening of the answer begins, behind the last message
    keys: Callable[[], Keys | None] | None = None  # what the next request may be recognised by
    steered: bool = False  # how a token is drawn depends on what `output` read in those before it
    drafted: bool = True  # its tokens may be guessed ahead, where anybody's are
    images: tuple[Image, ...] = ()  # in order; `text` holds a marker for each
    anchor: int = 0  # tokens before its first user message, where conversations with one system prompt part; 0 when unknown
    owner: str = ""  # who sent it, see scheduler.fairness; without a name all are one
    owner_limit: int = 0  # jobs of its owner that may run at once, itself included; 0 is no limit
    owner_weight: float = 1.0  # of its owner's share

    state: JobState = JobState.NEW
    times: Times = field(init=False)
    packed: bytes = field(init=False, repr=False)  # `tokens`, TOKEN_BYTES each, for fast comparison
    blocks: list[int] | None = field(default=None, repr=False)  # see scheduler.prefix_index
    probes: dict[int, tuple[int, Found]] = field(default_factory=dict, repr=False)  # by slot, with its generation

    slot: int | None = None
    generation: int = -1  # the slot's, when it was taken
    prompt: list[int] = field(default_factory=list, repr=False)  # the ids evaluated: `tokens`, unless a text was reused
    cached: int = 0  # of `prompt`, found in the slot
    tier: str = "none"  # how they were found
    prompt_text: str = field(default="", repr=False)  # of `prompt`; empty when unknown
    points: tuple[Point, ...] = ()  # of `prompt`, that a later request may come back to
    mark_at: int = 0  # tokens of `prompt` at which the session is marked, 0 where that is not needed
    parked: bool = False  # its session is in host memory and has to come back before it goes on
    turn_start: int = 0  # the length of the conversation's earlier turns, 0 when unknown
    done: int = 0  # of `prompt`, evaluated or cached
    limit: int = 0  # tokens it may draw: `max_tokens` or the context's room
    generated: list[int] = field(default_factory=list, repr=False)  # drawn, without a stop token
    pending: int | None = None  # the last drawn token while it is not evaluated
    drawing: int = 0  # draws that were begun and are not known
    chained: bool = False  # the first of those is already being evaluated
    unread: list[Sampled] = field(default_factory=list, repr=False)  # drawn, not yet given to `output`
    drafts: int = 0  # for it, checked
    drafts_accepted: int = 0
    ending: Literal["stop", "length"] | None = None  # once known by id; the last text is still to be read

    def __post_init__(self) -> None:
        if not self.tokens:
            raise ValueError("tokens: the prompt is empty")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens: {self.max_tokens} is below 1")
        if not math.isfinite(self.arrival):
            raise ValueError(f"arrival: {self.arrival} is not a time")
        if self.owner_limit < 0:
            raise ValueError(f"owner_limit: {self.owner_limit} is below 0")
        if not 0.0 < self.owner_weight < math.inf:
            raise ValueError(f"owner_weight: {self.owner_weight} is not a number above 0")
        self._check_places()
        self.text = masked(self.text, self.images)
        try:
            self.packed = pack(self.tokens)
        except (OverflowError, TypeError):
            raise ValueError("tokens: not all are ids of 0 to 2^32 - 1") from None
        self.times = Times(self.arrival)

    def _check_places(self) -> None:
        size = len(self.text)
        if self.continues is not None and not (self.continues.calls and 0 <= self.continues.suffix_from < size):
            raise ValueError("continues: it names no call, or its part of the text is empty")
        if self.generation_from is not None and not 0 < self.generation_from < size:
            raise ValueError(f"generation_from: {self.generation_from} is not inside a text of {size} characters")
        for image in self.images:
            if not (0 <= image.offset <= size - image.length and 0 <= image.at <= len(self.tokens) - image.tokens):
                raise ValueError(f"images: the one at {image.offset} is not inside the prompt")

    def move(self, state: JobState) -> None:
        """Go to `state`. Raises RuntimeError when the table of moves does not allow it."""
        if state not in MOVES[self.state]:
            raise RuntimeError(f"job {self.id}: {self.state.name} cannot become {state.name}")
        self.state = state

    @property
    def prefilling(self) -> bool:
        """Whether prompt tokens are still to be evaluated."""
        return self.state is JobState.PREFILL


def pack(tokens: Sequence[int]) -> bytes:
    """Token ids as bytes, so that two prompts compare at memory speed. Raises OverflowError and TypeError."""
    return array("I", tokens).tobytes()


def _span(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start
