"""The protocols the scheduler drives: a device, a tokeniser, a clock, and the reader of one job's output.

Everything here is an interface. The engine process implements it over torch (ds4batch.engine), the tests over a few lists
(scheduler.fake). The scheduler is the only caller, from one thread, and never calls two of these at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, Protocol

from scheduler.survey import Survey

Clock = Callable[[], float]
"""Monotonic seconds. Injected, so that a test or a simulation owns the time."""


class BackendError(RuntimeError):
    """A forward failed. Every slot named in the failed launch has lost its checkpoint (its tokens are empty)."""


class Unanswerable(ValueError):
    """What a job asks of its answer cannot be met, which shows while it is answered. The fault of the job: status 400."""


CHAINED: Final = (-1,)
"""As `Work.tokens`, itself and not an equal: the token that the last `sample` drew for the slot, which nobody has read yet."""


class Work(NamedTuple):
    """What one slot contributes to a forward: consecutive tokens that extend its checkpoint."""

    slot: int
    tokens: Sequence[int]  # or CHAINED
    wants_logits: bool  # the logits of the last token, and of each draft, are kept, so that `sample` may follow
    drafts: int = 0  # of those last proposed for the slot, evaluated behind `tokens`: the one token they were proposed to follow


class Pick(NamedTuple):
    """One draw."""

    slot: int
    sampling: Any  # the job's opaque value
    row: int = 0  # of the slot's last launch: 0 draws what follows its tokens, n what follows its n-th draft


class Room(NamedTuple):
    """The pages that all sessions share."""

    pages: int
    free: int
    page_tokens: int
    page_bytes: int


class Held(NamedTuple):
    """Pages of one session."""

    pages: int  # on the device
    own: int  # of those, held by nobody else
    parked: int  # in host memory


class Sampled(NamedTuple):
    """One token drawn for one slot."""

    token: int
    logprob: float | None  # natural log of the model's probability, when the request asked for it
    top: tuple[tuple[int, float], ...]  # the most likely tokens with their log-probabilities, best first


class Draws(Protocol):
    """Tokens that are being drawn."""

    def wait(self) -> Sequence[Sampled]:
        """One for each pick, in order. Called once, in the order in which the draws were begun.

        From here on the checkpoints hold the tokens that were chained to these draws. Raises BackendError when a forward since
        the draws before these failed: each slot that took part in one is empty then, whoever uses it now.
        """


class Backend(Protocol):
    """Resident sessions, one a slot. A checkpoint is the list of tokens whose state the device holds."""

    @property
    def ctx(self) -> int:
        """Positions a session can hold."""

    @property
    def survey(self) -> Survey | None:
        """What its steps were seen to take, where that was measured."""

    def tokens(self, slot: int) -> Sequence[int]:
        """The slot's checkpoint, without copying. Empty when the session is not valid."""

    def can_truncate(self, slot: int, length: int) -> bool:
        """Whether `truncate(slot, length)` would succeed. Pure."""

    def truncate(self, slot: int, length: int) -> bool:
        """Shorten the checkpoint to `length` tokens, or return False with nothing changed."""

    @property
    def needs_marks(self) -> bool:
        """Whether a session can only be cut to nothing or to its marked point."""

    def mark(self, slot: int) -> None:
        """Make the checkpoint's present length one that `truncate` can come back to, in place of an earlier such point."""

    def fork_point(self, source: int, most: int) -> int:
        """The longest prefix of `source`'s checkpoint, of at most `most` tokens, that `fork` can take; 0 when there is none.

        A session that runs can be forked from: what it evaluates meanwhile lies behind its `tokens`. Pure.
        """

    def can_fork(self, source: int, length: int) -> bool:
        """Whether `fork` from `source` of `length` tokens would succeed, given pages. Pure."""

    def fork(self, source: int, target: int, length: int) -> bool:
        """Make the first `length` tokens of `source` the checkpoint of `target`, in place of what that held.

        Whole pages are held by both from then on, the rest is copied. False, with nothing changed, when `can_fork` says no, pages
        lack, or the two are one. What a forward that is under way may still spoil is lost in `target` together with `source`.
        """

    def room(self) -> Room:
        """The pool's pages."""

    def held(self, slot: int) -> Held:
        """Pages of the slot's session."""

    def distinct(self, parts: Mapping[int, int]) -> int:
        """Pages that hold the first so many tokens of these slots' sessions, a shared one counted once. Pure."""

    def shortage(self, work: Sequence[Work]) -> int:
        """Pages that `launch` of `work` would lack; 0 when it finds all. Pure."""

    def park(self, slot: int) -> None:
        """Move the session's pages to host memory, but those that a session on the device holds too and will not write.

        Until `resume` it can only be emptied; its `tokens` stay. Done again for a parked session it moves the pages whose
        other holders are gone.
        """

    def resume(self, slot: int) -> bool:
        """Bring a parked session back, bit for bit, or return False with nothing changed when pages lack."""

    def can_chain(self, slot: int, sampling: Any) -> bool:
        """Whether CHAINED may follow a draw of `sampling` for the slot: it is drawn without the host, and a token too many
        can be cut off again. Pure."""

    def launch(self, work: Sequence[Work]) -> None:
        """Evaluate all rows in one forward. On return the checkpoints hold the new tokens.

        A CHAINED token counts as a position at once and is in `tokens` when its draws were waited for; until then `sample` is
        all that may be asked for its slot.

        Drafts are evaluated and are no part of the checkpoint: see `accept`. A slot with drafts that are neither accepted nor
        cut takes no part in a launch. What was proposed for a slot in `work` is used up, evaluated or not.

        Raises ValueError (a slot twice, a token outside the vocabulary, no room, nothing to do, drafts that were not proposed
        to follow) with no session changed, and BackendError when the device failed, after which every slot in `work` is empty.
        """

    def sample(self, picks: Sequence[Pick]) -> Draws:
        """Begin to draw a token for each pick from the logits its slot's last launch kept.

        The draw depends on the logits, the sampling and the position alone, for samplings that are not `independent` also on
        what was drawn for the request before. Raises ValueError with nothing begun for a sampling or a row that cannot be drawn
        from, and BackendError as `Draws.wait` does.
        """

    def independent(self, sampling: Any) -> bool:
        """Whether a draw of `sampling` depends on no draw before it, so that all rows of a slot may be drawn at once. Pure."""

    def can_draft(self, slot: int) -> bool:
        """Whether drafts can be proposed for the slot, and cut again. Pure."""

    def propose(self, wants: Sequence[tuple[int, int]], count: int) -> Sequence[int]:
        """Propose what follows each (slot, token that was drawn and is not evaluated): how many drafts each got, at most `count`.

        They are for the slot's next launch, and are dropped by anything else that is done to the slot. Raises BackendError, with
        every slot in `wants` emptied, when the drafter failed.
        """

    def expect(self, slots: Sequence[int]) -> None:
        """`propose` will be asked for these slots once the draws just begun, all of each slot's rows, were waited for: the drafter may
        begin. Nothing that is seen changes. Raises BackendError as `propose` does.
        """

    def drafts(self, slot: int) -> Sequence[int]:
        """The drafts of the slot's last launch. Known once the first draws behind that launch were waited for."""

    def accept(self, slot: int, count: int) -> None:
        """Make the first `count` drafts of the slot's last launch part of its checkpoint: they are the tokens that were drawn.

        The others lie behind it until they are accepted or `truncate`, to the checkpoint's length or less, cuts them; until then
        nothing but `sample` may be asked for the slot. The logits kept are those of the last token that was accepted.
        """


class Text(Protocol):
    """The only two things the scheduler needs of a tokeniser, both done once a job, never in a probe."""

    def tokenise(self, text: str) -> list[int]:
        """Token ids of rendered chat text (special tokens are recognised)."""

    def render(self, tokens: Sequence[int]) -> str:
        """The text of a checkpoint, special tokens included. Bytes that are not UTF-8 become U+FFFD."""


Answered = Literal["stop", "length", "tool_calls"]
"""How an answer ends that is whole, or as long as it may be."""


class Verdict(NamedTuple):
    """An output's answer to a token that ends the turn."""

    reason: Answered
    keep: int  # generated tokens, counted from the first, that the visible text still covers


class Output(Protocol):
    """Reads one job's tokens: detokenises, looks for stop strings, emits deltas."""

    def push(self, sampled: Sampled) -> Verdict | None:
        """Take one token. A verdict ends the turn. Raises Unanswerable; anything else that is raised is a fault of ours."""

    def finish(self, reason: Answered) -> Answered:
        """No token follows: flush what was held back. Returns the reason as the client is told it, which the text may have changed.

        Not called when the job was cancelled or failed.
        """
