"""`ds4batch chat`: its options, and how it starts and ends."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import signal
import sys
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import urlsplit

from ds4batch.repl import effort

if TYPE_CHECKING:
    from ds4batch.repl.commands import Chat
    from ds4batch.repl.loop import Repl

API_KEY_VARIABLE = "DS4BATCH_API_KEY"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the options."""
    add = parser.add_argument
    add("--url", type=_url, default="http://127.0.0.1:8000", help="the server (default: %(default)s)")
    add(
        "--api-key",
        metavar="KEY",
        type=_key,
        help="the key to send; by default that of DS4BATCH_API_KEY, which other users of this machine do not see",
    )
    add("--model", metavar="NAME", help="the model to ask for; by default the server's")
    add("-p", "--prompt", metavar="TEXT", type=_some, help="answer TEXT on standard output and leave")
    add("--system", metavar="TEXT", default="", help="the system text")
    add(
        "--prefix-file",
        metavar="FILE",
        help="turns that every conversation starts with: lines that start with USER: or ASSISTANT:",
    )
    add("--temperature", metavar="T", type=_temperature, help="0 always takes the likeliest token")
    add("--max-tokens", metavar="N", type=_tokens, help="the longest answer, thinking included")
    thinking = parser.add_mutually_exclusive_group()
    choose = thinking.add_argument
    choose("--think", dest="effort", action="store_const", const="high", default=effort.UNSET, help="think")
    choose("--think-max", dest="effort", action="store_const", const="max", help="think as hard as can be")
    choose("--nothink", dest="effort", action="store_const", const=effort.OFF, help="do not think")
    choose("--think-level", dest="effort", metavar="N", type=_level, help="how hard: 0..100, for models with such levels")
    parser.epilog = (
        "Without -p, and with a pipe for standard input, every line of it is entered as if typed. "
        "Thinking is shown on a terminal only. Exit status: 0, or 1 when something failed, 130 after ctrl-C."
    )


def run(arguments: argparse.Namespace) -> int:
    """Carry out parsed arguments. Returns the exit status."""
    try:
        repl = _repl(arguments)
    except OSError as error:
        print(f"ds4batch: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    except ValueError as error:
        print(f"ds4batch: {error}", file=sys.stderr)
        return 1
    try:
        status = _converse(repl, arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except OSError as error:  # of standard output: every other one is handled where it happens
        if not isinstance(error, BrokenPipeError):
            with contextlib.suppress(OSError):
                print(f"ds4batch: standard output: {error.strerror}", file=sys.stderr)
        # Python flushes standard output once more as it ends, and would complain again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status


def _converse(repl: Repl, arguments: argparse.Namespace) -> int:
    from ds4batch.repl.loop import feed, interact
    from ds4batch.repl.terminal import line_editor

    if arguments.prompt is not None:
        return repl.ask(arguments.prompt).status
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return feed(repl, sys.stdin.buffer)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    print(f"{arguments.url}: /help lists the commands, ctrl-D leaves")
    with line_editor(sys.stdin) as read:
        return interact(repl, read)


def _leave(number: int, frame: object) -> NoReturn:
    """Unwind instead of dying, so that the terminal gets its modes back."""
    raise SystemExit(128 + number)


def _repl(arguments: argparse.Namespace) -> Repl:
    """Raises OSError and ValueError, which name the file."""
    from prompt_toolkit.utils import is_dumb_terminal

    from ds4batch.repl.client import Client
    from ds4batch.repl.loop import Repl
    from ds4batch.repl.terminal import Screen

    given = {"model": arguments.model, "temperature": arguments.temperature, "max_tokens": arguments.max_tokens}
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    for out in (sys.stdout, sys.stderr):
        out.reconfigure(errors="replace")  # type: ignore[union-attr]  # a terminal may lack characters that a model has
    terminal = sys.stdout.isatty()
    screen = Screen(sys.stdout, terminal=terminal, dim=terminal and not is_dumb_terminal())
    return Repl(Client(arguments.url, api_key=_api_key(arguments)), _chat(arguments), options, screen, sys.stderr)


def _api_key(arguments: argparse.Namespace) -> str:
    """Raises ValueError, which does not repeat what is wrong."""
    if arguments.api_key is not None:
        return str(arguments.api_key)
    try:
        return _key(os.environ.get(API_KEY_VARIABLE, ""))
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"{API_KEY_VARIABLE}: {error}") from None


def _chat(arguments: argparse.Namespace) -> Chat:
    from ds4batch.repl import prefix_file
    from ds4batch.repl.commands import Chat
    from ds4batch.repl.transcript import Transcript

    prefix = tuple(prefix_file.read(arguments.prefix_file)) if arguments.prefix_file else ()
    return Chat(Transcript(arguments.system, list(prefix)), arguments.effort, prefix)


def _url(text: str) -> str:
    """The address in front of /v1; given with it is as good."""
    try:
        parts = urlsplit(text)
        well_formed = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        well_formed = False
    if not well_formed or parts.query or parts.fragment:
        raise argparse.ArgumentTypeError(f"expected http://HOST:PORT, got {text!r}")
    return text.rstrip("/").removesuffix("/v1")


def _key(text: str) -> str:
    text = text.strip()
    if not all("!" <= char <= "~" for char in text):
        raise argparse.ArgumentTypeError("a key is printable ASCII without spaces")
    return text


def _level(text: str) -> str:
    try:
        return effort.level(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _some(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("is empty")
    return text


def _tokens(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 on, got {text!r}")
    return int(text)


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number from 0 on, got {text!r}")
    return value
