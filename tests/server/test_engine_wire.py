from __future__ import annotations

import asyncio
import socket

from hypothesis import given, settings
from hypothesis import strategies as st

from ds4batch.messages import HEADER, Bye, Delta, FromEngine, Report, StartFailed, frame
from ds4batch.server.engine_wire import EngineWire
from ds4batch.server.inflight import Job

MESSAGES = [Bye(), StartFailed("x" * 300), Report(events=[Delta(id=1, text="\u00e9" * 40, tokens=1)]), Report()]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(MESSAGES), max_size=8), st.lists(st.integers(1, 90), min_size=1))
def test_messages_arrive_in_order_wherever_the_bytes_are_cut(messages: list[FromEngine], cuts: list[int]) -> None:
    async def run() -> None:
        got: list[FromEngine] = []
        wire = EngineWire(got.append)
        data = b"".join(map(frame, messages))
        at = i = 0
        while at < len(data):
            step = cuts[i % len(cuts)]
            wire.data_received(data[at : at + step])
            at, i = at + step, i + 1
        assert got == messages
        assert not wire.lost.done()

    asyncio.run(run())


def test_bytes_that_are_no_message_end_the_connection_with_the_reason() -> None:
    async def run() -> None:
        for data in (HEADER.pack(2) + b"\xc1\xc1", HEADER.pack(0xFFFFFFFF)):
            got: list[FromEngine] = []
            ours, theirs = socket.socketpair()
            with theirs:
                wire = await EngineWire.open(ours, got.append)
                theirs.sendall(frame(Bye()) + data + frame(Bye()))
                assert "is no message" in await wire.lost
                assert got == [Bye()]

    asyncio.run(run())


def test_an_unread_connection_is_congested_and_never_waited_for() -> None:
    async def run() -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            wire = await EngineWire.open(ours, lambda message: None)
            assert not wire.congested
            for _ in range(130):
                wire.send_raw(bytes(1 << 20))
            assert wire.congested
            wire.abort()
            assert await wire.lost == ""
            wire.send(Bye())  # type: ignore[arg-type]  # dropped, not raised

    asyncio.run(run())


def test_a_cancelled_job_wakes_its_reader_and_gives_nothing_more() -> None:
    async def run() -> None:
        job = Job(1, 10, 10, arrival=0.0)
        job.push(Delta(id=1, text="a", tokens=1), 1.0)
        job.push(Delta(id=1, text="b", tokens=1), 2.0)
        assert [event.text for event in await job.take(10) if isinstance(event, Delta)] == ["a", "b"]
        waiting = asyncio.create_task(job.take(10))
        await asyncio.sleep(0)
        job.cancel("client")
        assert await waiting == []
        job.push(Delta(id=1, text="c", tokens=1), 3.0)
        assert await job.take(10) == []
        assert job.trail.generated == 3  # still counted

    asyncio.run(run())
