"""The folder tells what may be touched: arrows point down only."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def imports(package: str) -> dict[Path, set[str]]:
    """Every module a package's files import."""
    return {path: imported(path) for path in sorted((ROOT / package).rglob("*.py"))}


def imported(path: Path) -> set[str]:
    """Every module a file imports, wherever in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module or "")
    return names


def roots(names: set[str]) -> set[str]:
    return {name.split(".")[0] for name in names}


def test_scheduler_imports_the_standard_library_and_itself() -> None:
    files = imports("scheduler")
    assert len(files) > 5
    for path, names in files.items():
        assert roots(names) <= sys.stdlib_module_names | {"scheduler"}, path


def test_kernels_import_torch_and_triton_only() -> None:
    for path, names in imports("triton_kernels").items():
        assert roots(names) <= sys.stdlib_module_names | {"torch", "triton", "triton_kernels"}, path


@pytest.mark.parametrize("package", ["ds4batch/server", "ds4batch/chat", "ds4batch/tokenizer"])
def test_the_front_imports_nothing_of_the_device(package: str) -> None:
    for path, names in imports(package).items():
        assert not roots(names) & {"torch", "triton", "triton_kernels"}, path
        assert not any(name.startswith("ds4batch.engine") and not name.startswith("ds4batch.engine.weights") for name in names), (
            path
        )


def test_the_engine_imports_nothing_of_the_front() -> None:
    for path, names in imports("ds4batch/engine").items():
        assert not any(name.startswith(("ds4batch.server", "ds4batch.chat.dialects", "aiohttp")) for name in names), path


@pytest.mark.parametrize("package", ["ds4batch", "scheduler", "triton_kernels"])
def test_the_product_imports_nothing_of_its_benchmarks_and_clients(package: str) -> None:
    for path, names in imports(package).items():
        assert not roots(names) & {"bench", "clients", "tests"}, path


def test_clients_import_nothing_of_the_benchmarks_that_use_them() -> None:
    for path in (ROOT / "clients").glob("*.py"):
        assert "bench" not in roots(imported(path)), path


def test_the_front_loads_without_torch() -> None:
    code = "import ds4batch.server.run, ds4batch.cli, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_nothing_reads_the_environment_but_what_systemd_says_in_it_and_a_clients_key() -> None:
    allowed = {ROOT / "ds4batch" / "server" / "notify.py", ROOT / "ds4batch" / "repl" / "tool.py"}
    for path in {*(ROOT / "ds4batch").rglob("*.py"), *(ROOT / "scheduler").rglob("*.py")} - allowed:
        assert "os.environ" not in path.read_text(), path
        assert "getenv" not in path.read_text(), path
