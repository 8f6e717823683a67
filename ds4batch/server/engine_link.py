"""The front's side of the engine: starts the process, restarts it when it dies, carries requests there and events back.

It owns the process, the connection and the table of requests in flight. It never waits for the engine: a message is queued or the
request is refused. It knows no HTTP beyond the status a refusal will have.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import signal
import socket
import sys
import time
from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple, Protocol

import msgspec

from ds4batch.messages import (
    HEADER,
    Bye,
    Cancel,
    CancelCause,
    Event,
    Failed,
    Finished,
    FromEngine,
    Ping,
    Ready,
    Report,
    Shutdown,
    StartFailed,
    Stats,
    StepSample,
    Submit,
    Transfer,
)
from ds4batch.server.engine_wire import EngineWire
from ds4batch.server.errors import Unavailable
from ds4batch.server.inflight import Job
from ds4batch.settings import Settings

log = logging.getLogger(__name__)

ENGINE_COMMAND = (sys.executable, "-m", "ds4batch.engine.process")
SHUTTING_DOWN = "server shutting down"
_EXIT_GRACE = 0.5  # seconds between the end of the connection and the end of the process, before it is killed


class EngineState(Enum):
    """What /health reports."""

    STARTING = "starting"  # the first start is under way
    READY = "ok"
    RESTARTING = "restarting"  # it died and is being started again
    DOWN = "down"  # a restart failed, another follows
    STOPPING = "stopping"


class EngineStartError(RuntimeError):
    """The first start failed; the message says why."""


class Observer(Protocol):
    """Who is told of everything that passes the link. Called before the job's own trail takes the event."""

    def submitted(self, job: Job) -> None:
        """The request is on its way to the engine."""

    def event(self, job: Job, event: Event, now: float) -> None:
        """One event of a request, `now` in monotonic seconds."""

    def cancelled(self, job: Job, cause: CancelCause) -> None:
        """The front gave a request up."""

    def step(self, sample: StepSample) -> None:
        """One forward."""

    def transfer(self, transfer: Transfer) -> None:
        """One checkpoint went to the disk or came from it."""

    def stats(self, stats: Stats) -> None:
        """Gauges at one instant."""

    def ready(self, ready: Ready) -> None:
        """The engine has loaded the model."""

    def engine_down(self) -> None:
        """The engine is gone, and every session with it."""


class Backoff:
    """Seconds to wait before each restart: `first`, doubling up to `most`; a life of `steady` seconds starts over."""

    def __init__(self, first: float = 0.5, most: float = 10.0, steady: float = 30.0) -> None:
        self._first = first
        self._most = most
        self._steady = steady
        self._next = first

    def after(self, ready_seconds: float) -> float:
        """The wait after a life that was ready for `ready_seconds`."""
        if ready_seconds >= self._steady:
            self._next = self._first
        wait = self._next
        self._next = min(self._most, 2 * wait)
        return wait


class EngineStatus(NamedTuple):
    """The engine as /health shows it."""

    state: EngineState
    restarts: int  # starts after the first
    last_error: str | None
    ready: Ready | None  # of the current life
    in_flight: int


