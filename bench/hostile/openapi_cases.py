"""Requests made from the server's own description by schemathesis: such as it allows, and such as it forbids.

Made in chunks, each from its own seed, so that one of them can be made again without the others.
"""

from __future__ import annotations

import json
import warnings
import zlib
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings

from bench.hostile.case import POSTS, Case, few_tokens, head, posted

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its own dependencies
    import schemathesis
    from schemathesis import GenerationMode

CHUNK = 20
"""Requests that are made together."""


class Described:
    """Makes requests from a description."""

    def __init__(self, description: Mapping[str, Any], number: int) -> None:
        """`number`: the run's seed."""
        self._schema = schemathesis.openapi.from_dict(json.loads(json.dumps(description)))
        self._seed = number
        self._chunk = lru_cache(maxsize=16)(self._make)

    def case(self, valid: bool, number: int) -> Case:
        """The request of that number: of a form that is allowed, or that is not."""
        path, at = POSTS[number % len(POSTS)], number // len(POSTS)
        chunk = self._chunk(path, valid, at // CHUNK)
        return chunk[at % CHUNK % len(chunk)]

    def _make(self, path: str, valid: bool, chunk: int) -> list[Case]:
        mode = GenerationMode.POSITIVE if valid else GenerationMode.NEGATIVE
        strategy = self._schema[path]["POST"].as_strategy(generation_mode=mode)
        made: list[Any] = []

        @seed(zlib.crc32(f"{self._seed} {path} {valid} {chunk}".encode()))
        @settings(
            max_examples=CHUNK, database=None, phases=[Phase.generate], deadline=None, suppress_health_check=list(HealthCheck)
        )
        @given(strategy)
        def take(case: Any) -> None:
            made.append(case)

        take()
        return [_case(path, one, valid) for one in made]


def _case(path: str, made: Any, valid: bool) -> Case:
    body = made.body
    if isinstance(body, dict):
        body = few_tokens(path, body)
    data = body if isinstance(body, bytes) else b"" if type(body).__name__ == "NotSet" else json.dumps(body).encode()
    kind, method = ("valid" if valid else "invalid"), str(made.method).upper()
    name = f"{path} by its description" if valid else f"{path} against its description"
    if method != "POST":  # a method that is not described, as the negative mode has it
        sent = head(method, path, {"Content-Length": str(len(data))}) + data
        return Case(kind, f"{method} {name}", (sent,), method)
    return Case(kind, name, (posted(path, data),), path=path, valid=valid)
