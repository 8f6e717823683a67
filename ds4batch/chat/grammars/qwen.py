"""The calls of Qwen3.8.

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

Several calls follow each other; white space between tags is free. Values have no type of their own, and only `</parameter>` ends one.
"""

from __future__ import annotations

import re

from ds4batch.chat.grammars.base import SPACE, Block, Grammar, Reading, Unreadable
from ds4batch.chat.grammars.xml_values import read_untyped

_START, _END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_NAME_STOP = re.compile(r"[<>\n]")


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
    yield from block.expect(_FUNCTION, f"{_FUNCTION} at the head of a call")
    name = yield from _name(block, "the name of a call")
    block.start_call(name)
    block.open_object()
    while True:
        yield from block.space()
        tag = yield from block.match(_PARAMETER, _FUNCTION_END)
        if not tag:
            raise Unreadable(f"a parameter or the end of the call of {name} was expected")
        if tag != _PARAMETER:
            break
        key = yield from _name(block, "the name of a parameter")
        block.key(key)
        yield from read_untyped(block, _PARAMETER_END, block.is_string(name, key), trims_newline=True)
    block.close_object()
    block.end_call()
    block.lacks(_END)
    yield from block.space()
    yield from block.expect(_END, f"{_END} behind the call of {name}")


def _name(block: Block, what: str) -> Reading[str]:
    name = (yield from block.until(_NAME_STOP, what)).strip(SPACE)
    yield from block.expect(">", f"> behind {what}")
    if not name:
        raise Unreadable(f"{what} is empty")
    return name


GRAMMAR = Grammar(name="qwen", starts=(_START,), read=_read, trims_newlines=True)
