"""The configuration file, and that what is written about options is what the options are."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from ds4batch import cli
from ds4batch.config import ConfigError, read_config
from ds4batch.settings import Settings, flag, grouped
from scripts import options

ROOT = Path(__file__).parents[1]
NAMES = [option.name for option in fields(Settings)]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """What the command line would have served."""
    found: list[Settings] = []
    monkeypatch.setattr("ds4batch.server.run.serve", lambda settings: found.append(settings) or 0)
    return found


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_a_file_gives_options_and_the_command_line_goes_before_it(tmp_path: Path, served: list[Settings]) -> None:
    file = write(
        tmp_path / "c.toml",
        'model = "m.gguf"\nctx = 4096\ncors = true\nitl-budget-ms = 20\nlog-level = "debug"\nkv-disk-dir = "a # b"\n',
    )
    assert cli.main(["serve", "--config", file]) == 0
    assert cli.main(["serve", "-c", "64", "--config", file, "--no-cors", "--log-level", "error", "-m", "other"]) == 0
    given = Settings(model="m.gguf", ctx=4096, cors=True, itl_budget_ms=20.0, log_level="debug", kv_disk_dir="a # b")
    assert served == [
        given,
        Settings(model="other", ctx=64, cors=False, itl_budget_ms=20.0, log_level="error", kv_disk_dir="a # b"),
    ]


@pytest.mark.parametrize("name", NAMES)
def test_every_option_can_stand_in_the_file_and_on_the_command_line(tmp_path: Path, served: list[Settings], name: str) -> None:
    option = Settings.__dataclass_fields__[name]
    meta, default = option.metadata, option.default
    value: Any
    if isinstance(default, bool):
        value = not default
    elif isinstance(default, str):
        value = next((choice for choice in meta["choices"] if choice != default), str(tmp_path))
    else:
        value = type(default)(meta["high"] or max(meta["low"] or 0, 1) + 7)
    needed = {"model": "m"} | ({"tls-cert": "c", "tls-key": "k"} if name.startswith("tls") else {})
    if name == "script":
        needed = {}
    lines = [f"{key} = {options._toml(text)}" for key, text in needed.items() if key != flag(name)[2:]]
    file = write(tmp_path / "c.toml", "\n".join([*lines, f"{flag(name)[2:]} = {options._toml(value)}"]))
    assert cli.main(["serve", "--config", file]) == 0
    assert getattr(served[0], name) == value
    assert type(getattr(served[0], name)) is type(default)
    others = [part for key, text in needed.items() if key != flag(name)[2:] for part in (f"--{key}", text)]
    spelled = [flag(name) if value else flag(name).replace("--", "--no-")] if isinstance(default, bool) else [flag(name), str(value)]
    assert cli.main(["serve", *others, *spelled]) == 0
    assert served[1] == served[0]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("ctx = 64\nbatched_session = 2", "line 2: batched_session: there is no such option, did you mean batched-session?"),
        ("ctx = 64\n\n# x\nxyzzy = 2", "line 4: xyzzy: there is no such option"),
        ('ctx = "64"', "line 1: ctx: expected a whole number, got '64'"),
        ("ctx = 64.0", "line 1: ctx: expected a whole number, got 64.0"),
        ("ctx = true", "line 1: ctx: expected a whole number, got True"),
        ("ctx = [64]", "line 1: ctx: expected a whole number, got [64]"),
        ('"ctx" = 1', "line 1: ctx: 1 is below 16"),
        ("port = 65536", "line 1: port: 65536 is above 65535"),
        ("itl-budget-ms = nan", "line 1: itl-budget-ms: nan is below 1"),
        ("itl-budget-ms = true", "line 1: itl-budget-ms: expected a number, got True"),
        ("cors = 1", "line 1: cors: expected true or false, got 1"),
        ("model = 3", "line 1: model: expected a text in quotes, got 3"),
        ('device = "tpu"', "line 1: device: 'tpu' is not one of auto, cpu, cuda"),
        ("ctx = 64\n[server]\nport = 1", "line 2: server: there are no sections, all options stand at the top"),
        ("ctx = 64\nctx = 65", "Cannot overwrite a value (at "),
        ("ctx 64", "Expected '=' after a key in a key/value pair (at line 1, column 5)"),
        ('config = "other"', "line 1: config: there is no such option"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, complaint: str
) -> None:
    file = write(tmp_path / "c.toml", text)
    with pytest.raises(ConfigError, match=re.escape(complaint)) as caught:
        read_config(file)
    assert str(caught.value).startswith(file)
    with pytest.raises(SystemExit) as exit_:
        cli.main(["serve", "--config", file])
    assert exit_.value.code == 2
    assert capsys.readouterr().err.rstrip().endswith(f"error: --config: {caught.value}")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path, what in ((tmp_path / "none", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(SystemExit):
            cli.main(["serve", "--config", str(path)])
        assert what in capsys.readouterr().err
    (tmp_path / "latin").write_bytes(b'model = "\xe9"')
    with pytest.raises(ConfigError, match="byte 9 is not UTF-8"):
        read_config(str(tmp_path / "latin"))


def test_what_is_written_about_options_is_what_they_are() -> None:
    """Else: python -m scripts.options."""
    assert (ROOT / "docs" / "options.md").read_text() == options.table()
    assert (ROOT / "deploy" / "ds4batch.toml").read_text() == options.sample()


def test_the_table_and_the_sample_have_every_option_with_its_default() -> None:
    table, sample = options.table(), options.sample()
    rows = re.findall(r"^\| `(?:-\w, )?--([a-z-]+)[^`]*` \| ([^|]*) \| ([^|]+) \|$", table, re.M)
    assert [name for name, _, _ in rows] == ["config", *(flag(name)[2:] for name in NAMES)]
    for (_, default, text), option in zip(rows[1:], fields(Settings), strict=True):
        if isinstance(option.default, bool):
            assert default == ("on" if option.default else "off")
        else:
            assert default == (str(option.default) or "-")
        assert option.metadata["help"] in text
    everything = tomllib.loads(re.sub(r"^#(?=[a-z-]+ = )", "", sample, flags=re.M))
    assert {name.replace("-", "_"): value for name, value in everything.items()} == {
        option.name: options.SET.get(option.name, option.default) for option in fields(Settings)
    }
    unwrapped = " ".join(sample.replace("\n# ", " ").split())
    for option in fields(Settings):
        assert " ".join(option.metadata["help"].split()) in unwrapped, option.name


def test_the_sample_is_taken_as_it_is(served: list[Settings]) -> None:
    assert cli.main(["serve", "--config", str(ROOT / "deploy" / "ds4batch.toml")]) == 0
    assert served == [Settings(**options.SET)]


def test_the_check_finds_drift(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(options, "ROOT", tmp_path)
    monkeypatch.setattr(options, "TABLE", tmp_path / "options.md")
    monkeypatch.setattr(options, "SAMPLE", tmp_path / "ds4batch.toml")
    monkeypatch.setattr(sys, "argv", ["options"])
    assert options.main() == 0
    monkeypatch.setattr(sys, "argv", ["options", "--check"])
    assert options.main() == 0
    (tmp_path / "options.md").write_text("old")
    assert options.main() == 1
    assert "options.md is not what settings.py says" in capsys.readouterr().err
    assert (tmp_path / "options.md").read_text() == "old"


def test_the_help_has_every_option_in_its_group_and_fits_the_screen() -> None:
    done = subprocess.run([sys.executable, "-m", "ds4batch.cli", "serve", "--help"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert max(map(len, done.stdout.splitlines())) <= 120
    at = 0
    for title, group in grouped():
        at = done.stdout.index(f"\n{title}:\n", at)
        for option in group:
            at = done.stdout.index(flag(option.name), at)
    assert "(default: 32768)" in done.stdout
    assert "one of text, json" in done.stdout
