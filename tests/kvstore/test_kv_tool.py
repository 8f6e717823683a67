"""`ds4batch kv`: what it prints, what it removes, and its exit status."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest

from ds4batch.cli import main
from ds4batch.kvstore.format import Reason
from ds4batch.kvstore.tool import ls, prune, verify
from tests.kvstore.rig import OTHER, Time, files, open_store, save

HOUR = 3600


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Three checkpoints, an hour apart, one of another model."""
    now = Time()
    save(open_store(tmp_path, now=now), b"the first secret text", Reason.COLD)
    now.now += HOUR
    save(open_store(tmp_path, now=now, identity=OTHER), b"the second", Reason.CONTINUED)
    now.now += HOUR
    save(open_store(tmp_path, now=now), b"the third of these", Reason.SHUTDOWN)
    return tmp_path


def damage(directory: Path, reason: int) -> str:
    for path in directory.iterdir():
        data = bytearray(path.read_bytes())
        if data[5] == reason:
            data[len(data) // 2] ^= 1
            path.write_bytes(bytes(data))
            return path.name
    raise AssertionError(reason)


def test_ls_lists_the_last_used_first_and_shows_no_text(directory: Path) -> None:
    out = io.StringIO()
    assert ls(directory, out, 1_000_000 + 5 * HOUR) == 0
    head, *lines, total = out.getvalue().splitlines()
    assert [line.split()[1:3] for line in lines] == [["shutdown", "18"], ["continued", "10"], ["cold", "21"]]
    assert "3 h" in lines[0]
    assert "5 h" in lines[2]
    assert head.split()[0] == "NAME"
    assert total.startswith("3 checkpoints, ")
    assert "secret" not in out.getvalue()


def test_ls_names_files_with_a_bad_head(directory: Path) -> None:
    (directory / ("a" * 40 + ".kv")).write_bytes(b"KVC")
    out = io.StringIO()
    assert ls(directory, out, 0) == 1
    assert out.getvalue().startswith("a" * 40 + ".kv: truncated: 3 bytes")


def test_verify_reads_to_the_last_byte_and_removes_nothing(directory: Path) -> None:
    out = io.StringIO()
    assert verify(directory, out) == 0
    assert out.getvalue().endswith("3 good, 0 bad\n")
    name = damage(directory, 1)
    out = io.StringIO()
    assert verify(directory, out) == 1
    assert f"{name}: corrupt: the checksum is wrong" in out.getvalue()
    assert len(files(directory)) == 3


def test_prune_removes_what_is_damaged_or_unfinished_and_nothing_else(directory: Path) -> None:
    name = damage(directory, 1)
    (directory / ("b" * 40 + ".kv.tmp.7.0011aabb")).write_bytes(b"KVC")
    (directory / "notes").write_bytes(b"")
    out = io.StringIO()
    assert prune(directory, out, 0, None) == 0
    assert "1 unfinished files removed" in out.getvalue()
    assert f"{name}: removed: the checksum is wrong" in out.getvalue()
    assert len(files(directory)) == 3
    assert "notes" in files(directory)


def test_prune_leaves_a_later_version_and_says_so(directory: Path) -> None:
    path = next(directory.iterdir())
    data = bytearray(path.read_bytes())
    data[3] = 9
    path.write_bytes(bytes(data))
    out = io.StringIO()
    assert prune(directory, out, 0, 0) == 1
    assert f"{path.name}: left: format version 9" in out.getvalue()
    assert files(directory) == [path.name]


def test_prune_to_a_size_removes_the_least_valuable(directory: Path) -> None:
    total = sum(p.stat().st_size for p in directory.iterdir())
    out = io.StringIO()
    assert prune(directory, out, 1_000_000 + 2 * HOUR, total - 1) == 0
    left = io.StringIO()
    ls(directory, left, 0)
    assert "continued" not in left.getvalue()
    assert len(files(directory)) == 2


def test_the_command_line_reaches_all_three(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kv", "ls", "--kv-disk-dir", str(directory)]) == 0
    assert "3 checkpoints" in capsys.readouterr().out
    assert main(["kv", "verify", "--kv-disk-dir", str(directory)]) == 0
    assert "3 good, 0 bad" in capsys.readouterr().out
    assert main(["kv", "prune", "--kv-disk-dir", str(directory), "--kv-disk-space-mb", "0"]) == 0
    assert files(directory) == []


def test_a_directory_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kv", "ls", "--kv-disk-dir", str(tmp_path / "none")]) == 1
    assert capsys.readouterr().err == f"ds4batch: --kv-disk-dir {tmp_path / 'none'}: No such file or directory\n"


@pytest.mark.parametrize("line", [["kv"], ["kv", "ls"], ["kv", "prune", "--kv-disk-dir", ".", "--kv-disk-space-mb", "-1"]])
def test_a_wrong_command_line_is_status_2(line: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(line)
    assert ended.value.code == 2


def test_the_store_loads_without_torch_and_the_command_line_without_numpy() -> None:
    root = Path(__file__).parents[2]
    code = (
        "import sys, ds4batch.cli\nassert 'numpy' not in sys.modules\n"
        "import ds4batch.kvstore.store, ds4batch.kvstore.tool\n"
        "assert not {'torch', 'aiohttp', 'scheduler'} & set(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0
