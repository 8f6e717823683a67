"""Requests in, reports out: the scheduler over an engine, spoken to by messages.

Knows no sockets and no model: tests run it in process over the scheduler's fake backend.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Protocol

import ds4batch.messages as m
from ds4batch.chat.grammars.base import SPACE
from ds4batch.chat.markup import MARKUP
from ds4batch.chat.tracker import Tracker
from ds4batch.engine.constraint import Constraints, Matching
from ds4batch.engine.output import Piece, TextOutput
from ds4batch.engine.sampler import Draw
from scheduler.backend import Backend, Clock, Text
from scheduler.bindings import Continuation, Keys
from scheduler.events import Ended, Event, Progress, Routed, Stats, StepDone
from scheduler.job import Job
from scheduler.loop import Scheduler, Stopping
from scheduler.options import Options
from scheduler.pricing import PricingStats
from scheduler.queue import QueueFull

if TYPE_CHECKING:
    from ds4batch.engine.checkpoint import DiskCheckpoints
    from ds4batch.kvstore.counters import Stats as DiskStats


class Vocabulary(Text, Protocol):
    """The tokeniser's part of a request: text to ids, ids to text, and which ids are special."""

    @property
    def stop_ids(self) -> frozenset[int]: ...

    @property
    def special_ids(self) -> frozenset[int]: ...

    def token_bytes(self, token: int) -> bytes: ...


