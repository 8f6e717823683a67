"""An environment for each tool, built from the requirements beside this file where it is missing.

The tools stand apart from this project and from each other: their dependencies are many and exclude each other.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

from bench.tools.load import ToolFailed

REQUIREMENTS = Path(__file__).resolve().parent
_BUILT = ".installed"  # holds the requirements that are in there


def program(name: str, environments: Path) -> Path:
    """The executable of the tool of that name, below `environments`. Raises ToolFailed when it cannot be installed."""
    wanted = REQUIREMENTS / f"{name}.txt"
    home = environments / name
    mark = home / _BUILT
    if not mark.exists() or mark.read_text(encoding="utf-8") != wanted.read_text(encoding="utf-8"):
        print(f"installing {name} into {home}", file=sys.stderr, flush=True)
        venv.create(home, with_pip=True)
        pip = [str(home / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r", str(wanted)]
        done = subprocess.run(pip, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ToolFailed(f"{name}: pip ended with status {done.returncode}: {done.stderr.strip()[-2000:]}")
        mark.write_bytes(wanted.read_bytes())
    return home / "bin" / name
