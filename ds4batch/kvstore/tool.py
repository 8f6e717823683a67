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
    from ds4batch.kvstore.format import BadFile
    from ds4batch.kvstore.index import Entry


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
    """One line a checkpoint, from its head alone, and a total. Raises OSError when the directory cannot be read."""
    entries, bad = [], 0
    for name, entry, problem in _heads(directory):
        if entry is None:
            bad += 1
            print(f"{name}: {problem}", file=out)
        else:
            entries.append(entry)
    entries.sort(key=lambda e: (-e.header.last_used, e.name))
    print(f"{'NAME':40}  {'REASON':13}  {'TOKENS':>8}  {'MIB':>9}  {'HITS':>5}  {'UNUSED':>7}  {'CTX':>8}  MODEL", file=out)
    for e in entries:
        h = e.header
        print(
            f"{e.name}  {h.reason.name.lower():13}  {h.tokens:8}  {e.file_bytes / (1 << 20):9.2f}  {h.hits:5}  "
            f"{_span(now - h.last_used):>7}  {h.ctx:8}  {e.fingerprint.hex()[:8]}",
            file=out,
        )
    total = sum(e.file_bytes for e in entries)
    print(f"{len(entries)} checkpoints, {total / (1 << 20):.2f} MiB", file=out)
    return 1 if bad else 0


def verify(directory: Path, out: TextIO) -> int:
    """Read all files whole; a line for each, and a total. Removes nothing. Raises OSError as `ls` does."""
    good = bad = 0
    for name, error in _checked(directory):
        print(f"{name}: {'ok' if error is None else f'{error.verdict.value}: {error}'}", file=out)
        good, bad = good + (error is None), bad + (error is not None)
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
    for name, error in _checked(directory):
        if error is None:
            continue
        if error.verdict is Verdict.CORRUPT:
            (directory / name).unlink(missing_ok=True)
            print(f"{name}: removed: {error}", file=out)
        else:
            left += 1
            print(f"{name}: left: {error}", file=out)
    if space is not None:
        entries = [entry for _, entry, _ in _heads(directory) if entry is not None]
        for entry in plan_eviction(entries, 0, space, now).victims:
            (directory / entry.file_name).unlink(missing_ok=True)
            print(f"{entry.file_name}: removed: {entry.header.tokens} tokens, {entry.file_bytes / (1 << 20):.2f} MiB", file=out)
    return 1 if left else 0


def _heads(directory: Path) -> Iterator[tuple[str, Entry | None, BadFile | None]]:
    """File name, and the entry or what is wrong, by name."""
    from ds4batch.kvstore.directory import checkpoints
    from ds4batch.kvstore.disk import Disk
    from ds4batch.kvstore.format import BadFile, Verdict
    from ds4batch.kvstore.index import entry_of
    from ds4batch.kvstore.reader import peek

    for name, _ in sorted(checkpoints(directory)):
        try:
            head, _ = peek(Disk(), directory / name)
        except BadFile as error:
            if error.verdict is not Verdict.VANISHED:
                yield name, None, error
        else:
            yield name, entry_of(name, head.header, head.tail.fingerprint, head.file_bytes), None


def _checked(directory: Path) -> Iterator[tuple[str, BadFile | None]]:
    """File name, and what is wrong after reading all of it."""
    from ds4batch.kvstore.directory import checkpoints
    from ds4batch.kvstore.disk import Disk
    from ds4batch.kvstore.format import BadFile, Verdict
    from ds4batch.kvstore.reader import read_checkpoint

    for name, _ in sorted(checkpoints(directory)):
        problem = None
        try:
            read_checkpoint(Disk(), directory / name)
        except BadFile as error:
            problem = error
        if problem is None or problem.verdict is not Verdict.VANISHED:
            yield name, problem


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
