"""Errors as the HTTP client sees them: status, JSON body, headers. Nothing here knows a protocol's stream format."""

from __future__ import annotations

from typing import Any

import msgspec

INVALID = "invalid_request_error"
SERVER = "server_error"
GATEWAY_TIMEOUT = 504
NO_RETRY = {"x-should-retry": "false"}
"""What the SDKs of OpenAI and Anthropic look for before they send a request again that met a 5xx."""


class ApiError(Exception):
    """A request that is answered with an HTTP error.

    `param` names the offending field, `extra` are further members of the error object, `retry_after` is in seconds.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
        extra: dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.retry_after = retry_after
        self.extra = extra or {}
        self._headers = headers or {}

    def body(self) -> bytes:
        """The JSON error object and a newline."""
        error: dict[str, Any] = {"message": self.message, "type": self.kind}
        if self.param is not None:
            error["param"] = self.param
        if self.code is not None:
            error["code"] = self.code
        return msgspec.json.encode({"error": error | self.extra}) + b"\n"

    def headers(self) -> dict[str, str]:
        """The error's own, and Retry-After in whole seconds, at least one, where the client may try again."""
        if self.retry_after is None:
            return self._headers
        return {**self._headers, "Retry-After": str(max(1, round(self.retry_after)))}


def bad_field(name: str, problem: str) -> ApiError:
    """400 for the field `name`; the message reads `name: problem`, `param` is the field without its indexes."""
    return ApiError(400, f"{name}: {problem}", param=name.split("[")[0].split(".")[0])


def context_length_exceeded(prompt_tokens: int, ctx: int, param: str) -> ApiError:
    """400 for a prompt that leaves no room for one token; agents look for the code and compact their history."""
    message = f"Prompt has {prompt_tokens} tokens, but the configured context size is {ctx} tokens"
    return ApiError(
        400, message, param=param, code="context_length_exceeded", extra={"n_prompt_tokens": prompt_tokens, "n_ctx": ctx}
    )


class Unavailable(ApiError):
    """503: no engine takes requests now, nothing was submitted."""

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(503, message, kind=SERVER, retry_after=retry_after)


def failure(status: int, message: str, retry_after: float | None = None) -> ApiError:
    """How a submitted request failed: a server error from 500 on, else the client's. What took too long would do so again."""
    headers = NO_RETRY if status == GATEWAY_TIMEOUT else None
    return ApiError(status, message, kind=SERVER if status >= 500 else INVALID, retry_after=retry_after, headers=headers)
