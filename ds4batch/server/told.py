"""What the owner is told of a request: one line in the log, and in which message a prompt left the nearest session."""

from __future__ import annotations

from ds4batch.messages import Divergence
from ds4batch.server.prompts import Prompt
from ds4batch.server.request_record import Record
from ds4batch.server.service import Tokenizer


def line(record: Record) -> str:
    """A record for people: who asked for what, how it ended, what was reused of what, and how long it took."""
    who = f"request {record.request}" + (f" of {record.key}" if record.key else "")
    parts = [f"{who}: {record.api}{' stream' if record.stream else ''}, {_ending(record)}"]
    if record.jobs:
        parts.append(_tokens(record))
    if record.retries:
        parts.append("tried twice")
    if record.fell_from is not None:
        parts.append(f"{record.fell_from} was found and could not be carried out")
    if record.divergence is not None:
        parts.append(_divergence(record))
    parts.append(_times(record))
    if record.device_memory_bytes is not None:
        parts.append(f"device memory {record.device_memory_bytes} bytes")
    return "; ".join(parts)


def _ending(record: Record) -> str:
    ending = str(record.status)
    if record.finish is not None:
        ending += f" {record.finish}"
    if record.gone is not None:
        ending += f", given up ({record.gone})"
    error = record.error
    if error is not None:
        about = [error.code or error.kind, error.param and f"field {error.param}", error.message and _one_line(error.message)]
        ending += f", {': '.join(part for part in about if part)}"
    return ending


def _one_line(text: str) -> str:
    """Nobody writes lines of the log but the server."""
    return text if text.isprintable() else repr(text)[1:-1]


def _tokens(record: Record) -> str:
    found = f"{record.tokens_cached} of {record.tokens_in} prompt tokens reused"
    if record.slot is None:
        return f"{record.tokens_in} prompt tokens, no slot"
    how = f"{record.tier}{', ' + record.checkpoint if record.checkpoint else ''}, " if record.tokens_cached else ""
    drafts = f", {record.drafts_accepted} of {record.drafts} drafts right" if record.drafts else ""
    return f"{found} ({how}slot {record.slot}), {record.tokens_out} generated{drafts}"


def _divergence(record: Record) -> str:
    differs = record.divergence
    assert differs is not None
    where = f"slot {differs.slot} agrees up to token {differs.at} of its {differs.live}"
    return where if differs.held is None else f"{where}: it holds {differs.held!r}, the request {differs.asked!r}"


def _times(record: Record) -> str:
    shown = [
        ("queue", record.queue_seconds),
        ("first token", record.ttft_seconds),
        ("gap", record.itl_mean_seconds),
        ("longest", record.itl_max_seconds),
        ("all", record.e2e_seconds),
    ]
    return ", ".join(f"{name} {seconds:.3f} s" for name, seconds in shown if seconds is not None)


def diverging_message(prompt: Prompt, divergence: Divergence, tokenizer: Tokenizer) -> int | None:
    """The index of the message in which the prompt leaves the session; None before the first and where there are none.

    A template may trim what it renders, so a message begins where its content is next found; one that is not found begins
    nowhere. Decodes up to the whole prompt: not for the event loop.
    """
    place = len(tokenizer.decode(prompt.tokens[: divergence.at]))
    found, at = None, 0
    for i, message in enumerate(prompt.messages):
        content = message.text.strip()
        begins = prompt.text.find(content, at) if content else -1
        if begins > place:
            break
        if begins >= 0:
            found, at = i, begins + len(content)
    return found
