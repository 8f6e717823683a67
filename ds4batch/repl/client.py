"""One streamed answer of /v1/chat/completions. Shows nothing and keeps no history."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncGenerator, Iterator
from typing import Any, NamedTuple

import aiohttp

from ds4batch.chat.events import Content, Reasoning
from ds4batch.repl.sse import Event, Events

CONNECT_SECONDS = 10.0
SILENCE_SECONDS = 60.0  # a server that lives sends a comment every few seconds
_LONGEST_ERROR = 500  # characters


class Finish(NamedTuple):
    """The end of an answer."""

    reason: str  # stop, length, or another that the server gives


class ServerError(Exception):
    """The server cannot be reached, refuses, or breaks off. The message is one line of printable text."""

    def __init__(self, message: str) -> None:
        line = "".join(char if char.isprintable() else " " for char in message)
        super().__init__(" ".join(line.split())[:_LONGEST_ERROR])


class Client:
    """Asks one server. Every answer has a connection of its own, so that leaving it tells the server, and a restart is not noticed."""

    def __init__(self, url: str, *, api_key: str = "", silence_seconds: float = SILENCE_SECONDS) -> None:
        """`url`: what stands in front of /v1; without a slash at its end. `api_key` may be empty."""
        self._url = url
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=silence_seconds)

    async def stream(self, body: dict[str, Any]) -> AsyncGenerator[Reasoning | Content | Finish, None]:
        """The pieces of an answer, a Finish last. Closing the iterator closes the connection. Raises ServerError."""
        connector = aiohttp.TCPConnector(force_close=True)
        try:
            async with (
                aiohttp.ClientSession(timeout=self._timeout, connector=connector, headers=self._headers) as session,
                session.post(
                    self._url + "/v1/chat/completions", json={**body, "stream": True}, allow_redirects=False
                ) as response,
            ):
                await _check(response)
                answer = _Answer()
                async for block in response.content.iter_any():
                    for piece in answer.feed(block):
                        yield piece
                    if answer.done:
                        break
                yield answer.end()
        except aiohttp.ClientConnectorCertificateError as error:
            why = getattr(error.certificate_error, "verify_message", error.certificate_error)
            raise ServerError(f"{self._url}: its certificate is not trusted: {why}; SSL_CERT_FILE may name its authority") from None
        except aiohttp.ClientConnectorError as error:
            code = error.os_error.errno or 0  # below 0 it is that of a name that was not found
            why = os.strerror(code) if code > 0 else error.os_error.strerror
            raise ServerError(f"cannot reach {self._url}: {why}") from None
        except TimeoutError:
            raise ServerError(f"{self._url}: no sign of life") from None
        except (aiohttp.ClientError, OSError) as error:
            raise ServerError(f"{self._url}: {error or type(error).__name__}") from None


async def _check(response: aiohttp.ClientResponse) -> None:
    if response.status != 200:
        text = (await response.read()).decode(errors="replace")
        retry = response.headers.get("Retry-After")
        again = f"; try again in {retry} s" if retry else ""
        raise ServerError(f"{_complaint(text)[:400] or response.reason} (HTTP {response.status}{again})")
    if response.content_type != "text/event-stream":
        raise ServerError(f"{response.url} answers with {response.content_type}, which is no stream; is it another server?")


class _Answer:
    """Makes pieces of an answer out of blocks of its stream."""

    def __init__(self) -> None:
        self._events = Events()
        self._reason = ""
        self.done = False  # the end mark came

    def feed(self, block: bytes) -> Iterator[Reasoning | Content]:
        """The pieces that `block` completes. Raises ServerError when the server says that it failed."""
        for event in self._events.feed(block):
            if event.data.strip() == "[DONE]":
                self.done = True
                return
            choice = _choice(event)
            delta = choice.get("delta")
            if isinstance(delta, dict):
                yield from _texts(delta)
            self._reason = str(choice.get("finish_reason") or self._reason)

    def end(self) -> Finish:
        """How it ended. Raises ServerError when the stream stopped in the middle."""
        if not self._reason and not self.done:
            raise ServerError("the server broke off")
        return Finish(self._reason or "stop")


def _texts(delta: dict[str, Any]) -> Iterator[Reasoning | Content]:
    for kind, name in ((Reasoning, "reasoning_content"), (Content, "content")):
        text = delta.get(name)
        if isinstance(text, str) and text:
            yield kind(text)


def _choice(event: Event) -> dict[str, Any]:
    """The choice in a chunk; empty in one that has none. Raises ServerError for an error, and for what is no chunk."""
    try:
        chunk = json.loads(event.data)
    except (ValueError, RecursionError):
        chunk = None
    if event.name == "error" or (isinstance(chunk, dict) and chunk.get("error")):
        raise ServerError(_complaint(event.data) or "the server failed")
    if not isinstance(chunk, dict):
        raise ServerError(f"the server sent an event that is no JSON object: {event.data[:100]}")
    choices = chunk.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else {}
    return choice if isinstance(choice, dict) else {}


def _complaint(text: str) -> str:
    """The message in the body of an error; the body itself where it has another shape."""
    try:
        error = json.loads(text)["error"]
    except (ValueError, RecursionError, KeyError, TypeError):
        return text
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) else text
