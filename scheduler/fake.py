"""A backend and a tokeniser without a model: the next token is a function of the tokens before it.

For tests and simulations. Keeps the contracts of scheduler.backend to the letter, fails on demand, and takes time only
from a clock that its owner winds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from scheduler.backend import CHAINED, BackendError, Held, Room, Sampled, Work
from scheduler.fake_pages import FakePages
from scheduler.survey import Survey

Script = Callable[[Sequence[int]], int | None]
"""The token that follows a history, or None to leave it to the hash."""

SPECIALS = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
END = SPECIALS.index("<|end|>")  # the stop token
_MERGES = ("th", "he", "in", "er", "an", "the", "ing", "and", "  ", "e ", "s ", "o w")
_PIECES = (*SPECIALS, *(chr(c) for c in range(0x20, 0x7F)), "\n", *_MERGES)
_VISIBLE = range(len(SPECIALS), len(_PIECES))
_LETTERS = tuple(_PIECES.index(letter) for letter in "thein")
_CODEPOINTS = len(_PIECES)  # any other character is this and its code point
VOCABULARY = _CODEPOINTS + 0x110000
_LOGGED = 4096  # what a long-lived instance remembers of its calls
_MASK = (1 << 64) - 1


class ManualClock:
    """A clock that stands still until it is advanced."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass."""
        self.now += seconds


