"""`ds4batch keys`: adds, lists and removes the keys that `ds4batch serve --api-key-file` checks. A running server notices.

A key is printed when it is made and never again: the file holds its hash. Every change writes the file anew beside itself and
renames it, so that a reader sees the old one or the new one.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ds4batch.server import keys
from ds4batch.server.keys import Entry, KeyFileError, KeyInfo


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the subcommands."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    add = _action(actions, "add", "make a key, print it once and keep its hash")
    add.add_argument("name", metavar="NAME", type=_checked(keys.read_name), help="whose it is; in logs and metrics")
    add.add_argument(
        "--scope",
        choices=keys.SCOPES,
        default="user",
        help="user: the APIs; admin: also the status page, its figures and /metrics (default: %(default)s)",
    )
    add.add_argument(
        "--concurrency",
        type=_checked(keys.read_concurrency),
        default=0,
        metavar="N",
        help="most requests of the key that run at once, more wait; 0 is no limit (default: %(default)s)",
    )
    add.add_argument(
        "--weight",
        type=_checked(keys.read_weight),
        default=1.0,
        metavar="W",
        help="its share of the engine beside other keys that have work (default: %(default)s)",
    )
    _action(actions, "list", "show names, scopes and limits")
    remove = _action(actions, "remove", "take a key away; what its owner has under way ends by itself")
    remove.add_argument("name", metavar="NAME", help="as the list shows it")


def run(arguments: argparse.Namespace) -> int:
    """Carry out parsed arguments. Returns the exit status."""
    try:
        match arguments.action:
            case "add":
                _add(arguments.file, KeyInfo(arguments.name, arguments.scope, arguments.concurrency, arguments.weight))
            case "list":
                _list(arguments.file)
            case _:
                _remove(arguments.file, arguments.name)
    except KeyFileError as error:
        print(f"ds4batch: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"ds4batch: {error.filename or arguments.file}: {error.strerror}", file=sys.stderr)
        return 1
    return 0


def _action(actions: Any, name: str, help: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(name, help=help, description=help[0].upper() + help[1:] + ".")
    parser.add_argument("--file", required=True, metavar="FILE", help="the key file")
    return parser


def _add(path: str, info: KeyInfo) -> None:
    key = keys.new_key()
    with _locked(path):
        entries = keys.read_file(path) if os.path.lexists(path) else []
        if any(entry.info.name == info.name for entry in entries):
            raise KeyFileError(f"{path}: {info.name} has a key already; remove it first, or give this one another name")
        if len(entries) >= keys.MAX_KEYS:
            raise KeyFileError(f"{path}: it holds {keys.MAX_KEYS} keys, which is all it may")
        before = Path(path).read_text(encoding="utf-8") if entries or os.path.lexists(path) else ""
        gap = "" if not before or before.endswith("\n") else "\n"
        _replace(path, before + gap + Entry(info, keys.digest_of(key)).line + "\n")
    print(key)
    print(f"ds4batch: this is the key of {info.name} ({info.scope}); it is not shown again", file=sys.stderr)


def _list(path: str) -> None:
    for entry in keys.read_file(path):
        info = entry.info
        print(f"{info.name:<24} {info.scope:<6} concurrency={info.concurrency or 'no limit'} weight={info.weight:g}")


def _remove(path: str, name: str) -> None:
    with _locked(path):
        if all(entry.info.name != name for entry in keys.read_file(path)):
            raise KeyFileError(f"{path}: there is no key of that name")
        lines = Path(path).read_text(encoding="utf-8").split("\n")
        _replace(path, "\n".join(line for line in lines if line.split()[:1] != [name]))
    print(f"ds4batch: the key of {name} is removed", file=sys.stderr)


@contextlib.contextmanager
def _locked(path: str) -> Iterator[None]:
    """One change at a time. The lock is on the folder: the file itself is replaced."""
    folder = os.open(os.path.dirname(os.path.abspath(path)), os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _replace(path: str, text: str) -> None:
    """Write the file anew, readable by its owner alone. An existing one keeps its owner, its group and its mode."""
    real = os.path.realpath(path)  # a link stays one
    number, temporary = tempfile.mkstemp(dir=os.path.dirname(real), prefix=".keys-")  # mode 0600
    try:
        with os.fdopen(number, "w", encoding="utf-8") as file:
            if os.path.exists(real):
                old = os.stat(real)
                if (old.st_uid, old.st_gid) != (os.geteuid(), os.getegid()):
                    os.fchown(number, old.st_uid, old.st_gid)
                os.fchmod(number, old.st_mode & 0o640)
            file.write(text)
            file.flush()
            os.fsync(number)
        os.replace(temporary, real)
    except BaseException:
        os.unlink(temporary)
        raise


def _checked(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """A reader of the file's fields for a command line."""

    def parse(text: str) -> Any:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse
