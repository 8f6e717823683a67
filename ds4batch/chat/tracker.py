"""The one reader of answers: splits sampled text into reasoning, content and calls while it comes.

Owns what is decided once for every API: where reasoning ends, what is markup and what is data, whether the next token is structure
of a call, when the turn is over, and what becomes of a call that nobody can read. The grammars (chat/grammars) know how calls are
written. Costs the same for every character, however long the answer is: nothing is read twice, and no more is held than may yet
turn out to be markup.

A block of calls that opens inside reasoning is a quotation until it is complete; it then ends the reasoning. Nothing of it is
reported before.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from enum import Enum, auto
from typing import NamedTuple

from ds4batch.chat.events import Content, Reasoning, ReasoningEnd, TurnEvent
from ds4batch.chat.grammars import GRAMMARS
from ds4batch.chat.grammars.base import SPACE, Block, Reading, Source, Unreadable

THINK, THINK_END = "<think>", "</think>"
_NOT_SPACE = re.compile(f"[^{SPACE}]")


class End(NamedTuple):
    """How an answer ended."""

    events: list[TurnEvent]  # what was held; the text of calls that could not be read
    reason: str  # as the caller gave it, or "tool_calls"
    raw: str | None  # the exact text of the calls, with the white space that separates it from what came before
    malformed: str  # why calls could not be read of which nothing was reported yet: `events` has their text, and may be dropped


class _Mode(Enum):
    HEAD = auto()  # nothing but white space yet: a tag may follow -> REASONING, CONTENT
    REASONING = auto()  # -> GUARD, CONTENT, BLOCK
    GUARD = auto()  # behind the first </think>, another may follow: all is held -> REASONING, CONTENT, BLOCK
    CONTENT = auto()  # -> BLOCK
    BLOCK = auto()  # in a block of calls -> ENDED, BROKEN; or back, where it was none
    BROKEN = auto()  # behind what could not be read: all is held
    ENDED = auto()  # behind the calls: nothing counts any more


class Tracker:
    """Reads one answer."""

    def __init__(
        self, grammar: str, *, thinking: bool, tools: Mapping[str, frozenset[str]] | None, new_id: Callable[[], str]
    ) -> None:
        """`thinking`: the prompt left the model inside its reasoning. `tools`: each tool's parameters that are strings and nothing
        else; None when the request offers no tools, and then markup of calls is content. `new_id` makes the id of a call.

        Raises KeyError for a grammar that does not exist; "" is that of a model that calls no tools.
        """
        self._grammar = GRAMMARS[grammar] if grammar else None
        self._calling = self._grammar if tools is not None else None  # the grammar, if calls are read
        self._thinking = thinking
        self._tools = tools or {}
        self._new_id = new_id
        self._trims = self._grammar is not None and self._grammar.trims_newlines
        self._guarded = self._calling is not None and self._calling.guard
        starts = self._calling.starts if self._calling else ()
        self._markers = {
            _Mode.REASONING: _markers(THINK_END, *starts),
            _Mode.GUARD: _markers(THINK, THINK_END, *starts),
            _Mode.CONTENT: _markers(*starts),
        }
        self._mode = _Mode.HEAD
        self._source = Source()
        self._events: list[TurnEvent] = []
        self._space: list[str] = []  # white space that ends the text so far: it is syntax if a block follows
        self._fresh = False  # newlines that come next belong to a think tag
        self._blank = True  # the answer has not begun
        self._held: list[str] = []  # in GUARD
        self._block: Block | None = None
        self._reader: Reading[None] | None = None
        self._home: _Mode | None = None  # where to go back if the block is none; None once that is settled
        self._separator = ""  # before the block
        self._why = ""  # it is broken

    @property
    def greedy(self) -> bool:
        """The next token is structure of a call, not payload: take the likeliest."""
        block = self._block
        return self._mode is _Mode.BLOCK and self._home is None and block is not None and block.greedy and not block.ended

    @property
    def done(self) -> bool:
        """The calls are over: the turn ends here."""
        return self._mode is _Mode.ENDED

    def push(self, text: str) -> list[TurnEvent]:
        """Read on: whole characters, cut anywhere. Returns what is certain now."""
        self._events = []
        if self._mode is not _Mode.ENDED:
            self._source.feed(text)
            while _STEPS[self._mode](self):
                pass
        return self._events

    def finish(self, reason: str) -> End:
        """The answer is over: "stop" by the model, "length", "error", or "cut" by the client's stop text, which becomes "stop".

        Nothing may be pushed after it. Only "stop" mends what lacks its outermost end.
        """
        self._events = []
        if self._block is None:
            self._flush()
            return End(self._events, _reported(reason), None, "")
        return self._finish_block(self._block, reason)

    # What each mode does: read on, and return whether the mode changed, so that there may be more to read.

    def _read_head(self) -> bool:
        if not self._skip_space():
            return False
        tags = (THINK,) if self._thinking else (THINK, THINK_END)
        tag = self._at(tags)
        if tag is None:
            return False
        if tag:
            self._source.pos += len(tag)
            self._space.clear()
            self._fresh = self._trims
        self._mode = _Mode.REASONING if self._thinking or tag == THINK else _Mode.CONTENT
        return True

    def _read_reasoning(self) -> bool:
        marker = self._read_to_marker(self._plain)
        if not marker:
            return False
        if marker != THINK_END:
            return self._open_block(marker, _Mode.REASONING)
        space = "".join(self._space)
        self._space.clear()
        self._emit(space.rstrip("\n") if self._trims else space)
        self._events.append(ReasoningEnd())
        self._mode = _Mode.GUARD if self._guarded else _Mode.CONTENT
        self._guarded = False
        self._fresh = self._trims
        return True

    def _read_guarded(self) -> bool:
        marker = self._read_to_marker(self._held.append)
        if not marker:
            return False
        if marker == THINK and not all(text.isspace() for text in self._held):
            self._held.append(marker)
            return True
        held = "".join(self._held)
        self._held.clear()
        if marker == THINK:
            self._mode = _Mode.REASONING
        elif marker == THINK_END:
            if held.strip(SPACE):
                self._events += [Reasoning(held), ReasoningEnd()]
            self._mode = _Mode.CONTENT
        else:
            self._mode = _Mode.CONTENT
            self._plain(held)
            return self._open_block(marker, None)
        return True

    def _read_content(self) -> bool:
        bare = self._calling.bare if self._calling else ()
        if bare and self._blank:
            marker = self._at(bare) if self._skip_space() else None
            if marker is None:
                return False
            self._blank = False
            if marker:
                self._source.pos += len(marker)
                return self._open_block(marker, _Mode.CONTENT)
        marker = self._read_to_marker(self._plain)
        return bool(marker) and self._open_block(marker, None)

    def _read_block(self) -> bool:
        block, why = self._block, ""
        assert block is not None
        assert self._reader is not None
        over = False
        try:
            next(self._reader)
        except StopIteration:
            over = True
        except Unreadable as error:
            why = str(error)
        if (self._home is _Mode.REASONING and block.ends) or (self._home is _Mode.CONTENT and block.started):
            self._settle()
        if self._home is None:
            self._events += block.take()
        if over:
            self._mode = _Mode.ENDED
        elif why and self._home is None:
            self._mode, self._why = _Mode.BROKEN, why
        elif why:
            self._go_back(self._home)
        return bool(why)

    def _read_broken(self) -> bool:
        self._source.rest()
        return False

    # Text.

    def _read_to_marker(self, take: Callable[[str], None]) -> str:
        """Take the text up to a marker and read that. Returns the marker, or "" where the text ends, in the middle of one perhaps."""
        source, markers = self._source, self._markers[self._mode]
        at, marker = markers.find(source.text, source.pos)
        if at > source.pos:
            take(source.text[source.pos : at])
        source.pos = at + len(marker)
        return marker

    def _skip_space(self) -> bool:
        """Hold the white space that comes next; returns whether something else follows."""
        source = self._source
        found = _NOT_SPACE.search(source.text, source.pos)
        end = found.start() if found else len(source.text)
        self._space.append(source.text[source.pos : end])
        source.pos = end
        return found is not None

    def _at(self, texts: tuple[str, ...]) -> str | None:
        """Which of `texts` stands here, "" for none, None when more text is needed to tell."""
        source = self._source
        for text in texts:
            if source.text.startswith(text, source.pos):
                return text
        rest = source.text[source.pos : source.pos + max(map(len, texts))]
        return None if any(text.startswith(rest) for text in texts) else ""

    def _plain(self, text: str) -> None:
        """Text that is no markup. White space at its end is held where a block or a tag may make it syntax."""
        solid = text if self._mode is _Mode.CONTENT and not self._calling else text.rstrip(SPACE)
        if not solid:
            self._space.append(text)
            return
        whole = "".join(self._space) + solid if self._space else solid
        self._space = [text[len(solid) :]] if len(solid) < len(text) else []
        if self._fresh:
            whole = whole.lstrip("\n")
            self._fresh = not whole
        self._emit(whole)

    def _emit(self, text: str) -> None:
        if text:
            self._events.append(Reasoning(text) if self._mode is _Mode.REASONING else Content(text))

    def _flush(self) -> None:
        """Report whatever is held as text."""
        rest = self._source.rest()
        if self._mode is _Mode.HEAD:
            self._mode = _Mode.REASONING if self._thinking else _Mode.CONTENT
        elif self._mode is _Mode.GUARD:
            self._mode = _Mode.CONTENT
            rest = "".join(self._held) + rest
        self._plain(rest)
        space = "".join(self._space)
        self._emit(space.lstrip("\n") if self._fresh else space)

    # The block of calls.

    def _open_block(self, marker: str, home: _Mode | None) -> bool:
        assert self._calling is not None
        self._source.record(back=len(marker))
        self._block = Block(self._source, marker, self._tools, self._new_id)
        self._reader = self._calling.read(self._block)
        self._mode = _Mode.BLOCK
        self._home = home
        if home is None:
            self._settle()
        return True

    def _settle(self) -> None:
        """The block is one: the white space before it is syntax."""
        self._home = None
        self._separator = "".join(self._space)
        self._space.clear()

    def _go_back(self, home: _Mode | None) -> None:
        """What looked like a block was text, as far as it was read."""
        assert home is not None
        self._mode = home
        self._block = self._reader = self._home = None
        text = self._source.recorded()
        self._source.stop_recording()
        self._plain(text)

    def _finish_block(self, block: Block, reason: str) -> End:
        if self._mode is not _Mode.ENDED:
            self._source.rest()
        text = self._source.recorded()
        if block.ended:
            return End([], reason if reason == "error" else "tool_calls", self._separator + text[: block.readable_to], "")
        left = text[block.readable_to :]
        lacks_closer = any(closer.startswith(left.strip(SPACE)) for closer in block.closers)
        if reason == "stop" and lacks_closer and self._mode is _Mode.BLOCK:
            if self._home is not None:
                self._settle()
            return End(block.take(), "tool_calls", self._separator + text, "")
        why = (self._why or "the calls are not finished") if reason == "stop" else ""
        if self._home is not None:
            why = why if self._home is _Mode.REASONING else ""
            self._go_back(self._home)
            self._flush()
            return End(self._events, _reported(reason), None, why)
        events = block.withdraw()
        if block.readable_to == 0:
            events.append(Content(self._separator + left))
        elif not lacks_closer:
            events.append(Content(left))
        return End(events, _reported(reason), None, "" if block.started else why)


def _reported(reason: str) -> str:
    return "stop" if reason == "cut" else reason


class _Markers:
    """Finds texts that a stream may cut."""

    def __init__(self, texts: tuple[str, ...]) -> None:
        self._texts = texts
        self._firsts = {text[0] for text in texts}
        self._longest = max(map(len, texts), default=0)
        self._pattern = re.compile("|".join(map(re.escape, texts)))

    def find(self, text: str, pos: int) -> tuple[int, str]:
        """Where the first text begins and which it is; or where begins what may become one, the end of `text` at the latest, and ""."""
        last = max((text.rfind(first, pos) for first in self._firsts), default=-1)
        if last < 0:
            return len(text), ""
        if found := self._pattern.search(text, pos):
            return found.start(), found[0]
        # The character that begins a text is in no other place of one: only the last can begin one that is cut.
        rest = text[last : last + self._longest]
        return (last if any(start.startswith(rest) for start in self._texts) else len(text)), ""


_STEPS: dict[_Mode, Callable[[Tracker], bool]] = {
    _Mode.HEAD: Tracker._read_head,
    _Mode.REASONING: Tracker._read_reasoning,
    _Mode.GUARD: Tracker._read_guarded,
    _Mode.CONTENT: Tracker._read_content,
    _Mode.BLOCK: Tracker._read_block,
    _Mode.BROKEN: Tracker._read_broken,
}


@functools.lru_cache(maxsize=64)
def _markers(*texts: str) -> _Markers:
    return _Markers(texts)
