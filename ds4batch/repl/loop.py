"""The conversation itself: asks, shows and remembers answers, and reads prompts until there are no more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TextIO

from ds4batch.chat.events import Content, Reasoning
from ds4batch.repl import commands, effort
from ds4batch.repl.client import Client, Finish, ServerError
from ds4batch.repl.commands import Chat, CommandError, Leave
from ds4batch.repl.terminal import Screen
from ds4batch.repl.transcript import Said

INTERRUPTED = 130  # exit status


class Outcome(Enum):
    """How a prompt ended."""

    DONE = 0
    FAILED = 1  # the server's error was shown
    CUT = INTERRUPTED  # by the user

    @property
    def status(self) -> int:
        """Exit status of a program that ends with it."""
        return self.value


@dataclass
class _Answer:
    """What was shown of an answer so far."""

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    finish: str = ""

    @property
    def begun(self) -> bool:
        return bool(self.text or self.reasoning)

    def said(self) -> Said:
        return Said("assistant", "".join(self.text), "".join(self.reasoning), cut=not self.finish)


class Repl:
    """A chat with one server. `options` go into every request; errors and notes go to `err`, a line each."""

    def __init__(self, client: Client, chat: Chat, options: dict[str, Any], screen: Screen, err: TextIO) -> None:
        self._client = client
        self._chat = chat
        self._options = options
        self._screen = screen
        self._err = err

    def enter(self, line: str) -> Outcome:
        """Carry out a line that the user entered: a prompt, or a command. Raises Leave."""
        if not line.strip():
            return Outcome.DONE
        if not line.startswith("/"):
            return self.ask(line)
        try:
            self._screen.print(commands.run(line, self._chat))
        except CommandError as error:
            self.complain(str(error))
            return Outcome.FAILED
        return Outcome.DONE

    def ask(self, prompt: str) -> Outcome:
        """Show the answer to `prompt` as it comes. Both are kept once anything was shown; SIGINT ends the answer."""
        answer = _Answer()
        outcome, error = Outcome.DONE, ""
        try:
            asyncio.run(self._stream(prompt, answer))
        except KeyboardInterrupt:
            outcome = Outcome.DONE if answer.finish else Outcome.CUT
        except ServerError as failed:
            outcome, error = Outcome.FAILED, str(failed)
        finally:
            self._screen.end()
        if answer.begun or answer.finish:
            self._chat.transcript.said += [Said("user", prompt), answer.said()]
        if error:
            self.complain(error + ("; what was shown is kept as a cut answer" if answer.begun else ""))
        else:
            self._note(answer)
        return outcome

    async def _stream(self, prompt: str, answer: _Answer) -> None:
        body = {"messages": self._chat.transcript.asking(prompt), **self._options, **effort.fields(self._chat.effort)}
        async with aclosing(self._client.stream(body)) as pieces:
            async for piece in pieces:
                match piece:
                    case Reasoning(text):
                        answer.reasoning.append(text)
                        self._screen.reasoning(text)
                    case Content(text):
                        answer.text.append(text)
                        self._screen.content(text)
                    case Finish(reason):
                        answer.finish = reason

    def _note(self, answer: _Answer) -> None:
        """Say what the answer itself does not show."""
        if not answer.finish:
            note = "the answer was cut" if answer.begun else "no answer; the prompt was forgotten"
        elif answer.finish != "stop":
            note = "the answer reached its token limit" if answer.finish == "length" else f"the answer ended with {answer.finish}"
        elif not answer.begun:
            note = "the answer is empty"
        else:
            return
        print(f"[{note}]", file=self._err, flush=True)

    def complain(self, message: str) -> None:
        """Show an error in one line."""
        print(f"ds4batch: {message}", file=self._err, flush=True)


def interact(repl: Repl, read: Callable[[], str]) -> int:
    """Read lines from the user until they leave. Returns the exit status."""
    while True:
        try:
            repl.enter(read())
        except KeyboardInterrupt:
            continue
        except (EOFError, Leave):
            return 0


def feed(repl: Repl, lines: Iterable[bytes]) -> int:
    """Carry out every line of a pipe. Returns the exit status: 1 when one failed, 130 after SIGINT, which ends it."""
    status = 0
    try:
        for number, raw in enumerate(lines, 1):
            try:
                line = raw.rstrip(b"\r\n").decode()
            except UnicodeDecodeError:
                repl.complain(f"standard input, line {number}: not UTF-8")
                status = 1
                continue
            outcome = repl.enter(line)
            if outcome is Outcome.CUT:
                return outcome.status
            status = max(status, outcome.status)
    except Leave:
        pass
    except KeyboardInterrupt:
        return INTERRUPTED
    return status
