"""The commands of a chat: lines that start with a slash. They change the chat and say so; they ask no server and print nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ds4batch.repl import effort, transcript
from ds4batch.repl.transcript import Said, Transcript

HISTORY_TURNS, MOST_HISTORY_TURNS = 3, 200
_LONGEST_LINES, _LONGEST_BYTES = 80, 12_000  # of an answer in /history


@dataclass
class Chat:
    """What the commands work on."""

    transcript: Transcript
    effort: str = effort.UNSET
    prefix: tuple[Said, ...] = ()  # what every new conversation starts with


class CommandError(ValueError):
    """A command that could not be carried out; nothing was changed."""


class Leave(Exception):
    """The user wants to go."""


class _Command(NamedTuple):
    arguments: str
    help: str
    act: Callable[[Chat, str], str]  # what it says


def run(line: str, chat: Chat) -> str:
    """Carry out a line that starts with a slash; returns what is to be shown. Raises CommandError, and Leave."""
    name = line[1:].split()[0] if line[1:2].strip() else ""
    argument = line[1 + len(name) :].strip()
    command = _COMMANDS.get(name)
    if command is None:
        raise CommandError(f"unknown command /{name}; /help lists them, and a space before the slash makes the line a prompt")
    if argument and not command.arguments:
        raise CommandError(f"/{name} takes no argument")
    try:
        return command.act(chat, argument)
    except OSError as error:
        raise CommandError(f"/{name} {argument}: {error.strerror or error}") from None
    except ValueError as error:
        raise CommandError(f"/{name}: {error}") from None


def _help(chat: Chat, argument: str) -> str:
    rows = [(f"/{name} {command.arguments}", command.help) for name, command in _COMMANDS.items()]
    keys = [
        ("Alt-Enter", "a new line in the prompt"),
        ("ctrl-C", "stop the answer, or clear the line"),
        ("ctrl-D", "leave"),
    ]
    return "\n".join(f"{left:16} {right}" for left, right in rows + keys)


def _new(chat: Chat, argument: str) -> str:
    chat.transcript.said = list(chat.prefix)
    return "a new conversation" + (f", after the {len(chat.prefix)} messages of the prefix file" if chat.prefix else "")


def _system(chat: Chat, argument: str) -> str:
    before, chat.transcript.system = chat.transcript.system, argument
    if argument:
        return "the system text is set"
    return f"no system text; it was: {before}" if before else "there is no system text"


def _think(chat: Chat, argument: str) -> str:
    if argument:
        chat.effort = effort.parse(argument)
    return f"thinking: {effort.name(chat.effort)}"


def _history(chat: Chat, argument: str) -> str:
    turns = HISTORY_TURNS
    if argument:
        if not (argument.isascii() and argument.isdigit() and 1 <= int(argument[:9]) <= MOST_HISTORY_TURNS):
            raise ValueError(f"expected a number of 1..{MOST_HISTORY_TURNS}, got {argument[:40]!r}")
        turns = int(argument)
    return "\n".join(_shown(one) for one in chat.transcript.last(turns)) or "nothing was said yet"


def _shown(one: Said) -> str:
    if one.role == "user":
        return f"USER: {one.text}"
    text = "\n".join(one.text.split("\n")[:_LONGEST_LINES])
    text = text.encode(errors="replace")[:_LONGEST_BYTES].decode(errors="ignore")
    left = len(one.text) - len(text)
    return f"ASSISTANT{' (cut)' if one.cut else ''}: {text}" + (f"\n[{left} more characters]" if left else "")


def _save(chat: Chat, argument: str) -> str:
    path = _path(argument)
    transcript.save(chat.transcript, path)
    return f"saved {len(chat.transcript.said)} messages to {path}"


def _load(chat: Chat, argument: str) -> str:
    path = _path(argument)
    chat.transcript = transcript.load(path)
    return f"loaded {len(chat.transcript.said)} messages from {path}"


def _path(argument: str) -> Path:
    if not argument:
        raise ValueError("name a file")
    return Path(argument).expanduser()


def _quit(chat: Chat, argument: str) -> str:
    raise Leave


_COMMANDS = {
    "help": _Command("", "this list", _help),
    "new": _Command("", "begin a new conversation; the system text stays", _new),
    "system": _Command("[TEXT]", "set the system text; without TEXT, remove it", _system),
    "think": _Command("[N]", f"how hard to think: {effort.WORDS}", _think),
    "history": _Command("[N]", f"show the last N turns, {HISTORY_TURNS} by default", _history),
    "save": _Command("FILE", "write the conversation to a file", _save),
    "load": _Command("FILE", "go on with a saved conversation", _load),
    "quit": _Command("", "leave", _quit),
}
