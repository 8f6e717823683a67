"""How a grammar of tool calls is written down, and what a reader of one block works with.

To add a grammar, write a module with one generator function and one `Grammar` that names it:

    def _read(block: Block) -> Reading[None]:
        while True:
            name = yield from block.until(_LINE_END, "the name")   # every wait is a `yield from`
            block.start_call(name)
            yield from read_object(block, block.write)             # json_values.py: pieces are passed on as they come
            yield from block.expect("</call>", "the end of a call")
            block.end_call()
            block.end()                                            # the block may be over here
            yield from block.space()
            if not (yield from block.match(block.marker)):
                return                                             # it is over: what follows is no part of it
            block.reopen()

    GRAMMAR = Grammar(name="mine", starts=("<call>",), read=_read)

and list it in `__init__.py`. The reader begins behind the marker that opened the block (`block.marker`). It reads by `block`'s
primitives, which wait where the text ends in the middle of something, so that it is written as if all of the text were there;
it reports by `start_call`, `write` (pieces that together are one JSON object), `end_call`. It raises `Unreadable` with a reason
for what it cannot read, with `source.pos` at the first character that does not fit. Returning ends the block. Rules:

- Nothing is read twice: consume what is understood, hold no more than a tag.
- `start_call` as soon as the name is certain; `write` as soon as a piece is. What was reported can be withdrawn as a call, not
  changed. Where arguments come before their name, keep the pieces in a list and write them after `start_call`.
- `block.lacks(closer)` says that all that is missing is the closer of the outermost wrapper: a text that ends there is mended.
- `block.greedy` tells the sampler whether the next token is structure. The primitives set it; a reader seldom has to.
- Markers begin with a character that occurs nowhere else in any marker.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Mapping
from json.encoder import encode_basestring
from typing import NamedTuple, TypeVar

from ds4batch.chat.events import CallBroken, CallDelta, CallEnd, CallStart, TurnEvent

T = TypeVar("T")
Reading = Generator[None, None, T]  # each yield waits for more text

SPACE = " \t\n\r\f\v"  # what counts as white space between tags and around texts
MAX_NAME = 1000  # characters of a name or a tag; what is longer is none
_NOT_SPACE = re.compile(f"[^{SPACE}]")
_BODY_STOP = re.compile("[<&]")


class Unreadable(Exception):
    """A block is not what its grammar says. The message completes "the block could not be read: "."""


class Source:
    """The text that has come and was not read yet, and a record of what was read since `record()`."""

    def __init__(self) -> None:
        self.text = ""
        self.pos = 0  # what lies before it was read
        self._kept: list[str] = []
        self._kept_length = 0
        self._from: int | None = None  # where in `text` the part of the record begins that is not in _kept

    def feed(self, more: str) -> None:
        """Append text. Costs what was not read, so readers hold little."""
        if self._from is not None:
            self._kept.append(self.text[self._from : self.pos])
            self._kept_length += self.pos - self._from
            self._from = 0
        self.text = self.text[self.pos :] + more
        self.pos = 0

    def record(self, back: int = 0) -> None:
        """Record what is read from `back` characters before here on."""
        self._kept, self._kept_length, self._from = [], 0, self.pos - back

    def stop_recording(self) -> None:
        """Forget the record."""
        self._kept, self._kept_length, self._from = [], 0, None

    @property
    def recorded_length(self) -> int:
        """Characters read since `record()`."""
        return self._kept_length + self.pos - (self._from or 0)

    def recorded(self) -> str:
        """What was read since `record()`."""
        return "".join(self._kept) + self.text[self._from : self.pos]

    def rest(self) -> str:
        """Read all that is there."""
        rest, self.pos = self.text[self.pos :], len(self.text)
        return rest


class Block:
    """One block of calls while it is read: the primitives of a reader, and the events it has reported."""

    def __init__(self, source: Source, marker: str, tools: Mapping[str, frozenset[str]], new_id: Callable[[], str]) -> None:
        """`source` stands behind `marker`, which opened the block and is the start of its record."""
        self.source = source
        self.marker = marker
        self.tools = tools  # name -> its parameters that are strings and nothing else
        self.greedy = True  # the next token is structure
        self.started = 0  # calls
        self.open = False  # the last of them is not complete
        self.readable_to = 0  # length of the record up to the end of the last complete call or of the block
        self.ended = False  # the block is over, unless another call opens it again
        self.ends = 0  # how often it was over
        self.closers: tuple[str, ...] = ()  # one of these is all that is missing; none where more is
        self._new_id = new_id
        self._events: list[TurnEvent] = []
        self._pieces: list[str] = []
        self._members: list[bool] = []  # of each open object: it has one

    # Reading.

    def space(self) -> Reading[None]:
        """Skip white space, up to a character that is none."""
        source = self.source
        while True:
            found = _NOT_SPACE.search(source.text, source.pos)
            if found:
                source.pos = found.start()
                return
            source.pos = len(source.text)
            self.greedy = True
            yield

    def match(self, *texts: str) -> Reading[str]:
        """Read whichever of `texts` stands here and return it; "", and nothing read, where none does. No text may begin another."""
        source = self.source
        while True:
            for text in texts:
                if source.text.startswith(text, source.pos):
                    source.pos += len(text)
                    return text
            rest = source.text[source.pos : source.pos + MAX_NAME]
            if not any(text.startswith(rest) for text in texts):
                return ""
            self.greedy = True
            yield

    def expect(self, text: str, what: str) -> Reading[None]:
        """Read `text`. Raises Unreadable naming `what` where something else stands."""
        if not (yield from self.match(text)):
            raise Unreadable(f"{what} was expected")

    def until(self, stop: re.Pattern[str], what: str) -> Reading[str]:
        """Read a short text up to the first match of `stop`, a set of characters, and not that. Raises Unreadable for a long one."""
        source = self.source
        parts: list[str] = []
        length = 0
        while True:
            found = stop.search(source.text, source.pos)
            end = found.start() if found else len(source.text)
            length += end - source.pos
            if length > MAX_NAME:
                raise Unreadable(f"{what} is too long")
            parts.append(source.text[source.pos : end])
            source.pos = end
            if found:
                return "".join(parts)
            self.greedy = True
            yield

    def body(self, ends: tuple[str, ...], write: Callable[[str], None]) -> Reading[None]:
        """Pass on a parameter's text, unescaped, up to one of `ends`, which is read. Data may hold anything else.

        An end inside data is escaped, see chat/escapes.py; escapes are those of `ends[0]`. All ends begin with `<`.
        """
        source = self.source
        while True:
            found = _BODY_STOP.search(source.text, source.pos)
            end = found.start() if found else len(source.text)
            if end > source.pos:
                write(source.text[source.pos : end])
                source.pos = end
            if not found:
                self.greedy = False
                yield
            elif source.text[end] == "&":
                yield from self._escape(ends[0][1:], write)
            elif (yield from self._body_end(ends)):
                return
            else:
                write("<")
                source.pos += 1

    def _body_end(self, ends: tuple[str, ...]) -> Reading[bool]:
        source = self.source
        while True:
            for end in ends:
                if source.text.startswith(end, source.pos):
                    source.pos += len(end)
                    return True
            rest = source.text[source.pos : source.pos + MAX_NAME]
            if not any(end.startswith(rest) for end in ends):
                return False
            self.greedy = len(rest) > 1  # a lone `<` is as likely to be data
            yield

    def _escape(self, tail: str, write: Callable[[str], None]) -> Reading[None]:
        """At `&`: `&lt;` and `&amp;lt;`, with any number of `amp;`, mean one level less where the tail of an end follows."""
        source = self.source
        source.pos += 1
        levels = 0
        last = "lt;" + tail
        while True:
            while source.text.startswith("amp;", source.pos):
                source.pos += 4
                levels += 1
            if source.text.startswith(last, source.pos):
                source.pos += len(last)
                write("<" + tail if not levels else "&" + "amp;" * (levels - 1) + last)
                return
            rest = source.text[source.pos : source.pos + len(last)]
            if not (last.startswith(rest) or "amp;".startswith(rest)):
                write("&" + "amp;" * levels)
                return
            self.greedy = False
            yield

    # Reporting.

    def start_call(self, name: str) -> None:
        """A call of `name` begins."""
        self._events.append(CallStart(self.started, self._new_id(), name))
        self.started += 1
        self.open, self.closers = True, ()

    def write(self, piece: str) -> None:
        """A piece of the call's JSON object."""
        self._pieces.append(piece)

    def write_text(self, piece: str) -> None:
        """A piece of a string inside the JSON object, which `write('"')` opens and closes."""
        self._pieces.append(encode_basestring(piece)[1:-1])

    def open_object(self) -> None:
        """Begin an object of which `key` names the members. JSON that is passed on as it stands needs none of this."""
        self._members.append(False)
        self.write("{")

    def key(self, key: str) -> None:
        """The next member of the open object; its value is to be written."""
        self.write("," if self._members[-1] else "")
        self._members[-1] = True
        self.write(encode_basestring(key) + ":")

    def close_object(self) -> None:
        """End the object that was opened last."""
        self._members.pop()
        self.write("}")

    def end_call(self) -> None:
        """The call is complete."""
        self._flush()
        self._events.append(CallEnd(self.started - 1))
        self.open = False
        self.readable_to = self.source.recorded_length

    def lacks(self, *closers: str) -> None:
        """Here, only one of `closers` is missing."""
        self.closers = closers

    def end(self) -> None:
        """The block is over here, unless `reopen` follows."""
        self.ended, self.closers = True, ()
        self.ends += 1
        self.readable_to = self.source.recorded_length

    def reopen(self) -> None:
        """Another call follows in the same block."""
        self.ended = False

    def is_string(self, tool: str, parameter: str) -> bool:
        """Whether the parameter is declared to be a string and nothing else."""
        return parameter in self.tools.get(tool, ())

    def take(self) -> list[TurnEvent]:
        """The events since the last time. The pieces written since become one."""
        self._flush()
        events, self._events = self._events, []
        return events

    def _flush(self) -> None:
        piece = "".join(self._pieces)
        self._pieces.clear()
        if piece:
            self._events.append(CallDelta(self.started - 1, piece))

    def withdraw(self) -> list[TurnEvent]:
        """What tells that the open call, if there is one, is none."""
        return [CallBroken(self.started - 1)] if self.open else []


class Grammar(NamedTuple):
    """One family's way of writing calls."""

    name: str
    starts: tuple[str, ...]  # markers that open a block, wherever they stand
    read: Callable[[Block], Reading[None]]  # reads one block from behind its marker
    guard: bool = False  # the model may reason once more behind its first </think>: text is held until that is ruled out
    trims_newlines: bool = False  # newlines before and behind </think> belong to the tag
    bare: tuple[str, ...] = ()  # texts that open a block only where the answer begins. One that is no call after all is text.
