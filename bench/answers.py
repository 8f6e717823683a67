"""What a token costs behind the sampler: microseconds a token a row, from the token to the bytes that go to the client.

    python -m bench.answers [--rows 16] [--tokens 4000] [--repeats 3]

Rows take turns token by token as in a step of the batch: their tokens are detokenised and tracked, one report is encoded for all
of them and decoded again, each row's events are collected and written in its API's form. Sockets and the waking of handlers are not
in it. The texts are those of bench/tracker.py; every stream is read again by a client, and must say what was fed. The exit status is
1 when any path takes longer than GOAL_US.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import ds4batch.messages as m
from bench.replay_clients import ClaudeCode, Client, Codex, OpenCode, Reply, sse_events
from bench.tracker import LOADS, TOOLS, Load
from ds4batch.chat.events import Turn
from ds4batch.chat.tracker import Tracker
from ds4batch.engine.output import Piece, TextOutput
from ds4batch.engine.sampler import Draw
from ds4batch.server.apis.chat_wire import ChatWire
from ds4batch.server.apis.messages_wire import MessagesWire
from ds4batch.server.apis.responses import read_request
from ds4batch.server.apis.responses_wire import ResponsesWire
from ds4batch.server.apis.served import Served
from ds4batch.server.generation import Output, Wire
from scheduler.backend import Sampled

GOAL_US = 60.0
_STOP = 1  # no token of a load


class Costs(NamedTuple):
    """Microseconds a token a row."""

    read: float  # detokenise and track
    messages: float  # encode and decode
    write: float  # collect, and the API's form

    @property
    def total(self) -> float:
        """All of it."""
        return sum(self)


class Api(NamedTuple):
    """One API: how it writes an answer, and a client that reads it."""

    name: str
    wire: Callable[[], Wire]
    client: Callable[[str], Client]


def _responses() -> Wire:
    body = {"input": "x", "reasoning": {"summary": "auto"}, "tools": [{"type": "function", "name": name} for name in TOOLS]}
    return ResponsesWire(read_request(body, Served("any", 1, 1, 1, False)))


APIS = (
    Api("chat", lambda: ChatWire("any", True, None), OpenCode),
    Api("responses", _responses, Codex),
    Api("messages", lambda: MessagesWire("any", 1), ClaudeCode),
)


class Path:
    """Everything behind the sampler for a few rows."""

    def __init__(self, load: Load, api: Api, rows: int, vocabulary: Sequence[bytes]) -> None:
        self.deltas: list[m.Event] = []
        self.wires = [api.wire() for _ in range(rows)]
        self.collected = [Output() for _ in range(rows)]
        self.sent = [bytearray(wire.opening()) for wire in self.wires]
        ids = itertools.count()
        tracker = partial(Tracker, load.grammar, thinking=load.thinking, tools=TOOLS, new_id=lambda: f"call_{next(ids)}")
        self.outputs = [
            TextOutput(vocabulary.__getitem__, (), [], partial(self._emit, row), tracker, Draw(m.Sampling(), [], {_STOP}))
            for row in range(rows)
        ]

    def _emit(self, row: int, piece: Piece) -> None:
        self.deltas.append(m.Delta(id=row, text=piece.text, events=piece.events, tokens=piece.tokens, logprobs=piece.logprobs))

    def step(self, token: int) -> tuple[float, float, float]:
        """One token for every row. Returns the seconds of each part."""
        started = time.perf_counter()
        for output in self.outputs:
            output.push(Sampled(token, None, ()))
        read = time.perf_counter()
        report = m.decode_from_engine(m.frame(m.Report(events=self.deltas))[m.HEADER.size :])
        passed = time.perf_counter()
        self.deltas = []
        assert isinstance(report, m.Report)
        for event in report.events:
            collected = self.collected[event.id]
            collected.collect(event)
            events, logprobs = collected.take()
            if events:
                self.sent[event.id] += self.wires[event.id].events(events, logprobs)
        written = time.perf_counter()
        return read - started, passed - read, written - passed

    def finish(self, row: int) -> tuple[Turn, bytes]:
        """The end of a row: the whole turn and the whole stream."""
        output, collected, wire = self.outputs[row], self.collected[row], self.wires[row]
        reason = output.finish("stop")
        assert output.end is not None
        collected.end = m.Finished(
            id=row, reason=reason, prompt_tokens=1, cached_tokens=0, completion_tokens=1, queue_seconds=0.0, prefill_seconds=0.0,
            decode_seconds=0.0, rest=output.end.events,
        )  # fmt: skip
        for event in self.deltas:
            if event.id == row:
                collected.collect(event)
        collected.close()
        sent = bytes(self.sent[row] + wire.events(*collected.take()) + wire.closing(collected.end))
        return collected.turn, sent


def measure(load: Load, api: Api, rows: int, tokens: int) -> Costs:
    """The costs of a load in an API. Raises AssertionError where its stream says anything else."""
    pieces = [load.opening, *map(load.token, range(tokens - tokens % 8)), load.closing]
    vocabulary = sorted({piece.encode() for piece in pieces})
    ids = {data: number for number, data in enumerate(vocabulary)}
    path = Path(load, api, rows, vocabulary)
    seconds = [0.0, 0.0, 0.0]
    for piece in pieces:
        for part, taken in enumerate(path.step(ids[piece.encode()])):
            seconds[part] += taken
    turn, sent = path.finish(rows - 1)
    assert load.right(turn, "".join(pieces[1:-1])), f"{load.name} of {load.grammar} came out wrong"
    _compare(turn, api.client("").take(sse_events(sent)), f"{load.name} of {load.grammar}, {api.name}")
    return Costs(*(1e6 * part / (rows * len(pieces)) for part in seconds))


def _compare(turn: Turn, reply: Reply, what: str) -> None:
    made = [(call.name, json.loads(call.arguments)) for call in turn.complete_calls]
    read = [(call.tool, json.loads(call.arguments)) for call in reply.calls]
    assert (reply.reasoning, reply.text, read) == ("".join(turn.reasoning), turn.content, made), (
        f"{what}: the stream says otherwise"
    )


def main() -> None:
    """Print one line a load, and which was the longest."""
    parser = argparse.ArgumentParser(prog="answers", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    names = "".join(f" {api.name:>10}" for api in APIS)
    print(f"{'us/token/row':<16} {'grammar':<8} {'read':>7} {'message':>8}{names} {'all, most':>10}")
    longest = 0.0
    for load in LOADS:
        costs = [_best([measure(load, api, options.rows, options.tokens) for _ in range(options.repeats)]) for api in APIS]
        total = max(cost.total for cost in costs)
        longest = max(longest, total)
        shared = f"{min(cost.read for cost in costs):>7.2f} {min(cost.messages for cost in costs):>8.2f}"
        written = "".join(f" {cost.write:>10.2f}" for cost in costs)
        print(f"{load.name:<16} {load.grammar or '-':<8} {shared}{written} {total:>10.2f}", flush=True)
    print(f"the longest path takes {longest:.1f} us a token a row; the goal is {GOAL_US:g}")
    sys.exit(longest > GOAL_US)


def _best(costs: Sequence[Costs]) -> Costs:
    return Costs(*(min(parts) for parts in zip(*costs, strict=True)))


if __name__ == "__main__":
    main()
