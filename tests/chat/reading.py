"""Feeds scripted answers to a tracker, cut in every way, and says what came of it. Used by the tests of tracker and grammars."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ds4batch.chat.events import (
    CallBroken,
    CallDelta,
    CallEnd,
    CallStart,
    Content,
    Reasoning,
    ReasoningEnd,
    Turn,
    TurnEvent,
)
from ds4batch.chat.tracker import End, Tracker

TOOLS: Mapping[str, frozenset[str]] = {
    "sh": frozenset({"cmd", "cwd"}),
    "add": frozenset(),
    "edit": frozenset({"path", "old", "new"}),
}


class Answer(NamedTuple):
    """A scripted answer and how it is read."""

    text: str
    grammar: str
    thinking: bool = False
    reason: str = "stop"
    tools: Mapping[str, frozenset[str]] | None = TOOLS


class Read(NamedTuple):
    """What came of an answer."""

    turn: Turn
    end: End
    early: list[TurnEvent]  # what was reported before the end
    shape: list[str]  # kinds of events, pieces of the same kind joined
    done_at: int | None  # characters after which the turn was over

    @property
    def calls(self) -> list[tuple[str, Any]]:
        """Name and arguments of every complete call."""
        return [(call.name, json.loads(call.arguments)) for call in self.turn.complete_calls]

    @property
    def reasoning(self) -> list[str]:
        return self.turn.reasoning

    @property
    def content(self) -> str:
        return self.turn.content


def tracker(answer: Answer) -> Tracker:
    """One that is about to read `answer`."""
    ids = itertools.count()
    return Tracker(answer.grammar, thinking=answer.thinking, tools=answer.tools, new_id=lambda: f"call_{next(ids)}")


def cut(text: str, borders: Iterable[int]) -> list[str]:
    """`text` in pieces."""
    at = [0, *sorted(border for border in borders if 0 < border < len(text)), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(at)]


def feed(answer: Answer, pieces: Sequence[str] | None = None) -> Read:
    """Read an answer in pieces, whole by default."""
    reader = tracker(answer)
    events: list[TurnEvent] = []
    done_at, seen = None, 0
    for piece in [answer.text] if pieces is None else pieces:
        events += reader.push(piece)
        seen += len(piece)
        if reader.done and done_at is None:
            done_at = seen
    early = list(events)
    end = reader.finish(answer.reason)
    events += end.events
    check_order(events)
    turn = Turn()
    turn.add(events)
    for call in turn.complete_calls:
        assert isinstance(json.loads(call.arguments), dict), call
    return Read(turn, end._replace(events=_joined(end.events)), early, _shape(events), done_at)


def check_order(events: Sequence[TurnEvent]) -> None:
    """Calls are numbered from 0, do not overlap, and are ended or withdrawn; nothing is empty; reasoning does not follow calls."""
    begun = -1
    current: int | None = None
    for event in events:
        match event:
            case CallStart(index, id, name):
                assert current is None
                assert index == begun + 1
                assert id
                assert name
                begun = current = index
            case CallDelta(index, text):
                assert index == current
                assert text
            case CallEnd(index) | CallBroken(index):
                assert index == current
                current = None
            case Content(text):
                assert text
                assert current is None
            case Reasoning(text):
                assert text
                assert begun < 0
            case ReasoningEnd():
                assert begun < 0
    assert current is None


def _shape(events: Iterable[TurnEvent]) -> list[str]:
    return [kind for kind, _ in itertools.groupby(type(event).__name__ for event in events)]


def _joined(events: list[TurnEvent]) -> list[TurnEvent]:
    """Pieces of one text joined: how a text is cut into events may differ."""
    found: list[TurnEvent] = []
    for event in events:
        last = found[-1] if found else None
        if isinstance(event, Content) and isinstance(last, Content):
            found[-1] = Content(last.text + event.text)
        elif isinstance(event, Reasoning) and isinstance(last, Reasoning):
            found[-1] = Reasoning(last.text + event.text)
        else:
            found.append(event)
    return found


def in_every_cut(answer: Answer) -> Read:
    """Read an answer whole, character by character, in pairs and in runs, and return the reading, which is the same every time."""
    whole = feed(answer)
    for size in (1, 2, 3, 7):
        check_same(answer, whole, range(size, len(answer.text), size))
    return whole


def check_same(answer: Answer, whole: Read, borders: Iterable[int]) -> None:
    """Reading in pieces gives what reading at once gave, but for what was held at the end."""
    pieces = cut(answer.text, borders)
    read = feed(answer, pieces)
    assert read.turn == whole.turn, pieces
    assert read.shape == whole.shape, pieces
    assert read.end == whole.end, pieces
    if whole.done_at is not None:
        assert read.done_at is not None


def sampled_characters(answer: Answer) -> str:
    """The characters of an answer that are sampled, not taken greedily, where every character is a token."""
    reader = tracker(answer)
    found = []
    for character in answer.text:
        if not reader.greedy:
            found.append(character)
        reader.push(character)
    return "".join(found)
