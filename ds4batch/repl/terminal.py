"""The terminal: how an answer looks on it, and how a line is edited.

Nothing here leaves a mode of the terminal switched on: dim begins and ends within one write, and the modes that editing needs end with it.
"""

from __future__ import annotations

import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from prompt_toolkit import PromptSession
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"

# What a terminal would obey is shown as a picture: a model may have been told to write it, and a carriage return hides what it follows.
_PICTURES = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"}
_PICTURES |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


def printable(text: str) -> str:
    """Text without control characters except tabs and line ends."""
    return text.translate(_PICTURES)


class Screen:
    """Where answers go. On a terminal thinking is dim and stands apart; anything else gets the bytes of the answers and no thinking."""

    def __init__(self, out: TextIO, *, terminal: bool, dim: bool) -> None:
        """`dim`: the terminal knows how; without it thinking only stands apart."""
        self._out = out
        self._terminal = terminal
        self._dim = dim
        self._kind = ""  # of what was shown last
        self._at_start = True  # of a line

    def reasoning(self, text: str) -> None:
        """Show a piece of thinking."""
        if self._terminal:
            self._show("reasoning", text)

    def content(self, text: str) -> None:
        """Show a piece of the answer."""
        self._show("content", text)

    def end(self) -> None:
        """Complete the line. Nothing is erased: in the last column that would take the character which was just shown."""
        if not self._at_start:
            self._write("\n")
        self._kind, self._at_start = "", True

    def print(self, text: str) -> None:
        """Show lines that are no answer."""
        self.end()
        self._write((printable(text) if self._terminal else text) + "\n")

    def _show(self, kind: str, text: str) -> None:
        if self._kind and self._kind != kind:
            self._write("\n" if self._at_start else "\n\n")
        shown = printable(text) if self._terminal else text
        self._write(f"{_DIM}{shown}{_PLAIN}" if self._dim and kind == "reasoning" else shown)
        self._kind, self._at_start = kind, text.endswith("\n")

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


@contextmanager
def line_editor(terminal: TextIO) -> Iterator[Callable[[], str]]:
    """What reads a prompt: Enter sends it, Alt-Enter and pasting make lines in it, the arrows bring back earlier ones.

    It raises KeyboardInterrupt for ctrl-C, and EOFError for ctrl-D on an empty line. However the block is left, `terminal` is as before.
    """
    keys = KeyBindings()

    @keys.add("enter")
    def send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    modes = termios.tcgetattr(terminal)
    session: PromptSession[str] = PromptSession(multiline=True, key_bindings=keys, enable_suspend=True)
    try:
        yield lambda: session.prompt("> ")
    finally:
        # The library does this too, but not when a signal strikes while it draws for the first time.
        session.output.enable_autowrap()
        session.output.disable_bracketed_paste()
        session.output.show_cursor()
        session.output.reset_attributes()
        session.output.flush()
        termios.tcsetattr(terminal, termios.TCSANOW, modes)
