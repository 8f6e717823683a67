"""The sampling fields that chat and completions share, checked and turned into messages.Sampling.

Ranges, where the APIs leave them open: temperature 0..100, top_p 0..1 (0 keeps the most likely token only), min_p 0..1, penalties
-2..2 as OpenAI has them, repetition_penalty above 0 up to 100, top_k a clamped integer. NaN in any of them counts as absent.
"""

from __future__ import annotations

import secrets
from typing import NamedTuple

from ds4batch.messages import Sampling
from ds4batch.server import fields
from ds4batch.server.errors import ApiError, bad_field
from ds4batch.server.fields import Object

MAX_STOPS = 64
MAX_STOP_BYTES = 4096
MAX_TOP_LOGPROBS = 20
_TINY_TOP_P = 1e-9  # a nucleus always holds one token, so this is "only the most likely"


class Limits(NamedTuple):
    """What the request asked for around the sampling itself."""

    max_tokens: int  # as requested, before the context's room cuts it
    stop: list[str]
    stream: bool
    include_usage: bool


def read_sampling(body: Object, *, logprobs: int | None, vocab_size: int, allow_ignore_eos: bool) -> Sampling:
    """The sampling of a request. Raises ApiError 400 naming the field."""
    return Sampling(
        temperature=fields.bounded(body, "temperature", 1.0, 0.0, 100.0),
        top_k=fields.integer(body, "top_k") or 0,
        top_p=fields.bounded(body, "top_p", 1.0, 0.0, 1.0) or _TINY_TOP_P,
        min_p=fields.bounded(body, "min_p", 0.05, 0.0, 1.0),
        seed=_seed(body),
        repetition_penalty=_repetition_penalty(body),
        presence_penalty=fields.bounded(body, "presence_penalty", 0.0, -2.0, 2.0),
        frequency_penalty=fields.bounded(body, "frequency_penalty", 0.0, -2.0, 2.0),
        logit_bias=_logit_bias(body, vocab_size),
        logprobs=logprobs,
        ignore_eos=_ignore_eos(body) if allow_ignore_eos else False,
    )


def read_limits(body: Object, *, default_max_tokens: int, names: tuple[str, ...]) -> Limits:
    """Output limit, stop strings and stream options. `names` are the fields that may hold the limit, the first present wins."""
    refuse_many_choices(body)
    stream = fields.flag(body, "stream")
    options = fields.obj(body, "stream_options") or {}
    return Limits(
        max_tokens=_max_tokens(body, names, default_max_tokens),
        stop=_stops(body),
        stream=stream,
        include_usage=fields.flag(options, "include_usage", where="stream_options."),
    )


def refuse_many_choices(body: Object) -> None:
    """One request has one answer."""
    for name in ("n", "best_of"):
        value = fields.number(body, name)
        if value is not None and value != 1:
            raise bad_field(name, f"only 1 is supported, got {fields.shown(value)}")


def chat_logprobs(body: Object) -> int | None:
    """`logprobs` (bool) and `top_logprobs` (0..20) of a chat request: how many rivals are wanted, None for no logprobs."""
    wanted = fields.flag(body, "logprobs")
    top = _top_count(body, "top_logprobs")
    if top is not None and not wanted:
        raise bad_field("top_logprobs", "needs logprobs to be true")
    return (top or 0) if wanted else None


def completion_logprobs(body: Object) -> int | None:
    """`logprobs` (0..20) of a text completion."""
    return _top_count(body, "logprobs")


def _top_count(body: Object, name: str) -> int | None:
    value = fields.number(body, name)
    if value is None:
        return None
    if not 0 <= value <= MAX_TOP_LOGPROBS:
        raise bad_field(name, f"expected a number between 0 and {MAX_TOP_LOGPROBS}, got {fields.shown(value)}")
    return int(value)


def _seed(body: Object) -> int:
    # Not clamped to 2^31-1: any 63-bit seed is as good as another, and clamping would make all large ones the same text.
    value = fields.number(body, "seed")
    if value is None or not 0 < value < float("inf"):
        return secrets.randbits(62) + 1
    return int(value) % 2**63 or 1


def _repetition_penalty(body: Object) -> float:
    value = fields.number(body, "repetition_penalty")
    if value is None or value != value:
        return 1.0
    if not 0 < value <= 100:
        raise bad_field("repetition_penalty", f"expected a number above 0 and up to 100, got {fields.shown(value)}")
    return float(value)


def _ignore_eos(body: Object) -> bool:
    if not fields.flag(body, "ignore_eos"):
        return False
    if fields.number(body, "temperature") != 0:
        raise ApiError(400, "ignore_eos requires an explicit temperature of 0", param="ignore_eos")
    return True


def _logit_bias(body: Object, vocab_size: int) -> dict[int, float]:
    bias: dict[int, float] = {}
    for key, value in (fields.obj(body, "logit_bias") or {}).items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) < vocab_size):
            raise bad_field("logit_bias", f"{key[:40]!r} is not a token id below {vocab_size}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not -100 <= value <= 100:
            raise bad_field("logit_bias", f"the bias of token {key} must be a number between -100 and 100")
        bias[int(key)] = float(value)
    return bias


def _max_tokens(body: Object, names: tuple[str, ...], default: int) -> int:
    for name in names:
        value = fields.integer(body, name)
        if value is None:
            continue
        if value == 0:  # what the integer rule makes of 0, of a fraction, of a negative number and of NaN
            raise bad_field(name, f"must be at least 1, got {fields.shown(body[name])}")
        return value
    return default


def _stops(body: Object) -> list[str]:
    value = body.get("stop")
    if value is None:
        return []
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list):
        raise bad_field("stop", f"expected a string or a list of strings, got {fields.describe(value)}")
    stops = list(dict.fromkeys(item for item in value if isinstance(item, str) and item))
    if len(stops) > MAX_STOPS:
        raise bad_field("stop", f"at most {MAX_STOPS} stop strings, got {len(stops)}")
    if any(len(item.encode()) > MAX_STOP_BYTES for item in stops):
        raise bad_field("stop", f"a stop string may have at most {MAX_STOP_BYTES} bytes")
    return stops
