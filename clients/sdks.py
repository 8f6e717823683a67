"""The official SDKs, each a program in its own language: what a scripted server says to them, and how their checks are collected.

A program gets the server's address and its model, and prints a JSON line a check: {"check": NAME, "problem": TEXT or null}.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from clients.agents import FOLDER
from clients.dialects import Call, answer
from clients.server import Server

SDK_SECONDS = 120


class Sdk(NamedTuple):
    """One language."""

    name: str
    command: Sequence[str]


SDKS = (
    Sdk("Python SDKs", [str(FOLDER / ".venv" / "bin" / "python"), "-W", "error", str(FOLDER / "sdk_python.py")]),
    Sdk("JavaScript SDKs", [str(FOLDER / "node_modules" / ".bin" / "node"), str(FOLDER / "sdk_javascript.mjs")]),
)

_TEXT = "Plain wörds: 日本語 <b>&amp;</b> 🙂."
_FORM = '{"city":"Oslo","days":3}'
_REASONING = "First I look\nat it."
_ZURICH = Call("weather", [("days", 3), ("city", 'Zürich "ZH" <&>')])
_FORCED = Call("weather", list(reversed(_ZURICH.arguments)))  # a forced call has its parameters as they were declared
_OSLO = Call("weather", [("days", 1), ("city", "Oslo\n(NO)")])


def sdk_answers(dialect: str) -> list[dict[str, Any]]:
    """The script. The programs know what comes: the two must agree."""
    said = {
        "say a text": answer(dialect, "", _TEXT),
        "think, then say a text": answer(dialect, _REASONING, _TEXT),
        "call once": answer(dialect, "", "I look.", [_ZURICH]),
        "think, then call once": answer(dialect, _REASONING, "I look.", [_ZURICH]),
        "think, then call twice": answer(dialect, _REASONING, "I look.", [_ZURICH, _OSLO]),
        "as JSON": answer(dialect, "", _FORM),
        "must call": answer(dialect, "", "", [_FORCED]),
        "sunny": answer(dialect, _REASONING, "It is sunny."),
    }
    return [{"after": after, "say": say} for after, say in said.items()]


def run_sdk(sdk: Sdk, server: Server) -> tuple[float, int, list[str]]:
    """Run the program: seconds, checks that passed, problems."""
    started = time.monotonic()
    try:
        done = subprocess.run([*sdk.command, server.url, server.model], stdin=subprocess.DEVNULL, capture_output=True, text=True,
                              timeout=SDK_SECONDS, check=False)  # fmt: skip
    except subprocess.TimeoutExpired:
        return time.monotonic() - started, 0, [f"not done after {SDK_SECONDS} s"]
    checks = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    problems = [f"{one['check']}: {one['problem']}" for one in checks if one["problem"]]
    if done.returncode or not checks:
        problems.append(f"exit status {done.returncode}: {done.stderr[-1000:]}")
    return time.monotonic() - started, sum(1 for one in checks if not one["problem"]), problems
