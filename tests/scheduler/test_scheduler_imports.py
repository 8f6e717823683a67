"""The scheduler stands alone: nothing but itself and the standard library."""

import ast
import sys
from pathlib import Path

import scheduler

ROOT = Path(scheduler.__file__).parent
ALLOWED = sys.stdlib_module_names | {"scheduler"}


def imported(path: Path) -> set[str]:
    """The top-level packages a file imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add("." if node.level else (node.module or "").partition(".")[0])
    return found


def test_the_scheduler_imports_only_the_standard_library():
    files = sorted(ROOT.rglob("*.py"))
    assert len(files) > 10
    strangers = {path.name: imported(path) - ALLOWED for path in files}
    assert {name: found for name, found in strangers.items() if found} == {}


def test_no_clock_but_the_injected_one():
    for path in ROOT.rglob("*.py"):
        assert not imported(path) & {"time", "datetime", "threading", "asyncio", "random"}, path.name
