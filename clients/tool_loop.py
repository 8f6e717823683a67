"""One agent through one task of three turns: a command, then a command and a file at once, then the answer.

What each turn is answered with occurs in no earlier prompt: the texts that the script waits for are computed by the commands.
"""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import Any, NamedTuple

from clients.agents import Agent, Place, environment
from clients.dialects import answer
from clients.server import Server

AGENT_SECONDS = 180
_TRACE_SECONDS = 10
_TURNS = 3
_TEXT = 'Grüße & <b>"quoted"</b> \\n'


class Outcome(NamedTuple):
    """How an instance did."""

    seconds: float
    cached: list[int]  # of each turn's prompt
    frontiers: list[int]  # tokens that the session held at the end of each turn
    span: tuple[float, float]  # from its first request to the end of its last; times of the clock
    problems: list[str]


class Instance:
    """One agent in folders of its own."""

    def __init__(self, agent: Agent, number: int, folder: Path) -> None:
        """`folder` is made."""
        self.agent = agent
        self.name = f"{agent.name} {number}"
        self._tag = f"{agent.package.rpartition('/')[2]}-{number:02}"
        self._folder = folder / self._tag
        self._place = Place(self._folder / "home", self._folder / "work")
        (self._place.home / "tmp").mkdir(parents=True)
        self._place.work.mkdir()

    def answers(self, dialect: str) -> list[dict[str, Any]]:
        """Its part of a script."""
        tag, agent = self._tag, self.agent
        first = f"cat > first.txt <<'END'\n{_TEXT}\nEND\necho line-$((40+4))-{tag} >> first.txt; echo one-$((40+2))-{tag}"
        second = f"printf 'second\\n' > second.txt; echo two-$((40+3))-{tag}"
        both = [agent.run_command(second), agent.read_file(self._place.work / "first.txt")]
        turns = [
            answer(dialect, "I begin with a file.", "First a file.", [agent.run_command(first)]),
            answer(dialect, "Now both at once.", "Then another one.", both),
            answer(dialect, "That was all.", self._final),
        ]
        after = [[self._task], [f"one-42-{tag}"], [f"two-43-{tag}", f"line-44-{tag}"]]
        return [{"after": text, "say": turn} for turn, texts in zip(turns, after, strict=True) for text in texts]

    def run(self, server: Server) -> Outcome:
        """Do the task, and judge client, files and trace."""
        settings = environment(self._place) | self.agent.configure(self._place, server)
        command = self.agent.command(server, self._task)
        started = time.monotonic()
        problems: list[str] = []
        with (self._folder / "stdout").open("w") as out, (self._folder / "stderr").open("w") as err:
            try:
                done = subprocess.run(command, cwd=self._place.work, env=settings, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                                      timeout=AGENT_SECONDS, check=False)  # fmt: skip
                if done.returncode:
                    problems.append(f"exit status {done.returncode}: {self._last_words()}")
            except subprocess.TimeoutExpired:
                problems.append(f"not done after {AGENT_SECONDS} s")
        seconds = time.monotonic() - started
        turns = self._turns(server)
        problems += self._of_files() + _of_turns(turns, self.agent.api)
        cached = [turn["routed"]["cached_tokens"] for turn in turns]
        problems += self._of_output(sum(cached))
        span = (turns[0]["time"], turns[-1]["time"] + turns[-1]["seconds"]["end"]) if turns else (0.0, 0.0)
        return Outcome(seconds, cached, [_frontier(turn) for turn in turns], span, problems)

    @property
    def _task(self) -> str:
        return f"Make the files of task {self._tag} now."

    @property
    def _final(self) -> str:
        return f"Both files of {self._tag} are made."

    def _last_words(self) -> str:
        return ((self._folder / "stderr").read_text()[-500:] or (self._folder / "stdout").read_text()[-500:]).strip()

    def _turns(self, server: Server) -> list[dict[str, Any]]:
        """The requests of the conversation. The server writes its trace a moment after the answer."""
        deadline = time.monotonic() + _TRACE_SECONDS
        while True:
            own = [one for one in server.requests() if self._task in one["prompt"]]
            turns = [one for one in own if not self.agent.side or self.agent.side not in one["prompt"]]
            if len(turns) >= _TURNS or time.monotonic() > deadline:
                return turns
            time.sleep(0.1)

    def _of_files(self) -> list[str]:
        wanted = {"first.txt": f"{_TEXT}\nline-44-{self._tag}\n", "second.txt": "second\n"}
        problems = []
        for name, text in wanted.items():
            path = self._place.work / name
            if not path.exists():
                problems.append(f"{name} was not made")
            elif path.read_text(encoding="utf-8") != text:
                problems.append(f"{name} holds {path.read_text(encoding='utf-8')!r}")
        return problems

    def _of_output(self, cached: int) -> list[str]:
        output = (self._folder / "stdout").read_text(encoding="utf-8")
        try:
            said = self.agent.said(output)
        except (LookupError, ValueError, TypeError) as error:
            return [f"its output cannot be read ({error!r}): {output[-300:]!r}"]
        problems = [] if said.text == self._final else [f"it ended with {said.text!r}"]
        if said.cached not in (None, cached):
            problems.append(f"it counted {said.cached} cached tokens, the server {cached}")
        return problems


def _frontier(turn: dict[str, Any]) -> int:
    """Tokens that a session holds after a turn: the last one that was drawn is evaluated with what follows it."""
    end = turn["end"]
    return int(end["prompt_tokens"] + end["completion_tokens"] - 1)


def _of_turns(turns: list[dict[str, Any]], api: str) -> list[str]:
    if len(turns) != _TURNS:
        return [f"{len(turns)} turns: {[turn['output'][:80] for turn in turns]}"]
    problems = []
    for i, (turn, reason) in enumerate(zip(turns, ("tool_calls", "tool_calls", "stop"), strict=True), 1):
        if turn["api"] != api:
            problems.append(f"turn {i} came by {turn['api']}")
        if turn["cancelled"] or turn["end"] is None or turn["end"]["reason"] != reason:
            problems.append(f"turn {i} ended by {turn['cancelled'] or turn['end']}")
            return problems
        if turn["end"]["prompt_tokens"] != turn["prompt_tokens"]:
            problems.append(f"turn {i}: {turn['end']['prompt_tokens']} tokens evaluated for a prompt of {turn['prompt_tokens']}")
        if turn["tool_replay"]["rewritten"] or turn["tool_replay"]["missing"]:
            problems.append(f"turn {i}: calls not replayed as they were sampled: {turn['tool_replay']}")
    for i in range(1, _TURNS):
        cached, frontier = turns[i]["routed"]["cached_tokens"], _frontier(turns[i - 1])
        if cached < frontier:
            problems.append(f"turn {i + 1}: {cached} cached of {frontier} ({turns[i]['routed']['tier']})")
    return problems
