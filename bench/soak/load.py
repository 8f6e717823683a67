"""The load of one life of a server: clients in closed loops, bursts, and the one way in which a request is sent and noted.

Owns the clients and the ledger's growth. What they ask is asks.py's; what became of it is ledger.py's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from random import Random
from typing import Any

from bench import seeded
from bench.soak import asks, hostile
from bench.soak.asks import Ask, Pool, Script
from bench.soak.ledger import Ending, Record, judged
from bench.soak.wire import PLAIN, Behaviour, Manner, Reply, exchange, request_bytes

PATIENCE = 240.0  # seconds; a request that has not ended then hangs
TRIES = 4  # of a turn that was refused for a while
HEAVY_ASKS = 4  # different ones
FILL_TOKENS = 24  # of each answer of the fill
FILL_SPARE = 16  # tokens of the context that are left: a number may be cut into more or fewer
FILL_BURST = -1  # its number; those of the plan begin at 0
FILL_SAMPLE = 8  # sentences of the prompt that tells how many tokens one has
PAUSE_LIMIT = 3.0  # seconds; a client here does not wait as long as it is told to, the run is short

# What a client draws, in parts of a hundred.
_HOSTILE, _CONVERSATION, _HEAVY = 6, 50, 2
_LEAVE_UPLOAD, _LEAVE_EARLY, _LEAVE_WITHIN, _SLOW = 3, 10, 10, 5


class Load:
    """All requests to one server."""

    def __init__(self, life: int, address: tuple[str, int], pool: Pool, seed: int, ctx: int) -> None:
        self.records: list[Record] = []
        self.in_flight = 0
        self._life = life
        self._address = address
        self._pool = pool
        self._seed = seed
        self._ctx = ctx
        self._open = asyncio.Event()
        self._open.set()
        self._ended = False
        self._clients: list[asyncio.Task[None]] = []
        self._stalling = False

    # the one way to send

    async def send(self, ask: Ask, behaviour: Behaviour = PLAIN, kind: str = "") -> Record:
        """Send a request and note how it ended."""
        began = self._begin()
        try:
            reply = await exchange(self._address, request_bytes("POST", ask.path, ask.data), behaviour, PATIENCE)
        finally:
            self.in_flight -= 1
        ending, fates, said, detail = judged(ask, behaviour, reply)
        return self._note(
            began, reply, api=ask.wish.api, kind=kind or ask.wish.kind, behaviour=behaviour, ending=ending, fates=fates, said=said,
            ask=ask, detail=detail, limit=ask.wish.limit, wall=time.time(),
        )  # fmt: skip

    async def attack(self, one: hostile.Hostile) -> Record:
        """Send a hostile request and note how it ended."""
        began = self._begin()
        try:
            reply = await exchange(self._address, one.data, PLAIN, PATIENCE)
        finally:
            self.in_flight -= 1
        ending, fates, detail = hostile.judged(one, reply)
        return self._note(
            began, reply, api="-", kind="hostile", behaviour=PLAIN, ending=ending, fates=fates, detail=detail, limit=self._ctx
        )

    def _begin(self) -> float:
        self.in_flight += 1
        return time.monotonic()

    def _note(self, began: float, reply: Reply, **judged: Any) -> Record:
        """A request that has ended: what every reply tells, and what was judged of it."""
        record = Record(
            number=len(self.records),
            life=self._life,
            began=began,
            ended=time.monotonic(),
            status=reply.status,
            retry_after=reply.headers.get("retry-after", ""),
            others=self.in_flight,
            **judged,
        )
        self.records.append(record)
        return record

    # before the clients

    async def fill(self, slots: int, most: int) -> None:
        """Every kind of request and the largest forwards, before anything is measured: one of each API and form, so that the code for it
        is in memory; a long prompt for every slot at once, the same again, a burst.

        The first time they are evaluated beside each other, the second time they are there and all decode at once. `most` is the size
        of the burst, the largest that the load makes.
        """
        for ask in self._pool.one_of_each():
            await self.send(ask, kind="fill")
        short = [await self._sized(count) for count in (1, 1 + FILL_SAMPLE)]
        per_sentence = (short[1] - short[0]) / FILL_SAMPLE
        if per_sentence <= 0:  # one was not answered, which is for the judge
            return
        padding = 1 + int((self._ctx - FILL_TOKENS - FILL_SPARE - short[0]) / per_sentence)
        prompts = [
            asks.long(self._seed, self._life, i, limit=FILL_TOKENS, stream=bool(i % 2), padding=padding) for i in range(slots)
        ]
        for _ in range(2):
            await asyncio.gather(*(self.send(ask, kind="fill") for ask in prompts))
        await self.burst(FILL_BURST, most)

    async def _sized(self, sentences: int) -> int:
        """Tokens of a prompt of so many sentences. It begins like no other: one that goes on another's text may go on from its tokens."""
        ask = asks.long(self._seed, self._life, "sized", sentences, limit=1, stream=False, padding=sentences)
        return (await self.send(ask, kind="fill")).said.prompt_tokens

    # clients

    def start(self, clients: int) -> None:
        """Let so many clients work until `end`."""
        self._clients = [asyncio.create_task(self._client(number)) for number in range(clients)]

    def hold(self) -> None:
        """Let no client begin a further request."""
        self._open.clear()

    def go_on(self) -> None:
        """Let them begin again."""
        self._open.set()

    async def drained(self, patience: float) -> bool:
        """Wait until nothing is in flight; whether that came."""
        end = time.monotonic() + patience
        while self.in_flight and time.monotonic() < end:
            await asyncio.sleep(0.05)
        return not self.in_flight

    async def end(self, *, at_once: bool = False) -> None:
        """Let every client finish what it has begun, and leave; `at_once`: drop it."""
        self._ended = True
        self._open.set()
        for client in self._clients if at_once else ():
            client.cancel()
        await asyncio.gather(*self._clients, return_exceptions=at_once)

    async def burst(self, number: int, size: int) -> None:
        """So many requests at once, and their ends."""
        rnd = seeded.generator(self._seed, "burst", self._life, number)
        await asyncio.gather(*(self.send(rnd.choice(self._pool.singles)) for _ in range(size)))

    async def _client(self, number: int) -> None:
        rnd = seeded.generator(self._seed, "client", self._life, number)
        while await self._may_begin():
            draw = rnd.randrange(100)
            if draw < _HOSTILE:
                await self.attack(hostile.draw(rnd, self._ctx))
            elif draw < _HOSTILE + _CONVERSATION:
                await self._converse(rnd, rnd.choice(self._pool.scripts))
            elif draw < _HOSTILE + _CONVERSATION + _HEAVY:
                await self._stall(rnd)
            else:
                ask = rnd.choice(self._pool.singles)
                await self.send(ask, drawn(rnd, ask))
            await asyncio.sleep(rnd.expovariate(4.0))

    async def _may_begin(self) -> bool:
        await self._open.wait()
        return not self._ended

    async def _stall(self, rnd: Random) -> None:
        if self._stalling:  # one at a time: each takes hundreds of kilobytes
            return
        self._stalling = True
        behaviour = Behaviour(Manner.STALL, after_bytes=rnd.randrange(1, 20_000), after_seconds=rnd.choice((1.0, 4.0, 6.0)))
        try:
            await self.send(asks.heavy(self._seed, rnd.randrange(HEAVY_ASKS)), behaviour, "heavy")
        finally:
            self._stalling = False

    async def _converse(self, rnd: Random, script: Script) -> None:
        answers: list[str] = []
        tries = 0
        while (ask := script.turn(answers)) is not None and await self._may_begin():
            record = await self.send(ask, drawn(rnd, ask) if not tries else PLAIN)
            tries += 1
            if record.ending is Ending.ANSWERED:
                answers.append(record.said.text)
                tries = 0
            elif record.ending is Ending.LEFT and rnd.random() < 0.12:
                answers.append(record.said.text)  # stopped by its user, who goes on from what was shown
                tries = 0
            elif record.ending in (Ending.UNAVAILABLE, Ending.BUSY, Ending.FAILED):
                await asyncio.sleep(min(PAUSE_LIMIT, float(record.retry_after or 1)))
            if tries > TRIES or (answers and not answers[-1].strip()):
                return
            await asyncio.sleep(rnd.expovariate(8.0))


def drawn(rnd: Random, ask: Ask) -> Behaviour:
    """How a client behaves this time."""
    draw = rnd.randrange(100)
    abruptly = rnd.random() < 0.3
    if draw < _LEAVE_UPLOAD:
        return Behaviour(Manner.LEAVE_UPLOAD, after_bytes=rnd.randrange(1, 100 + len(ask.data)), abruptly=abruptly)
    if draw < _LEAVE_UPLOAD + _LEAVE_EARLY:
        return Behaviour(Manner.LEAVE_EARLY, after_seconds=rnd.choice((0.0, 0.02, 0.2, 1.0)), abruptly=abruptly)
    if draw < _LEAVE_UPLOAD + _LEAVE_EARLY + _LEAVE_WITHIN and ask.wish.stream:
        return Behaviour(Manner.LEAVE_WITHIN, after_bytes=int(rnd.expovariate(1 / 1500)), abruptly=abruptly)
    if draw >= 100 - _SLOW:
        return Behaviour(Manner.SLOW)
    return PLAIN


def within(records: Sequence[Record], first: int) -> list[Record]:
    """The records from number `first` on."""
    return [record for record in records if record.number >= first]
