"""DSML: the calls of DeepSeek V4 and V4.1, in every spelling that their checkpoints sample.

    <｜DSML｜tool_calls>
    <｜DSML｜invoke name="NAME">
    <｜DSML｜parameter name="KEY" string="true">TEXT</｜DSML｜parameter>
    <｜DSML｜parameter name="KEY" string="false">JSON</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜tool_calls>

White space between tags is free. A parameter without `string` is text, or holds parameters of its own and is an object of them.
The start marker decides the spelling of the whole block.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from ds4batch.chat.escapes import unattribute
from ds4batch.chat.grammars.base import MAX_NAME, SPACE, Block, Grammar, Reading, Unreadable
from ds4batch.chat.grammars.json_values import read_value

_TAG_END = re.compile(r'[">]')
_QUOTE = re.compile('"')
_ATTRIBUTE = re.compile(r'\s+([A-Za-z_]+)\s*=\s*"([^"]*)"')
_SPACES = re.compile(f"[{SPACE}]*")


class Spelling(NamedTuple):
    """The tags of one spelling. Ends may come with a space before their `>`; the renderer's own stand first."""

    calls_ends: tuple[str, ...]
    invoke: str
    invoke_ends: tuple[str, ...]
    parameter: str
    parameter_ends: tuple[str, ...]


def _spelling(prefix: str, calls: str, spaced_ends: bool = False) -> Spelling:
    def ends(name: str) -> tuple[str, ...]:
        end = f"</{prefix}{name}"
        return (f"{end}>", f"{end} >") if spaced_ends else (f"{end}>",)

    return Spelling(ends(calls), f"<{prefix}invoke", ends("invoke"), f"<{prefix}parameter", ends("parameter"))


_V41 = _spelling("｜DSML｜ ", "calls", spaced_ends=True)
SPELLINGS = {
    "<｜DSML｜tool_calls>": _spelling("｜DSML｜", "tool_calls"),
    "<DSML｜tool_calls>": _spelling("DSML｜", "tool_calls"),
    "<tool_calls>": _spelling("", "tool_calls"),
    "<｜DSML｜ calls>": _V41,
    "<｜DSML｜ calls >": _V41,
}


def _read(block: Block) -> Reading[None]:
    tags = SPELLINGS[block.marker]
    while True:
        yield from block.space()
        found = yield from block.match(tags.invoke, *tags.calls_ends)
        if found == tags.invoke:
            yield from _invoke(block, tags)
            block.lacks(*tags.calls_ends)
        elif found and block.started:
            block.end()
            return
        else:
            raise Unreadable("the block holds no call" if found else "a call or the end of the calls was expected")


def _invoke(block: Block, tags: Spelling) -> Reading[None]:
    attributes = yield from _attributes(block, "the tag of a call")
    name = attributes.get("name", "").strip()
    if not name:
        raise Unreadable("a call has no name")
    block.start_call(name)
    block.open_object()
    while True:
        yield from block.space()
        found = yield from block.match(tags.parameter, *tags.invoke_ends)
        if not found:
            raise Unreadable(f"a parameter or the end of the call of {name} was expected")
        if found != tags.parameter:
            break
        yield from _parameter(block, tags, nested=False)
    block.close_object()
    block.end_call()


def _parameter(block: Block, tags: Spelling, *, nested: bool) -> Reading[None]:
    attributes = yield from _attributes(block, "the tag of a parameter")
    name = attributes.get("name", "")
    if not name:
        raise Unreadable("a parameter has no name")
    block.key(name)
    kind = attributes.get("string", "true" if nested else "")
    if kind == "true":
        yield from _text(block, tags, "")
    elif kind == "false":
        yield from _json(block, tags, name)
    elif kind:
        raise Unreadable(f'string="{kind}" of parameter {name} is neither true nor false')
    else:
        yield from _text_or_object(block, tags)


def _text(block: Block, tags: Spelling, begun: str) -> Reading[None]:
    block.write('"')
    block.write_text(begun)
    yield from block.body(tags.parameter_ends, block.write_text)
    block.write('"')


def _json(block: Block, tags: Spelling, name: str) -> Reading[None]:
    yield from block.space()
    if (yield from block.match(*tags.parameter_ends)):
        block.write("null")
        return
    yield from read_value(block, block.write)
    yield from block.space()
    if not (yield from block.match(*tags.parameter_ends)):
        raise Unreadable(f"the JSON of parameter {name} is followed by something else")


def _text_or_object(block: Block, tags: Spelling) -> Reading[None]:
    source = block.source
    before: list[str] = []
    while True:
        found = _SPACES.match(source.text, source.pos)
        assert found is not None
        before.append(found[0])
        source.pos = found.end()
        if source.pos < len(source.text):
            break
        yield
    if not (yield from block.match(tags.parameter)):
        yield from _text(block, tags, "".join(before))
        return
    block.open_object()
    yield from _parameter(block, tags, nested=True)
    while True:
        yield from block.space()
        found_tag = yield from block.match(tags.parameter, *tags.parameter_ends)
        if found_tag != tags.parameter:  # where the end is missing, the end of the call follows
            break
        yield from _parameter(block, tags, nested=True)
    block.close_object()


def _attributes(block: Block, what: str) -> Reading[dict[str, str]]:
    """Read a tag from behind its name to its `>`, and return its attributes with entities decoded."""
    source = block.source
    parts: list[str] = []
    while True:
        parts.append((yield from block.until(_TAG_END, what)))
        end = source.text[source.pos]
        source.pos += 1
        if end == ">":
            break
        if sum(map(len, parts)) > MAX_NAME:
            raise Unreadable(f"{what} is too long")
        parts.append(f'"{(yield from block.until(_QUOTE, what))}"')
        source.pos += 1
    text = "".join(parts)
    attributes: dict[str, str] = {}
    pos = 0
    while found := _ATTRIBUTE.match(text, pos):
        attributes[found[1]] = unattribute(found[2])
        pos = found.end()
    if text[pos:].strip():
        raise Unreadable(f"{what} is malformed")
    return attributes


GRAMMAR = Grammar(name="dsml", starts=tuple(SPELLINGS), read=_read, guard=True)
