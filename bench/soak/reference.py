"""Holds every answer of a soak against the answer to the same request made alone, to a server that nothing is done to.

Owns the reference server's order: one request at a time, and a stranger before each, so that it is evaluated from its first token.

A history is text, and the tokens that a session sampled need not be those into which its text is cut again. A server that still has the
session goes on from the sampled ones, one that lost it from the others; both are right. So a turn whose answer is another than the cold
one is asked again behind earlier turns of its conversation, each subset of them in order, as a server may have kept or lost them. And
behind each earlier turn broken off at each of its tokens, by itself and behind all before it: a client that leaves leaves a session
with the beginning of an answer, from which another client's turn goes on, its rest cut into tokens from there.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from bench.soak.asks import Ask, Wish, ask_of
from bench.soak.ledger import Ending, Record, judged
from bench.soak.replies import Said
from bench.soak.wire import PLAIN, exchange, request_bytes

PATIENCE = 120.0  # seconds for an answer with nobody else there
CHARACTERS_A_TOKEN = 3  # how many tokens of an endless answer are asked for first
MOST_TURNS = 4  # before a turn whose subsets are tried


@dataclass(frozen=True)
class Wrong:
    """An answer that is not the one that the same request gets alone."""

    record: Record
    alone: Said

    @property
    def where(self) -> str:
        """What differs, and where."""
        got, wanted = self.record.said, self.alone
        for name in ("text", "reasoning", "calls", "logprobs", "finish", "tokens"):
            ours, theirs = getattr(got, name), getattr(wanted, name)
            if ours != theirs:
                if isinstance(ours, int):
                    return f"{name}: {ours} instead of {theirs}"
                at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
                return f"{name}, from {at}: {ours[max(0, at - 8) : at + 24]!r} instead of {theirs[max(0, at - 8) : at + 24]!r}"
        return "nothing"


@dataclass(frozen=True)
class Comparison:
    """What came of it."""

    different: int = 0  # requests that were asked alone
    whole: int = 0  # answers that were compared to their end
    beginnings: int = 0  # answers that broke off and were compared as far as they went
    as_sampled: int = 0  # of them all, equal only behind earlier turns of their conversation or beginnings of them
    wrong: tuple[Wrong, ...] = ()
    unanswered: tuple[str, ...] = ()  # what the reference failed to answer
    warm: int = 0  # cold answers for which the reference had reused something
    seconds: float = 0.0


def comparable(records: Sequence[Record]) -> dict[str, list[Record]]:
    """The records that say something, by the key of their request."""
    found: dict[str, list[Record]] = {}
    for record in records:
        if record.ask is not None and not record.said.empty:
            found.setdefault(record.ask.key, []).append(record)
    return found


def agrees(record: Record, alone: Said) -> bool:
    """Whether an answer, or what came of it, is the one that the request gets alone."""
    if record.ending is Ending.ANSWERED:
        return record.said.bits == alone.bits
    return record.said.begins(alone)


class Reference:
    """Asks a server alone."""

    def __init__(self, address: tuple[str, int], note: Callable[[int, int], None] = lambda done, all: None) -> None:
        """`note` is told how many of how many requests have been asked."""
        self._address = address
        self._note = note
        self._strangers = itertools.count()
        self.warm = 0

    async def compare(self, records: Sequence[Record], until: Callable[[], bool] = lambda: False) -> Comparison:
        """Ask for everything in `records`; `until` says when to stop early, which leaves requests unanswered."""
        began = time.monotonic()
        groups = comparable(records)
        wrong: list[Wrong] = []
        unanswered: list[str] = []
        whole = beginnings = as_sampled = 0
        for number, (key, group) in enumerate(groups.items()):
            self._note(number, len(groups))
            ask = group[0].ask
            assert ask is not None
            alone = None if until() else await self._cold(ask, group)
            if alone is None:
                unanswered.append(key)
                continue
            whole += sum(record.ending is Ending.ANSWERED for record in group)
            beginnings += sum(record.ending is not Ending.ANSWERED for record in group)
            odd = [record for record in group if not agrees(record, alone)]
            unexplained = await self._unexplained(ask, odd)
            as_sampled += len(odd) - len(unexplained)
            wrong += [Wrong(record, alone) for record in unexplained]
        seconds = time.monotonic() - began
        return Comparison(len(groups), whole, beginnings, as_sampled, tuple(wrong), tuple(unanswered), self.warm, seconds)

    async def _cold(self, ask: Ask, group: Sequence[Record]) -> Said | None:
        """The answer of `ask` from nothing; an endless one as far as any of `group` goes."""
        if ask.wish.endless and not any(record.ending is Ending.ANSWERED for record in group):
            longest = max(len(record.said.text) for record in group)
            limit = max(8, longest // CHARACTERS_A_TOKEN)
            while True:
                said = await self._alone(ask_of(replace(ask.wish, limit=min(limit, ask.wish.limit))))
                if said is None or len(said.text) >= longest or limit >= ask.wish.limit:
                    return said
                limit *= 2
        return await self._alone(ask)

    async def _alone(self, ask: Ask) -> Said | None:
        await self._stranger()
        said = await self._ask(ask)
        self.warm += said is not None and said.cached_tokens > 0
        return said

    async def _unexplained(self, ask: Ask, odd: list[Record]) -> list[Record]:
        """Those of `odd` that no history of the session explains either."""
        if odd:
            async for other in self._behind_turns(ask):
                odd = [record for record in odd if not agrees(record, other)]
                if not odd:
                    break
        return odd

    async def _behind_turns(self, ask: Ask) -> AsyncIterator[Said]:
        """The answers of `ask` where the server still has what it sampled at some of the turns before, or began to sample at one."""
        for turns in itertools.chain(subsets(ask.wish), broken_off(ask.wish)):
            await self._stranger()
            for turn in turns:
                await self._ask(ask_of(turn))
            said = await self._ask(ask)
            if said is not None:
                yield said

    async def _stranger(self) -> None:
        """Give the only slot to somebody who shares nothing with anybody."""
        number = next(self._strangers)
        await self._ask(ask_of(Wish("completions", (f"{number} {'zyx' * (number % 5)}",), limit=1)))

    async def _ask(self, ask: Ask) -> Said | None:
        reply = await exchange(self._address, request_bytes("POST", ask.path, ask.data), patience=PATIENCE)
        ending, _, said, _ = judged(ask, PLAIN, reply)
        return said if ending is Ending.ANSWERED else None


def subsets(wish: Wish) -> Iterator[tuple[Wish, ...]]:
    """Every choice of earlier turns of a conversation but none at all, in their order; all of them first."""
    turns = _turns(wish)
    for count in range(len(turns), 0, -1):
        yield from itertools.combinations(turns, count)


def broken_off(wish: Wish) -> Iterator[tuple[Wish, ...]]:
    """Each earlier turn of a conversation ended after each number of tokens, by itself and behind all turns before it."""
    turns = _turns(wish)
    for at, turn in enumerate(turns):
        for limit in range(1, turn.limit):
            beginning = replace(turn, limit=limit)
            yield (beginning,)
            if at:
                yield (*turns[:at], beginning)


def _turns(wish: Wish) -> list[Wish]:
    return [replace(wish, said=wish.said[: end + 1]) for end in range(0, len(wish.said) - 1, 2)][-MOST_TURNS:]
