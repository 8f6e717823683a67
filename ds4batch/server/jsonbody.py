"""Request bodies: size limit, JSON parsing, text clean-up. Knows no field.

Python's parser already takes NaN and Infinity and lets the last of duplicate members win. What is added: depth and size
limits, numbers of any length, and lone surrogates turned into U+FFFD, which could not be encoded as UTF-8 later.
"""

from __future__ import annotations

import asyncio
import json
import re
from concurrent.futures import Executor
from typing import Any, NamedTuple

from aiohttp import web

from ds4batch.server import spelt
from ds4batch.server.errors import ApiError
from ds4batch.server.unpack import BadEncoding, Unpacker

MAX_DEPTH = 256
MAX_CONTAINERS = 1_000_000
"""Brackets a body may open, in strings too. The parser's C code would hold up the server for seconds over more empty lists."""
INLINE_BYTES = 256 << 10
"""Larger bodies are parsed off the event loop."""
READ_SECONDS = 10.0
"""A client that sends a body must send some of it this often."""

_SURROGATES = re.compile("[\ud800-\udfff]")


class BodyLimits(NamedTuple):
    """What a body is held to."""

    bytes: int  # decompressed
    seconds: float  # until its last byte; 0 is no limit


async def read_object(request: web.BaseRequest, pool: Executor, limits: BodyLimits) -> dict[str, Any]:
    """The request's body as a JSON object.

    Raises ApiError 413 for a body that is too large, 408 for one that comes too slowly, 400 for one that is cut short or no JSON
    object, and ConnectionError when the client left.
    """
    data = await _read(request, limits)
    if len(data) <= INLINE_BYTES:
        return parse_object(data)
    return await asyncio.get_running_loop().run_in_executor(pool, parse_object, data)


def parse_object(data: bytes | bytearray) -> dict[str, Any]:
    """`data` as a JSON object. Time is linear in its length. Raises ApiError 400."""
    if data.count(b"[") + data.count(b"{") > MAX_CONTAINERS:
        raise ApiError(400, f"invalid JSON request: more than {MAX_CONTAINERS} objects and lists")
    try:
        value = json.loads(data.decode("utf-8-sig"), parse_int=spelt.integer, parse_float=spelt.real, object_pairs_hook=_members)
    except RecursionError:
        raise _too_deep() from None
    except UnicodeDecodeError as error:
        raise ApiError(400, f"invalid JSON request: byte {error.start} is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise ApiError(400, f"invalid JSON request: {error.msg} at character {error.pos}") from None
    if not isinstance(value, dict):
        raise ApiError(400, "invalid JSON request: the top level must be an object")
    _check_depth(value)
    return value


async def _read(request: web.BaseRequest, limits: BodyLimits) -> bytes | bytearray:
    length = request.content_length
    if length is not None and length > limits.bytes:
        raise _too_large(limits)
    if request.headers.get("Expect", "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # an interim response is no part of the answer
    body = bytearray()
    try:
        unpacker = Unpacker(request.headers.get("Content-Encoding", ""))
        async with asyncio.timeout(limits.seconds or None):
            while chunk := await _next(request):
                for piece in unpacker.pieces(chunk):
                    body += piece
                    if len(body) > limits.bytes:
                        body.clear()  # the error's traceback holds on to it
                        raise _too_large(limits)
                    await asyncio.sleep(0)  # a few bytes may stand for many, and none of them has to be waited for
        unpacker.finish()
    except BadEncoding as error:
        raise ApiError(400, f"bad HTTP request: {error}") from None
    except TimeoutError:
        raise ApiError(408, f"bad HTTP request: the body did not arrive within {limits.seconds:g} s") from None
    except web.RequestPayloadError as error:
        raise ApiError(400, f"bad HTTP request: {error}") from None
    return body


async def _next(request: web.BaseRequest) -> bytes:
    """The next bytes of a body, none at its end. Raises ApiError 408 when none come, TimeoutError only from outside."""
    try:
        async with asyncio.timeout(READ_SECONDS) as silence:
            return await request.content.readany()
    except TimeoutError:
        if silence.expired():
            raise ApiError(408, f"bad HTTP request: no byte of the body arrived for {READ_SECONDS:g} s") from None
        raise


def _too_large(limits: BodyLimits) -> ApiError:
    return ApiError(413, f"bad HTTP request: the body exceeds {limits.bytes} bytes")


def _too_deep() -> ApiError:
    return ApiError(400, f"invalid JSON request: nested deeper than {MAX_DEPTH} levels")


# The hooks are Python functions on purpose: between two of them the interpreter can hand the lock to the event loop's thread,
# which the parser's C code alone would hold until the end of a large body.


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return spelt.members([(_clean(name), _clean_value(value)) for name, value in pairs])


def _clean(text: str) -> str:
    return text if text.isascii() else _SURROGATES.sub("\ufffd", text)


def _clean_value(value: Any) -> Any:
    """Strings, and strings in lists; objects inside were cleaned when they were built."""
    if isinstance(value, str):
        return _clean(value)
    if isinstance(value, list):
        pending = [value]
        while pending:
            items = pending.pop()
            for i, item in enumerate(items):
                if isinstance(item, str):
                    items[i] = _clean(item)
                elif isinstance(item, list):
                    pending.append(item)
    return value


def _check_depth(root: dict[str, Any]) -> None:
    """Level by level, so that neither the check's stack nor its time depends on the shape."""
    level: list[Any] = [root]
    depth = 0
    while level:
        if depth > MAX_DEPTH:
            raise _too_deep()
        level = [
            child
            for parent in level
            for child in (spelt.values(parent) if isinstance(parent, dict) else parent)
            if isinstance(child, dict | list)
        ]
        depth += 1
