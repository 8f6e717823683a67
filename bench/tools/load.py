"""The load that every tool is given, and the figures that every tool is asked for. Owns the prompts' files."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Load:
    """A closed loop: `concurrency` workers, each asking again as soon as it was answered, until `requests` are made.

    Every request is one streamed chat message of about `prompt_tokens` tokens; its answer has exactly `max_tokens`.
    """

    url: str  # without /v1
    model: str  # as the server calls it
    tokenizer: Path  # a Hugging Face directory
    requests: int
    concurrency: int
    prompt_tokens: int
    max_tokens: int
    seed: int
    run_id: str  # of this run alone: it makes the nonces that keep its prompts apart from all others


@dataclass(frozen=True)
class Seen:
    """What a tool reports of one run. Milliseconds; token counts are the server's."""

    completed: int
    failed: int
    duration_s: float  # first request to last answer
    prompt_tokens: int  # of all requests together
    cached_tokens: int
    output_tokens: int
    output_throughput: float  # tokens a second over the duration
    ttft_mean: float
    ttft_p50: float
    token_mean: float  # of the requests' times from the first token to the end, over the tokens behind the first
    e2e_mean: float


class ToolFailed(Exception):
    """A tool did not run to its end, or its report cannot be read; the message says which and why."""


def write_prompts(path: Path, prompts: Sequence[str], line: Callable[[str], dict[str, Any]]) -> None:
    """One JSON object a line, as `line` makes it of a prompt."""
    path.write_text("".join(json.dumps(line(prompt)) + "\n" for prompt in prompts), encoding="utf-8")
