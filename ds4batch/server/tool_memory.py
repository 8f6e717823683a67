"""The text that calls were sampled as, by their ids: so that a history is replayed as it is in the session, not as a client spells it.

Clients give calls back as JSON, re-ordered or with other escapes. A call is recognised by its id and its meaning, and all calls of a turn
must be: else the turn is written anew. What was sampled before this server is looked up in the checkpoints on disk, which have ids and
text alone; that is read as any answer is. Used by several threads.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec

from ds4batch.chat.conversation import Call, Conversation, Message, Tool
from ds4batch.chat.events import Turn, TurnCall
from ds4batch.chat.tracker import Tracker
from ds4batch.server.tool_trailers import ToolTrailers

MAX_BYTES = 512 << 20
_ENTRY = 64  # bytes that an id takes beside its text


Meaning = tuple[tuple[str, Any], ...]
"""Name and arguments of each call of a turn."""


class Block(NamedTuple):
    """The calls of one turn."""

    text: str  # as it was sampled, with what separates it from the content
    ids: int  # that share it
    meaning: Meaning | None  # None until somebody asks: how text is read depends on the tools that a request offers
    from_disk: bool = False


class Replay(NamedTuple):
    """What became of the turns with calls of one history."""

    replayed: int = 0  # as they were sampled, from memory
    disk: int = 0  # as they were sampled, from a checkpoint
    rewritten: int = 0
    missing: int = 0  # ids that nothing is known of


class ToolMemory:
    """Remembers up to `most` calls and MAX_BYTES of text; those not used for longest go first."""

    def __init__(self, most: int, trailers: ToolTrailers | None = None) -> None:
        """0 remembers nothing. `trailers`: where to look for what is not remembered."""
        self._most = most
        self._trailers = trailers if most else None
        self._blocks: OrderedDict[str, Block] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def may_know(self, call_id: str) -> bool:
        """Whether the call may have been made here: what remembers nothing cannot say."""
        return not self._most or call_id in self._blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def remember(self, calls: Sequence[TurnCall], text: str) -> None:
        """Keep the text of a turn's calls."""
        if not self._most:
            return
        with self._lock:
            self._keep([call.id for call in calls], Block(text, len(calls), _meaning_of(calls)))

    def unknown(self, messages: Sequence[Message]) -> set[str]:
        """Ids of calls that `load` may find. Asks no disk."""
        if self._trailers is None:
            return set()
        return {call.id for message in messages for call in message.calls if call.id and call.id not in self._blocks}

    def load(self, ids: Collection[str]) -> None:
        """Remember those of the calls that a checkpoint has. Takes as long as the disk."""
        found = self._trailers.find(ids) if self._trailers is not None else {}
        turns: dict[str, list[str]] = {}
        for call_id, text in found.items():
            turns.setdefault(text, []).append(call_id)
        with self._lock:
            for text, calls in turns.items():
                fresh = [call_id for call_id in calls if call_id not in self._blocks]
                self._keep(fresh, Block(text, len(calls), None, from_disk=True))

    def attach(self, conversation: Conversation, grammar: str) -> tuple[list[Message], Replay]:
        """The messages, those with calls as they were sampled where that is known. Linear in their number.

        `grammar`, of chat/grammars, is what text from a checkpoint is read with.
        """
        out, replayed, disk, rewritten, missing = [], 0, 0, 0, 0
        for message in conversation.messages:
            if message.calls and message.raw is None:
                found = [self._use(call.id) for call in message.calls]
                missing += found.count(None)
                block = self._common(found, message.calls, conversation.tools, grammar)
                if block is not None:
                    message = replace(message, raw=block.text)
                    replayed, disk = replayed + (not block.from_disk), disk + block.from_disk
                else:
                    rewritten += 1
            out.append(message)
        return out, Replay(replayed, disk, rewritten, missing)

    def _common(self, found: Sequence[Block | None], calls: Sequence[Call], tools: Sequence[Tool], grammar: str) -> Block | None:
        """The block that all of the calls are of and that says what they say, if there is one."""
        block = found[0]
        if block is None or any(one is None or one.text != block.text for one in found):
            return None
        if block.meaning is not None:
            return block if _same(block.meaning, calls) else None
        meaning = _read(block.text, grammar, tools)
        if meaning is None or not _same(meaning, calls):
            return None  # with other tools it may be read otherwise
        with self._lock:
            for call in calls:
                if self._blocks.get(call.id) is block:
                    self._blocks[call.id] = block._replace(meaning=meaning)
        return block

    def _keep(self, ids: Iterable[str], block: Block) -> None:
        for call_id in ids:
            self._forget(call_id)
            self._blocks[call_id] = block
            self._bytes += self._size(call_id, block)
        while self._blocks and (len(self._blocks) > self._most or self._bytes > MAX_BYTES):
            self._forget(next(iter(self._blocks)))

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
        return _ENTRY + len(call_id) + len(block.text) // block.ids


def _read(text: str, grammar: str, tools: Sequence[Tool]) -> Meaning | None:
    """What a block says; None where it is not calls from its beginning to its end."""
    tracker = Tracker(grammar, thinking=False, tools={tool.name: tool.strings for tool in tools}, new_id=str)
    turn = Turn()
    turn.add(tracker.push(text))
    end = tracker.finish("stop")
    turn.add(end.events)
    return _meaning_of(turn.calls) if end.raw == text and turn.calls == turn.complete_calls else None


def _meaning_of(calls: Sequence[TurnCall]) -> Meaning:
    return tuple((call.name, _meaning(call.arguments)) for call in calls)


def _same(meaning: Meaning, calls: Sequence[Call]) -> bool:
    try:
        return len(calls) == len(meaning) and all(
            call.name == name and (_alike(_meaning(call.arguments), arguments) or call.arguments == _only_text(arguments))
            for call, (name, arguments) in zip(calls, meaning, strict=True)
        )
    except RecursionError:
        return False


def _only_text(arguments: Any) -> str | None:
    """The one string among the arguments: the clients of tools that take one text get it without its JSON."""
    values = list(arguments.values()) if isinstance(arguments, dict) else []
    return values[0] if len(values) == 1 and isinstance(values[0], str) else None


def _alike(one: Any, other: Any) -> bool:
    """Equality of JSON: 1 is 1.0 and not true."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_alike(value, other[key]) for key, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_alike, one, other))
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


def _meaning(arguments: str) -> Any:
    """The value that JSON stands for; text that is no JSON stands for itself. No arguments are an empty object."""
    try:
        return msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, RecursionError):
        return arguments
