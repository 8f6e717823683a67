"""What a request is read against, beside itself. A plain value: the readers of all APIs are pure."""

from __future__ import annotations

from typing import NamedTuple


class Served(NamedTuple):
    """The loaded model and the server's options, as far as they decide what a request means."""

    model: str  # the id of an answer whose request names no model
    max_tokens: int  # of a request that names no limit
    ctx: int  # tokens
    vocab_size: int
    levels: bool  # the dialect takes efforts of 1..100