class Service:
    """Turns messages into jobs and the scheduler's events into reports."""

    def __init__(
        self,
        backend: Backend,
        vocabulary: Vocabulary,
        clock: Clock,
        slots: int,
        options: Options,
        fallback: Callable[[], str | None] = lambda: None,
        memory: Callable[[], int] = lambda: 0,
        checkpoints: DiskCheckpoints | None = None,
        constraints: Constraints | None = None,
    ) -> None:
        """`fallback` says why the last forward was ordered; `memory` how many bytes the device has in use. Without `constraints`
        a request that has one is refused.
        """
        self._vocabulary = vocabulary
        self._scheduler = Scheduler(backend, vocabulary, clock, slots=slots, options=options, checkpoints=checkpoints)
        self._checkpoints = checkpoints
        self._constraints = constraints
        self._fallback = fallback
        self._memory = memory
        self._deltas: list[m.Delta] = []
        self._refused: list[m.Event] = []
        self._outputs: dict[int, TextOutput] = {}  # of the requests that have not ended
        read = {i for i in vocabulary.special_ids if vocabulary.token_bytes(i).decode("utf-8", "replace") in MARKUP}
        self._silent = vocabulary.special_ids - read
        self.stopping = False

    @property
    def busy(self) -> bool:
        """Whether a step has something to do or to say."""
        return self._scheduler.busy or bool(self._refused) or (self._checkpoints is not None and self._checkpoints.told)

    @property
    def blocked(self) -> bool:
        """Whether nothing can go on before a message or the store's thread comes."""
        return self._scheduler.blocked and not self._refused

    def close(self) -> None:
        """Save all sessions. Called when nothing is busy any more; returns when they are on the disk."""
        if self._checkpoints is not None:
            self._scheduler.save_all()
            self._checkpoints.close()

    def handle(self, message: m.ToEngine) -> None:
        """Take one message from the front."""
        match message:
            case m.Submit():
                self._submit(message)
            case m.Cancel(id, cause):
                self._scheduler.cancel(id, cause)
            case m.Shutdown():
                self.stopping = True
                self._scheduler.stop(drain=False)

    def step(self) -> m.Report:
        """One step of the scheduler, and all that came of it."""
        ended = self._checkpoints is not None and self._checkpoints.told
        happened = self._scheduler.step()
        deltas, self._deltas = _joined(self._deltas), []
        refused, self._refused = self._refused, []
        before = [e for h in happened if not isinstance(h, Ended) for e in _translate(h, None)]
        after = [e for h in happened if isinstance(h, Ended) for e in _translate(h, self._outputs.pop(h.job, None))]
        steps = [
            m.StepSample(h.decode_rows, h.prefill_tokens, h.seconds, self._fallback(), h.checked_rows, h.drafts, list(h.accepted))
            for h in happened
            if isinstance(h, StepDone)
        ]
        transfers = [] if self._checkpoints is None else [m.Transfer(*one) for one in self._checkpoints.transfers()]
        return m.Report(
            events=[*refused, *before, *deltas, *after],
            steps=steps,
            transfers=transfers,
            stats=self._stats(self._scheduler.stats(), ended or any(isinstance(h, Routed | Ended) for h in happened)),
        )

    def _submit(self, message: m.Submit) -> None:
        words = self._vocabulary
        draw = Draw(message.sampling, message.tokens, words.stop_ids)
        reading = message.reading
        try:
            output = TextOutput(
                words.token_bytes,
                words.special_ids if reading is None else self._silent,
                message.stop,
                partial(self._emit, message.id),
                partial(_tracker, reading) if reading is not None else None,
                draw,
                self._matching(message),
            )
        except ValueError as error:
            self._refuse(message.id, 400, str(error))
            return
        results = message.continues
        stop_tokens = frozenset[int]() if message.sampling.ignore_eos else words.stop_ids
        try:
            self._scheduler.submit(
                Job(
                    id=message.id,
                    tokens=message.tokens,
                    text=message.text,
                    max_tokens=message.max_tokens,
                    sampling=draw,
                    stop_tokens=stop_tokens,
                    api=message.api,
                    arrival=message.arrival,
                    output=output,
                    anchor=message.anchor,
                    generation_from=message.generation_from,
                    continues=None if results is None else Continuation(frozenset(results.calls), results.suffix_from),
                    needs_live_state=message.needs_live_state,
                    keys=partial(self._answered, message, output),
                    owner=message.owner,
                    owner_limit=message.owner_limit,
                    owner_weight=message.owner_weight,
                    drafted=message.constraint is None and not message.sampling.ignore_eos,
                    steered=message.constraint is not None
                    or (reading is not None and reading.tools is not None and message.sampling.temperature > 0.0),
                )
            )
            self._outputs[message.id] = output
            if self._checkpoints is not None:
                self._checkpoints.tool_blocks.learn(message.replayed)
        except QueueFull as error:
            self._refuse(message.id, 429, "the queue is full; retry later", error.retry_after)
        except Stopping as error:
            self._refuse(message.id, 503, str(error))
        except ValueError as error:
            self._refuse(message.id, 400, str(error))

    def _answered(self, message: m.Submit, output: TextOutput) -> Keys | None:
        """The turn is complete and its session not yet anybody's: remember its calls, and say what it can be recognised by."""
        end, calls = output.end, output.turn.complete_calls
        if self._checkpoints is not None and end is not None and end.raw is not None and calls:
            self._checkpoints.tool_blocks.remember([call.id for call in calls], end.raw)
        return _keys(message, output)

    def _matching(self, message: m.Submit) -> Matching | None:
        if message.constraint is None:
            return None
        if self._constraints is None:
            raise ValueError(f"{message.constraint.field}: the model's vocabulary cannot be masked")
        return self._constraints.matching(message.constraint, message.reading is not None and message.reading.thinking)

    def _refuse(self, request: int, status: int, why: str, retry_after: float | None = None) -> None:
        self._refused.append(m.Failed(id=request, status=status, message=why, retry_after=retry_after))

    def _emit(self, request: int, piece: Piece) -> None:
        self._deltas.append(
            m.Delta(id=request, text=piece.text, events=piece.events, tokens=piece.tokens, logprobs=piece.logprobs)
        )

    def _stats(self, stats: Stats, disk: bool) -> m.Stats:
        """`disk`: the store's totals may have changed."""
        return m.Stats(
            running=stats.running,
            waiting=stats.waiting,
            kv_usage=stats.kv_usage,
            slots=[m.SlotStat(*slot) for slot in stats.slots],
            device_memory=self._memory(),
            pool=m.PoolStat(**stats.pool._asdict()),
            drafts=None if stats.pricing is None else _drafting(stats.pricing),
            disk=_disk(self._checkpoints.store.stats()) if disk and self._checkpoints is not None else None,
            owners=[m.OwnerStat(*one) for one in stats.owners],
        )


