"""`GET /openapi.json`: every route with its request, its answers and its errors, in OpenAPI 3.1.

The requests are openapi_requests.py's; the status snapshot's schema is made from its types. The tests hold the paths to the routes.
"""

from __future__ import annotations

import functools
from typing import Any

import msgspec

from ds4batch import __version__
from ds4batch.server.errors import INVALID, SERVER
from ds4batch.server.openapi_parts import ANY_OBJECT, Object, array, either, flag, number, obj, ref, text, whole
from ds4batch.server.openapi_requests import request_schemas
from ds4batch.server.service import OWNER
from ds4batch.server.status_shapes import Snapshot

JSON = "application/json"
SSE = "text/event-stream"

_STATUSES = {
    "400": "The request is refused; the message names the field.",
    "401": "Keys are checked, and none that holds was sent.",
    "403": "The key is of user scope, and this needs admin scope.",
    "408": "The body did not arrive in time.",
    "409": "What the request goes on with was lost meanwhile; replay the history.",
    "413": "The body is larger than --max-body-mb.",
    "429": "Too many requests wait; Retry-After says for how long to stay away.",
    "500": "The engine or the server failed.",
    "503": "No engine takes requests now; Retry-After says when one may.",
    "504": "The request took longer than --request-timeout.",
}
_READING = ("400", "401", "408", "413")
"""What may become of any request with a body, whatever it asks."""

_BEARER: Object = {"bearerKey": []}
_HEADER: Object = {"headerKey": []}
_BASIC: Object = {"basicKey": []}


@functools.cache
def document(levels: bool) -> dict[str, Any]:
    """The description. `levels`: the model takes efforts as numbers."""
    return {
        "openapi": "3.1.0",
        "jsonSchemaDialect": "https://json-schema.org/draft/2020-12/schema",
        "info": {
            "title": OWNER,
            "version": __version__,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
            "description": "Members of requests that are not described are passed over. Every error is JSON. Every answer carries "
            "X-Request-Id, the request's own where it has a fitting one. Keys are checked where the server has a file of keys, "
            "else none is needed.",
        },
        "security": [{}, _BEARER, _HEADER],
        "paths": {
            "/v1/chat/completions": _generation(
                "createChatCompletion",
                "Answer a conversation",
                "ChatRequest",
                "ChatCompletion",
                "chat.completion.chunk objects and `[DONE]`",
            ),
            "/v1/completions": _generation(
                "createCompletion",
                "Continue a raw prompt",
                "CompletionRequest",
                "Completion",
                "text_completion objects and `[DONE]`",
            ),
            "/v1/responses": _generation(
                "createResponse", "Answer a list of items", "ResponsesRequest", "Response", "response.* events"
            ),
            "/v1/messages": _generation(
                "createMessage",
                "Answer a conversation, as Anthropic has it",
                "MessagesRequest",
                "Message",
                "message_start to message_stop",
                error="AnthropicError",
            ),
            "/v1/messages/count_tokens": {
                "post": {
                    "operationId": "countTokens",
                    "summary": "Count the tokens of a prompt",
                    "requestBody": _request("CountTokensRequest"),
                    "responses": {"200": _answer("The count", ref("TokenCount")), **_errors("AnthropicError", *_READING, "500")},
                }
            },
            "/v1/models": _get("listModels", "The loaded model, under all names that mean it", ref("ModelList")),
            "/v1/models/{model}": _model_path(),
            "/health": {
                "get": {
                    "operationId": "getHealth",
                    "summary": "Whether the engine takes requests",
                    "description": "Open to all; where keys are checked, who shows none learns the status alone.",
                    "security": [{}],
                    "responses": {
                        "200": _answer("It does", ref("Health")),
                        "503": _answer("It does not, and why", ref("Health")),
                    },
                }
            },
            "/metrics": _admin(_get("getMetrics", "Prometheus text, format 0.0.4", text(), "text/plain")),
            "/": _admin(_get("getStatusPage", "The status page", text(), "text/html")),
            "/status.json": _admin(_get("getStatus", "The figures of the status page", ref("Snapshot"))),
            "/status/stream": _admin(
                {
                    "get": {
                        "operationId": "streamStatus",
                        "summary": "The same once a second",
                        "responses": {
                            "200": _answer("Events whose data is a Snapshot", text(), SSE),
                            **_errors("OpenAIError", "401", "503"),
                        },
                    }
                }
            ),
            "/openapi.json": _get("getDescription", "This description", ANY_OBJECT),
        },
        "components": {
            "schemas": {**request_schemas(levels), **_answers(), **_status()},
            "securitySchemes": {
                "bearerKey": {"type": "http", "scheme": "bearer", "description": "a key of user or admin scope"},
                "headerKey": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "the same, as Anthropic has it"},
                "basicKey": {"type": "http", "scheme": "basic", "description": "a key of admin scope as the password, for browsers"},
            },
        },
    }


