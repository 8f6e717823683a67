"""What is kept of one HTTP request for the log and the trace, while it is under way. Holds references, computes nothing."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ds4batch.chat.events import Turn
from ds4batch.messages import CancelCause, Failed, Finished
from ds4batch.server.errors import ApiError

if TYPE_CHECKING:
    from ds4batch.server.generation import Plan
    from ds4batch.server.inflight import Job
    from ds4batch.server.prompts import Prompt

_MODEL_CHARS = 100


@dataclass
class Try:
    """One submission to the engine. A request has a second one where the first one's calls could not be read."""

    prompt: Prompt
    job: Job
    text: list[str]  # as it was sampled, in pieces
    end: Finished | Failed | None = None  # as the handler saw it


@dataclass
class Account:
    """One request so far. Times are `time.monotonic()`."""

    started: float = field(default_factory=time.monotonic)
    started_wall: float = field(default_factory=time.time)  # Unix seconds
    key_name: str = ""  # of the API key
    model: str = ""  # as the client named it
    stream: bool = False
    plan: Plan | None = None  # None when it was refused before there was one
    turn: Turn | None = None
    tries: list[Try] = field(default_factory=list)
    finish: str | None = None  # why the answer ended; None when there was none
    error: ApiError | None = None  # what the client was told instead, or in the middle of a stream
    gone: CancelCause | None = None  # why nobody reads the answer
    status: int = 0  # of the HTTP answer
    ended: float | None = None  # the answer was handed to the connection
    ended_wall: float = 0.0

    def asked(self, model: object, stream: object) -> None:
        """Note the two fields that every API has, whatever stands there."""
        self.model = model[:_MODEL_CHARS] if isinstance(model, str) else ""
        self.stream = stream is True

    def begin(self, prompt: Prompt, job: Job, text: list[str]) -> None:
        """A try went to the engine."""
        self.tries.append(Try(prompt, job, text))
