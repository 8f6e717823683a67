"""The HTTP server: connections, routes, the headers of every answer, and the promise that each error is JSON."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable

from aiohttp import web

from ds4batch.server.access import Access
from ds4batch.server.apis.messages_wire import error_body
from ds4batch.server.chat import chat_completions, count_tokens, create_message, create_response
from ds4batch.server.completions import completions
from ds4batch.server.connections import LINGER_SECONDS, ConnectionLimits, FrontProtocol, most_connections
from ds4batch.server.errors import SERVER, ApiError, Unavailable
from ds4batch.server.fields import Object
from ds4batch.server.health import health
from ds4batch.server.jsonbody import BodyLimits, read_object
from ds4batch.server.keys import STRANGER
from ds4batch.server.metrics import CONTENT_TYPE
from ds4batch.server.models import known, model_list, model_object
from ds4batch.server.openapi import document
from ds4batch.server.request_record import CLIENT_GONE
from ds4batch.server.service import OWNER, Exchange, Service
from ds4batch.server.status import Status

log = logging.getLogger(__name__)

MODEL_PREFIX = "/v1/models/"
REFUSED_BYTES = 4 << 20
"""How much of the body of a refused request is read and thrown away, so that its sender gets to see the refusal."""
CORS = {
    "Access-Control-Allow-Origin": "*",
    "Access-Control-Allow-Methods": "GET, POST, OPTIONS",
    "Access-Control-Allow-Headers": "*",
}
UNAUTHORIZED = 401
REJECTED_AS = {400: "invalid", 408: "timeout", 413: "too_large"}
"""What refusals by the front are counted as, by their status."""
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")

Generator = Callable[[Service, Exchange, Object], Awaitable[web.StreamResponse]]


class FrontServer(web.Server):
    """Makes one protocol a connection."""

    def __init__(self, service: Service) -> None:
        super().__init__(Front(service).handle)
        settings = service.settings
        self._limits = ConnectionLimits(settings.header_timeout, most_connections(settings.max_connections))
        self._dropped = service.metrics.connection_dropped

    def __call__(self) -> web.RequestHandler:
        """The protocol of a new connection."""
        return FrontProtocol(self, self._loop, self._limits, self._dropped)


class Front:
    """Routes requests to handlers."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._access = Access(service.keys, service.metrics)
        # The Fetch standard excepts Authorization from what `*` stands for.
        cors = CORS if service.keys is None else {**CORS, "Access-Control-Allow-Headers": "*, Authorization"}
        self._cors = cors if service.settings.cors else {}
        self._body = BodyLimits(service.settings.max_body_mb << 20, service.settings.body_timeout)
        status = Status(service)
        self._gets: dict[str, Callable[[Exchange], web.Response]] = {
            "/": status.page,
            "/status.json": status.json,
            "/openapi.json": self._openapi,
            "/health": self._health,
            "/metrics": self._metrics,
            "/v1/models": self._models,
        }
        self._streams = {"/status/stream": status.stream}
        self._posts: dict[str, Generator] = {
            "/v1/chat/completions": chat_completions,
            "/v1/completions": completions,
            "/v1/responses": create_response,
            "/v1/messages": create_message,
            "/v1/messages/count_tokens": count_tokens,
        }

    @property
    def routes(self) -> set[tuple[str, str]]:
        """Method and path of everything that is answered."""
        gets = [*self._gets, *self._streams, MODEL_PREFIX + "{model}"]
        return {*(("GET", path) for path in gets), *(("POST", path) for path in self._posts)}

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request, whatever it is."""
        given = request.headers.get("X-Request-Id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(12)
        ids = {"X-Request-Id": request_id}
        if request.path.startswith("/v1/messages"):
            ids["request-id"] = request_id  # where Anthropic's clients look for it
        exchange = Exchange(request, request_id, {**self._cors, "Server": OWNER, **ids})
        response: web.StreamResponse | None = None
        try:
            response = await self._answer(exchange)
            return response
        finally:
            if request.path in self._posts and request.method != "OPTIONS":
                self._service.requests.ended(self._service, exchange, None if response is None else response.status)

    async def _answer(self, exchange: Exchange) -> web.StreamResponse:
        try:
            return await self._route(exchange)
        except ApiError as error:
            return await self._refuse(exchange, error)
        except ConnectionError:
            return web.Response(status=CLIENT_GONE)
        except Exception:
            log.exception("request %s failed", exchange.request_id)
            return await self._refuse(exchange, ApiError(500, "internal error; the server's log says more", kind=SERVER))

    async def _refuse(self, exchange: Exchange, error: ApiError) -> web.StreamResponse:
        """The error as the API's clients read it. A body that was not read is not waited for: some of it is thrown away."""
        exchange.account.error = error
        request = exchange.request
        anthropic = request.path.startswith("/v1/messages") or "anthropic-version" in request.headers
        response = exchange.error(error, error_body if anthropic else ApiError.body)
        if error.status == UNAUTHORIZED:
            response.force_close()
        if request.content.is_eof():
            return response
        response.force_close()
        left = REFUSED_BYTES
        with contextlib.suppress(TimeoutError, web.RequestPayloadError, ConnectionError):
            await response.prepare(request)
            await response.write_eof()
            async with asyncio.timeout(LINGER_SECONDS):
                while left > 0 and (part := await request.content.readany()):
                    left -= len(part)
        if not request.content.is_eof():
            request.protocol.force_close()
        return response

    async def _route(self, exchange: Exchange) -> web.StreamResponse:
        method, path = exchange.request.method, exchange.request.path
        if method == "OPTIONS":
            return self._to_stranger(web.Response(status=204, headers=exchange.headers))
        exchange = dataclasses.replace(exchange, key=self._access.admit(exchange.request.headers, path))
        exchange.account.key_name = exchange.key.name
        if path in self._posts:
            self._allow(exchange, "POST")
            return await self._generate(exchange, self._posts[path])
        if path in self._gets:
            self._allow(exchange, "GET", "HEAD")
            return self._gets[path](exchange)
        if path in self._streams:
            self._allow(exchange, "GET")
            return await self._streams[path](exchange)
        if path.startswith(MODEL_PREFIX):
            self._allow(exchange, "GET", "HEAD")
            return self._model(exchange, path.removeprefix(MODEL_PREFIX))
        raise ApiError(404, "unknown endpoint")

    @staticmethod
    def _allow(exchange: Exchange, *methods: str) -> None:
        if exchange.request.method not in methods:
            raise ApiError(
                405,
                f"{exchange.request.method} is not allowed here, use {methods[0]}",
                headers={"Allow": ", ".join((*methods, "OPTIONS"))},
            )

    async def _generate(self, exchange: Exchange, handler: Generator) -> web.StreamResponse:
        try:
            body = await read_object(exchange.request, self._service.pool, self._body)
            exchange.account.asked(body.get("model"), body.get("stream"))
            # A request arrives when it has been read: a slow upload is no part of any latency.
            return await handler(self._service, dataclasses.replace(exchange, arrival=time.monotonic()), body)
        except ApiError as error:
            self._count(error)
            raise

    def _count(self, error: ApiError) -> None:
        """Refusals of the front itself; the engine's are counted with its events."""
        if isinstance(error, Unavailable):
            self._service.metrics.rejected("unavailable")
        elif error.code == "context_length_exceeded":
            self._service.metrics.rejected("context_length")
        elif error.status in REJECTED_AS:
            self._service.metrics.rejected(REJECTED_AS[error.status])

    def _openapi(self, exchange: Exchange) -> web.Response:
        return exchange.json(document(self._service.model.dialect.levels))

    def _health(self, exchange: Exchange) -> web.Response:
        status, body = health(self._service)
        if exchange.key is not STRANGER:
            return exchange.json(body, status)
        return self._to_stranger(exchange.json({"status": body["status"]}, status))

    def _to_stranger(self, response: web.Response) -> web.Response:
        """An answer that took no key. Where there are keys, idle connections are for those who have one."""
        if self._service.keys is not None:
            response.force_close()
        return response

    def _metrics(self, exchange: Exchange) -> web.Response:
        return exchange.content(self._service.metrics.exposition(), CONTENT_TYPE)

    def _models(self, exchange: Exchange) -> web.Response:
        return exchange.json(model_list(self._service))

    def _model(self, exchange: Exchange, id: str) -> web.Response:
        if not known(self._service, id):
            raise ApiError(404, f"model {id[:200]!r} is not loaded, {self._service.model.id!r} is", code="model_not_found")
        return exchange.json(model_object(self._service, id))