def _get(operation: str, summary: str, schema: Object, kind: str = JSON) -> Object:
    responses = {"200": _answer(summary, schema, kind), **_errors("OpenAIError", "401")}
    return {"get": {"operationId": operation, "summary": summary, "responses": responses}}


def _admin(path: Object) -> Object:
    """The same under admin scope."""
    get = path["get"]
    refusal = _errors("OpenAIError", "403")
    return {"get": {**get, "security": [{}, _BEARER, _HEADER, _BASIC], "responses": {**get["responses"], **refusal}}}


def _model_path() -> Object:
    path = _get("getModel", "The loaded model under one of its names", ref("Model"))
    name = {"name": "model", "in": "path", "required": True, "schema": text(), "description": "may hold slashes"}
    path["get"]["parameters"] = [name]
    path["get"]["responses"]["404"] = _answer("No such model is loaded", ref("OpenAIError"))
    return path


def _generation(operation: str, summary: str, request: str, answer: str, events: str, *, error: str = "OpenAIError") -> Object:
    content = {JSON: {"schema": ref(answer)}, SSE: {"schema": text(events)}}
    return {
        "post": {
            "operationId": operation,
            "summary": summary,
            "requestBody": _request(request),
            "responses": {
                "200": {"description": "The answer; with `stream`, events", "content": content},
                **_errors(error, *_READING, "409", "429", "500", "503", "504"),
            },
        }
    }


def _request(schema: str) -> Object:
    return {"required": True, "content": {JSON: {"schema": ref(schema)}}}


def _answer(about: str, schema: Object, kind: str = JSON) -> Object:
    return {"description": about, "content": {kind: {"schema": schema}}}


def _errors(schema: str, *statuses: str) -> Object:
    out = {status: _answer(_STATUSES[status], ref(schema)) for status in statuses}
    for status in {"429", "503"} & out.keys():
        out[status]["headers"] = {"Retry-After": {"schema": whole("seconds", 1)}}
    if "401" in out:
        out["401"]["headers"] = {"WWW-Authenticate": {"schema": text("Bearer; Basic where browsers come")}}
    return out


def _closed(properties: Object) -> Object:
    """An object of exactly these members."""
    return obj(properties, tuple(properties))


def _or_null(schema: Object) -> Object:
    return either(schema, {"type": "null"})


