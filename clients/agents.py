"""The agents: how each is pointed at a server, run once without a terminal, and what its output says.

A home of its own keeps every instance apart from the others and from the user's settings. Starts nothing itself.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from clients.dialects import Call
from clients.server import CONTEXT, Server

FOLDER = Path(__file__).parent
_BINARIES = FOLDER / "node_modules" / ".bin"


class Place(NamedTuple):
    """Where one instance lives."""

    home: Path
    work: Path


class Said(NamedTuple):
    """What an agent reported at its end."""

    text: str  # the last answer
    cached: int | None  # prompt tokens of all requests that it was told were cached; None where it counts otherwise


class Agent(NamedTuple):
    """One client. Its two tools are called in ways that its own schemas know: numbers, and an order of arguments of the model's own."""

    name: str
    package: str  # on npm
    api: str  # as the trace names it
    run_command: Callable[[str], Call]
    read_file: Callable[[Path], Call]
    configure: Callable[[Place, Server], dict[str, str]]  # writes the settings and returns the environment
    command: Callable[[Server, str], list[str]]  # that gives it a task
    said: Callable[[str], Said]  # reads its standard output
    side: str = ""  # what only prompts of requests beside the conversation hold
    sessions: int = 1  # that it uses, those beside the conversation included


def environment(place: Place) -> dict[str, str]:
    """What every instance starts from: nothing of the user's own but where programs are."""
    return {
        "PATH": f"{_BINARIES}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(place.home),
        "TMPDIR": str(place.home / "tmp"),
        "LANG": "C.UTF-8",
        "NO_COLOR": "1",
        "DO_NOT_TRACK": "1",
    }


def _filled(template: str, server: Server) -> str:
    text = (FOLDER / "config" / template).read_text(encoding="utf-8")
    return text.replace("@URL@", server.url).replace("@MODEL@", server.model).replace("@CONTEXT@", str(CONTEXT))


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _lines(output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


# Claude Code


def _configure_claude(place: Place, server: Server) -> dict[str, str]:
    return dict(line.split("=", 1) for line in _filled("claude.env", server).split())


def _command_claude(server: Server, task: str) -> list[str]:
    return ["claude", "-p", task, "--output-format", "json", "--allowedTools", "Bash,Read"]


def _said_by_claude(output: str) -> Said:
    result = _lines(output)[-1]
    return Said(result["result"], result["usage"]["cache_read_input_tokens"])


# Codex CLI


def _configure_codex(place: Place, server: Server) -> dict[str, str]:
    _write(place.home / ".codex" / "config.toml", _filled("codex.toml", server))
    return {"DS4BATCH_KEY": "unused"}


def _command_codex(server: Server, task: str) -> list[str]:
    # Its own sandbox needs more of the kernel than many containers give.
    return ["codex", "exec", "--json", "--skip-git-repo-check", "--sandbox", "danger-full-access", task]


def _said_by_codex(output: str) -> Said:
    lines = _lines(output)
    texts = [line["item"]["text"] for line in lines if line.get("item", {}).get("type") == "agent_message"]
    usage = [line["usage"] for line in lines if line["type"] == "turn.completed"]
    return Said(texts[-1], usage[-1]["cached_input_tokens"])


# OpenCode


def _configure_opencode(place: Place, server: Server) -> dict[str, str]:
    _write(place.home / ".config" / "opencode" / "opencode.json", _filled("opencode.json", server))
    return {"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"}


def _command_opencode(server: Server, task: str) -> list[str]:
    return ["opencode", "run", "--format", "json", "--model", f"ds4batch/{server.model}", task]


def _said_by_opencode(output: str) -> Said:
    lines = _lines(output)
    texts = [line["part"]["text"] for line in lines if line["type"] == "text"]
    cached = [line["part"]["tokens"]["cache"]["read"] for line in lines if line["type"] == "step_finish"]
    return Said(texts[-1], sum(cached))


# pi


def _configure_pi(place: Place, server: Server) -> dict[str, str]:
    _write(place.home / ".pi" / "agent" / "models.json", _filled("pi-models.json", server))
    return {"PI_OFFLINE": "1"}


def _command_pi(server: Server, task: str) -> list[str]:
    return ["pi", "-p", "--mode", "json", "--provider", "ds4batch", "--model", server.model, task]


def _said_by_pi(output: str) -> Said:
    answers = [line["message"] for line in _lines(output) if line["type"] == "turn_end"]
    texts = [part["text"] for part in answers[-1]["content"] if part["type"] == "text"]
    return Said("".join(texts), None)


AGENTS: Sequence[Agent] = (
    Agent(
        "Claude Code",
        "@anthropic-ai/claude-code",
        "anthropic",
        lambda command: Call("Bash", [("description", "Make a file"), ("timeout", 60000), ("command", command)]),
        lambda path: Call("Read", [("limit", 10), ("file_path", str(path))]),
        _configure_claude,
        _command_claude,
        _said_by_claude,
    ),
    Agent(
        "Codex CLI",
        "@openai/codex",
        "responses",
        lambda command: Call("exec_command", [("yield_time_ms", 10000), ("cmd", command)]),
        lambda path: Call("exec_command", [("cmd", f"cat '{path}'")]),
        _configure_codex,
        _command_codex,
        _said_by_codex,
    ),
    Agent(
        "OpenCode",
        "opencode-ai",
        "chat",
        lambda command: Call("bash", [("timeout", 60000), ("command", command)]),
        lambda path: Call("read", [("limit", 10), ("filePath", str(path))]),
        _configure_opencode,
        _command_opencode,
        _said_by_opencode,
        side="You are a title generator.",
        sessions=2,
    ),
    Agent(
        "pi",
        "@mariozechner/pi-coding-agent",
        "chat",
        lambda command: Call("bash", [("timeout", 60), ("command", command)]),
        lambda path: Call("read", [("limit", 10), ("path", str(path))]),
        _configure_pi,
        _command_pi,
        _said_by_pi,
    ),
)
