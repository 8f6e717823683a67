"""A call as one JSON object, {"name": ..., "arguments": {...}}: what the grammars of such calls have in common.

The members come in either order, and others between them are read over. The arguments are handed on as they come, unless their call
has no name yet.
"""

from __future__ import annotations

from collections.abc import Callable

from ds4batch.chat.grammars.base import Block, Reading, T, Unreadable
from ds4batch.chat.grammars.json_values import read_object, read_string, read_value
from ds4batch.chat.schemas import compact, members

_ARGUMENTS = ("arguments", "parameters")
_BESIDE = ("type", "id")  # what else a call may have where it is not marked as one


def read_call(block: Block, *, marked: bool = True) -> Reading[None]:
    """Read one call from behind its `{`, and report it.

    One that is not `marked` as a call is one only if a tool of its name is offered and it has arguments: other JSON begins like it.
    Raises Unreadable.
    """
    reader = _Reader(block, marked)
    while True:
        yield from reader.member()
        yield from block.space()
        end = yield from block.match(",", "}")
        if end == "}":
            break
        if not end:
            raise Unreadable("a call's JSON goes on with neither a comma nor its end")
    reader.end()


class _Reader:
    """What is known of a call."""

    def __init__(self, block: Block, marked: bool) -> None:
        self._block = block
        self._marked = marked
        self._name = ""
        self._early: list[str] | None = None  # arguments that came before the name
        self._started = False
        self._argued = False

    def member(self) -> Reading[None]:
        """Read one member."""
        block = self._block
        key = yield from _structure(block, read_string(block))
        yield from block.space()
        yield from block.expect(":", "a colon in a call's JSON")
        if key == "name":
            yield from self._read_name()
        elif key in _ARGUMENTS:
            yield from self._read_arguments()
        elif self._marked or key in _BESIDE:
            yield from read_value(block, _ignore)
        else:
            raise Unreadable(f"a call has no member {key[:40]!r}")

    def end(self) -> None:
        """The object is complete."""
        block = self._block
        if not self._name:
            raise Unreadable("a call has no name")
        if not (self._marked or self._argued):
            raise Unreadable("a call has no arguments")
        self._start()
        if not self._argued:
            block.write("{}")
        block.end_call()

    def _read_name(self) -> Reading[None]:
        if self._name:
            raise Unreadable("a call has two names")
        self._name = (yield from _structure(self._block, read_string(self._block))).strip()
        if not self._name:
            raise Unreadable("a call has no name")
        if not self._marked and self._name not in self._block.tools:
            raise Unreadable(f"no tool is called {self._name[:40]!r}")
        if self._marked or self._argued:
            self._start()

    def _read_arguments(self) -> Reading[None]:
        if self._argued:
            raise Unreadable("a call has its arguments twice")
        block = self._block
        yield from block.space()
        first = block.source.text[block.source.pos]
        if not self._marked and first != "{":
            raise Unreadable("a call's arguments are no JSON object")
        self._argued = True
        if self._name:
            self._start()
            yield from _arguments(block, block.write)
        else:
            self._early = []
            yield from _arguments(block, self._early.append)

    def _start(self) -> None:
        if self._started:
            return
        self._started = True
        self._block.start_call(self._name)
        for piece in self._early or ():
            self._block.write(piece)


def _arguments(block: Block, write: Callable[[str], None]) -> Reading[None]:
    """Read an object, or a string that is the JSON of one, as clients are sent it; nothing is an empty object."""
    first = block.source.text[block.source.pos]
    if first == '"':
        spelt = (yield from read_string(block)) or "{}"
        if members(spelt) is None:
            raise Unreadable("a call's arguments are a string that is no JSON object")
        write(compact(spelt))
    elif first == "n":
        yield from read_value(block, _ignore)
        write("{}")
    else:
        yield from read_object(block, write)


def _structure(block: Block, reading: Reading[T]) -> Reading[T]:
    """Read something that is structure although it is a string, such as the name."""
    while True:
        try:
            next(reading)
        except StopIteration as done:
            value: T = done.value
            return value
        block.greedy = True
        yield


def _ignore(piece: str) -> None:
    pass
