"""What users do: sessions of requests that wait for each other, as functions of a seed and a number.

A session belongs to a user and an application, whose system prompt and tools begin every prompt. It has threads, each a growing
conversation: one in a chat, a main agent and its sub-agents in an agent's. A request goes on with its thread: all that was said
there, then `fresh` tokens. It is sent `pause` seconds after the requests in `after` have ended. Clients send back every token as it
was drawn.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from bench import seeded
from bench.arrivals import arrival_offsets

KINDS = ("agents", "chat", "mixed")
_BATCH = 4096  # arrivals drawn at once


class Told(NamedTuple):
    """A request that was recorded: its ids, and those that were drawn for it, as many as the request's `answer` says."""

    prompt: list[int]
    drawn: list[int]
    stopped: bool  # behind `drawn` the model drew the end of its turn


class Ask(NamedTuple):
    """One request."""

    thread: int
    fresh: int  # prompt tokens beyond what its thread holds
    answer: int  # tokens
    pause: float
    after: tuple[int, ...]  # requests of the session, by number, all before this one
    told: Told | None = None  # what it says; None: ids of its own behind its thread's


@dataclass(frozen=True)
class Session:
    """One visit of a user."""

    id: int
    user: int
    app: int
    shared: int  # tokens of the application's system prompt and tools
    asks: tuple[Ask, ...]


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Lengths in tokens, pauses in seconds. A pair is the range of a log-uniform draw. Raises ValueError."""

    kind: str = "agents"
    ctx: int = 32768
    users: int = 64
    apps: int = 4
    agent_prompt: int = 12_000
    chat_prompt: int = 600
    task: tuple[int, int] = (100, 800)
    tool_result: tuple[int, int] = (60, 1_500)
    agent_answer: tuple[int, int] = (40, 300)
    tool_pause: tuple[float, float] = (0.1, 8.0)
    agent_turns: tuple[int, int] = (4, 16)
    sub_agents: tuple[int, int] = (2, 6)
    sub_turns: tuple[int, int] = (2, 8)
    fan_out: float = 0.12  # of a main agent's turns
    chat_message: tuple[int, int] = (20, 250)
    chat_answer: tuple[int, int] = (60, 500)
    chat_turns: tuple[int, int] = (1, 6)
    think_pause: tuple[float, float] = (3.0, 60.0)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"workload: {self.kind} is none of {', '.join(KINDS)}")
        if min(self.users, self.apps) < 1:
            raise ValueError("users and apps: below 1")
        if self.ctx < max(self.agent_prompt, self.chat_prompt) + 2048:
            raise ValueError(f"ctx: {self.ctx} leaves less than 2048 tokens behind a system prompt")

    def session(self, seed: int, number: int) -> Session:
        """The session of that number."""
        draw = seeded.generator(seed, "session", number)
        user, app = draw.randrange(self.users), draw.randrange(self.apps)
        kind = self.kind if self.kind != "mixed" else ("agents" if draw.random() < 0.5 else "chat")
        if kind == "chat":
            return Session(number, user, app + self.apps, self.chat_prompt, _chat(self, draw))
        return Session(number, user, app, self.agent_prompt, _agents(self, draw))

    def mean_asks(self, seed: int, of: int = 200) -> float:
        """Requests of a session, over the first few."""
        return sum(len(self.session(seed, number).asks) for number in range(of)) / of


@dataclass
class _Script:
    """A session's requests as they are made up; none outgrows the context."""

    room: int  # tokens of a thread
    asks: list[Ask] = field(default_factory=list)
    held: dict[int, int] = field(default_factory=dict)

    def add(self, thread: int, fresh: int, answer: int, pause: float, after: tuple[int, ...]) -> int | None:
        """The request's number; None when its thread is full."""
        held = self.held.get(thread, 0) + fresh + answer
        if held >= self.room:
            return None
        self.held[thread] = held
        self.asks.append(Ask(thread, fresh, answer, pause, after))
        return len(self.asks) - 1


def _chat(traffic: Traffic, draw: random.Random) -> tuple[Ask, ...]:
    script = _Script(traffic.ctx - traffic.chat_prompt)
    last: tuple[int, ...] = ()
    for turn in range(_whole(draw, traffic.chat_turns)):
        pause = _real(draw, traffic.think_pause) if turn else 0.0
        made = script.add(0, _whole(draw, traffic.chat_message), _whole(draw, traffic.chat_answer), pause, last)
        if made is None:
            break
        last = (made,)
    return tuple(script.asks)


def _agents(traffic: Traffic, draw: random.Random) -> tuple[Ask, ...]:
    """A main agent's tool loop; now and then it sends out sub-agents, whose ends it waits for."""
    script = _Script(traffic.ctx - traffic.agent_prompt)
    last: tuple[int, ...] = ()
    threads = count(1)
    for turn in range(_whole(draw, traffic.agent_turns)):
        fresh = _whole(draw, traffic.tool_result if turn else traffic.task)
        pause = _real(draw, traffic.tool_pause) if turn else 0.0
        made = script.add(0, fresh, _whole(draw, traffic.agent_answer), pause, last)
        if made is None:
            break
        last = (made,)
        if draw.random() < traffic.fan_out:
            last = tuple(_sub_agent(traffic, draw, script, next(threads), made) for _ in range(_whole(draw, traffic.sub_agents)))
    return tuple(script.asks)


def _sub_agent(traffic: Traffic, draw: random.Random, script: _Script, thread: int, parent: int) -> int:
    """The sub-agent's last request."""
    last = parent
    for turn in range(_whole(draw, traffic.sub_turns)):
        fresh = _whole(draw, traffic.tool_result if turn else traffic.task)
        pause = _real(draw, traffic.tool_pause) if turn else 0.0
        made = script.add(thread, fresh, _whole(draw, traffic.agent_answer), pause, (last,))
        if made is None:
            break
        last = made
    return last


def starts(rate: float, burstiness: float, seed: int) -> Iterator[float]:
    """When the sessions of an open loop begin, `rate` a second, without end."""
    at = 0.0
    for batch in count():
        offsets = arrival_offsets(_BATCH, rate, burstiness, seed + batch * 7919)
        yield from (at + offset for offset in offsets)
        at += offsets[-1]


def ids(count_: int, seed: int, *what: object) -> list[int]:
    """Token ids that nothing else has, but for a chance of 2^-11 a pair of long texts."""
    first = seeded.below((1 << 32) - (1 << 21), seed, "ids", *what)
    return list(range(first, first + count_))


def _whole(draw: random.Random, between: tuple[int, int]) -> int:
    return round(_real(draw, between))


def _real(draw: random.Random, between: tuple[float, float]) -> float:
    low, high = between
    return float(low * (high / low) ** draw.random())
