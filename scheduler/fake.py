"""A backend and a tokeniser without a model: the next token is a function of the tokens before it.

For tests and simulations. Keeps the contracts of scheduler.backend to the letter, fails on demand, and takes time only
from a clock that its owner winds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from scheduler.backend import CHAINED, BackendError, Held, Pick, Room, Sampled, Work
from scheduler.fake_drafts import Ahead, Guesses, Proposal
from scheduler.fake_pages import FakePages
from scheduler.fake_text import END, LOGGED, SPECIALS, VISIBLE, VOCABULARY, FakeText, Script, mix, next_token, scripted
from scheduler.survey import Survey

__all__ = ["END", "SPECIALS", "VOCABULARY", "Counts", "FakeBackend", "FakeDraws", "FakeText", "ManualClock", "Script", "scripted"]


class ManualClock:
    """A clock that stands still until it is advanced."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass."""
        self.now += seconds


class Counts(NamedTuple):
    """What a FakeBackend did since it was made."""

    launches: int = 0
    tokens: int = 0  # evaluated
    truncations: int = 0
    failures: int = 0


class FakeDraws:
    """Tokens that are known and kept back until they are waited for. Implements Draws."""

    def __init__(
        self, backend: FakeBackend, slots: Sequence[int], drawn: Sequence[Sampled], touched: list[int], ready: float
    ) -> None:
        self._backend = backend
        self.slots = slots
        self.drawn = drawn
        self.touched = touched  # slots of the forwards since the draws before, and their forks
        self.ready = ready  # when the device is done with them
        self.spoilt = False

    def wait(self) -> Sequence[Sampled]:
        """The tokens, at the earliest when the device is done."""
        return self._backend.finish(self)


