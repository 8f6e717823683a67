"""The trace file: one JSON line a request with its texts: what was asked, decided, sampled and read from it.

Who may read it reads what users wrote: it is made readable by its owner alone.
"""

from __future__ import annotations

import logging
import os
import stat
from typing import Any

import msgspec

from ds4batch.messages import Routed
from ds4batch.server.account import Account, Try
from ds4batch.server.inflight import Trail
from ds4batch.server.line_file import LineFile
from ds4batch.server.request_record import Record
from ds4batch.server.service import Tokenizer
from ds4batch.server.told import diverging_message

log = logging.getLogger(__name__)

_AROUND = 8  # tokens on either side of the first that differs
_RECORD_BYTES = 4096  # about what a line takes beside its texts


class Trace:
    """Appends to one file. Raises OSError when it cannot be opened."""

    def __init__(self, path: str) -> None:
        self._file = LineFile(path, 0o600, "the trace")
        mode = stat.S_IMODE(os.stat(path).st_mode)
        if mode & 0o077:
            log.warning("the trace %s holds what users write, and its mode %03o lets others at it", path, mode)

    def add(self, account: Account, record: Record, tokenizer: Tokenizer) -> None:
        """Write one request; returns at once. The writer decodes, which takes its time for a long prompt."""
        size = sum(2 * len(one.prompt.text) + 2 * sum(map(len, one.text)) for one in account.tries)
        self._file.add(lambda: msgspec.json.encode(_line(account, record, tokenizer)), _RECORD_BYTES + size)

    def reopen(self) -> None:
        """Open the path anew: it may have been renamed."""
        self._file.reopen()

    def close(self) -> None:
        """Write what is left."""
        self._file.close()


def _line(account: Account, record: Record, tokenizer: Tokenizer) -> dict[str, Any]:
    error = account.error
    line: dict[str, Any] = {
        "time": account.started_wall,
        "request": record.request,
        "api": record.api,
        "record": record,
        "error": None if error is None else {"status": error.status, "message": error.message, "param": error.param},
    }
    plan, tries = account.plan, account.tries
    if plan is None or not tries:
        return line
    last = tries[-1]
    trail = tries[0].job.trail
    # The times count from the arrival, when the request had been read.
    line["time"] = account.ended_wall - ((account.ended or trail.arrival) - trail.arrival)
    return {
        **line,
        "max_tokens": plan.limits.max_tokens,
        "stop": plan.limits.stop,
        "stream": plan.limits.stream,
        "sampling": plan.sampling,
        "constraint": plan.constraint,
        "tool_replay": plan.prompt.replay._asdict(),
        **_tried(last, tokenizer),
        "turn": account.turn,
        "earlier_tries": [_tried(one, tokenizer) for one in tries[:-1]],
        "seconds": {
            "routed": _since(trail, trail.routed_at),
            "first_token": _since(trail, trail.first_token_at),
            "last_token": _since(trail, trail.last_token_at),
            "end": _since(trail, account.ended),
        },
    }


def _tried(one: Try, tokenizer: Tokenizer) -> dict[str, Any]:
    """What one submission was, what was decided about it, and what came of it."""
    routed = one.job.trail.routed
    return {
        "prompt": one.prompt.text,
        "prompt_tokens": one.job.prompt_tokens,
        "routed": routed,
        "window": None if routed is None else _window(one, routed, tokenizer),
        "divergence_message": None
        if routed is None or routed.divergence is None
        else diverging_message(one.prompt, routed.divergence, tokenizer),
        "cancelled": one.job.cancelled,
        "output": "".join(one.text),
        "end": one.end if one.end is not None else one.job.trail.last,
    }


def _window(one: Try, routed: Routed, tokenizer: Tokenizer) -> dict[str, Any] | None:
    """The tokens around the first one in which the prompt differs from the nearest session: [id, text] each."""
    differs = routed.divergence
    if differs is None:
        return None
    start = max(0, differs.at - _AROUND)

    def spelled(ids: list[int]) -> list[list[Any]]:
        return [[i, tokenizer.decode([i])] for i in ids]

    return {
        "from": start,
        "held": spelled(differs.held_tokens),
        "asked": spelled(one.prompt.tokens[start : differs.at + _AROUND + 1]),
    }


def _since(trail: Trail, moment: float | None) -> float | None:
    return None if moment is None else round(moment - trail.arrival, 6)
