"""A run of bench.agents as a server's trace has it: who asked what, after whom, and what it saw; and the same asked of the simulation.

Owns the reading of the trace. What a request says, how long its answer is and how long its client thought before it are the load, and
are taken from the trace; when it got a slot, what was reused for it and how long it took are the server's doing, and are compared.

The texts are turned into ids by the model's tokenizer, prompts as the server does and answers by themselves: where that gives an answer
another number of ids than were drawn, it is cut or filled up with ids that occur nowhere else.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from bench.agent_scenario import MAIN
from bench.simulation.backend import IDS
from bench.simulation.boxes import Done, ExactBox
from bench.simulation.costs import StepCosts
from bench.simulation.run import Plan, simulate
from bench.simulation.traffic import Ask, Session, Told, Traffic
from ds4batch.tokenizer import ModelTokenizer

_FILL = IDS >> 1  # ids from here on are no model's


class Name(NamedTuple):
    """A request's id, as bench.agents makes it: label-agent-turn-kind."""

    agent: str
    turn: int
    kind: str


@dataclass(frozen=True)
class Line:
    """One request of the trace. Times are seconds on the server's clock."""

    name: Name
    prompt: list[int]
    answer: str
    output_tokens: int
    stopped: bool
    arrival: float
    first_token: float
    end: float
    tier: str
    cached: int


class Agents(NamedTuple):
    """What there is to compare of one run."""

    ttft: dict[Name, float]  # seconds, of every request
    e2e: dict[Name, float]
    token: float  # mean seconds a token behind the first ones
    makespan: float  # first arrival to last end
    output_tokens: int
    prompt_tokens: int
    reused: Counter[str]  # tokens, by tier


def read_trace(path: Path, tokenizer: ModelTokenizer) -> list[Line]:
    """Every request, in the order of arrival. Raises OSError, and ValueError for a trace that is not of bench.agents."""
    lines = []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            lines.append(_line(json.loads(text), tokenizer))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path}, line {number}: no answered request of bench.agents: {type(error).__name__}: {error}"
            ) from None
    return sorted(lines, key=lambda line: line.arrival)


def _line(record: Mapping[str, Any], tokenizer: ModelTokenizer) -> Line:
    _, agent, turn, kind = record["request"].split("-")
    prompt = tokenizer.with_bos(tokenizer.encode(record["prompt"]))
    if len(prompt) != record["prompt_tokens"]:
        raise ValueError(f"its prompt has {len(prompt)} tokens by this model, and {record['prompt_tokens']} by the server's")
    start, seconds = record["time"], record["seconds"]
    return Line(
        name=Name(agent, int(turn), kind),
        prompt=prompt,
        answer=record["output"],
        output_tokens=record["record"]["tokens_out"],
        stopped=record["record"]["finish"] == "stop",
        arrival=start,
        first_token=start + seconds["first_token"],
        end=start + seconds["end"],
        tier=record["routed"]["tier"],
        cached=record["routed"]["cached_tokens"],
    )


def measured(lines: Sequence[Line]) -> Agents:
    """What the server's clients saw, less the way over the socket."""
    reused: Counter[str] = Counter()
    for line in lines:
        reused[line.tier] += line.cached
    behind = [line for line in lines if line.output_tokens > 1]
    return Agents(
        ttft={line.name: line.first_token - line.arrival for line in lines},
        e2e={line.name: line.end - line.arrival for line in lines},
        token=sum(line.end - line.first_token for line in behind) / sum(line.output_tokens - 1 for line in behind),
        makespan=max(line.end for line in lines) - lines[0].arrival,
        output_tokens=sum(line.output_tokens for line in lines),
        prompt_tokens=sum(len(line.prompt) for line in lines),
        reused=+reused,
    )


def script(lines: Sequence[Line], tokenizer: ModelTokenizer) -> Session:
    """The same load: every request with its ids, after the requests that its client waited for and as long after them."""
    shared = _shared([line.prompt for line in lines])
    threads = {agent: number for number, agent in enumerate(dict.fromkeys(line.name.agent for line in lines))}
    held: dict[str, int] = defaultdict(lambda: shared)
    asks: list[Ask] = []
    for number, line in enumerate(lines):
        after = _waited_for(line.name, lines[:number])
        pause = line.arrival - max((lines[one].end for one in after), default=lines[0].arrival)
        answer = tokenizer.encode(line.answer)[: line.output_tokens]
        filled = answer + [_FILL + number * 4096 + i for i in range(line.output_tokens - len(answer))]
        told = Told(line.prompt, filled, line.stopped)
        fresh = max(1, len(line.prompt) - held[line.name.agent])
        asks.append(Ask(threads[line.name.agent], fresh, line.output_tokens, max(0.0, pause), after, told))
        held[line.name.agent] = len(line.prompt) + line.output_tokens
    return Session(0, 0, 0, shared, tuple(asks))


def _shared(prompts: Sequence[Sequence[int]]) -> int:
    """Ids that all begin with."""
    return next((i for i, ids in enumerate(zip(*prompts, strict=False)) if len(set(ids)) > 1), min(map(len, prompts)))


def _waited_for(name: Name, earlier: Sequence[Line]) -> tuple[int, ...]:
    """By the rules of bench.agent_scenario: an agent waits for its own last answer, the main one for its sub-agents, they for it."""
    own = [i for i, line in enumerate(earlier) if line.name.agent == name.agent][-1:]
    turn = name.turn - 1 if name.agent == MAIN else name.turn
    others = [i for i, line in enumerate(earlier) if line.name.turn == turn and (line.name.agent == MAIN) != (name.agent == MAIN)]
    return tuple(sorted({*own, *others}))


def simulated(lines: Sequence[Line], tokenizer: ModelTokenizer, costs: StepCosts, slots: int, ctx: int) -> Agents:
    """The figures of the same load on the simulated box. Raises ValueError when a request did not end as it should."""
    session = script(lines, tokenizer)
    plan = Plan(costs=costs, traffic=Traffic(agent_prompt=0, chat_prompt=0, ctx=ctx), slots=slots, requests=len(lines), clients=1)
    trail = simulate(plan, [session])
    (box,) = trail.boxes
    assert isinstance(box, ExactBox)
    answered = sum(not one.failed for one in trail.done)
    if answered < len(lines):
        raise ValueError(f"{answered} of {len(lines)} requests were answered as they were told")
    done = _by_name(trail.done, session, lines)
    behind = [one for one in done.values() if one.request.answer > 1]
    return Agents(
        ttft={name: one.first_token - one.request.arrival for name, one in done.items()},
        e2e={name: one.end - one.request.arrival for name, one in done.items()},
        token=sum(one.end - one.first_token for one in behind) / sum(one.request.answer - 1 for one in behind),
        makespan=max(one.end for one in done.values()) - min(one.request.arrival for one in done.values()),
        output_tokens=sum(one.request.answer for one in done.values()),
        prompt_tokens=sum(one.request.prompt for one in done.values()),
        reused=+box.reused,
    )


def _by_name(done: Sequence[Done], session: Session, lines: Sequence[Line]) -> dict[Name, Done]:
    """An agent's requests keep their order, whatever the order among agents."""
    of_thread: dict[int, list[Name]] = defaultdict(list)
    for ask, line in zip(session.asks, lines, strict=True):
        of_thread[ask.thread].append(line.name)
    names = {thread: iter(found) for thread, found in of_thread.items()}
    found = {next(names[one.request.thread]): one for one in sorted(done, key=lambda one: one.request.arrival)}
    return {line.name: found[line.name] for line in lines}
