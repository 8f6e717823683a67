"""What a request can be recognised by besides its tokens: call ids, the conversation as its client sees it, points of return.

Plain values. Bindings hold for one state of one slot: they name the length and the generation at which they were published, and
any change of either voids them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

IMAGE_MASK = "\x1e"  # stands for every character of an image's marker, which differs from request to request
_MOST_POINTS = 4  # of a session: the prompt's end, the turn's beginning, and those of the turn before


class Image(NamedTuple):
    """One image of a prompt."""

    fingerprint: str  # of its pixels
    tokens: int  # positions it takes
    at: int  # the first of them
    offset: int  # of its marker in the text, in characters
    length: int  # of the marker


class Continuation(NamedTuple):
    """The end of a request that answers tool calls."""

    calls: frozenset[str]  # the ids it answers
    suffix_from: int  # where in the text everything begins that follows the last sampled token of the calls


class Keys(NamedTuple):
    """What an answered turn can be recognised by."""

    calls: frozenset[str] = frozenset()  # ids of all calls it made
    visible: str | None = None  # how the next request's text will begin, when it shows less than was sampled


class Bindings(NamedTuple):
    """Keys and the state they hold for."""

    api: str  # of the request that was answered
    keys: Keys
    frontier: int  # tokens of the session
    generation: int  # of the slot
    owed: tuple[int, ...] = ()  # the last tokens of the calls, where the answer ended before they were evaluated


class Point(NamedTuple):
    """A place in a session that its client may come back to."""

    tokens: int
    text: int | None  # characters of the last request's text that these tokens stand for; None when unknown


def bound(bindings: Bindings | None, length: int, generation: int) -> Bindings | None:
    """The bindings if they hold for a session of `length` tokens in a slot of `generation`."""
    if bindings is None or (bindings.frontier, bindings.generation) != (length, generation):
        return None
    return bindings


def masked(text: str, images: Sequence[Image]) -> str:
    """`text` with every image's marker made alike."""
    for image in images:
        end = image.offset + image.length
        text = text[: image.offset] + IMAGE_MASK * image.length + text[end:]
    return text


def latest(points: Sequence[Point]) -> tuple[Point, ...]:
    """The last few of `points` in order, each place once; of two at one place the later given."""
    kept: list[Point] = []
    for point in sorted(points, key=lambda point: point.tokens):
        if kept and kept[-1].tokens == point.tokens:
            kept.pop()
        kept.append(point)
    return tuple(kept[-_MOST_POINTS:])


def unavailable(api: str) -> str:
    """What a request is told whose continuation nobody holds."""
    name, history = {"responses": ("Responses", "input"), "anthropic": ("Anthropic", "messages")}.get(api, ("live", "messages"))
    return f"{name} continuation state is not available; retry by replaying the full {history} history"