def _answers() -> dict[str, Object]:
    cached = _closed({"cached_tokens": whole("reused from a session"), "cache_write_tokens": whole("the rest of the prompt")})
    counts = {"prompt_tokens": whole(), "completion_tokens": whole(), "total_tokens": whole()}
    head = {"id": text(), "object": text(), "created": whole(), "model": text()}
    reason = text("", "stop", "length", "tool_calls", "abort", "error")
    message = obj(
        {
            "role": text("", "assistant"),
            "content": _or_null(text()),
            "reasoning_content": text(),
            "tool_calls": array(
                obj({"id": text(), "type": text(), "function": obj({"name": text(), "arguments": text("JSON")})})
            ),
        },
        ("role",),
    )
    choice = {"index": whole(), "finish_reason": reason}
    overflow = {name: whole("of a prompt that does not fit") for name in ("n_prompt_tokens", "n_ctx")}
    usage = ref("Usage")
    return {
        "Usage": _closed({**counts, "prompt_tokens_details": cached}),
        "ChatCompletion": _closed(
            {
                **head,
                "choices": array(obj({**choice, "message": message, "logprobs": ANY_OBJECT}, (*choice, "message"))),
                "usage": usage,
            }
        ),
        "Completion": _closed(
            {**head, "choices": array(obj({**choice, "text": text(), "logprobs": ANY_OBJECT}, (*choice, "text"))), "usage": usage}
        ),
        "Response": _closed(
            {
                "id": text(),
                "object": text("", "response"),
                "created_at": whole(),
                "status": text("", "completed", "incomplete", "failed"),
                "model": text(),
                "output": array(ANY_OBJECT, "reasoning, message, function_call, custom_tool_call and tool_search_call items"),
                "error": _or_null(obj({"code": text(), "message": text()})),
                "incomplete_details": _or_null(obj({"reason": text()})),
                "parallel_tool_calls": flag(),
                "tool_choice": either(text(), ANY_OBJECT),
                "tools": array(ANY_OBJECT),
                "usage": _or_null(ANY_OBJECT),
            }
        ),
        "Message": obj(
            {
                "id": text(),
                "type": text("", "message"),
                "role": text("", "assistant"),
                "model": text(),
                "content": array(ANY_OBJECT, "thinking, text and tool_use blocks"),
                "stop_reason": _or_null(text()),
                "stop_sequence": _or_null(text()),
                "usage": obj(
                    {
                        "input_tokens": whole(),
                        "cache_creation_input_tokens": whole(),
                        "cache_read_input_tokens": whole(),
                        "output_tokens": whole(),
                    }
                ),
            },
            ("id", "type", "role", "model", "content", "stop_reason", "usage"),
        ),
        "TokenCount": _closed({"input_tokens": whole()}),
        "Model": _closed(
            {
                "id": text(),
                "object": text("", "model"),
                "created": whole(),
                "owned_by": text(),
                "name": text(),
                "context_length": whole(),
                "top_provider": _closed({"context_length": whole(), "max_completion_tokens": whole(), "is_moderated": flag()}),
                "supported_parameters": array(text()),
            }
        ),
        "ModelList": _closed({"object": text("", "list"), "data": array(ref("Model"))}),
        "Health": obj(
            {
                "status": text("", "starting", "ok", "restarting", "down", "stopping"),
                "model": text(),
                "version": text(),
                "uptime_seconds": number(),
                "slots": whole(),
                "ctx": whole(),
                "requests_in_flight": whole(),
                "restarts": whole(),
                "last_error": _or_null(text()),
                "exact_path": _or_null(text("", "native", "ordered")),
                "device": _or_null(text()),
                "dtype": _or_null(text()),
                "engine_pid": _or_null(whole()),
            },
            ("status",),
            "all of it but for those who show no key where keys are checked",
        ),
        "OpenAIError": _closed(
            {
                "error": obj(
                    {
                        "message": text(),
                        "type": text("", INVALID, SERVER),
                        "param": text("the field"),
                        "code": text("context_length_exceeded, model_not_found, invalid_api_key, insufficient_permissions"),
                        **overflow,
                    },
                    ("message", "type"),
                )
            }
        ),
        "AnthropicError": _closed(
            {
                "type": text("", "error"),
                "error": obj({"type": text(), "message": text(), **overflow}, ("type", "message")),
            }
        ),
    }


def _status() -> dict[str, Object]:
    """Made from the types of the snapshot, so that it cannot say anything else."""
    _, parts = msgspec.json.schema_components([Snapshot], ref_template="#/components/schemas/{name}")
    return dict(parts)
