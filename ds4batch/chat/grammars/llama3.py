"""Calls as bare JSON, as Llama 3 writes them: the whole answer is {"name": "NAME", "parameters": {...}}, or <|python_tag|> is before it.

Several are separated by `;` or white space. An answer that begins with other JSON, or names no tool that is offered, is text.
"""

from __future__ import annotations

from ds4batch.chat.grammars.base import Block, Grammar, Reading, Unreadable
from ds4batch.chat.grammars.json_call import read_call

_TAG, _OBJECT = "<|python_tag|>", "{"


def _read(block: Block) -> Reading[None]:
    marked = block.marker == _TAG
    if marked:
        yield from block.space()
        if not (yield from block.match(_OBJECT)):
            raise Unreadable("code, or a tool of the model's own, was called: only calls in JSON can be read")
    while True:
        yield from read_call(block, marked=marked)
        block.end()
        yield from block.space()
        if (yield from block.match(";")):
            yield from block.space()
        if (yield from block.match(_TAG)):
            yield from block.space()
        if not (yield from block.match(_OBJECT)):
            return
        block.reopen()


GRAMMAR = Grammar(name="llama3", starts=(_TAG,), read=_read, bare=(_OBJECT,))
