"""A scheduler over the fake backend, and an output that detokenises and looks for stop strings as the real one does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from scheduler import Answered, Ended, Event, Job, Options, Routed, Sampled, Scheduler, StepDone, Verdict
from scheduler.fake import END, FakeBackend, FakeText, ManualClock
from scheduler.job import pack
from scheduler.slots import Checkpoint, Slot

TEXT = FakeText()


def options(**changes: Any) -> Options:
    """The options of the tests: small quanta, every invariant checked after each step."""
    values: dict[str, Any] = {
        "mixed_prefill_quantum": 32,
        "idle_prefill_quantum": 128,
        "itl_budget": 0.1,
        "max_queue": 64,
        "self_check": True,
    }
    return Options(**(values | changes))


class Reader:
    """An output: the visible text, cut at the first stop string."""

    def __init__(self, stop: Sequence[str] = (), on_push: Callable[[Sampled], None] | None = None) -> None:
        self.stop = stop
        self.on_push = on_push
        self.tokens: list[int] = []
        self.text = ""
        self.finished = False

    def push(self, sampled: Sampled) -> Verdict | None:
        assert not self.finished, "a token after the end"
        if self.on_push is not None:
            self.on_push(sampled)
        self.tokens.append(sampled.token)
        whole = self.text + TEXT.render([sampled.token])
        hits = [whole.find(one) for one in self.stop if one in whole]
        if not hits:
            self.text = whole
            return None
        self.text = whole[: min(hits)]
        keep = 0
        while len(TEXT.render(self.tokens[: keep + 1])) <= len(self.text) and keep < len(self.tokens):
            keep += 1
        return Verdict("stop", keep)

    def finish(self, reason: Answered) -> Answered:
        assert not self.finished, "finished twice"
        self.finished = True
        return reason


def make_job(
    id: int,
    prompt: str | Sequence[int],
    *,
    max_tokens: int = 8,
    stop: Sequence[str] = (),
    ignore_eos: bool = False,
    sampling: Any = 0,
    arrival: float = 0.0,
    output: Any = None,
    api: str = "chat",
    **rest: Any,
) -> Job:
    """A job whose prompt is a text, or ids without a text."""
    text = prompt if isinstance(prompt, str) else ""
    return Job(
        id=id,
        tokens=TEXT.tokenise(prompt) if isinstance(prompt, str) else list(prompt),
        text=text,
        max_tokens=max_tokens,
        sampling=sampling,
        stop_tokens=frozenset() if ignore_eos else frozenset({END}),
        api=api,
        arrival=arrival,
        output=Reader(stop) if output is None else output,
        **rest,
    )


class Rig:
    """One scheduler with all that it drives."""

    chains = False  # unless told otherwise

    def __init__(self, slots: int = 2, ctx: int = 4096, *, ladder: Any = None, **changes: Any) -> None:
        known = ("script", "price", "can_rewind", "chains", "page_tokens", "pages", "guesses")
        backend = {k: changes.pop(k) for k in known if k in changes}
        backend.setdefault("chains", self.chains)
        self.clock = ManualClock(1000.0)
        self.backend = FakeBackend(slots, ctx, clock=self.clock, **backend)
        self.text = FakeText()
        tiers = {} if ladder is None else {"ladder": ladder}
        self.scheduler = Scheduler(self.backend, self.text, self.clock, slots=slots, options=options(**changes), **tiers)
        self.events: list[Event] = []
        self._next = 0

    def submit(self, prompt: str | Sequence[int], **rest: Any) -> Job:
        """Submit a new job."""
        self._next += 1
        job = make_job(self._next, prompt, arrival=self.clock(), **rest)
        self.scheduler.submit(job)
        return job

    def step(self) -> list[Event]:
        """One step; its events are also kept."""
        events = self.scheduler.step()
        self.events += events
        return events

    def run(self, limit: int = 5000) -> None:
        """Step until nothing is left to do."""
        for _ in range(limit):
            self.step()
            if not self.scheduler.busy:
                return
        raise AssertionError(f"still busy after {limit} steps")

    def answer(self, prompt: str | Sequence[int], **rest: Any) -> Job:
        """Submit a job and run until it is answered."""
        job = self.submit(prompt, **rest)
        self.run()
        return job

    def routed(self, job: Job) -> Routed:
        """How `job` was placed."""
        return next(e for e in self.events if isinstance(e, Routed) and e.job == job.id)

    def ended(self, job: Job) -> Ended:
        """How `job` ended."""
        (event,) = [e for e in self.events if isinstance(e, Ended) and e.job == job.id]
        return event

    def steps(self) -> list[StepDone]:
        """All forwards so far."""
        return [e for e in self.events if isinstance(e, StepDone)]

    def alone(self, job: Job, prompt: Sequence[int] | None = None) -> list[int]:
        """What `job` would draw with no one else about."""
        return self.backend.answer(job.prompt if prompt is None else prompt, job.sampling, job.max_tokens, job.stop_tokens)


def checkpoint(tokens: Sequence[int], **rest: Any) -> Checkpoint:
    """A published checkpoint of `tokens`."""
    return Checkpoint(length=len(tokens), packed=pack(tokens), **rest)


def slot_of(tokens: Sequence[int], *, id: int = 0, last_used: float | None = 0.0, **rest: Any) -> Slot:
    """A free slot that holds `tokens`."""
    return Slot(id, checkpoint=checkpoint(tokens, **rest), last_used=last_used)
