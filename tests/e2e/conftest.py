"""Servers of scripted models, one for each dialect."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.api_clients import CLIENTS, Client
from tests.scripted.spellings import COUNT, LOOK, NO_ARGUMENTS, SPELLINGS, Spelling
from tests.server.harness import RealServer

CTX, SLOTS = 6000, 4
RETRY = "Tool error: invalid"
"""What every dialect says to a model whose calls could not be read."""


def answers(spelling: Spelling) -> list[dict[str, Any]]:
    """What the model says to which word of the last message."""
    turn = spelling.turn
    said: dict[str, str] = {
        "ask-text": turn("hm, é\nso", "Hello \U0001f600, wörld.\n\nBye."),
        "ask-quiet": spelling.reasoned.format("") * spelling.opened + turn("", "I look.", COUNT),
        "ask-call": turn("hm", "I look.", LOOK),
        "ask-bare": turn("hm", "", NO_ARGUMENTS),
        "ask-many": turn("hm", "I look twice.", LOOK, COUNT, NO_ARGUMENTS),
        "ask-loop": turn("first", "I look.", LOOK, COUNT),
        "seen-one": turn("second", "And again.", ("look", {"at": "there", "times": 1})),
        "seen-two": turn("third", "All is seen."),
        "say-bare": turn("", "Just text.", COUNT),
        "ask-more": turn("fourth", "There is no more."),
        "ask-broken": turn("hm", "I try.") + spelling.unreadable,
        "ask-half": turn("hm", "I try.", COUNT).partition(" \U0001f411")[0],
        "ask-mended": turn("hm", "I look.", LOOK).removesuffix(spelling.closer),
        "ask-inside": spelling.reasoned.partition("{}")[0] + "hm, I look" + spelling.block(COUNT),
        "ask-patch": turn("hm", "", ("patch", {"input": "*** Begin\n+ \u00e9\n*** End\n"})),
        RETRY: turn("again", "Now then.", COUNT),
    }
    return [{"after": after, "say": say} for after, say in said.items()]


class Scripted(RealServer):
    """`ds4batch serve --script`, and what its model says."""

    def __init__(self, dialect: str, directory: Path) -> None:
        self.dialect, self.spelling = dialect, SPELLINGS[dialect]
        self.answers = {one["after"]: one["say"] for one in answers(self.spelling)}
        script = directory / f"{dialect}.json"
        script.write_text(json.dumps({"dialect": dialect, "answers": answers(self.spelling)}))
        super().__init__("--script", str(script), "--ctx", str(CTX), "--batched-session", str(SLOTS))


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Scripted]]:
    directory = tmp_path_factory.mktemp("scripts")
    with ThreadPoolExecutor(len(SPELLINGS)) as pool, contextlib.ExitStack() as stack:  # their start is mostly imports
        started = list(pool.map(lambda dialect: Scripted(dialect, directory), SPELLINGS))
        stack.callback(lambda: list(pool.map(Scripted.close, started)))
        yield {server.dialect: server for server in started}


@pytest.fixture(params=SPELLINGS)
def model(request: pytest.FixtureRequest, servers: dict[str, Scripted]) -> Scripted:
    return servers[request.param]


@pytest.fixture(params=CLIENTS, ids=lambda client: client.name)
def client(request: pytest.FixtureRequest) -> Client:
    found: Client = request.param
    return found