class FakeText:
    """A greedy vocabulary of characters and a few merges, so that a text has several tokenisations. Implements Text."""

    def __init__(self) -> None:
        self._ids = {piece: i for i, piece in enumerate(_PIECES)}
        self._by_size = sorted({len(piece) for piece in _PIECES}, reverse=True)
        self.tokenised: deque[str] = deque(maxlen=_LOGGED)  # the latest texts
        self.rendered = 0  # tokens

    def tokenise(self, text: str) -> list[int]:
        """The longest piece that fits, again and again."""
        self.tokenised.append(text)
        tokens: list[int] = []
        at = 0
        while at < len(text):
            for size in self._by_size:
                known = self._ids.get(text[at : at + size])
                if known is not None:
                    tokens.append(known)
                    at += len(_PIECES[known])
                    break
            else:
                tokens.append(_CODEPOINTS + ord(text[at]))
                at += 1
        return tokens

    def render(self, tokens: Sequence[int]) -> str:
        """The pieces, one after another."""
        self.rendered += len(tokens)
        return "".join(_PIECES[t] if t < _CODEPOINTS else chr(t - _CODEPOINTS) for t in tokens)


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
    when it is waited for, and rows may be chained unless their sampling is a negative number. `pages` of `page_tokens` are
    the memory of all sessions; without a number there are enough for every session's whole context.
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
        self._failures = 0
        self.chains = chains
        self._free_at = 0.0  # when the device has done all it was given
        self._begun: deque[FakeDraws] = deque()  # draws nobody has waited for
        self._unread: dict[int, FakeDraws] = {}  # slots whose last token was chained to these
        self._touched: list[int] = []  # slots of the forwards since the last draws
        self._spoil = 0  # launches that will give nonsense
        self._spoilt = False  # one has, which shows when the draws after it are waited for
        self.counts = Counts()
        self.log: deque[tuple[Work, ...]] = deque(maxlen=_LOGGED)  # the latest launches that were evaluated

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

    def tokens(self, slot: int) -> Sequence[int]:
        """The slot's checkpoint."""
        return self._tokens[slot][:-1] if slot in self._unread else self._tokens[slot]

    def can_chain(self, slot: int, sampling: Any) -> bool:
        """Whether CHAINED may follow a draw of `sampling`."""
        return self.chains and self._can_rewind and not (isinstance(sampling, int) and sampling < 0)

    def can_truncate(self, slot: int, length: int) -> bool:
        """Whether `truncate` would succeed."""
        live = len(self._tokens[slot])
        if length in (0, live):
            return True
        return 0 < length < live and not self.memory.parked(slot) and (self._can_rewind or length == self._marks[slot])

    def truncate(self, slot: int, length: int) -> bool:
        """Shorten the checkpoint, or change nothing."""
        self._require_read(slot)
        if not self.can_truncate(slot, length):
            return False
        if length < len(self._tokens[slot]):
            del self._tokens[slot][length:]
            self._marks[slot] = min(self._marks[slot], length)
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
        if source == target or not self.can_fork(source, length) or not self.memory.fork(source, target, length):
            return False
        self._tokens[target] = self._tokens[source][:length]
        self._marks[target] = 0
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
        wanted = sum(self.memory.need(row.slot, len(self._tokens[row.slot]), len(row.tokens)) for row in work)
        return max(0, wanted - self.memory.room().free)

    def park(self, slot: int) -> None:
        """Move a session to host memory."""
        self._require_read(slot)
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
            states = [self.memory.last(row.slot, start)]
            for token in row.tokens:
                states.append(_mix(states[-1], token))
            self.memory.extend(row.slot, start, states[1:])
            self._tokens[row.slot].extend(row.tokens)
            self._logits[row.slot] = row.wants_logits
        self._touched += [row.slot for row in work]
        evaluated = self.counts.tokens + sum(len(row.tokens) for row in work)
        self.counts = self.counts._replace(launches=self.counts.launches + 1, tokens=evaluated)
        self.log.append(tuple(known))

    def sample(self, picks: Sequence[tuple[int, Any]]) -> FakeDraws:
        """The token that follows each slot's history; an int as sampling makes another one of it."""
        drawn = []
        for slot, sampling in picks:
            if not self._logits[slot]:
                raise ValueError(f"slot {slot} has no logits")
            drawn.append(self.drawn(slot, sampling))
        draws = FakeDraws(self, [slot for slot, _ in picks], drawn, self._touched, self._free_at)
        draws.spoilt, self._spoilt, self._touched = self._spoilt, False, []
        self._begun.append(draws)
        return draws

    def drawn(self, slot: int, sampling: Any) -> Sampled:
        """The token that follows the slot's history."""
        token = self._scripted(self._tokens[slot])
        state = self.memory.last(slot, len(self._tokens[slot]))
        return Sampled(_draw(state, sampling) if token is None else token, None, ())

    def finish(self, draws: FakeDraws) -> Sequence[Sampled]:
        """What `draws` is waited for by."""
        if not self._begun or self._begun.popleft() is not draws:
            raise RuntimeError("draws are waited for once, in their order")
        self._wait_until(draws.ready)
        if draws.spoilt:
            self._lose(draws.touched)
            raise BackendError("the device gave nonsense on demand")
        self._unread = {slot: of for slot, of in self._unread.items() if of is not draws}
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
            self._unread.pop(slot, None)
        self.counts = self.counts._replace(failures=self.counts.failures + 1)

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
            state = _mix(state, token)
        for _ in range(min(limit, self._ctx - len(prompt))):
            dictated = self._scripted(history)
            token = _draw(state, sampling) if dictated is None else dictated
            if token in stops:
                break
            history.append(token)
            state = _mix(state, token)
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
            if self.memory.parked(row.slot):
                raise ValueError(f"slot {row.slot}: parked")
            if not row.tokens:
                raise ValueError(f"slot {row.slot}: nothing to do")
            if row.tokens is CHAINED:
                if not self._begun or row.slot not in self._begun[-1].slots:
                    raise ValueError(f"slot {row.slot}: no token was drawn that could be chained")
            elif not all(0 <= token < VOCABULARY for token in row.tokens):
                raise ValueError(f"slot {row.slot}: a token outside the vocabulary")
            if len(self._tokens[row.slot]) + len(row.tokens) > self._ctx:
                raise ValueError(f"slot {row.slot}: no room")
        if lacking := self.shortage(work):
            raise ValueError(f"{lacking} pages lacking")


def scripted(answers: Mapping[tuple[int, ...], Sequence[int]]) -> Script:
    """A script that continues each prompt with its answer, and says nothing after it or elsewhere."""

    def follow(history: Sequence[int]) -> int | None:
        seen = tuple(history)
        for prompt, answer in answers.items():
            said = seen[len(prompt) :]
            if seen[: len(prompt)] == prompt and len(said) < len(answer) and said == tuple(answer[: len(said)]):
                return answer[len(said)]
        return None

    return follow


def _mix(state: int, token: int) -> int:
    """A step of a 64-bit hash; the constants are those of splitmix64."""
    state = (state + token + 0x9E3779B97F4A7C15) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


def _draw(state: int, sampling: Any) -> int:
    """A visible token, or the stop token once in a while. Half of them are letters that the tokeniser would merge."""
    drawn = _mix(state, sampling if isinstance(sampling, int) else 0)
    if drawn % 41 == 0:
        return END
    among = _LETTERS if drawn & 128 else _VISIBLE
    return among[(drawn >> 8) % len(among)]
