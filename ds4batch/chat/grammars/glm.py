"""The calls of GLM 5.2 and 5.3.

    <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>

Several calls follow each other; white space between tags is free. Values have no type of their own.
"""

from __future__ import annotations

import re

from ds4batch.chat.escapes import unescape
from ds4batch.chat.grammars.base import SPACE, Block, Grammar, Reading, Unreadable
from ds4batch.chat.grammars.xml_values import read_untyped

_START, _END = "<tool_call>", "</tool_call>"
_KEY, _KEY_END = "<arg_key>", "</arg_key>"
_VALUE, _VALUE_END = "<arg_value>", "</arg_value>"
_NAME_STOP = re.compile(f"[<{SPACE}]")
_TAG = re.compile("<")


def _read(block: Block) -> Reading[None]:
    while True:
        yield from _call(block)
        block.end()
        yield from block.space()
        if not (yield from block.match(_START)):
            return
        block.reopen()


def _call(block: Block) -> Reading[None]:
    yield from block.space()
    name = yield from block.until(_NAME_STOP, "the name of a call")
    yield from block.space()
    tag = yield from block.match(_KEY, _END)
    if not name or not tag:
        raise Unreadable("a call has no name" if tag else "the name of a call is followed by neither an argument nor its end")
    block.start_call(name)
    block.open_object()
    while tag == _KEY:
        key = yield from block.until(_TAG, "the name of an argument")
        yield from block.expect(_KEY_END, f"{_KEY_END} behind the name of an argument")
        yield from block.space()
        yield from block.expect(_VALUE, f"the value of an argument of {name}")
        key = unescape(key.strip(SPACE), _KEY_END)
        block.key(key)
        yield from read_untyped(block, _VALUE_END, block.is_string(name, key))
        yield from block.space()
        tag = yield from block.match(_KEY, _END)
    if not tag:
        raise Unreadable(f"an argument or the end of the call of {name} was expected")
    block.close_object()
    block.end_call()


GRAMMAR = Grammar(name="glm", starts=(_START,), read=_read, guard=True)
