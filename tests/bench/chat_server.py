"""A small chat server on a real socket, in a thread of its own, that answers well or badly as the test says.

Its tokens are words; the length of a prompt in tokens is its characters divided by CHARACTERS_PER_TOKEN, plus a
template.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from bench.serve_concurrency import main

CHARACTERS_PER_TOKEN = 5
Bench = Callable[..., tuple[int, dict[str, Any]]]
Body = dict[str, Any]
GOOD = "good"
METRICS = """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0"}} {running}
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{{engine="0"}} 0
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{{engine="0"}} {tokens}
# TYPE vllm:request_queue_time_seconds histogram
vllm:request_queue_time_seconds_bucket{{le="0.1"}} 0
vllm:request_queue_time_seconds_bucket{{le="0.2"}} {requests}
vllm:request_queue_time_seconds_bucket{{le="+Inf"}} {requests}
vllm:request_queue_time_seconds_sum {queue_seconds}
vllm:request_queue_time_seconds_count {requests}
"""


@dataclass
class ChatServer:
    """What the test may set, and what it may look at afterwards."""

    behave: Callable[[int, Body], str] = lambda number, body: GOOD  # by arrival, the first streamed request is 0
    tokens: int = 4
    token_seconds: float = 0.002
    first_token_seconds: float = 0.002
    largest_prompt: int = 1 << 30  # tokens; a longer one is refused
    template_tokens: int = 0  # what the chat template adds to a prompt
    fixed_count: int | None = None  # usage.prompt_tokens, whatever the prompt
    url: str = ""
    streamed: list[Body] = field(default_factory=list)
    calibrations: list[Body] = field(default_factory=list)
    running: int = 0
    most_running: int = 0
    finished: int = 0
    hung_up: int = 0
    generated: int = 0

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "tiny"}]})

    async def metrics(self, request: web.Request) -> web.Response:
        done = self.finished
        text = METRICS.format(running=self.running, tokens=self.generated, requests=done, queue_seconds=0.15 * done)
        return web.Response(text=text)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        characters = sum(len(message["content"]) for message in body["messages"])
        prompt = self.fixed_count or self.template_tokens + characters // CHARACTERS_PER_TOKEN
        if prompt > self.largest_prompt:
            return web.json_response({"error": {"message": "the prompt is too long"}}, status=400)
        if not body.get("stream"):
            self.calibrations.append(body)
            return web.json_response({"usage": {"prompt_tokens": prompt, "completion_tokens": 1}})
        kind = self.behave(len(self.streamed), body)
        self.streamed.append(body)
        if kind == "busy":
            return web.json_response({"error": {"message": "the queue is full"}}, status=429)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            return await self._stream(request, body, prompt, kind)
        except (ConnectionError, asyncio.CancelledError):
            self.hung_up += 1
            raise
        finally:
            self.running -= 1
            self.finished += 1

    async def _stream(self, request: web.Request, body: Body, prompt: int, kind: str) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        count = body["max_tokens"] if body.get("ignore_eos") else min(self.tokens, body["max_tokens"])
        await response.write(b": prefill\n\n" + _chunk({"role": "assistant", "content": ""}))
        await asyncio.sleep(self.first_token_seconds + 0.3 * (kind == "late"))
        for number in range(0 if kind == "no token" else count):
            if number:
                await asyncio.sleep(self.token_seconds)
            if number == 2 and kind == "broken json":
                await response.write(b'data: {"choices": [{"delta": {"cont\n\n')
            if number == 2 and kind == "error event":
                await response.write(b'data: {"error": {"message": "out of memory", "code": 500}}\n\n')
            if number == 2 and kind == "named error event":
                await response.write(b'event: error\ndata: {"message": "out of memory"}\n\n')
            if number == 2 and kind == "disconnect":
                assert request.transport is not None
                request.transport.abort()
                return response
            if number == 2 and kind == "hang":
                await asyncio.sleep(60)
            await response.write(_chunk({"content": f"word{number} "}))
            self.generated += 1
        await self._end(response, prompt, count, kind)
        return response

    async def _end(self, response: web.StreamResponse, prompt: int, count: int, kind: str) -> None:
        finish = {"wrong finish reason": "content_filter", "no finish reason": None}.get(kind, "length")
        await response.write(_chunk({}, finish))
        said = {"wrong token count": count - 1, "zero tokens": 0, "too many tokens": count + 1000}.get(kind, count)
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": said,
            "prompt_tokens_details": {"cached_tokens": prompt // 2},
        }
        if kind != "missing usage":
            await response.write(_event({"choices": [], "usage": usage}))
        if kind != "no done":
            await response.write(b"data: [DONE]\n\n")


def _chunk(delta: dict[str, Any], finish: str | None = None) -> bytes:
    return _event({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}], "usage": None})


def _event(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


@contextmanager
def serving(server: ChatServer) -> Iterator[ChatServer]:
    """Run `server` on a free port of this machine while the block runs."""
    loop = asyncio.new_event_loop()
    app = web.Application(client_max_size=1 << 26)
    app.add_routes(
        [
            web.get("/v1/models", server.models),
            web.get("/metrics", server.metrics),
            web.post("/v1/chat/completions", server.chat),
        ]
    )
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)

    async def start() -> None:
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        server.url = "http://{}:{}".format(*runner.addresses[0])

    loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def bench_of(server: ChatServer, directory: Path) -> Bench:
    """Runs the benchmark against `server` with further flags: its exit status and its JSON, kept in `directory`."""

    def run(*argv: str) -> tuple[int, dict[str, Any]]:
        path = directory / "result.json"
        status = main(["--base-url", server.url, "--prompt-tokens", "40", "--warmup", "0", "--json", str(path), *argv])
        return status, json.loads(path.read_text())

    return run
