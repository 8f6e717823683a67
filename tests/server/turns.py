"""Random turns of a model, as event lists, for the tests of every API's stream."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

from ds4batch.chat.events import CallBroken, CallDelta, CallEnd, CallStart, Content, Reasoning, ReasoningEnd, Turn, TurnEvent
from ds4batch.messages import Finished, TokenLogprob

texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
_values = st.recursive(st.none() | st.booleans() | st.integers() | texts, lambda inner: st.lists(inner, max_size=2), max_leaves=3)


def finished(reason: str = "stop", *, prompt: int = 10, cached: int = 7, generated: int = 2) -> Finished:
    """The end of an answered request."""
    return Finished(
        id=1,
        reason=reason,  # type: ignore[arg-type]
        prompt_tokens=prompt,
        cached_tokens=cached,
        completion_tokens=generated,
        queue_seconds=0.0,
        prefill_seconds=0.0,
        decode_seconds=0.0,
    )


def turn_of(events: list[TurnEvent]) -> Turn:
    """The sum of the events."""
    turn = Turn()
    turn.add(events)
    return turn


def broken_ids(events: list[TurnEvent]) -> set[str]:
    """The calls that were begun and broke."""
    ids = {event.index: event.id for event in events if isinstance(event, CallStart)}
    return {ids[event.index] for event in events if isinstance(event, CallBroken)}


@st.composite
def _call(draw: Any, index: int, broken: bool = False) -> list[TurnEvent]:
    text = json.dumps(draw(st.dictionaries(texts, _values, max_size=3)), ensure_ascii=False, separators=(",", ":"))
    if broken:
        text = text[: draw(st.integers(0, len(text) - 1))]
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=4)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    start = CallStart(index, f"id{index}", draw(st.sampled_from(["ls", "spähen"])))
    return [start, *(CallDelta(index, piece) for piece in pieces), CallBroken(index) if broken else CallEnd(index)]


@st.composite
def plain_turns(draw: Any) -> list[TurnEvent]:
    """Blocks of reasoning, then an answer, then calls: the order of a turn in which nothing went wrong."""
    events: list[TurnEvent] = []
    for pieces in draw(st.lists(st.lists(texts, max_size=3), max_size=3)):
        events += [*(Reasoning(piece) for piece in pieces), ReasoningEnd()]
    if events and draw(st.booleans()):
        events.pop()  # cut in its reasoning
    events += [Content(piece) for piece in draw(st.lists(texts, max_size=4))]
    for index in range(draw(st.integers(0, 3))):
        events += draw(_call(index))
    return events


@st.composite
def any_turns(draw: Any) -> list[TurnEvent]:
    """Everything in any order, with calls that break and calls that are cut off."""
    events: list[TurnEvent] = []
    calls = 0
    for kind in draw(st.lists(st.sampled_from(["reasoning", "end", "content", "call", "broken"]), max_size=9)):
        match kind:
            case "reasoning":
                events.append(Reasoning(draw(texts)))
            case "end":
                events.append(ReasoningEnd())
            case "content":
                events.append(Content(draw(texts)))
            case _:
                events += draw(_call(calls, broken=kind == "broken"))
                calls += 1
    return events


@st.composite
def batches(draw: Any, events: list[TurnEvent]) -> list[tuple[list[TurnEvent], list[TokenLogprob]]]:
    """The events as they arrive: some at once, with the log-probabilities of the tokens they were made from."""
    cuts = sorted(draw(st.lists(st.integers(0, len(events)), max_size=5)))
    parts = [events[a:b] for a, b in zip([0, *cuts], [*cuts, len(events)], strict=True)]
    return [(part, [TokenLogprob(i, -0.5, [])] if draw(st.booleans()) else []) for i, part in enumerate(parts)]
