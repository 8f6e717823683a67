from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4batch.repl import prefix_file
from ds4batch.repl.transcript import Said


def said(*texts: str) -> list[Said]:
    return [Said("assistant" if i % 2 else "user", text) for i, text in enumerate(texts)]


@pytest.mark.parametrize(
    ("data", "texts"),
    [
        (b"USER: a\nASSISTANT: b\n", ("a", "b")),
        (b"USER: a\nASSISTANT: b", ("a", "b")),
        (b"\xef\xbb\xbfUSER: a\nASSISTANT: b", ("a", "b")),
        (b"USER:a\nASSISTANT:\tb", ("a", "b")),
        (b"USER:  a\nASSISTANT:\t\tb", (" a", "\tb")),
        (b"USER: a\r\nASSISTANT: b\r\n", ("a", "b")),
        (b"USER: a\r\nx\r\nASSISTANT: b\r\n", ("a\r\nx", "b")),
        (b"USER: a\n\nASSISTANT: b\n\n", ("a\n", "b\n")),
        (b"USER:\na\nASSISTANT:\nb\n", ("\na", "\nb")),
        (b"USER: a\n USER: b\nuser: c\nASSISTANT: d\nxASSISTANT: e", ("a\n USER: b\nuser: c", "d\nxASSISTANT: e")),
        (b"USER: a\nASSISTANT: b\nUSER: c\nASSISTANT: d", ("a", "b", "c", "d")),
        (b"USER: a\nASSISTANT: b\r", ("a", "b\r")),
        ("USER: 你好\nASSISTANT: é\n".encode(), ("你好", "é")),
    ],
)
def test_turns_run_from_marker_to_marker(data: bytes, texts: tuple[str, ...]) -> None:
    assert prefix_file.parse(data) == said(*texts)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "line 1: expected USER:"),
        (b"hello\nUSER: a\nASSISTANT: b", "line 1: expected USER:"),
        (b"\nUSER: a\nASSISTANT: b", "line 1: expected USER:"),
        (b"ASSISTANT: a", "line 1: expected USER:"),
        (b"USER: a\nb\nUSER: c", "line 3: expected ASSISTANT:"),
        (b"USER: a\nASSISTANT: b\nASSISTANT: c", "line 3: expected USER:"),
        (b"USER: a\nASSISTANT: b\nUSER: c\n", "line 4: expected ASSISTANT: before the end of the file"),
        (b"USER: a\nb", "line 2: expected ASSISTANT: before the end of the file"),
        (b"USER:\nASSISTANT: b", "line 1: empty turn"),
        (b"USER: a\nASSISTANT: ", "line 2: empty turn"),
        (b"USER: a\nASSISTANT:\n\n", "line 2: empty turn"),
        (b"USER: a\r\nASSISTANT:\r\n", "line 2: empty turn"),
        (b"USER: a\nASSISTANT: b\0", "line 2: NUL byte"),
        (b"USER: a\nASSISTANT: b\nc\xff\n", "line 3: not UTF-8"),
        ("USER: a\nASSISTANT: b".encode("utf-16"), "line 1: NUL byte"),
    ],
)
def test_what_is_wrong_is_named_by_its_line(data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        prefix_file.parse(data)


def test_errors_of_a_file_name_it(tmp_path: Path) -> None:
    path = tmp_path / "prefix.txt"
    path.write_bytes(b"oops")
    with pytest.raises(ValueError, match=r"prefix\.txt: line 1: expected USER:$"):
        prefix_file.read(path)


_TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))


def _fits(text: str) -> bool:
    """Whether a turn can hold it: it is not blank, and has no line that begins a turn."""
    return bool(text.strip()) and not any(line.startswith(("USER:", "ASSISTANT:")) for line in text.split("\n")[1:])


@given(st.lists(_TEXT.filter(_fits), min_size=1).map(lambda texts: texts * 2), st.sampled_from(["\n", "\r\n"]))
def test_every_turn_comes_back_as_it_was_written(texts: list[str], end: str) -> None:
    lines = [f"{'ASSISTANT' if i % 2 else 'USER'}: {text}{end}" for i, text in enumerate(texts)]
    expected = texts if end == "\r\n" else [text.removesuffix("\r") for text in texts]  # then CR and LF are one line end
    expected_ok = [Said("assistant" if i % 2 else "user", text) for i, text in enumerate(expected)]
    if all(text.strip() for text in expected):
        assert prefix_file.parse("".join(lines).encode()) == expected_ok