class EngineLink:
    """Supervised engine process. Create it in a running loop, then run `run()` as a task."""

    def __init__(
        self, settings: Settings, observer: Observer, *, command: Sequence[str] = ENGINE_COMMAND, backoff: Backoff | None = None
    ) -> None:
        # A relative --chdir has already happened, and the engine inherits the directory.
        self._settings = dataclasses.replace(settings, chdir="")
        self.observer = observer
        """May be replaced by one that passes everything on."""
        self._command = list(command)
        self._backoff = backoff or Backoff()
        self._ids = itertools.count(1)
        self._jobs: dict[int, Job] = {}
        self._wire: EngineWire | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._state = EngineState.STARTING
        self._ready: Ready | None = None
        self._ready_at = 0.0
        self._restarts = 0
        self._start_error: str | None = None
        self._last_error: str | None = None
        self._retry_at = 0.0
        self._load_seconds = 0.0
        self.heard = 0
        """Messages of the engine so far, of all its lives."""
        self._stop = asyncio.Event()
        self.first_ready = asyncio.Event()

    @property
    def status(self) -> EngineStatus:
        """The engine as it stands."""
        return EngineStatus(self._state, self._restarts, self._last_error, self._ready, len(self._jobs))

    @property
    def pid(self) -> int | None:
        """The engine's process id while there is one."""
        return self._process.pid if self._process is not None else None

    # requests

    def check_available(self) -> None:
        """Raise Unavailable when a request could not be submitted now."""
        if self._state is EngineState.STOPPING:
            raise Unavailable(SHUTTING_DOWN)
        if self._state is not EngineState.READY or self._wire is None:
            wait = max(0.0, self._retry_at - time.monotonic()) + max(1.0, self._load_seconds)
            what = (
                "the model is still loading"
                if self._state is EngineState.STARTING
                else (f"the engine is being restarted: {self._last_error}")
            )
            raise Unavailable(what, wait)
        if self._wire.congested:
            raise Unavailable("the engine does not keep up with incoming requests", 2.0)

    def submit(self, request: Submit, request_id: str = "") -> Job:
        """Send a request under an id of the link's own, its output limit cut to the context's room. Raises Unavailable.

        `request_id` is the one of the HTTP request.
        """
        self.check_available()
        assert self._wire is not None
        job = Job(next(self._ids), len(request.tokens), request.max_tokens, request.arrival, request.owner)
        job.request_id = request_id
        self._jobs[job.id] = job
        self.observer.submitted(job)
        room = max(1, self._settings.ctx - len(request.tokens))
        self._wire.send(msgspec.structs.replace(request, id=job.id, max_tokens=min(request.max_tokens, room)))
        return job

    def cancel(self, job: Job, cause: CancelCause) -> None:
        """Give a request up. The engine's last word on it still counts in the metrics. Repeating it does nothing."""
        if job.cancelled is not None or job.id not in self._jobs:
            return
        self.observer.cancelled(job, cause)
        job.cancel(cause)
        if self._wire is not None:
            self._wire.send(Cancel(job.id, cause))

    def give_up(self, job: Job, cause: CancelCause, status: int, message: str) -> None:
        """The same for a request whose client is still there: it is answered with an error."""
        if job.cancelled is not None or job.id not in self._jobs:
            return
        self.observer.cancelled(job, cause)
        job.cancel(cause, Failed(id=job.id, status=status, message=message))
        if self._wire is not None:
            self._wire.send(Cancel(job.id, cause))

    def ping(self) -> None:
        """Ask an engine that is silent whether it lives."""
        if self._wire is not None:
            self._wire.send(Ping())

    def replace(self, why: str) -> None:
        """Kill an engine that hangs. What is in flight ends as an error at once, and another one is started."""
        if self._state is not EngineState.READY or self._wire is None:
            return
        self._state = EngineState.RESTARTING
        self._last_error = why
        self._fail_jobs(f"{why}; it is being restarted", max(1.0, self._load_seconds))
        self._wire.abort(why)
        self._kill()

    # life cycle

    async def run(self) -> None:
        """Keep an engine running until `stop`. Raises EngineStartError when the very first start reports a failure."""
        while not self._stop.is_set():
            self._start_error = None
            ready_before = self.first_ready.is_set()
            why = await self._one_life()
            ready_seconds = time.monotonic() - self._ready_at if self._ready is not None else -1.0
            self._ready = None
            self._wire = None
            if self._stop.is_set():
                break
            if self._start_error is not None and not ready_before and self._restarts == 0:
                raise EngineStartError(self._start_error)
            self._last_error = self._start_error or why
            wait = self._backoff.after(ready_seconds)
            self._retry_at = time.monotonic() + wait
            if self.first_ready.is_set():
                self._state = EngineState.RESTARTING if ready_seconds >= 0 else EngineState.DOWN
            log.error("%s; starting it again in %.1f s", self._last_error, wait)
            self._fail_all(f"{self._last_error}; it is being restarted", retry_after=wait + max(1.0, self._load_seconds))
            try:
                await asyncio.wait_for(self._stop.wait(), wait)
            except TimeoutError:
                self._restarts += 1

    async def stop(self, timeout: float) -> None:
        """Ask the engine to end, wait up to `timeout` seconds, then kill it. What is in flight then ends as an error."""
        loading = self._state is not EngineState.READY
        self._state = EngineState.STOPPING
        self._stop.set()
        if self._wire is not None and self._process is not None:
            if loading:
                self._kill()
            self._wire.send(Shutdown())
            if not (await asyncio.wait({self._wire.lost}, timeout=timeout))[0]:
                self._kill()
        self._fail_all(SHUTTING_DOWN)

    def kill(self) -> None:
        """End the engine at once, without waiting for anything."""
        self._stop.set()
        self._kill()

    def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            try:
                self._process.kill()
            except ProcessLookupError:
                return

    async def _one_life(self) -> str:
        """Start the process, serve until it ends; returns how it ended."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            try:
                # The engine stays in our process group: whoever signals or lists the server's group means both.
                process = await asyncio.create_subprocess_exec(
                    *self._command, "--fd", str(theirs.fileno()), pass_fds=(theirs.fileno(),), stdin=asyncio.subprocess.DEVNULL
                )
            except OSError as error:
                ours.close()
                return f"the engine process cannot be started: {error}"
            self._process = process
            if self._stop.is_set():
                self._kill()
        wire = await EngineWire.open(ours, self._on_message)
        settings = msgspec.msgpack.encode(dataclasses.asdict(self._settings))
        wire.send_raw(HEADER.pack(len(settings)) + settings)
        self._wire = wire
        exit_: asyncio.Task[int] = asyncio.create_task(process.wait())
        try:
            ends: set[asyncio.Future[Any]] = {exit_, wire.lost}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            # What the process wrote before it died is still in the socket: read to its end before judging.
            await asyncio.wait({wire.lost}, timeout=_EXIT_GRACE)
            await asyncio.wait({exit_}, timeout=_EXIT_GRACE)
            wire.abort()
            self._kill()
            code = await exit_
        finally:
            exit_.cancel()
            wire.abort()
            self._kill()
        return wire.lost.result() or _ending(code)

    def _on_message(self, message: FromEngine) -> None:
        self.heard += 1
        match message:
            case Report():
                self._dispatch(message)
            case Ready():
                self._ready = message
                self._ready_at = time.monotonic()
                self._load_seconds = message.load_seconds
                if self._state is not EngineState.STOPPING:
                    self._state = EngineState.READY
                self.observer.ready(message)
                self.first_ready.set()
            case StartFailed():
                self._start_error = message.message
            case Bye():
                log.info("the engine has left in order")

    def _dispatch(self, report: Report) -> None:
        now = time.monotonic()
        for event in report.events:
            job = self._jobs.get(event.id)
            if job is not None:
                self._deliver(job, event, now)
        for sample in report.steps:
            self.observer.step(sample)
        for transfer in report.transfers:
            self.observer.transfer(transfer)
        if report.stats is not None:
            self.observer.stats(report.stats)

    def _deliver(self, job: Job, event: Event, now: float) -> None:
        if isinstance(event, Finished | Failed):
            del self._jobs[job.id]
        self.observer.event(job, event, now)
        job.push(event, now)

    def _fail_all(self, message: str, retry_after: float | None = None) -> None:
        self._fail_jobs(message, retry_after)
        self.observer.engine_down()

    def _fail_jobs(self, message: str, retry_after: float | None) -> None:
        now = time.monotonic()
        for job in list(self._jobs.values()):
            self._deliver(job, Failed(id=job.id, status=503, message=message, retry_after=retry_after), now)


def _ending(code: int) -> str:
    if code >= 0:
        return f"the engine process ended with exit code {code}"
    try:
        return f"the engine process was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"the engine process was killed by signal {-code}"
