"""The record of one request: every field, what it means, and how it is made of what is known at the end.

Names and meanings are part of the interface (docs/operations.md): fields are added, none changes. No text of a user is in it,
unless the owner asked for that (--log-text).
"""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec

from ds4batch.messages import Finished
from ds4batch.server.account import Account, Try
from ds4batch.server.errors import ApiError
from ds4batch.server.inflight import Trail

CLIENT_GONE = 499
_QUOTING = (400, 404, 409, 422)
"""Statuses whose messages may quote the request."""
_PLAIN = ("invalid JSON request: ", "missing ")
"""How messages with such a status begin that quote nothing."""


class ErrorNote(msgspec.Struct, frozen=True, kw_only=True):
    """What the client was told."""

    kind: str
    code: str | None
    param: str | None  # the field of the request
    message: str | None  # None where it may quote the request


class DivergenceNote(msgspec.Struct, frozen=True, kw_only=True):
    """Where the prompt left the session that shares most of it."""

    slot: int
    at: int  # tokens that both begin with
    live: int  # tokens of the session
    held: str | None  # both texts around the place, with --log-text
    asked: str | None


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One request. Seconds; None what did not come to pass. Tokens are summed over its tries."""

    time: str  # its first byte was read, ISO 8601, UTC
    request: str  # its id, in X-Request-Id of the answer
    key: str  # name of the API key, "" without keys
    api: str  # chat, completions, responses, anthropic, count_tokens
    route: str
    model: str  # as the client named it
    stream: bool
    status: int  # of the HTTP answer; 499: the client left. A stream that fails later has 200 and an error
    finish: str | None  # stop, length, tool_calls
    error: ErrorNote | None
    gone: str | None  # client, slow_reader, shutdown, stall, deadline: why the request was given up
    tier: str | None  # of the reuse ladder, of the first try
    slot: int | None
    checkpoint: str | None  # file that was restored
    fell_from: str | None  # tier that was found and could not be carried out
    divergence: DivergenceNote | None
    tokens_in: int  # of the prompt, reused ones included
    tokens_cached: int  # of those, reused
    tokens_out: int
    queue_seconds: float | None  # arrival to slot
    ttft_seconds: float | None  # arrival to first token
    itl_mean_seconds: float | None  # between two tokens
    itl_max_seconds: float | None  # longest wait between two deliveries of tokens
    e2e_seconds: float  # arrival, which is when the request had been read, until the answer was handed to the connection
    drafts: int | None  # tokens guessed ahead and checked; None where nothing drafts
    drafts_accepted: int | None
    retries: int  # further tries, because calls could not be read
    jobs: list[int]  # numbers of the tries in the engine's log
    device_memory_bytes: int | None  # with --gpu-stats


def record_of(
    account: Account,
    *,
    request_id: str,
    key: str,
    api: str,
    route: str,
    texts: bool,
    drafting: bool,
    device_memory: int | None,
) -> Record:
    """The record of a request that has ended. `texts`: users' texts may be in it."""
    tries = account.tries
    trails = [one.job.trail for one in tries]
    first = trails[0] if trails else None
    routed = first.routed if first is not None else None
    differs = routed.divergence if routed is not None else None
    gaps = sum(trail.gaps for trail in trails)
    ended = account.ended if account.ended is not None else account.started
    return Record(
        time=datetime.fromtimestamp(account.started_wall, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        request=request_id,
        key=key,
        api=api,
        route=route,
        model=account.model,
        stream=account.stream,
        status=CLIENT_GONE if account.gone in ("client", "slow_reader") else account.status,
        finish=account.finish,
        error=_note(account.error, texts),
        gone=account.gone,
        tier=routed.tier if routed is not None else None,
        slot=routed.slot if routed is not None else None,
        checkpoint=(routed.source or None) if routed is not None else None,
        fell_from=routed.fell_from if routed is not None else None,
        divergence=None
        if differs is None
        else DivergenceNote(
            slot=differs.slot,
            at=differs.at,
            live=differs.live,
            held=differs.held if texts else None,
            asked=differs.asked if texts else None,
        ),
        tokens_in=sum(one.job.prompt_tokens for one in tries),
        tokens_cached=sum(trail.cached(one.job.prompt_tokens) for one, trail in zip(tries, trails, strict=True)),
        tokens_out=sum(trail.produced for trail in trails),
        queue_seconds=round(routed.queue_seconds, 6) if routed is not None else None,
        ttft_seconds=_ttft(trails),
        itl_mean_seconds=round(sum(trail.decoding for trail in trails) / gaps, 6) if gaps else None,
        itl_max_seconds=round(max(trail.longest_gap for trail in trails), 6) if gaps else None,
        e2e_seconds=round(max(0.0, ended - (first.arrival if first is not None else account.started)), 6),
        drafts=sum(_drafts(one)[0] for one in tries) if drafting and tries else None,
        drafts_accepted=sum(_drafts(one)[1] for one in tries) if drafting and tries else None,
        retries=max(0, len(tries) - 1),
        jobs=[one.job.id for one in tries],
        device_memory_bytes=device_memory,
    )


def _ttft(trails: list[Trail]) -> float | None:
    first = next((trail.first_token_at for trail in trails if trail.first_token_at is not None), None)
    return None if first is None else round(first - trails[0].arrival, 6)


def _drafts(one: Try) -> tuple[int, int]:
    last = one.job.trail.last
    return (last.drafts, last.drafts_accepted) if isinstance(last, Finished) else (0, 0)


def _note(error: ApiError | None, texts: bool) -> ErrorNote | None:
    if error is None:
        return None
    plain = error.code == "context_length_exceeded" or error.message.startswith(_PLAIN)
    quotes = error.status in _QUOTING and not plain
    return ErrorNote(
        kind=error.kind, code=error.code, param=error.param, message=None if quotes and not texts else error.message
    )
