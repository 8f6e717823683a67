"""The map of calls behind a checkpoint: its bytes, what becomes of malformed ones, and what the tool says of it."""

from __future__ import annotations

import io
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4batch.kvstore.format import FLAG_TITLE, FLAG_TOOL_MAP
from ds4batch.kvstore.tool import ls, prune, verify
from ds4batch.kvstore.trailer import MAX_ID, pack_tool_map, read_tool_map
from tests.kvstore.rig import files, open_store, restore, save

CALLS = [
    ("call_a", "\n\n<｜DSML｜tool_calls>é"),
    ("call_b", "\n\n<｜DSML｜tool_calls>é"),
    ("toolu_c", "<tool_call>x</tool_call>"),
]
MOST = 100

texts = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=20)
maps = st.dictionaries(texts, texts, max_size=6)


def test_the_bytes_are_as_documented() -> None:
    expected = b"KTM\x01" + struct.pack("<I", 2)
    expected += struct.pack("<II", 2, 3) + b"id" + "é!".encode()
    expected += struct.pack("<II", 1, 1) + b"x" + b"y"
    assert pack_tool_map([("id", "é!"), ("x", "y")]) == expected


def test_without_calls_there_is_no_trailer() -> None:
    assert pack_tool_map([]) == b""
    assert pack_tool_map([("", "text"), ("i" * (MAX_ID + 1), "text"), ("id", "")]) == b""


def test_calls_of_one_turn_come_back_as_one_object() -> None:
    read = read_tool_map(pack_tool_map(CALLS), MOST)
    assert read == (dict(CALLS), "")
    assert read.texts["call_a"] is read.texts["call_b"]


@given(maps)
def test_what_was_written_is_read(calls: dict[str, str]) -> None:
    if calls:
        assert read_tool_map(pack_tool_map(calls.items()), MOST) == (calls, "")


@given(maps, st.data())
def test_of_a_trailer_that_breaks_off_the_calls_before_the_break_are_read(calls: dict[str, str], data: st.DataObject) -> None:
    whole = pack_tool_map(calls.items())
    read = read_tool_map(whole[: data.draw(st.integers(0, max(len(whole) - 1, 0)))], MOST)
    assert read.problem
    assert list(read.texts.items()) == list(calls.items())[: len(read.texts)]


@given(st.binary(max_size=60) | st.binary(max_size=60).map(lambda rest: b"KTM\x01\x02\0\0\0" + rest))
def test_no_bytes_at_all_are_an_error(data: bytes) -> None:
    read = read_tool_map(data, MOST)
    assert sum(len(call_id) + len(text) for call_id, text in read.texts.items()) <= len(data)


@pytest.mark.parametrize("head", [b"", b"KTM", b"KTM\x02\x01\0\0\0", b"ktm\x01\x01\0\0\0", b"KTM\x01\x01\0\0"])
def test_another_head_or_version_is_no_map(head: bytes) -> None:
    assert read_tool_map(head + pack_tool_map(CALLS)[8:], MOST).texts == {}


def test_more_calls_than_anybody_keeps_are_not_believed() -> None:
    data = pack_tool_map((f"id{i}", "text") for i in range(9))
    assert read_tool_map(data, 2) == ({}, "it states 9 calls")
    assert len(read_tool_map(data, 3).texts) == 9


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        (struct.pack("<II", 0, 1) + b"x", "sizes"),
        (struct.pack("<II", 1, 0) + b"x", "sizes"),
        (struct.pack("<II", 257, 1) + b"x" * 258, "sizes"),
        (struct.pack("<II", 1, 0xFFFFFFFF) + b"xy", "sizes"),
        (struct.pack("<II", 1, 3) + b"xy", "sizes"),
        (struct.pack("<II", 1, 2) + b"x\xff\xfe", "UTF-8"),
        (struct.pack("<II", 1, 2) + b"\xffxy", "UTF-8"),
        (b"\x01\0\0", "ends before call 1 of 3"),
    ],
)
def test_a_bad_call_ends_the_reading_and_those_before_it_stay(bad: bytes, problem: str) -> None:
    good = pack_tool_map([("id", "text"), ("other", "text"), ("third", "text")])
    read = read_tool_map(good[: 8 + 8 + 2 + 4] + bad, MOST)
    assert read.texts == {"id": "text"}
    assert problem in read.problem


def test_of_an_id_that_comes_twice_the_last_text_counts() -> None:
    assert read_tool_map(pack_tool_map([("id", "old"), ("id", "new")]), MOST).texts == {"id": "new"}


def test_the_flag_says_whether_there_are_calls(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for calls in (CALLS, [], CALLS[:1]):
        save(store, b"some text", trailer=pack_tool_map(calls), flags=FLAG_TOOL_MAP)
        found = restore(open_store(tmp_path), b"some text")
        assert found is not None
        assert found.entry.header.flags == (FLAG_TOOL_MAP if calls else 0)
        assert found.trailer == pack_tool_map(calls)


# the tool


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Checkpoints with three calls, with none, and with a title."""
    store = open_store(tmp_path)
    save(store, b"with calls", trailer=pack_tool_map(CALLS), flags=FLAG_TOOL_MAP)
    save(store, b"without")
    save(store, b"titled", trailer=b"\x05\0\0\0title", flags=FLAG_TITLE)
    return tmp_path


def told(directory: Path) -> tuple[list[str], list[str], int]:
    """The column of calls, the lines of `verify` without names, and its status."""
    listed, verified = io.StringIO(), io.StringIO()
    assert ls(directory, listed, 1_000_000) == 0
    head, *lines, _ = listed.getvalue().splitlines()
    column = head.split().index("CALLS")
    status = verify(directory, verified)
    said = [line.partition(": ")[2] or line for line in verified.getvalue().splitlines()]
    return sorted(line.split()[column] for line in lines), sorted(said), status


def test_the_tool_counts_the_calls(directory: Path) -> None:
    assert told(directory) == (["0", "0", "3"], ["3 good, 0 bad", "ok", "ok", "ok, 3 calls"], 0)


@pytest.mark.parametrize("cut", [False, True])
def test_the_tool_tells_a_damaged_trailer_from_a_damaged_session_and_prunes_neither_session(directory: Path, cut: bool) -> None:
    path = next(path for path in directory.iterdir() if b"toolu_c" in path.read_bytes())
    data = path.read_bytes()
    path.write_bytes(data[:-1] if cut else data[:-1] + b"!")
    line = "the session is good, its trailer is not: it is damaged"
    assert told(directory) == (["0", "0", "?"], ["2 good, 1 bad", "ok", "ok", line], 1)
    assert prune(directory, io.StringIO(), 0, None) == 0
    assert len(files(directory)) == 3


def test_the_tool_tells_a_trailer_that_was_written_malformed(tmp_path: Path) -> None:
    save(open_store(tmp_path), b"some text", trailer=pack_tool_map(CALLS)[:-1], flags=FLAG_TOOL_MAP)
    line = "the session is good, its trailer is not: call 2 of 3 states sizes that cannot be"
    assert told(tmp_path) == (["?"], ["0 good, 1 bad", line], 1)
