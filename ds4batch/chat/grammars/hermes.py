"""Calls as JSON between tags, as Hermes, Qwen 2.5 and 3 and many others write them.

    <tool_call>
    {"name": "NAME", "arguments": {"KEY": VALUE}}
    </tool_call>

Several follow each other, with white space between them or none. A tag inside a JSON string is data.
"""

from __future__ import annotations

from ds4batch.chat.grammars.base import Block, Grammar, Reading
from ds4batch.chat.grammars.json_call import read_call

_START, _END = "<tool_call>", "</tool_call>"


def _read(block: Block) -> Reading[None]:
    while True:
        yield from block.space()
        yield from block.expect("{", "the JSON object of a call")
        yield from read_call(block)
        block.lacks(_END)
        yield from block.space()
        yield from block.expect(_END, f"{_END} behind the JSON object of a call")
        block.end()
        yield from block.space()
        if not (yield from block.match(_START)):
            return
        block.reopen()


GRAMMAR = Grammar(name="hermes", starts=(_START,), read=_read, trims_newlines=True)
