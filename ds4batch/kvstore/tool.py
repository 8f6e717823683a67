"""`ds4batch kv ls|verify|prune`: look at a checkpoint directory, check it, clean it up.

Safe beside a running server: what it removes the server finds missing, and no more. It never shows a checkpoint's text.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from ds4batch.kvstore.format import BadFile, Header
    from ds4batch.kvstore.index import Entry
    from ds4batch.kvstore.reader import Contents


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the three subcommands."""
    commands = parser.add_subparsers(dest="kv_command", required=True, metavar="COMMAND")
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--kv-disk-dir", required=True, metavar="DIR", help="the directory of the checkpoints")
    commands.add_parser("ls", parents=[shared], help="list the checkpoints, last used first")
    commands.add_parser("verify", parents=[shared], help="read every checkpoint to its last byte and say which are bad")
    prune = commands.add_parser("prune", parents=[shared], help="remove unfinished and damaged files")
    prune.add_argument(
        "--kv-disk-space-mb",
        type=_megabytes,
        metavar="N",
        help="then also the checkpoints worth least, until N MiB are left",
    )


def run(arguments: argparse.Namespace) -> int:
    """Carry out parsed arguments. Exit status: 0 all is well, 1 a bad file was found or the directory cannot be read."""
    directory = Path(arguments.kv_disk_dir)
    try:
        if arguments.kv_command == "ls":
            return ls(directory, sys.stdout, time.time())
        if arguments.kv_command == "verify":
            return verify(directory, sys.stdout)
        space = arguments.kv_disk_space_mb
        return prune(directory, sys.stdout, time.time(), None if space is None else space << 20)
    except OSError as error:
        print(f"ds4batch: --kv-disk-dir {directory}: {error.strerror}", file=sys.stderr)
        return 1


def ls(directory: Path, out: TextIO, now: float) -> int:
    """One line a checkpoint, from its head and trailer, and a total. Raises OSError when the directory cannot be read.

    CALLS are those whose sampled text it holds; "?" stands where its trailer is damaged.
    """
    found, bad = [], 0
    for name, one in _heads(directory):
        if isinstance(one, Exception):
            bad += 1
            print(f"{name}: {one}", file=out)
        else:
            found.append(one)
    found.sort(key=lambda one: (-one[0].header.last_used, one[0].name))
    columns = f"{'TOKENS':>8}  {'MIB':>9}  {'HITS':>5}  {'CALLS':>5}  {'UNUSED':>7}  {'CTX':>8}"
    print(f"{'NAME':40}  {'REASON':13}  {columns}  MODEL", file=out)
    for e, trailer in found:
        h = e.header
        calls, fault = _calls(h, trailer)
        print(
            f"{e.name}  {h.reason.name.lower():13}  {h.tokens:8}  {e.file_bytes / (1 << 20):9.2f}  {h.hits:5}  "
            f"{'?' if fault else calls:>5}  {_span(now - h.last_used):>7}  {h.ctx:8}  {e.fingerprint.hex()[:8]}",
            file=out,
        )
    total = sum(e.file_bytes for e, _ in found)
    print(f"{len(found)} checkpoints, {total / (1 << 20):.2f} MiB", file=out)
    return 1 if bad else 0


def verify(directory: Path, out: TextIO) -> int:
    """Read all files whole; a line for each, and a total. Removes nothing. Raises OSError as `ls` does.

    One whose trailer alone is damaged counts as bad, although its session is used.
    """
    good = bad = 0
    for name, one in _checked(directory):
        if isinstance(one, Exception):
            fault, line = True, f"{one.verdict.value}: {one}"
        else:
            calls, problem = _calls(one.head.header, one.trailer)
            fault, line = bool(problem), f"the session is good, its trailer is not: {problem}"
            if not fault:
                line = f"ok, {calls} calls" if calls else "ok"
        print(f"{name}: {line}", file=out)
        good, bad = good + (not fault), bad + fault
    print(f"{good} good, {bad} bad", file=out)
    return 1 if bad else 0


def prune(directory: Path, out: TextIO, now: float, space: int | None) -> int:
    """Remove what a crash left and what is damaged, then the least valuable until `space` bytes are left; None removes none of them.

    Files of another version, and such as may not be read, stay. Raises OSError as `ls` does, and when a file cannot be removed.
    """
    from ds4batch.kvstore.directory import remove_leftovers
    from ds4batch.kvstore.disk import Disk
    from ds4batch.kvstore.eviction import plan_eviction
    from ds4batch.kvstore.format import Verdict

    left = 0
    leftovers = remove_leftovers(Disk(), directory)
    print(f"{leftovers} unfinished files removed", file=out)
    for name, one in _checked(directory):
        if not isinstance(one, Exception):
            continue
        if one.verdict is Verdict.CORRUPT:
            (directory / name).unlink(missing_ok=True)
            print(f"{name}: removed: {one}", file=out)
        else:
            left += 1
            print(f"{name}: left: {one}", file=out)
    if space is not None:
        entries = [one[0] for _, one in _heads(directory) if not isinstance(one, Exception)]
        for entry in plan_eviction(entries, 0, space, now).victims:
            (directory / entry.file_name).unlink(missing_ok=True)
            print(f"{entry.file_name}: removed: {entry.header.tokens} tokens, {entry.file_bytes / (1 << 20):.2f} MiB", file=out)
    return 1 if left else 0


def _heads(directory: Path) -> Iterator[tuple[str, tuple[Entry, bytes | None] | BadFile]]:
    """File name, and the entry and trailer or what is wrong, by name."""
    from ds4batch.kvstore.directory import checkpoints
    from ds4batch.kvstore.disk import Disk
    from ds4batch.kvstore.format import BadFile, Verdict
    from ds4batch.kvstore.index import entry_of
    from ds4batch.kvstore.reader import peek

    for name, _ in sorted(checkpoints(directory)):
        try:
            head, trailer = peek(Disk(), directory / name, trailer=True)
        except BadFile as error:
            if error.verdict is not Verdict.VANISHED:
                yield name, error
        else:
            yield name, (entry_of(name, head.header, head.tail.fingerprint, head.file_bytes), trailer)


def _checked(directory: Path) -> Iterator[tuple[str, Contents | BadFile]]:
    """File name, and the contents or what is wrong after reading all of it."""
    from ds4batch.kvstore.directory import checkpoints
    from ds4batch.kvstore.disk import Disk
    from ds4batch.kvstore.format import BadFile, Verdict
    from ds4batch.kvstore.reader import read_checkpoint

    for name, _ in sorted(checkpoints(directory)):
        try:
            yield name, read_checkpoint(Disk(), directory / name)
        except BadFile as error:
            if error.verdict is not Verdict.VANISHED:
                yield name, error


def _calls(header: Header, trailer: bytes | None) -> tuple[int, str]:
    """The calls in a trailer, and what is wrong with it."""
    from ds4batch.kvstore.format import FLAG_TOOL_MAP
    from ds4batch.kvstore.trailer import read_tool_map

    if trailer is None:
        return 0, "it is damaged"
    if not header.flags & FLAG_TOOL_MAP:
        return 0, ""
    read = read_tool_map(trailer, len(trailer))
    return len(read.texts), read.problem


def _megabytes(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is below 0")
    return value


def _span(seconds: float) -> str:
    """A duration in its largest whole unit."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return f"{max(int(seconds), 0)} s"
