from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ds4batch.repl.transcript import Said, Transcript, load, save

TALK = Transcript(
    "be brief\n你好",
    [
        Said("user", "a\n\tb"),
        Said("assistant", "one", "because \ud800 \x1b[31m"),
        Said("user", "more"),
        Said("assistant", "tw", cut=True),
    ],
)


def test_a_saved_conversation_comes_back_whole(tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    save(TALK, path)
    assert load(path) == TALK
    assert [one.name for one in tmp_path.iterdir()] == ["talk.json"]


def test_a_saved_conversation_has_the_shape_of_a_request(tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    save(TALK, path)
    messages = json.loads(path.read_text())["messages"]
    assert messages[-1].pop("cut") is True
    assert messages == TALK.messages()


@pytest.mark.parametrize("transcript", [Transcript(), Transcript("only a system text")])
def test_a_conversation_that_has_not_begun_can_be_saved(tmp_path: Path, transcript: Transcript) -> None:
    path = tmp_path / "talk.json"
    save(transcript, path)
    assert load(path) == transcript


def test_saving_replaces_a_saved_conversation_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    save(Transcript(), path)
    save(TALK, path)
    assert load(path) == TALK
    notes = tmp_path / "notes.md"
    notes.write_text("precious")
    with pytest.raises(ValueError, match=r"notes\.md exists and is no saved conversation"):
        save(TALK, notes)
    assert notes.read_text() == "precious"


def test_saving_through_a_link_keeps_the_link(tmp_path: Path) -> None:
    path, link = tmp_path / "talk.json", tmp_path / "link"
    save(Transcript(), path)
    link.symlink_to(path)
    save(TALK, link)
    assert link.is_symlink()
    assert load(path) == TALK


def test_a_save_that_fails_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "talk.json"
    save(TALK, path)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="No space"):
        save(Transcript(), path)
    assert load(path) == TALK
    assert [one.name for one in tmp_path.iterdir()] == ["talk.json"]


USER = {"role": "user", "content": "a"}
ANSWER = {"role": "assistant", "content": "b"}


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([], "expected an object with messages"),
        ({}, "expected an object with messages"),
        ({"messages": ["x"]}, "expected an object with messages"),
        ({"messages": [{"role": "system"}]}, r"messages\[0\]\.content: expected a string"),
        ({"messages": [ANSWER]}, r"messages\[0\]\.role: expected user, got 'assistant'"),
        ({"messages": [{"role": "system", "content": "s"}, USER, USER]}, r"messages\[2\]\.role: expected assistant, got 'user'"),
        ({"messages": [USER, ANSWER, USER]}, r"messages\[2\]: the last message must be the assistant's"),
        ({"messages": [USER, {**ANSWER, "content": None}]}, r"messages\[1\]\.content: expected a string"),
        ({"messages": [USER, {**ANSWER, "reasoning_content": 3}]}, r"messages\[1\]\.reasoning_content: expected a string"),
        ({"messages": [USER, {**ANSWER, "cut": "yes"}]}, r"messages\[1\]\.cut: expected true or false"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path: Path, table: Any, message: str) -> None:
    path = tmp_path / "talk.json"
    path.write_text(json.dumps(table))
    with pytest.raises(ValueError, match=rf"talk\.json: {message}"):
        load(path)


@pytest.mark.parametrize("data", [b"", b"{", b"\xff\xfe", b"[" * 200_000])
def test_what_is_no_json_is_said_to_be_none(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "talk.json"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"talk\.json: not JSON"):
        load(path)
