"""Every request of a run, how it ended, and what the server may therefore have counted it as. Pure.

A client that hangs up cannot know how far its request came, so a record holds all fates that fit what it saw. The books of a server's
life balance when each counter lies between the records that must be in it and those that may be (see books.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from bench.soak.asks import Ask
from bench.soak.replies import BadAnswer, Said, error_message, read_stream, read_whole
from bench.soak.wire import Behaviour, Framing, Manner, Reply

CONTEXT_LENGTH = b"context_length_exceeded"


class Fate(StrEnum):
    """What a request became in the server's books."""

    UNSEEN = "unseen"  # counted nowhere
    INVALID = "invalid"
    CONTEXT = "context_length"
    UNAVAILABLE = "unavailable"
    QUEUE_FULL = "queue_full"
    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    ABORT = "abort"
    ERROR = "error"


ANSWERED = frozenset({Fate.STOP, Fate.LENGTH, Fate.TOOL_CALLS})
REFUSED = frozenset({Fate.INVALID, Fate.CONTEXT, Fate.UNAVAILABLE})
ENDED = ANSWERED | {Fate.ABORT, Fate.ERROR}
SUBMITTED = ENDED | {Fate.QUEUE_FULL}
ANY = frozenset(Fate)


class Ending(StrEnum):
    """How a request ended for its client."""

    ANSWERED = "answered"
    FAILED = "failed by an error event"
    BUSY = "429"
    UNAVAILABLE = "503"
    REFUSED = "refused (4xx)"
    LEFT = "left by its client"
    CUT_OFF = "cut off, as it did not read"
    # what must not be
    BROKEN = "5xx other than 503"
    GARBLED = "unreadable"
    CUT = "cut by the server"
    HUNG = "without an end"
    ACCEPTED = "not refused as it must be"


BAD_ENDINGS = frozenset({Ending.BROKEN, Ending.GARBLED, Ending.CUT, Ending.HUNG, Ending.ACCEPTED})


@dataclass(frozen=True)
class Record:
    """One request as it went. Times are `time.monotonic()`."""

    number: int
    life: int  # of the server
    api: str
    kind: str  # single, turn, call, json, heavy, width, fill, stop, hostile
    behaviour: Behaviour
    began: float
    ended: float
    ending: Ending
    fates: frozenset[Fate]
    status: int = 0
    said: Said = field(default_factory=Said)
    ask: Ask | None = None  # None for a hostile request
    detail: str = ""
    retry_after: str = ""  # as the header gave it
    others: int = 0  # requests of this run that were in flight when it ended
    limit: int = 0  # tokens it may have been given at most
    wall: float = 0.0  # Unix seconds by our clock when it ended

    @property
    def tokens(self) -> tuple[int, int]:
        """Tokens that the server generated for it: at least, at most."""
        if self.ending is Ending.ANSWERED and self.said.finish:
            return self.said.tokens, self.said.tokens
        return 0, self.limit if self.fates & ENDED else 0


def judged(ask: Ask, behaviour: Behaviour, reply: Reply) -> tuple[Ending, frozenset[Fate], Said, str]:
    """How a well-formed request ended, what the server may have made of it, what was said, and a sentence on what is odd."""
    said, detail = Said(), reply.detail
    if reply.status == 200:
        try:
            said = _read(ask, reply)
        except BadAnswer as error:
            return Ending.GARBLED, ENDED, said, str(error)
    begun = ENDED if reply.status == 200 else ANY
    if behaviour.manner is Manner.LEAVE_UPLOAD:
        return Ending.LEFT, frozenset({Fate.UNSEEN}), said, detail
    match reply.framing:
        case Framing.WHOLE:
            return _complete(reply, said)
        case Framing.LEFT:
            return Ending.LEFT, _seen(said, begun), said, detail
        case Framing.CUT | Framing.NONE if behaviour.manner is Manner.STALL:
            return Ending.CUT_OFF, begun, said, detail
        case Framing.HUNG:
            return Ending.HUNG, begun, said, detail
        case Framing.GARBLED:
            return Ending.GARBLED, ANY, said, detail
        case _:
            return Ending.CUT, begun, said, f"{reply.framing}: {detail}"


def _read(ask: Ask, reply: Reply) -> Said:
    whole = reply.framing is Framing.WHOLE
    if ask.wish.stream:
        return read_stream(ask.wish.api, reply.body, whole)
    return read_whole(ask.wish.api, reply.body) if whole else Said()


def _seen(said: Said, begun: frozenset[Fate]) -> frozenset[Fate]:
    """The fates of a request whose client left after reading `said`."""
    if said.error:
        return frozenset({Fate.ERROR})
    return frozenset({Fate(said.finish), Fate.ABORT}) if said.finish else begun


def _complete(reply: Reply, said: Said) -> tuple[Ending, frozenset[Fate], Said, str]:
    """The fate of a response that arrived whole."""
    message = error_message(reply.body) if reply.status != 200 else said.error
    match reply.status:
        case 200 if said.error:
            return Ending.FAILED, frozenset({Fate.ERROR}), said, message
        case 200:
            return Ending.ANSWERED, frozenset({Fate(said.finish)}), said, ""
        case 400:
            return Ending.REFUSED, frozenset({Fate.CONTEXT if CONTEXT_LENGTH in reply.body else Fate.INVALID}), said, message
        case 429:
            return Ending.BUSY, frozenset({Fate.QUEUE_FULL}), said, message
        case 503:
            return Ending.UNAVAILABLE, frozenset({Fate.UNAVAILABLE, Fate.ERROR}), said, message
        case status if status < 500:
            return Ending.REFUSED, frozenset({Fate.UNSEEN}), said, message
        case status:
            return Ending.BROKEN, frozenset({Fate.ERROR, Fate.UNSEEN}), said, f"{status}: {message}"
