"""The text that calls were sampled as, by their ids: so that a history is replayed as it is in the session, not as a client spells it.

Clients give calls back as JSON, re-ordered or with other escapes. A call is recognised by its id and its meaning, and all calls of a turn
must be: else the turn is written anew. Used by several threads.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec

from ds4batch.chat.conversation import Call, Message
from ds4batch.chat.events import TurnCall

MAX_BYTES = 512 << 20
_ENTRY = 64  # bytes that an id takes beside its text


class Block(NamedTuple):
    """The calls of one turn."""

    text: str  # as it was sampled, with what separates it from the content
    meaning: tuple[tuple[str, Any], ...]  # name and arguments of each call


class Replay(NamedTuple):
    """What became of the turns with calls of one history."""

    replayed: int = 0  # as they were sampled
    rewritten: int = 0
    missing: int = 0  # ids that nothing is known of


class ToolMemory:
    """Remembers up to `most` calls and MAX_BYTES of text; those not used for longest go first."""

    def __init__(self, most: int) -> None:
        """0 remembers nothing."""
        self._most = most
        self._blocks: OrderedDict[str, Block] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def __contains__(self, call_id: str) -> bool:
        return call_id in self._blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def remember(self, calls: Sequence[TurnCall], text: str) -> None:
        """Keep the text of a turn's calls."""
        if not self._most:
            return
        block = Block(text, tuple((call.name, _meaning(call.arguments)) for call in calls))
        with self._lock:
            for call in calls:
                self._forget(call.id)
                self._blocks[call.id] = block
                self._bytes += self._size(call.id, block)
            while self._blocks and (len(self._blocks) > self._most or self._bytes > MAX_BYTES):
                self._forget(next(iter(self._blocks)))

    def attach(self, messages: Sequence[Message]) -> tuple[list[Message], Replay]:
        """The messages, those with calls as they were sampled where that is known. Linear in their number."""
        out, replayed, rewritten, missing = [], 0, 0, 0
        for message in messages:
            if message.calls and message.raw is None:
                found = [self._use(call.id) for call in message.calls]
                missing += found.count(None)
                block = found[0]
                if block is not None and all(one is block for one in found) and _same(block, message.calls):
                    message = replace(message, raw=block.text)
                    replayed += 1
                else:
                    rewritten += 1
            out.append(message)
        return out, Replay(replayed, rewritten, missing)

    def _use(self, call_id: str) -> Block | None:
        with self._lock:
            block = self._blocks.get(call_id)
            if block is not None:
                self._blocks.move_to_end(call_id)
            return block

    def _forget(self, call_id: str) -> None:
        block = self._blocks.pop(call_id, None)
        if block is not None:
            self._bytes -= self._size(call_id, block)

    @staticmethod
    def _size(call_id: str, block: Block) -> int:
        """A block is counted once for each of its calls that is known, in equal parts."""
        return _ENTRY + len(call_id) + len(block.text) // len(block.meaning)


def _same(block: Block, calls: Sequence[Call]) -> bool:
    return len(calls) == len(block.meaning) and all(
        call.name == name and _meaning(call.arguments) == arguments
        for call, (name, arguments) in zip(calls, block.meaning, strict=True)
    )


def _meaning(arguments: str) -> Any:
    """The value that JSON stands for; text that is no JSON stands for itself. No arguments are an empty object."""
    try:
        return msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, RecursionError):
        return arguments
