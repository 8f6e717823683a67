"""Two API keys over HTTP, of which one keeps ten times as many requests under way: both get the same from the engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench.fairness import Sender, Watched, chosen, differing, load, write_keys
from bench.http_stream import Outcome
from tests.server.harness import RealServer

LIMIT = 1.2


def crowd(folder: Path, weight: float = 1.0, same: bool = False) -> tuple[Sender, Sender, Watched]:
    """Forty requests against four on four slots of a scripted model whose steps take 4 ms."""
    script = folder / "script.json"
    script.write_text(json.dumps({"step_seconds": 0.004, "answers": [{"after": "", "say": "so", "end": False}]}))
    made = write_keys(folder / "keys", weight, same)
    options = ("--ctx", "4096", "--batched-session", "4", "--max-queue", "99")
    many, few = Sender("many", 40, 1.0), Sender("few", 4, weight)
    with contextlib.closing(RealServer("--script", str(script), "--api-key-file", str(folder / "keys"), *options)) as server:
        _, _, watched = asyncio.run(load(f"http://127.0.0.1:{server.port}", many, few, made, 3.0, 0))
    assert not [result.detail for sender in (many, few) for _, result in sender.results if result.outcome is Outcome.FAILED]
    return many, few, watched


@pytest.mark.parametrize("weight", [1.0, 2.0])
def test_a_key_gets_its_share_however_much_another_sends(tmp_path: Path, weight: float) -> None:
    many, few, watched = crowd(tmp_path, weight)
    shares = [watched.computed(many.name), watched.computed(few.name) / weight]
    assert max(shares) / min(shares) <= LIMIT, shares


@pytest.fixture(scope="module")
def one_key(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Sender, Sender]:
    """Both clients with the same key, and where their server's script is."""
    folder = tmp_path_factory.mktemp("one_key")
    many, few, _ = crowd(folder, same=True)
    return folder, many, few


def test_with_one_key_for_both_the_one_that_sends_more_gets_more(one_key: tuple[Path, Sender, Sender]) -> None:
    """What the other test would see if keys did not count."""
    answered = [sum(result.outcome is Outcome.COMPLETED for _, result in sender.results) for sender in one_key[1:]]
    assert answered[0] > 3 * answered[1]


def test_answers_are_compared_with_those_of_a_server_that_does_nothing_else(one_key: tuple[Path, Sender, Sender]) -> None:
    folder, many, _ = one_key
    asked = chosen(many, 4)
    call, result = asked[0]
    altered = (call, replace(result, text=result.text + "."))
    with contextlib.closing(RealServer("--script", str(folder / "script.json"), "--ctx", "4096")) as server:
        wrong = asyncio.run(differing(f"http://127.0.0.1:{server.port}", [*asked, altered]))
    assert len(asked) == 4
    assert [line.split(":")[0] for line in wrong] == [f"request {call.index}"]
