"""A server over a real socket that answers chat completions as a test says."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web

Reply = Callable[[web.Request], Awaitable[web.StreamResponse]]
PATIENCE = 30.0  # seconds until a wait for something that must happen gives up


class FakeServer:
    """Takes the replies of `replies` one by one; what it was asked is in `bodies`."""

    def __init__(self) -> None:
        self.replies: list[Reply] = []
        self.bodies: list[dict[str, Any]] = []
        self.asked = threading.Event()
        self.left = threading.Event()  # the client closed the connection of a stream that had not ended
        self.url = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        self.asked.set()
        return await self.replies.pop(0)(request)

    def says(self, *deltas: dict[str, str] | str, reason: str = "stop") -> None:
        """Answer with these pieces; a text is content."""
        blocks = [chunk({"content": one} if isinstance(one, str) else one) for one in deltas]
        self.sends(*blocks, chunk({}, reason), b"data: [DONE]\n\n")

    def sends(self, *blocks: bytes) -> None:
        """Answer with these bytes as a stream of events, and end it."""

        async def reply(request: web.Request) -> web.StreamResponse:
            response = await stream(request)
            for block in blocks:
                await response.write(block)
            return response

        self.replies.append(reply)

    def begins(self, *blocks: bytes) -> None:
        """Answer with these bytes, then with comments until the client leaves."""

        async def reply(request: web.Request) -> web.StreamResponse:
            response = await stream(request)
            try:
                for block in blocks:
                    await response.write(block)
                while True:
                    await response.write(b": prefill\n\n")
                    await asyncio.sleep(0.02)
            except (ConnectionError, asyncio.CancelledError):
                self.left.set()
                raise

        self.replies.append(reply)

    def breaks(self, *blocks: bytes) -> None:
        """Answer with these bytes, then drop the connection."""

        async def reply(request: web.Request) -> web.StreamResponse:
            response = await stream(request)
            for block in blocks:
                await response.write(block)
            assert request.transport is not None
            request.transport.close()
            return response

        self.replies.append(reply)

    def stays_silent(self) -> None:
        """Never answer."""

        async def reply(request: web.Request) -> web.StreamResponse:
            await asyncio.sleep(PATIENCE)
            raise AssertionError("the client waited too long")

        self.replies.append(reply)

    def refuses(self, status: int, body: str, **headers: str) -> None:
        """Answer with a status, and a body that is no stream."""

        async def reply(request: web.Request) -> web.StreamResponse:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            return web.Response(status=status, text=body, headers=named)

        self.replies.append(reply)


async def stream(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    return response


def chunk(delta: dict[str, str], reason: str | None = None) -> bytes:
    payload = {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}
    return f"data: {json.dumps(payload)}\n\n".encode()


@contextmanager
def serving() -> Iterator[FakeServer]:
    """A server in a thread of its own."""
    server = FakeServer()
    loop = asyncio.new_event_loop()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", server.handle)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)

    async def start() -> None:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"

    loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(PATIENCE)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(PATIENCE)
        loop.close()
