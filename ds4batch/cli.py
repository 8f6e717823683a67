"""The `ds4batch` command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from ds4batch import __version__, keys_tool
from ds4batch.config import ConfigError, read_config
from ds4batch.kvstore import tool as kv_tool
from ds4batch.repl import tool as repl_tool
from ds4batch.settings import add_arguments, from_arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand. Exit status: 0 done, 1 it could not run, 2 the command line is wrong, 130 interrupted twice."""
    parser = argparse.ArgumentParser(prog="ds4batch", description="LLM server for one box shared by several people.")
    parser.add_argument("--version", action="version", version=f"ds4batch {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser(
        "serve",
        help="serve a model over HTTP",
        usage="ds4batch serve [--config FILE] -m FILE [OPTION ...]",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=36, width=120),
    )
    add_arguments(serve)
    kv_tool.add_arguments(commands.add_parser("kv", help="look at the checkpoints on disk, check them, clean up"))
    keys_tool.add_arguments(commands.add_parser("keys", help="make, list and remove API keys"))
    repl_tool.add_arguments(commands.add_parser("chat", help="talk to a running server"))
    arguments = parser.parse_args(argv)
    if arguments.command == "kv":
        return kv_tool.run(arguments)
    if arguments.command == "keys":
        return keys_tool.run(arguments)
    if arguments.command == "chat":
        return repl_tool.run(arguments)
    if arguments.config:
        try:
            serve.set_defaults(**read_config(arguments.config))
        except (OSError, ConfigError) as error:
            serve.error(f"--config: {error}")
        arguments = parser.parse_args(argv)
    settings = from_arguments(arguments)
    if bool(settings.model) == bool(settings.script):
        serve.error("-m/--model: name a GGUF file or a model directory, or a --script instead")
    if settings.mtp and settings.draft == "lookup":
        serve.error("--mtp: it is --draft mtp, and --draft lookup was given")
    if bool(settings.tls_cert) != bool(settings.tls_key):
        serve.error("--tls-cert and --tls-key: each needs the other")
    if settings.chdir:
        try:
            os.chdir(settings.chdir)
        except OSError as error:
            print(f"ds4batch: --chdir {settings.chdir}: {error.strerror}", file=sys.stderr)
            return 1
    from ds4batch.server.run import serve as run  # late: --help answers without aiohttp

    return run(settings)


if __name__ == "__main__":
    sys.exit(main())
