"""Writes docs/options.md and deploy/ds4batch.toml from ds4batch/settings.py: `python -m scripts.options`; with --check it only says
whether they are as they would be written.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from dataclasses import Field
from pathlib import Path
from typing import Any

from ds4batch.settings import CONFIG_HELP, flag, grouped, meaning

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "docs" / "options.md"
SAMPLE = ROOT / "deploy" / "ds4batch.toml"

SET = {
    "model": "/srv/models/model.gguf",
    "batched_session": 16,
    "kv_disk_dir": "/var/lib/ds4batch/kv",
    "kv_disk_space_mb": 65536,
}
"""What the sample sets; it is the file that the systemd unit starts with."""

_TABLE_HEAD = """# Options of `ds4batch serve`

Written by `python -m scripts.options` from `ds4batch/settings.py`; a test holds both to each other.

`--config FILE` takes options from a TOML file: its keys are the names below without the dashes, all at the top level, and
[deploy/ds4batch.toml](../deploy/ds4batch.toml) has every one. What the command line gives goes before the file; a switch that the
file turns on is turned off by `--no-` and its name. A key that is no option and a value of the wrong kind are refused with the file
and the line, exit status 2. Paths in the file are relative to where the server starts, or to `--chdir`.

"""
_SAMPLE_HEAD = """# Options of `ds4batch serve --config FILE`, written by `python -m scripts.options` from ds4batch/settings.py.
# A line that begins with #KEY = shows the default. Flags on the command line go before this file. Every option: docs/options.md.
"""


def table() -> str:
    """docs/options.md."""
    rows = ["| option | default | meaning |", "|---|---|---|", f"| `--config FILE` | - | {CONFIG_HELP} |"]
    for title, options in grouped():
        rows += [f"| **{title}** | | |", *map(_row, options)]
    return _TABLE_HEAD + "\n".join(rows) + "\n"


def _row(option: Field[Any]) -> str:
    meta = option.metadata
    names = [meta["short"]] if meta["short"] else []
    names.append(flag(option.name) + ("" if isinstance(option.default, bool) else f" {meta['metavar']}"))
    return f"| `{', '.join(names)}` | {_shown(option.default)} | {meaning(option)} |"


def _shown(default: Any) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    return "-" if default == "" else str(default)


def sample() -> str:
    """deploy/ds4batch.toml."""
    out = [_SAMPLE_HEAD]
    for title, options in grouped():
        out.append(f"\n# {title}\n")
        for option in options:
            out.append("\n" + textwrap.fill(meaning(option), 118, initial_indent="# ", subsequent_indent="# ") + "\n")
            if option.name in SET:
                out.append(f"{flag(option.name)[2:]} = {_toml(SET[option.name])}  # default: {_toml(option.default)}\n")
            else:
                out.append(f"#{flag(option.name)[2:]} = {_toml(option.default)}\n")
    return "".join(out)


def _toml(value: Any) -> str:
    """JSON's spelling of a text, a number or a truth is TOML's."""
    return json.dumps(value, ensure_ascii=False)


def main() -> int:
    """Exit status 1 when --check finds a difference."""
    parser = argparse.ArgumentParser(prog="scripts.options", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    status = 0
    for path, text in ((TABLE, table()), (SAMPLE, sample())):
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        if check:
            print(f"{path.relative_to(ROOT)} is not what settings.py says: python -m scripts.options writes it", file=sys.stderr)
            status = 1
        else:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")
    return status


if __name__ == "__main__":
    sys.exit(main())
