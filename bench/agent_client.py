"""One chat request of an agent: sent as it is, read to its end, judged, and what came back put in order.

Owns the socket and the reading of an answer: text, reasoning and tool calls. A failure is an answer with a reason, never an exception.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field

import aiohttp

from bench.agent_messages import Json, ToolCall
from bench.chat_stream import ChatStream, Events, Rejection, StreamRejected
from bench.http_stream import Connections, ServerUnusable, now
from bench.server_metrics import Reading, settled

REQUEST_ID = "X-Request-Id"


@dataclass(frozen=True)
class Request:
    """One request of the scenario."""

    id: str  # goes with it as X-Request-Id, and so into the server's trace
    agent: str
    kind: str  # turn, retry, edit, hangup
    body: Json
    hangup_after: int = 0  # token chunks, 0 to read the whole answer


@dataclass(frozen=True)
class Answer:
    """What came back. Counts are the server's, 0 where it did not say."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    finish_reason: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    hung_up: bool = False
    failure: str = ""

    @property
    def bits(self) -> tuple[object, ...]:
        """All that has to be the same when the same request is made again. The ids of calls are names, not content."""
        calls = tuple((call.name, call.arguments) for call in self.calls)
        return self.content, self.reasoning, calls, self.finish_reason, self.output_tokens


@dataclass
class Pieces:
    """The parts of an answer as they arrive."""

    stream: ChatStream = field(default_factory=ChatStream)
    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, Json] = field(default_factory=dict)

    def delta(self, data: str) -> None:
        """Take what the stream itself does not keep: reasoning and the fragments of calls."""
        if data.strip() == "[DONE]":
            return
        for choice in json.loads(data).get("choices") or []:
            delta = choice.get("delta") or {}
            self.reasoning.append(delta.get("reasoning_content") or delta.get("reasoning") or "")
            for fragment in delta.get("tool_calls") or []:
                call = self.calls.setdefault(fragment.get("index", 0), {"id": "", "name": "", "arguments": ""})
                function = fragment.get("function") or {}
                call["id"] += fragment.get("id") or ""
                call["name"] += function.get("name") or ""
                call["arguments"] += function.get("arguments") or ""

    def answer(self, *, hung_up: bool = False, failure: str = "") -> Answer:
        """What has arrived."""
        stream = self.stream
        return Answer(
            content="".join(stream.content),
            reasoning="".join(self.reasoning),
            calls=tuple(ToolCall(**self.calls[index]) for index in sorted(self.calls)),
            finish_reason=stream.finish_reason or "",
            prompt_tokens=stream.prompt_tokens,
            cached_tokens=stream.cached_tokens,
            output_tokens=max(stream.output_tokens, 0),
            hung_up=hung_up,
            failure=failure,
        )


class AgentClient(Connections):
    """Connections to one server. Use as an async context manager."""

    def __init__(self, url: str, timeout: float) -> None:
        """`timeout` is the longest an answer may take, seconds."""
        self.url = url.rstrip("/").removesuffix("/v1")
        self._timeout = timeout
        super().__init__({})

    async def metrics(self) -> Reading:
        """The server's metrics once it is idle; empty where it shows none."""
        try:
            return await settled(self.session, f"{self.url}/metrics")
        except ServerUnusable:
            return {}

    async def first_model(self) -> str:
        """The id of the model that is served. Raises ServerUnusable."""
        try:
            return str((await self.get("/v1/models"))["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise ServerUnusable(f"{self.url}/v1/models lists no model") from None

    async def get(self, path: str) -> Json:
        """The JSON object at `path`. Raises ServerUnusable."""
        try:
            async with asyncio.timeout(self._timeout), self.session.get(self.url + path) as response:
                answer: Json = await response.json(content_type=None)
                return answer
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError) as error:
            raise ServerUnusable(f"{self.url}{path}: {error}") from None

    async def ask(self, request: Request) -> Answer:
        """Send `request` and read its answer."""
        pieces = Pieces()
        try:
            async with asyncio.timeout(self._timeout):
                complete = await self._read(request, pieces)
            if complete:
                pieces.stream.check(request.body["max_tokens"], exact=False)
        except StreamRejected as rejected:
            # A greedy answer of no text at all is an answer: the model may end its turn at once.
            if rejected.reason == Rejection.NO_TOKEN and pieces.stream.finish_reason == "stop":
                return pieces.answer()
            return pieces.answer(failure=str(rejected))
        except TimeoutError:
            return pieces.answer(failure=f"no answer within {self._timeout:g} s")
        except (aiohttp.ClientError, OSError) as error:
            return pieces.answer(failure=f"{type(error).__name__}: {error}")
        return pieces.answer(hung_up=not complete)

    async def _read(self, request: Request, pieces: Pieces) -> bool:
        """False when this side hung up."""
        body = {**request.body, "stream": True, "stream_options": {"include_usage": True}}
        headers = {REQUEST_ID: request.id}
        url = f"{self.url}/v1/chat/completions"
        async with self.session.post(url, json=body, headers=headers) as response:
            if response.status != 200:
                raise StreamRejected(f"http_{response.status}", (await response.text())[:300])
            events = Events()
            async for block in response.content.iter_any():
                for event in events.feed(block):
                    pieces.stream.accept(event, now())
                    pieces.delta(event.data)
                    if request.hangup_after and len(pieces.stream.token_times) >= request.hangup_after:
                        response.close()
                        return False
        return True
