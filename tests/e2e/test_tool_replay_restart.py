"""Calls of a session that outlived its server are replayed as they were sampled: the demo model, held to its tools, over HTTP."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_restart import DEMO, MODEL, SMALL, cached, evaluated, kv
from tests.server.harness import RealServer

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a town. " + "It knows all towns. " * 12,
        "parameters": {
            "type": "object",
            "properties": {"town": {"enum": ["Paris", "Rome"]}, "days": {"enum": [1, 2]}},
            "required": ["town", "days"],
            "additionalProperties": False,
        },
    },
}


class Agent:
    """A client that spells the arguments of its history in its own way."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = [{"role": "user", "content": "What will the weather be?"}]
        self.ids: list[str] = []

    def ask(self, server: RealServer) -> dict[str, Any]:
        """One more call and its result; the usage."""
        named = {"type": "function", "function": {"name": "weather"}}
        body = {"messages": self.messages, "tools": [TOOL], "tool_choice": named, "temperature": 0, "max_tokens": 200}
        answer = server.request("POST", "/v1/chat/completions", body)
        assert answer.status == 200, answer.raw
        calls = answer.body["choices"][0]["message"]["tool_calls"]
        for call in calls:
            arguments = json.loads(call["function"]["arguments"])
            call["function"]["arguments"] = json.dumps(dict(sorted(arguments.items())), indent=3)
        self.ids += [call["id"] for call in calls]
        self.messages.append({"role": "assistant", "content": "", "tool_calls": calls})
        self.messages += [{"role": "tool", "tool_call_id": call["id"], "content": "It will rain."} for call in calls]
        usage: dict[str, Any] = answer.body["usage"]
        return usage


def serving(directory: Path, *more: str) -> RealServer:
    trace = directory / "trace"
    return RealServer(*MODEL, *SMALL, "--kv-disk-dir", str(directory / "kv"), "--trace", str(trace), *more)


def replay(directory: Path) -> dict[str, int]:
    """What became of the calls of the last request."""
    found: dict[str, int] = json.loads((directory / "trace").read_text().splitlines()[-1])["tool_replay"]
    return found


def test_calls_are_replayed_as_they_were_sampled_through_every_restart(tmp_path: Path) -> None:
    if not DEMO.exists():
        pytest.fail(f"{DEMO} is missing; `make setup` fetches it")
    agent = Agent()
    with contextlib.closing(serving(tmp_path)) as server:
        agent.ask(server)
    for turn in (1, 2):  # the second time, its first calls are of the server before the last
        with contextlib.closing(serving(tmp_path)) as server:
            usage = agent.ask(server)
            assert cached(usage) > evaluated(usage)
            assert evaluated(usage) < 40, "the session was not continued behind its calls"
            assert server.metric('ds4batch_disk_load_total{result="hit"}') == 1
        assert replay(tmp_path) == {"replayed": 0, "disk": turn, "rewritten": 0, "missing": 0}
    verified = kv("verify", "--kv-disk-dir", str(tmp_path / "kv")).stdout
    assert f"ok, {len(agent.ids)} calls" in verified
    assert verified.endswith(" 0 bad\n")
    with contextlib.closing(serving(tmp_path, "--disable-exact-dsml-tool-replay")) as server:
        usage = agent.ask(server)
        assert evaluated(usage) > 60, "the calls are spelt anew, so the session ends before the first of them"
    assert replay(tmp_path) == {"replayed": 0, "disk": 0, "rewritten": 3, "missing": 3}
