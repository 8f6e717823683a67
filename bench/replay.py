"""Replays long agent conversations against scripted servers, and compares the tokens they evaluate with those that are new.

    python -m bench.replay [--turns 40] [--dialects NAME,...] [--clients NAME,...] [--keep DIR]

One server a dialect, whose model says what a transcript dictates, and one conversation a client at the same time, over real
sockets. Every client encodes its history anew for each request, as the agent of its name does: see bench/replay_clients.py.

**New** are the tokens of what a client adds to a conversation. Of the first request that is the whole prompt. Of a later one it is
the end of the prompt behind the last token that the model sampled: the end of that turn, each added message with its frame, and
the opening of the next answer. It is measured in the rendering alone: the request is read and rendered by the server's own code,
the dialect says what follows the answer (`Dialect.tail`), the prompt in the server's trace must end with that very text, and its
tokens are counted. What was sampled is never new, and whatever the server did reuse plays no part.

**Evaluated** are prompt tokens less cached tokens, as the client is told in its usage. Where a request evaluates more than is new
the surplus was evaluated **again**, and no saving elsewhere makes up for it. The exit status is 1 when what was evaluated again is
more than 1 % of what is new in any conversation, or when any reasoning, text, call or reason is not what the script says.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rich import box
from rich.console import Console
from rich.table import Table

from bench.replay_clients import CLIENTS, Client, Reply, sse_events
from bench.replay_growth import Growth
from bench.replay_transcript import Json, Transcript, Turn, transcript
from clients.dialects import Call, answer
from clients.server import Server, serving
from ds4batch.chat.dialects.choose import FAMILIES

MOST_AGAIN = 0.01  # of what is new
DIALECTS = (*FAMILIES, "jinja")
PATIENCE = 300  # seconds
SHOWN = 5  # problems of a conversation


@dataclass
class Played:
    """One conversation."""

    client: str
    api: str
    requests: int = 0
    prompts: int = 0  # tokens of all
    new: int = 0
    evaluated: int = 0
    again: int = 0
    tiers: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    suspects: list[str] = field(default_factory=list)  # requests that evaluated more than they should

    @property
    def fine(self) -> bool:
        """Whether all was answered as the script says, and hardly anything was evaluated again."""
        return not self.problems and self.again <= MOST_AGAIN * self.new


def spelled(dialect: str, turn: Turn) -> str:
    """A turn as a model of that dialect samples it."""
    if dialect != "jinja":
        calls = [Call(call.tool, list(call.arguments.items())) for call in turn.calls]
        return answer(dialect, turn.reasoning, turn.text, calls)
    made = [json.dumps({"name": call.tool, "arguments": call.arguments}, ensure_ascii=False) for call in turn.calls]
    block = "".join(f"\n<tool_call>\n{one}\n</tool_call>" for one in made)
    return f"<think>\n{turn.reasoning}\n</think>\n\n{turn.text}{block}"


def script(dialect: str, transcripts: Sequence[Transcript]) -> Json:
    """What the model says in all conversations."""
    answers = [
        {"after": story.after(number), "say": spelled(dialect, turn)}
        for story in transcripts
        for number, turn in enumerate(story.turns)
    ]
    return {"dialect": dialect, "answers": answers}


def play(client: Client, story: Transcript, url: str) -> tuple[Played, list[tuple[str, Json]]]:
    """Hold a whole conversation. Returns what it took, as far as the client knows, and its requests with their ids."""
    played, sent = Played(client.name, client.api), list[tuple[str, Json]]()
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=PATIENCE)
    for number, turn in enumerate(story.turns):
        if turn.asked:
            client.ask(turn.asked)
        if turn.reminder:
            client.remind(turn.reminder)
        body, name = client.body(), f"{client.name}-{number}"
        sent.append((name, json.loads(json.dumps(body))))
        connection.request("POST", client.path, json.dumps(body).encode(), {"X-Request-Id": name})
        response = connection.getresponse()
        raw = response.read()
        if response.status != 200:
            played.problems.append(f"turn {number}: {response.status} {raw[:300].decode(errors='replace')}")
            break
        try:
            reply = client.take(sse_events(raw))
        except ValueError as error:
            played.problems.append(f"turn {number}: {error}")
            break
        played.requests += 1
        played.prompts += reply.prompt
        played.evaluated += reply.prompt - reply.cached
        played.problems += [f"turn {number}: {problem}" for problem in _wrong(turn, reply)]
        if len(reply.calls) != len(turn.calls):
            break
        if turn.calls:
            client.bring(list(zip(reply.calls, turn.results, strict=True)))
    connection.close()
    return played, sent


def _wrong(turn: Turn, reply: Reply) -> Iterator[str]:
    made: list[tuple[str, Any]] = [(call.tool, json.loads(call.arguments)) for call in reply.calls]
    pairs = (
        ("reasoning", turn.reasoning, reply.reasoning),
        ("text", turn.text, reply.text),
        ("calls", [(call.tool, call.arguments) for call in turn.calls], made),
        ("reason", "tool_calls" if turn.calls else "stop", reply.reason),
    )
    for what, wanted, got in pairs:
        if wanted != got:
            yield f"the {what} should be {wanted!r} and is {got!r}"


def account(played: Played, sent: Sequence[tuple[str, Json]], growth: Growth, server: Server) -> None:
    """Add what the trace and the rendering know. The trace has a line for each request."""
    traced = {record["request"]: record for record in server.requests()}
    for name, body in sent[: played.requests]:
        record = traced[name]
        try:
            new = growth.new_tokens(played.api, body, record["prompt"])
        except ValueError as error:
            played.problems.append(f"{name}: {error}")
            continue
        evaluated = record["end"]["prompt_tokens"] - record["end"]["cached_tokens"]
        again = max(0, evaluated - new)
        played.new += new
        played.again += again
        played.tiers[record["routed"]["tier"]] += 1
        if again > MOST_AGAIN * new:
            played.suspects.append(_told(name, again, new, record))


def _told(name: str, again: int, new: int, record: Json) -> str:
    """Where a request that evaluated too much left the session, as the server saw it."""
    routed, differs = record["routed"], record["routed"]["divergence"] or {}
    return (
        f"{name}: {again} tokens again, {new} new; {routed['tier']} reused {routed['cached_tokens']}; differs in message "
        f"{record['divergence_message']}, from token {differs.get('at')} on: {differs.get('held')!r} held, {differs.get('asked')!r} asked"
    )


def replay(dialect: str, clients: Sequence[type[Client]], turns: int, folder: Path) -> list[Played]:
    """One server and a conversation a client."""
    stories = [transcript(client.name, turns) for client in clients]
    with serving(script(dialect, stories), folder, slots=len(clients)) as server, ThreadPoolExecutor(len(clients)) as pool:
        made = [client(story.system) for client, story in zip(clients, stories, strict=True)]
        done = list(pool.map(play, made, stories, [server.url] * len(made)))
    growth = Growth(folder / "scripted.json")
    for played, sent in done:
        account(played, sent, growth, server)
    return [played for played, _ in done]


def main() -> None:
    """Play all, print a row a conversation."""
    parser = argparse.ArgumentParser(prog="replay", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--turns", type=int, default=40, help="answers of the model in each conversation (default: %(default)s)")
    parser.add_argument("--dialects", default=",".join(DIALECTS), help="(default: %(default)s)")
    parser.add_argument("--clients", default=",".join(client.name for client in CLIENTS), help="(default: %(default)s)")
    parser.add_argument("--keep", type=Path, help="folder for scripts, logs and traces")
    options = parser.parse_args()
    known = {client.name: client for client in CLIENTS}
    clients, dialects = options.clients.split(","), options.dialects.split(",")
    if unknown := (set(clients) - set(known)) | (set(dialects) - set(DIALECTS)):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join([*known, *DIALECTS])}")
    chosen = [known[name] for name in clients]
    table = Table("dialect", "client", "API", "requests", "prompt tokens", "new", "evaluated", "again", "how", "", box=box.SIMPLE)
    bad = False
    with tempfile.TemporaryDirectory() as temporary:
        for dialect in dialects:
            for played in replay(dialect, chosen, options.turns, (options.keep or Path(temporary)) / dialect):
                bad = bad or not played.fine
                how = ", ".join(f"{tier} {count}" for tier, count in played.tiers.most_common())
                again = f"{played.again} ({played.again / max(1, played.new):.2%})"
                figures = map(str, (played.requests, played.prompts, played.new, played.evaluated))
                table.add_row(dialect, played.client, played.api, *figures, again, how, "ok" if played.fine else "FAILED")
                for problem in (played.problems + played.suspects * (not played.fine))[:SHOWN]:
                    print(f"{dialect}, {played.client}: {problem}", file=sys.stderr)
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    sys.exit(bad)


if __name__ == "__main__":
    main()
