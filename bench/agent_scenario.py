"""One main agent and its sub-agents: who says what to the server, and in which order.

Owns the script. The main agent speaks, its sub-agents speak side by side, what they said is the result of the main
agent's calls, and so on. All share one system prompt and its tools. One sub-agent hangs up and asks the same again, one edits
what it said last and asks again. The script depends on the seed and on the answers alone, never on time: a server that answers
alike is asked alike, whatever its size. Knows no HTTP: requests go through a function it is given.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

from bench import seeded
from bench.agent_accounting import Box, Renderer
from bench.agent_client import Answer, Request
from bench.agent_messages import TOOLS, Habit, Json, ToolCall, Turn, history
from bench.prompts import PromptBook

MAIN = "main"
SUB_AGENTS = 8
HANGUP_CHUNKS = 2
FIRST_USER_TURN = 1  # from here on every second turn ends a tool loop, and the user speaks
HANGUP_AT, EDIT_AT = 1, 2  # turns: one that answers a tool's result, one that answers the user
FEWEST_TURNS = EDIT_AT + 1
HABITS = (Habit.SCHEMA_ORDER, Habit.COMPACT, Habit.FORGETFUL, Habit.EXACT)
REPORT_CHARACTERS = 60  # of a sub-agent's answer, that the main agent is told
REPORT_TOKENS = SUB_AGENTS * 32  # of all reports together, at most, as far as the answers are words

Ask = Callable[[Request], Awaitable[Answer]]


@dataclass(frozen=True)
class Record:
    """One request as it went. Token counts of the prompt as this program renders it."""

    request: Request
    answer: Answer
    rendered_tokens: int
    new_tokens: int  # see agent_accounting


@dataclass(frozen=True)
class Plan:
    """What shapes the scenario. Lengths in tokens."""

    seed: int
    turns: int
    main_tokens: int  # system prompt and tools, which all agents share
    turn_tokens: int  # what each turn adds beside the answer
    answer_tokens: int  # the longest answer


@dataclass
class Agent:
    """One conversation."""

    name: str
    habit: Habit
    opening: str
    sampling: Json
    turns: list[Turn] = field(default_factory=list)
    lost: bool = False  # a request failed; its conversation cannot go on


class Scenario:
    """The whole script. Build one for each run; `run` is called once."""

    def __init__(self, plan: Plan, renderer: Renderer, book: PromptBook, model: str, ask: Ask, label: str) -> None:
        """`book` cuts the texts, `label` makes the requests' ids this run's own."""
        self.records: list[Record] = []
        self._plan = plan
        self._renderer = renderer
        self._book = book
        self._model = model
        self._ask = ask
        self._label = label
        self._box = Box()
        self._system = self._system_prompt()
        self._main = self._agent(MAIN, Habit.SCHEMA_ORDER, 0)
        self._subs = [self._agent(f"sub{i}", HABITS[i % len(HABITS)], i) for i in range(1, SUB_AGENTS + 1)]

    async def run(self, after_round: Callable[[int], Awaitable[None]]) -> None:
        """Make every request. `after_round` is awaited while nothing is under way."""
        for turn in range(self._plan.turns):
            await self._step(self._main, turn)
            await asyncio.gather(*(self._step(agent, turn) for agent in self._subs))
            self._report_to_main()
            await after_round(turn)
        await self._step(self._main, self._plan.turns)

    async def _step(self, agent: Agent, turn: int) -> None:
        """One turn of one agent, with what its client does wrong."""
        if agent.lost:
            return
        if agent is self._subs[0] and turn == HANGUP_AT:
            await self._made(agent, turn, "hangup", hangup_after=HANGUP_CHUNKS)
            answer = await self._made(agent, turn, "retry")
        else:
            answer = await self._made(agent, turn, "turn")
        if agent is self._subs[1] and turn == EDIT_AT and not answer.failure:
            said = agent.turns[-1]
            agent.turns[-1] = replace(said, user=said.user + " And leave out the dates.")
            answer = await self._made(agent, turn, "edit")
        if answer.failure:
            agent.lost = True
            return
        agent.turns.append(self._next(agent, turn, answer))

    async def _made(self, agent: Agent, turn: int, kind: str, hangup_after: int = 0) -> Answer:
        request = Request(f"{self._label}-{agent.name}-{turn}-{kind}", agent.name, kind, self.body(agent), hangup_after)
        prompt = self._renderer.rendered(request.body)
        new = self._box.new_tokens(prompt)
        answer = await self._ask(request)
        if not answer.failure:
            stopped = answer.finish_reason == "stop"
            self._box.evaluated(prompt, self._renderer.fed_back(answer.content, stopped=stopped))
        self.records.append(Record(request, answer, prompt.tokens, new))
        return answer

    def body(self, agent: Agent) -> Json:
        """The request that asks for the agent's next turn."""
        opening = [{"role": "system", "content": self._system}, {"role": "user", "content": agent.opening}]
        turns = history(agent.turns, agent.habit)
        return {
            "model": self._model,
            "messages": opening + turns,
            "tools": list(TOOLS),
            "max_tokens": self._plan.answer_tokens,
            **agent.sampling,
        }

    def _next(self, agent: Agent, turn: int, answer: Answer) -> Turn:
        """What follows an answer: the user, or the results of the model's calls, or of one it is made to have made."""
        if agent is not self._main and turn >= FIRST_USER_TURN and (turn - FIRST_USER_TURN) % 2 == 0:
            user = f"Go on with part {turn} of {agent.name}. {self._text(self._plan.turn_tokens, agent.name, turn)}"
            return Turn(answer.content, answer.reasoning, user=user)
        calls = answer.calls or (self._scripted_call(agent, turn),)
        results = tuple(self._result(agent, turn, i) for i in range(len(calls)))
        return Turn(answer.content, answer.reasoning, calls, results)

    def _scripted_call(self, agent: Agent, turn: int) -> ToolCall:
        """A call in the bytes a model might have drawn: another order than the schema's, escapes, spaces."""
        if agent is self._main:
            return ToolCall(f"call_{turn}", "agent", json.dumps({"name": f"crew {turn}", "task": "Überblick: every part, once"}))
        place = {"limit": 40 + turn, "path": f"notes/{agent.name}/caf\u00e9-{turn}.txt", "offset": 100 * turn}
        return ToolCall(f"call_{turn}", "read_file", json.dumps(place))

    def _result(self, agent: Agent, turn: int, call: int) -> str:
        if agent is self._main:
            return ""  # what its sub-agents are about to say
        text = self._text(self._plan.turn_tokens, agent.name, turn, call)
        return json.dumps({"path": f"{agent.name}/{turn}", "lines": text, "at": turn, "end": False}, ensure_ascii=False)

    def _report_to_main(self) -> None:
        if self._main.lost:
            return
        said = {agent.name: agent.turns[-1].content[:REPORT_CHARACTERS] for agent in self._subs if agent.turns}
        report = json.dumps({"reports": said, "at": len(self._main.turns)}, ensure_ascii=False)
        last = self._main.turns[-1]
        self._main.turns[-1] = replace(last, results=(report,) * len(last.calls))

    def _agent(self, name: str, habit: Habit, index: int) -> Agent:
        task = f"{name} here. {self._text(self._plan.turn_tokens, name, 'task')} Say what matters in it."
        seed = seeded.below(1 << 31, self._plan.seed, "sampling", name)
        drawn: Json = {"temperature": 0.8, "top_p": 0.95, "seed": seed}
        return Agent(name, habit, task, drawn if index % 2 else {"temperature": 0})

    def _system_prompt(self) -> str:
        """A system prompt that makes, with the tools, the shared beginning `main_tokens` long."""
        frame = "You work through a folder of notes with your tools and report briefly.\n"
        body = {"messages": [{"role": "system", "content": frame}], "tools": list(TOOLS)}
        missing = self._plan.main_tokens - self._renderer.rendered(body).tokens
        return frame + self._text(max(0, missing), "system")

    def _text(self, tokens: int, *what: object) -> str:
        return self._book.slice(round(tokens * self._book.characters_per_token), *what)


def unique_bodies(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Answered records by what was asked, in the order in which it was asked first."""
    by_body: dict[str, list[Record]] = {}
    for record in records:
        if not record.answer.failure and not record.answer.hung_up:
            by_body.setdefault(json.dumps(record.request.body, sort_keys=True), []).append(record)
    return by_body