def _joined(deltas: list[m.Delta]) -> list[m.Delta]:
    """One delta a request: the tokens of one step came together, however many there are."""
    joined: dict[int, m.Delta] = {}
    for delta in deltas:
        before = joined.get(delta.id)
        if before is not None:
            delta = m.Delta(
                id=delta.id,
                text=before.text + delta.text,
                events=[*before.events, *delta.events],
                tokens=before.tokens + delta.tokens,
                logprobs=[*before.logprobs, *delta.logprobs],
            )
        joined[delta.id] = delta
    return list(joined.values())


def _drafting(stats: PricingStats) -> m.DraftStat:
    prices = []
    for one in stats.buckets:
        plain, speculative = one.plain_seconds or 0.0, one.speculative_seconds or 0.0
        drafting = plain > 0.0 and 0.0 < speculative < one.tokens * plain
        prices.append(m.PriceStat(one.low, one.high, one.acceptance, one.tokens, plain, speculative, drafting))
    return m.DraftStat(prices=prices, decisions={kind.value: count for kind, count in stats.decisions.items()})


def _disk(stats: DiskStats) -> m.DiskStat:
    return m.DiskStat(
        files=stats.files,
        bytes=stats.bytes,
        stored=dict(stats.stored),
        known=dict(stats.known),
        skipped=dict(stats.skipped),
        loaded=dict(stats.loaded),
        evicted=dict(stats.evicted),
        removed=dict(stats.removed),
        left=dict(stats.left),
    )


def _tracker(reading: m.Reading) -> Tracker:
    tools = None if reading.tools is None else {name: frozenset(strings) for name, strings in reading.tools.items()}
    return Tracker(reading.grammar, thinking=reading.thinking, tools=tools, new_id=lambda: reading.ids + secrets.token_hex(16))


def _keys(message: m.Submit, output: TextOutput) -> Keys | None:
    """What the request after this one can be recognised by, once the answer is complete."""
    end, turn = output.end, output.turn
    if end is None or output.cut or end.malformed:
        return None
    visible, place = None, message.visible
    if place is not None and not turn.reasoning_open:
        answer = turn.content if not place.trimmed else turn.content.lstrip(SPACE)
        if place.trimmed == "both" or (place.trimmed and end.raw is not None):
            answer = answer.rstrip(SPACE)
        visible = message.text[: place.shared] + place.head + answer + (end.raw or "")
    return Keys(frozenset(call.id for call in turn.complete_calls), visible)


def _translate(event: Event, output: TextOutput | None) -> Iterable[m.Event]:
    match event:
        case Routed():
            yield m.Routed(
                id=event.job,
                slot=event.slot,
                tier=event.tier,
                cached_tokens=event.cached_tokens,
                victim=event.victim,
                evicted_tokens=event.evicted_tokens,
                queue_seconds=event.queue_seconds,
                fell_from=event.fell_from,
                divergence=event.divergence and m.Divergence(**event.divergence._asdict()),
                source=event.source,
                restore_seconds=event.restore_seconds,
            )
        case Progress():
            yield m.Progress(event.job, event.done, event.total)
        case Ended(reason="error"):
            yield m.Failed(id=event.job, status=event.status or 500, message=event.message or "the request failed")
        case Ended():
            end = output.end if output is not None else None
            yield m.Finished(
                id=event.job,
                rest=end.events if end is not None else [],
                raw=end.raw if end is not None else None,
                malformed=end.malformed if end is not None else "",
                reason=event.reason,
                prompt_tokens=event.prompt_tokens,
                cached_tokens=event.cached_tokens,
                completion_tokens=event.completion_tokens,
                queue_seconds=event.queue_seconds or 0.0,
                prefill_seconds=event.prefill_seconds or 0.0,
                decode_seconds=event.decode_seconds or 0.0,
                drafts=event.drafts,
                drafts_accepted=event.drafts_accepted,
            )
        case StepDone():
            pass
