"""What was said in a conversation, as messages of a request, and the file it is saved in.

The file is JSON in the shape of a request to /v1/chat/completions, so that it can be sent again as it is. An answer that was cut
short has the member `cut` besides.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Role = Literal["user", "assistant"]


@dataclass(frozen=True)
class Said:
    """One message. Reasoning and `cut` are an assistant's."""

    role: Role
    text: str
    reasoning: str = ""
    cut: bool = False  # the user, or an error, ended it early

    def message(self) -> dict[str, Any]:
        """As requests write it."""
        reasoning = {"reasoning_content": self.reasoning} if self.reasoning else {}
        return {"role": self.role, "content": self.text, **reasoning}


@dataclass
class Transcript:
    """A conversation. Its messages alternate, the user's first, an assistant's last."""

    system: str = ""
    said: list[Said] = field(default_factory=list)

    def messages(self) -> list[dict[str, Any]]:
        """As requests write them."""
        head = [{"role": "system", "content": self.system}] if self.system else []
        return head + [one.message() for one in self.said]

    def asking(self, prompt: str) -> list[dict[str, Any]]:
        """The messages of a request that goes on with `prompt`."""
        return [*self.messages(), Said("user", prompt).message()]

    def last(self, turns: int) -> Sequence[Said]:
        """The messages of the last turns: a user's and the answer each."""
        return self.said[-2 * turns :]


def save(transcript: Transcript, path: Path) -> None:
    """Write a file whole or not at all. Raises OSError, and ValueError when the path holds something else than a conversation."""
    path = path.resolve()  # a link stays one
    if path.exists():
        try:
            load(path)
        except ValueError:
            raise ValueError(f"{path} exists and is no saved conversation") from None
    messages = transcript.messages()
    for message, one in zip(messages[len(messages) - len(transcript.said) :], transcript.said, strict=True):
        if one.cut:
            message["cut"] = True
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", encoding="utf-8", delete=False) as file:
        try:
            json.dump({"messages": messages}, file, indent=1)
            file.write("\n")
            file.close()
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def load(path: Path) -> Transcript:
    """The conversation in a file. Raises OSError, and ValueError naming the file and what is wrong in it."""
    try:
        table = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    try:
        return _transcript(table)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _transcript(table: Any) -> Transcript:
    given = table.get("messages") if isinstance(table, dict) else None
    if not isinstance(given, list) or not all(isinstance(one, dict) for one in given):
        raise ValueError("expected an object with messages, a list of objects")
    system = ""
    first = 0
    if given and given[0].get("role") == "system":
        system, first = _text(given[0], "content", "messages[0]"), 1
    said = [_said(one, f"messages[{first + i}]", "assistant" if i % 2 else "user") for i, one in enumerate(given[first:])]
    if len(said) % 2:
        raise ValueError(f"messages[{len(given) - 1}]: the last message must be the assistant's")
    return Transcript(system, said)


def _said(item: dict[str, Any], where: str, role: Role) -> Said:
    if item.get("role") != role:
        raise ValueError(f"{where}.role: expected {role}, got {item.get('role')!r}")
    if role == "user":
        return Said(role, _text(item, "content", where))
    cut = item.get("cut", False)
    if not isinstance(cut, bool):
        raise ValueError(f"{where}.cut: expected true or false")
    return Said(role, _text(item, "content", where), _text({"reasoning_content": "", **item}, "reasoning_content", where), cut)


def _text(item: dict[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise ValueError(f"{where}.{name}: expected a string")
    return value
