from __future__ import annotations

import io
import itertools

from hypothesis import given
from hypothesis import strategies as st

from ds4batch.repl.terminal import Screen, printable

DIM, PLAIN = "\x1b[2m", "\x1b[0m"


def shown(*pieces: tuple[str, str], terminal: bool = True, dim: bool = True) -> str:
    """What is written for pieces of thinking ("r") and of answers ("c")."""
    out = io.StringIO()
    screen = Screen(out, terminal=terminal, dim=dim)
    for kind, text in pieces:
        (screen.reasoning if kind == "r" else screen.content)(text)
    screen.end()
    return out.getvalue()


def test_thinking_is_dim_and_stands_apart() -> None:
    assert shown(("r", "a"), ("r", "b"), ("c", "x")) == f"{DIM}a{PLAIN}{DIM}b{PLAIN}\n\nx\n"
    assert shown(("r", "a\n"), ("c", "x\n"), ("r", "b")) == f"{DIM}a\n{PLAIN}\nx\n\n{DIM}b{PLAIN}\n"
    assert shown(("r", "a"), ("c", "x"), dim=False) == "a\n\nx\n"


def test_a_pipe_gets_the_answer_alone() -> None:
    assert shown(("r", "a"), ("c", "\x1b[1m\r\nx"), ("c", "y"), terminal=False, dim=False) == "\x1b[1m\r\nxy\n"


def test_an_answer_ends_its_line_once() -> None:
    assert shown(("c", "x\n")) == "x\n"
    assert shown(("c", "x")) == "x\n"
    assert shown() == ""


def test_a_model_cannot_drive_the_terminal() -> None:
    assert shown(("c", "\x1b]0;title\x07a\rb\x7f\x9b2J\t\n")) == "␛]0;title␇a␍b␡�2J\t\n"
    assert shown(("r", "\x1b[0m")) == f"{DIM}␛[0m{PLAIN}\n"


def test_lines_that_are_no_answer_begin_on_a_line_of_their_own() -> None:
    out = io.StringIO()
    screen = Screen(out, terminal=True, dim=True)
    screen.content("x")
    screen.print("a\x1bb")
    assert out.getvalue() == "x\na␛b\n"


@given(st.text(), st.lists(st.integers(0, 50)))
def test_no_character_is_lost_wherever_an_answer_is_cut(text: str, cuts: list[int]) -> None:
    bounds = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [("c", text[a:b]) for a, b in itertools.pairwise(bounds)]
    assert shown(*pieces).removesuffix("\n") == printable(text).removesuffix("\n")
    assert len(printable(text)) == len(text)
