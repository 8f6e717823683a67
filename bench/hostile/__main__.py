"""Sends hostile requests to a server and fails where one of them does harm.

    python -m bench.hostile --requests 10000 --url http://127.0.0.1:8000
    python -m bench.hostile --requests 10000 -m MODEL | --script FILE [-- further options of ds4batch serve]
    python -m bench.hostile --url http://127.0.0.1:8000 --seed 0 --only GROUP:NUMBER

A failure is: a status of 500 or one that the description does not have; an error that is no JSON, has another shape or names no field; a
refusal of what the description allows; an answer that is not as described; a request that hangs, or during which /health does; and after
a batch: a restart of the engine, a request that still runs, a slot that does not answer, open files or memory that grew, a good request
whose answer is another one. docs/reliability.md has figures.

The server's processes must run on this machine. Exit status: 0 without a failure, 1 with one, 2 when the server cannot be used.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from bench.hostile.attack import Attack, again
from bench.hostile.report import print_report
from bench.hostile.serve import Served, served


def main(argv: Sequence[str] | None = None) -> int:
    """Run, report, and say by the status whether anything failed."""
    options = _parser().parse_args(argv)
    with _server(options) as server:
        try:
            attack = Attack(server.url, options.seed, options.workers)
        except OSError as error:
            print(f"hostile: {server.url}: {error}", file=sys.stderr)
            return 2
        with attack:
            if options.only:
                return again(attack, options.only)
            attack.run(options.requests, options.batch, options.minutes)
        attack.failures += [f"the server's log has a traceback:\n{trace}" for trace in server.tracebacks()]
    return print_report(attack, options.requests)


@contextmanager
def _server(options: argparse.Namespace) -> Iterator[Served]:
    if options.url:
        yield Served(options.url.rstrip("/"))
        return
    source = ["-m", options.model] if options.model else ["--script", options.script]
    with served(source, options.slots, options.ctx, options.serve) as server:
        yield server


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.hostile", allow_abbrev=False, description=(__doc__ or "").splitlines()[0]
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--url", help="a server on this machine")
    where.add_argument("-m", "--model", help="serve this model")
    where.add_argument("--script", help="serve this script")
    parser.add_argument("--requests", type=int, default=1000, help="how many (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=250, help="requests between two looks at the server (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no batch after so many (default: no limit)")
    parser.add_argument("--seed", type=int, default=0, help="another number, other requests (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=8, help="requests at once (default: %(default)s)")
    parser.add_argument("--only", help="one request again: GROUP:NUMBER of a failure")
    parser.add_argument("--slots", default="16", help="sessions of a server that is started (default: %(default)s)")
    parser.add_argument("--ctx", default="1024", help="context of each (default: %(default)s)")
    parser.add_argument("serve", nargs="*", help="behind --: further options of ds4batch serve")
    return parser


if __name__ == "__main__":
    sys.exit(main())
