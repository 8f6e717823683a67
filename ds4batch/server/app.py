"""The HTTP server: connections, routes, the headers of every answer, and the promise that each error is JSON."""

from __future__ import annotations

import dataclasses
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable

from aiohttp import web

from ds4batch.server.apis.messages_wire import error_body
from ds4batch.server.chat import chat_completions, count_tokens, create_message, create_response
from ds4batch.server.completions import completions
from ds4batch.server.errors import SERVER, ApiError, Unavailable
from ds4batch.server.fields import Object
from ds4batch.server.generation import CLIENT_GONE
from ds4batch.server.health import health
from ds4batch.server.jsonbody import read_object
from ds4batch.server.metrics import CONTENT_TYPE
from ds4batch.server.models import known, model_list, model_object
from ds4batch.server.openapi import document
from ds4batch.server.service import OWNER, Exchange, Service
from ds4batch.server.status import Status

log = logging.getLogger(__name__)

MODEL_PREFIX = "/v1/models/"
MAX_HEADER_BYTES = 64 << 10
IDLE_SECONDS = 3600.0
"""How long a connection may stay idle between two requests: agents come back after minutes."""
LINGER_SECONDS = 2.0
"""How long the rest of a refused body is read, so that its sender gets to see the refusal."""
CORS = {
    "Access-Control-Allow-Origin": "*",
    "Access-Control-Allow-Methods": "GET, POST, OPTIONS",
    "Access-Control-Allow-Headers": "*",
}
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")

Generator = Callable[[Service, Exchange, Object], Awaitable[web.StreamResponse]]


class FrontProtocol(web.RequestHandler):
    """aiohttp's connection, whose own errors are JSON like all others."""

    __slots__ = ()

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """The answer to what could not be parsed as HTTP, or to a fault that reached the connection."""
        if request.writer.output_size > 0:
            raise ConnectionError("the response has begun, no error can follow") from exc
        if status >= 500:
            log.error("a request failed", exc_info=exc)
        text = "bad HTTP request" if status < 500 else "internal error"
        error = ApiError(status, text if message is None or status >= 500 else f"{text}: {message.splitlines()[0][:200]}")
        response = web.Response(status=status, body=error.body(), content_type="application/json")
        response.force_close()
        return response


class FrontServer(web.Server):
    """Makes one protocol a connection."""

    def __init__(self, service: Service) -> None:
        super().__init__(Front(service).handle)

    def __call__(self) -> web.RequestHandler:
        """The protocol of a new connection."""
        return FrontProtocol(
            self,
            loop=self._loop,
            access_log=None,  # type: ignore[arg-type]  # None: no log
            lingering_time=LINGER_SECONDS,
            keepalive_timeout=IDLE_SECONDS,
            max_line_size=MAX_HEADER_BYTES,
            max_field_size=MAX_HEADER_BYTES,
        )


class Front:
    """Routes requests to handlers."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._cors = CORS if service.settings.cors else {}
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
        exchange = Exchange(request, request_id, {**self._cors, "Server": OWNER, "X-Request-Id": request_id})
        spelled = error_body if request.path.startswith("/v1/messages") else ApiError.body
        try:
            return await self._route(exchange)
        except ApiError as error:
            return exchange.error(error, spelled)
        except ConnectionError:
            return web.Response(status=CLIENT_GONE)
        except Exception:
            log.exception("request %s failed", request_id)
            return exchange.error(ApiError(500, "internal error; the server's log says more", kind=SERVER), spelled)

    async def _route(self, exchange: Exchange) -> web.StreamResponse:
        method, path = exchange.request.method, exchange.request.path
        if method == "OPTIONS":
            return web.Response(status=204, headers=exchange.headers)
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
            body = await read_object(exchange.request, self._service.pool)
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
        elif error.status == 400:
            self._service.metrics.rejected("invalid")

    def _openapi(self, exchange: Exchange) -> web.Response:
        return exchange.json(document(self._service.model.dialect.levels))

    def _health(self, exchange: Exchange) -> web.Response:
        status, body = health(self._service)
        return exchange.json(body, status)

    def _metrics(self, exchange: Exchange) -> web.Response:
        return exchange.content(self._service.metrics.exposition(), CONTENT_TYPE)

    def _models(self, exchange: Exchange) -> web.Response:
        return exchange.json(model_list(self._service))

    def _model(self, exchange: Exchange, id: str) -> web.Response:
        if not known(self._service, id):
            raise ApiError(404, f"model {id[:200]!r} is not loaded, {self._service.model.id!r} is", code="model_not_found")
        return exchange.json(model_object(self._service, id))