class FakeBackend:
    """Sessions that are lists of tokens. Implements Backend.

    `script` may dictate tokens. `price` gives the seconds a launch takes on `clock`. `can_rewind=False` behaves like a
    recurrent model: a session can only be cut to its marked point. With `chains` the device works on its own, as a card does: time passes
    when it is waited for, and rows may be chained unless their sampling is a negative number; such rows are not drawn together
    with the one before them either. `pages` of `page_tokens` are the memory of all sessions; without a number there are enough for
    every session's whole context. `guesses` makes drafts.
    """

    def __init__(
        self,
        slots: int,
        ctx: int,
        *,
        script: Script | None = None,
        clock: ManualClock | None = None,
        price: Callable[[Sequence[Work]], float] | None = None,
        can_rewind: bool = True,
        chains: bool = False,
        page_tokens: int = 16,
        pages: int | None = None,
        guesses: Guesses | None = None,
    ) -> None:
        self._ctx = ctx
        self._script = script
        self._clock = clock
        self._price = price
        self._can_rewind = can_rewind
        self._marks = [0] * slots  # tokens of each session's marked point
        self._tokens: list[list[int]] = [[] for _ in range(slots)]
        self.memory = FakePages(slots, slots * -(-ctx // page_tokens) if pages is None else pages, page_tokens)  # hashes
        self._logits = [False] * slots
        self._guesses = guesses
        self._samplings: dict[int, Any] = {}  # by slot, of the last draw: what a right draft is follows from it
        self._proposed: dict[int, Proposal] = {}
        self._ahead: dict[int, Ahead] = {}  # drafts of each slot's last launch
        self._open: set[int] = set()  # slots that hold drafts behind their checkpoint
        self._hidden: set[int] = set()  # slots whose drafts nobody may know yet
        self._drafters_failures = 0
        self._failures = 0
        self.chains = chains
        self._free_at = 0.0  # when the device has done all it was given
        self._begun: deque[FakeDraws] = deque()  # draws nobody has waited for
        self._unread: dict[int, FakeDraws] = {}  # slots whose last token was chained to these
        self._touched: list[int] = []  # slots of the forwards since the last draws
        self._spoil = 0  # launches that will give nonsense
        self._spoilt = False  # one has, which shows when the draws after it are waited for
        self.counts = Counts()
        self.log: deque[tuple[Work, ...]] = deque(maxlen=LOGGED)  # the latest launches that were evaluated

    @property
    def ctx(self) -> int:
        """Positions a session can hold."""
        return self._ctx

    @property
    def survey(self) -> Survey | None:
        """None: it is learnt what its steps take."""
        return None

    def fail_next(self, launches: int = 1) -> None:
        """Let the next launches fail as a device does."""
        self._failures = launches

    def spoil_next(self, launches: int = 1) -> None:
        """Let the next launches fail in a way that shows only when their draws are waited for."""
        self._spoil = launches

    def fail_proposals(self, count: int = 1) -> None:
        """Let the next proposals fail."""
        self._drafters_failures = count

    def tokens(self, slot: int) -> Sequence[int]:
        """The slot's checkpoint."""
        return self._tokens[slot][:-1] if slot in self._unread else self._tokens[slot]

    def can_chain(self, slot: int, sampling: Any) -> bool:
        """Whether CHAINED may follow a draw of `sampling`."""
        return self.chains and self._can_rewind and not (isinstance(sampling, int) and sampling < 0)

    def can_truncate(self, slot: int, length: int) -> bool:
        """Whether `truncate` would succeed."""
        live, ahead = len(self._tokens[slot]), self._ahead.get(slot)
        if length in (0, live):
            return True
        # states that cannot be shortened were saved behind each row of a launch with drafts, but the last
        saved = ahead is not None and ahead.base <= length < ahead.base + len(ahead.values)
        possible = self._can_rewind or length == self._marks[slot] or saved
        return 0 < length < live and not self.memory.parked(slot) and possible

    def truncate(self, slot: int, length: int) -> bool:
        """Shorten the checkpoint, or change nothing."""
        self._require_read(slot)
        if not self.can_truncate(slot, length):
            return False
        self._proposed.pop(slot, None)
        if slot in self._open:
            self._open.discard(slot)
            self.memory.cut(slot, length)
        if length < len(self._tokens[slot]):
            del self._tokens[slot][length:]
            if self._marks[slot] > length:
                self._marks[slot] = 0
            self.memory.cut(slot, length)
            self._logits[slot] = False
            self.counts = self.counts._replace(truncations=self.counts.truncations + 1)
        return True

    @property
    def needs_marks(self) -> bool:
        """Whether it behaves like a recurrent model."""
        return not self._can_rewind

    def mark(self, slot: int) -> None:
        """Remember the session's length."""
        self._require_read(slot)
        self._require_settled(slot)
        self._marks[slot] = len(self._tokens[slot])

    def fork_point(self, source: int, most: int) -> int:
        """The longest prefix of at most `most` tokens that can be forked."""
        live = len(self.tokens(source))
        if self.memory.parked(source):
            return 0
        if self._can_rewind:
            return max(0, min(live, most))
        return max((n for n in (live, self._marks[source]) if n <= most), default=0)

    def can_fork(self, source: int, length: int) -> bool:
        """Whether a session can begin with the first `length` tokens of another."""
        return length > 0 and self.fork_point(source, length) == length

    def fork(self, source: int, target: int, length: int) -> bool:
        """Make a prefix of one session another's checkpoint, or change nothing."""
        self._require_read(target)
        self._require_settled(source, target)
        if source == target or not self.can_fork(source, length) or not self.memory.fork(source, target, length):
            return False
        self._tokens[target] = self._tokens[source][:length]
        self._marks[target] = 0
        self._forget_drafts(target)
        self._logits[target] = False
        for members in [self._touched, *(draws.touched for draws in self._begun)]:
            if source in members:
                members.append(target)
        return True

    def room(self) -> Room:
        """The pages."""
        return self.memory.room()

    def held(self, slot: int) -> Held:
        """Pages of one session."""
        return self.memory.held(slot)

    def distinct(self, parts: Mapping[int, int]) -> int:
        """Pages of these prefixes, each once."""
        return self.memory.distinct(parts)

    def shortage(self, work: Sequence[Work]) -> int:
        """Pages that `launch` would lack."""
        wanted = sum(self.memory.need(row.slot, len(self._tokens[row.slot]), len(row.tokens) + row.drafts) for row in work)
        return max(0, wanted - self.memory.room().free)

    def park(self, slot: int) -> None:
        """Move a session to host memory."""
        self._require_read(slot)
        self._require_settled(slot)
        self._proposed.pop(slot, None)
        others = range(len(self._tokens))
        self.memory.park(slot, {i: len(self.tokens(i)) for i in others if i != slot and not self.memory.parked(i)})

    def resume(self, slot: int) -> bool:
        """Bring a session back, or change nothing."""
        return self.memory.resume(slot)

    def launch(self, work: Sequence[Work]) -> None:
        """Append every row's tokens."""
        self._validate(work)
        if self._clock is not None and self._price is not None:
            self._free_at = max(self._clock(), self._free_at) + self._price(work)
            if not self.chains:
                self._wait_until(self._free_at)
        if self._failures:
            self._failures -= 1
            self._lose([row.slot for row in work])
            raise BackendError("the device failed on demand")
        if self._spoil:
            self._spoil -= 1
            self._spoilt = True
        known = [self._known(row) for row in work]
        for row in known:
            start = len(self._tokens[row.slot])
            drafts = self._proposed[row.slot].values[: row.drafts] if row.drafts else ()
            states = [self.memory.last(row.slot, start)]
            for token in (*row.tokens, *drafts):
                states.append(mix(states[-1], token))
            self.memory.extend(row.slot, start, states[1:])
            self._tokens[row.slot].extend(row.tokens)
            self._logits[row.slot] = row.wants_logits
            self._forget_drafts(row.slot)
            if drafts:
                self._ahead[row.slot] = Ahead(len(self._tokens[row.slot]), drafts)
                self._open.add(row.slot)
                self._hidden.add(row.slot)
        self._touched += [row.slot for row in work]
        evaluated = self.counts.tokens + sum(len(row.tokens) + row.drafts for row in work)
        self.counts = self.counts._replace(launches=self.counts.launches + 1, tokens=evaluated)
        self.log.append(tuple(known))

    def sample(self, picks: Sequence[Pick]) -> FakeDraws:
        """The token that follows each slot's history; an int as sampling makes another one of it."""
        drawn = []
        for slot, sampling, row in picks:
            if not self._logits[slot] or (row and (slot not in self._open or row > len(self._ahead[slot].values))):
                raise ValueError(f"slot {slot} has no logits")
            if not self.independent(sampling) and sum(pick.slot == slot for pick in picks) > 1:
                raise ValueError(f"slot {slot}: one draw depends on the other")
            self._samplings[slot] = sampling
            drawn.append(self._drawn_behind(slot, sampling, row) if row else self.drawn(slot, sampling))
        draws = FakeDraws(self, [pick.slot for pick in picks], drawn, self._touched, self._free_at)
        draws.spoilt, self._spoilt, self._touched = self._spoilt, False, []
        self._begun.append(draws)
        return draws

    def drawn(self, slot: int, sampling: Any) -> Sampled:
        """The token that follows the slot's history."""
        token = self._scripted(self._tokens[slot])
        state = self.memory.last(slot, len(self._tokens[slot]))
        return Sampled(next_token(state, sampling) if token is None else token, None, ())

    def _drawn_behind(self, slot: int, sampling: Any, row: int) -> Sampled:
        """The token that follows the slot's draft of this number."""
        base, values = self._ahead[slot]
        token = self._scripted([*self._tokens[slot][:base], *values[:row]])
        return Sampled(next_token(self.memory.last(slot, base + row), sampling) if token is None else token, None, ())

    def independent(self, sampling: Any) -> bool:
        """Whether all rows may be drawn at once."""
        return not (isinstance(sampling, int) and sampling < 0)

    def can_draft(self, slot: int) -> bool:
        """Whether there are guesses."""
        return self._guesses is not None

    def expect(self, slots: Sequence[int]) -> None:
        """Nothing to begin. Raises ValueError for a slot that nothing was drawn for."""
        if missing := [slot for slot in slots if not self._tokens[slot]]:
            raise ValueError(f"nothing was drawn for slots {missing}")

    def propose(self, wants: Sequence[tuple[int, int]], count: int) -> Sequence[int]:
        """Guesses at what follows, right or wrong as was said."""
        if self._drafters_failures:
            self._drafters_failures -= 1
            self._lose([slot for slot, _ in wants])
            raise BackendError("the drafter failed on demand")
        for slot, token in wants:
            self._require_read(slot)
            self._require_settled(slot)
            position = len(self._tokens[slot])
            self._proposed[slot] = Proposal(position, token, self._guessed(slot, token, count))
        return [len(self._proposed[slot].values) for slot, _ in wants]

    def _guessed(self, slot: int, token: int, count: int) -> tuple[int, ...]:
        history = [*self._tokens[slot], token]
        state = mix(self.memory.last(slot, len(history) - 1), token)
        values: list[int] = []
        for right in self._guesses(history, count) if self._guesses is not None else ():
            dictated = self._scripted(history)
            follows = next_token(state, self._samplings.get(slot)) if dictated is None else dictated
            wrong = END if follows != END else VISIBLE.start
            values.append(follows if right else wrong)
            history.append(values[-1])
            state = mix(state, values[-1])
        return tuple(values)

    def drafts(self, slot: int) -> Sequence[int]:
        """What the slot's last launch evaluated ahead."""
        if slot in self._hidden:
            raise RuntimeError(f"slot {slot}: no draw behind its drafts was waited for")
        return self._ahead[slot].values

    def accept(self, slot: int, count: int) -> None:
        """Make drafts tokens."""
        base, values = self._ahead[slot]
        accepted = len(self._tokens[slot]) - base
        if slot not in self._open or not accepted <= count <= len(values):
            raise RuntimeError(f"slot {slot}: {count} of {len(values)} drafts cannot be accepted")
        self._tokens[slot] += values[accepted:count]

    def finish(self, draws: FakeDraws) -> Sequence[Sampled]:
        """What `draws` is waited for by."""
        if not self._begun or self._begun.popleft() is not draws:
            raise RuntimeError("draws are waited for once, in their order")
        self._wait_until(draws.ready)
        if draws.spoilt:
            self._lose(draws.touched)
            raise BackendError("the device gave nonsense on demand")
        self._unread = {slot: of for slot, of in self._unread.items() if of is not draws}
        self._hidden.difference_update(draws.slots)
        return draws.drawn

    def _known(self, row: Work) -> Work:
        """The row with its own tokens, and a note of whose token it took unread."""
        if row.tokens is not CHAINED:
            return row._replace(tokens=tuple(row.tokens))
        draws = self._begun[-1]
        self._unread[row.slot] = draws
        return row._replace(tokens=(draws.drawn[draws.slots.index(row.slot)].token,))

    def _lose(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self._tokens[slot].clear()
            self._marks[slot] = 0
            self.memory.cut(slot, 0)
            self._logits[slot] = False
            self._forget_drafts(slot)
            self._unread.pop(slot, None)
        self.counts = self.counts._replace(failures=self.counts.failures + 1)

    def _forget_drafts(self, slot: int) -> None:
        self._proposed.pop(slot, None)
        self._ahead.pop(slot, None)
        self._open.discard(slot)
        self._hidden.discard(slot)

    def _require_settled(self, *slots: int) -> None:
        for slot in slots:
            if slot in self._open:
                raise RuntimeError(f"slot {slot}: its drafts are neither accepted nor cut")

    def _wait_until(self, time: float) -> None:
        if self._clock is not None:
            self._clock.advance(max(0.0, time - self._clock()))

    def _require_read(self, slot: int) -> None:
        if slot in self._unread:
            raise RuntimeError(f"slot {slot}: its last token was not waited for")

    def answer(self, prompt: Sequence[int], sampling: Any, limit: int, stop_tokens: Iterable[int] = ()) -> list[int]:
        """What a job alone would draw after `prompt`: at most `limit` tokens, or up to a stop token."""
        stops = frozenset(stop_tokens)
        history = list(prompt)
        state = 0
        for token in prompt:
            state = mix(state, token)
        for _ in range(min(limit, self._ctx - len(prompt))):
            dictated = self._scripted(history)
            token = next_token(state, sampling) if dictated is None else dictated
            if token in stops:
                break
            history.append(token)
            state = mix(state, token)
        return history[len(prompt) :]

    def _scripted(self, history: Sequence[int]) -> int | None:
        return self._script(history) if self._script is not None else None

    def _validate(self, work: Sequence[Work]) -> None:
        if not work:
            raise ValueError("nothing to do")
        if len({row.slot for row in work}) != len(work):
            raise ValueError("a slot twice")
        for row in work:
            self._require_read(row.slot)
            self._require_settled(row.slot)
            if self.memory.parked(row.slot):
                raise ValueError(f"slot {row.slot}: parked")
            if not row.tokens:
                raise ValueError(f"slot {row.slot}: nothing to do")
            if row.tokens is CHAINED:
                if not self._begun or row.slot not in self._begun[-1].slots:
                    raise ValueError(f"slot {row.slot}: no token was drawn that could be chained")
            elif not all(0 <= token < VOCABULARY for token in row.tokens):
                raise ValueError(f"slot {row.slot}: a token outside the vocabulary")
            if row.drafts:
                proposed = self._proposed.get(row.slot)
                follows = proposed is not None and (proposed.position, [proposed.parent]) == (
                    len(self._tokens[row.slot]), list(row.tokens)
                )  # fmt: skip
                if proposed is None or not follows or row.drafts > len(proposed.values):
                    raise ValueError(f"slot {row.slot}: {row.drafts} drafts were not proposed to follow")
            if len(self._tokens[row.slot]) + len(row.tokens) + row.drafts > self._ctx:
                raise ValueError(f"slot {row.slot}: no room")
        if lacking := self.shortage(work):
            raise ValueError(f"{lacking} pages lacking")
