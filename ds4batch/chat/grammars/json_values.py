"""Reads JSON that is still being generated: checked, and handed on minified, as it comes.

What it hands on is valid JSON once it returns. One freedom is taken: control characters inside strings, which models write and JSON
forbids, are escaped. Numbers and strings keep their spelling.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from json.encoder import encode_basestring

from ds4batch.chat.grammars.base import Block, Reading, Unreadable

MAX_DEPTH = 256
_STRING_STOP = re.compile(r'["\\\x00-\x1f]')
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_ESCAPE_BEGUN = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?\Z")
_WORD = re.compile(r"[A-Za-z0-9+.\-]*")
_SCALAR = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_CLOSERS = {"{": "}", "[": "]"}


def read_value(block: Block, write: Callable[[str], None]) -> Reading[None]:
    """Read one value, white space before it included. Raises Unreadable where it is not JSON or deeper than MAX_DEPTH."""
    source = block.source
    closers: list[str] = []
    while True:
        yield from block.space()
        char = source.text[source.pos]
        if char == '"':
            yield from _string(block, write)
        elif char in _CLOSERS:
            if len(closers) == MAX_DEPTH:
                raise Unreadable("JSON nests too deeply")
            source.pos += 1
            write(char)
            closers.append(_CLOSERS[char])
            yield from block.space()
            if source.text[source.pos] != closers[-1]:
                if char == "{":
                    yield from _key(block, write)
                continue
        else:
            yield from _scalar(block, write)
        if not (yield from _after_value(block, write, closers)):
            return


def read_object(block: Block, write: Callable[[str], None]) -> Reading[None]:
    """Read one object, white space before it included. Raises Unreadable for any other value."""
    yield from block.space()
    if block.source.text[block.source.pos] != "{":
        raise Unreadable("a JSON object was expected")
    yield from read_value(block, write)


def read_string(block: Block) -> Reading[str]:
    """Read one string, white space before it included, and return what it says. Raises Unreadable for any other value."""
    yield from block.space()
    pieces: list[str] = []
    yield from _string(block, pieces.append)
    value: str = json.loads("".join(pieces))
    return value


def _after_value(block: Block, write: Callable[[str], None], closers: list[str]) -> Reading[bool]:
    """Close what ends here; return whether another value is due."""
    source = block.source
    while closers:
        yield from block.space()
        char = source.text[source.pos]
        if char == closers[-1]:
            source.pos += 1
            write(closers.pop())
        elif char == ",":
            source.pos += 1
            write(",")
            if closers[-1] == "}":
                yield from block.space()
                yield from _key(block, write)
            return True
        else:
            raise Unreadable("a JSON value is not followed by a comma or an end")
    return False


def _key(block: Block, write: Callable[[str], None]) -> Reading[None]:
    yield from _string(block, write)
    yield from block.space()
    yield from block.expect(":", "a colon in JSON")
    write(":")


def _string(block: Block, write: Callable[[str], None]) -> Reading[None]:
    source = block.source
    yield from block.expect('"', "a JSON string")
    write('"')
    while True:
        found = _STRING_STOP.search(source.text, source.pos)
        end = found.start() if found else len(source.text)
        if end > source.pos:
            write(source.text[source.pos : end])
            source.pos = end
        if not found:
            block.greedy = False
            yield
        elif found[0] == '"':
            source.pos += 1
            write('"')
            return
        elif found[0] == "\\":
            yield from _escape(block, write)
        else:
            write(encode_basestring(found[0])[1:-1])
            source.pos += 1


def _escape(block: Block, write: Callable[[str], None]) -> Reading[None]:
    source = block.source
    while not (found := _ESCAPE.match(source.text, source.pos)):
        if not _ESCAPE_BEGUN.match(source.text, source.pos):
            raise Unreadable("a JSON string holds an unknown escape")
        block.greedy = False
        yield
    write(found[0])
    source.pos = found.end()


def _scalar(block: Block, write: Callable[[str], None]) -> Reading[None]:
    """A number or a literal. It is over where something else follows, so it is handed on as a whole."""
    source = block.source
    parts: list[str] = []
    while True:
        found = _WORD.match(source.text, source.pos)
        assert found is not None
        parts.append(found[0])
        source.pos = found.end()
        if source.pos < len(source.text):
            break
        block.greedy = True
        yield
    word = "".join(parts)
    if not _SCALAR.fullmatch(word):
        raise Unreadable("a value is not JSON")
    write(word)
