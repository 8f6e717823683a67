"""Starts `ds4batch serve` on a free port, runs the load benchmark against it, and stops it.

    python -m bench.with_server -m MODEL [--slots N] [--ctx N] [serve_concurrency options]

The server's own lines go to stderr. The exit status is the benchmark's.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from bench import serve_concurrency
from clients.process import address, command, stop

LOAD = ["--sweep", "1:8,16:64", "--prompt-tokens", "64", "--max-tokens", "96", "--ignore-eos"]


def main(argv: Sequence[str] | None = None) -> int:
    """Serve, measure, stop."""
    parser = argparse.ArgumentParser(prog="with_server", allow_abbrev=False, description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-m", "--model", required=True, help="GGUF file or model directory")
    parser.add_argument("--slots", default="16", help="resident sessions (default: %(default)s)")
    parser.add_argument("--ctx", default="4096", help="context of each (default: %(default)s)")
    options, load = parser.parse_known_args(argv)
    with serving(options.model, options.slots, options.ctx) as url:
        return serve_concurrency.main(["--base-url", url, *(load or LOAD)])


@contextmanager
def serving(model: str, slots: str, ctx: str, extra: Sequence[str] = ()) -> Iterator[str]:
    """The address of a server of `model`, which is stopped at the end. `extra` are further options of ds4batch serve."""
    options = ["-m", model, "--batched-session", slots, "--ctx", ctx, *extra]
    server = subprocess.Popen(command(options), stdout=subprocess.PIPE, text=True)
    try:
        yield _url(server)
    finally:
        stop(server)


def _url(server: subprocess.Popen[str]) -> str:
    """Where the server says it is ready. Raises SystemExit when it ends instead."""
    assert server.stdout is not None
    for line in server.stdout:
        print(line, end="", file=sys.stderr)
        found = address(line)
        if found is not None:
            # Nobody reads what follows, and a full pipe would stop the server.
            threading.Thread(target=server.stdout.read, daemon=True).start()
            return found
    raise SystemExit(f"the server ended with status {server.wait()}")


if __name__ == "__main__":
    sys.exit(main())
