"""The command on a terminal: colours, keys, and the modes it leaves behind."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.repl.fake_server import PATIENCE, FakeServer, chunk
from tests.repl.pseudo_terminal import CTRL_C, CTRL_D, EDITING, ENTER, NOT_EDITING, Terminal, terminal


@pytest.fixture
def chat(server: FakeServer) -> Iterator[Terminal]:
    """A chat at its first prompt."""
    with terminal("chat", "--url", server.url) as started:
        started.until(b"ctrl-D leaves")
        started.prompt()
        yield started


def left_as_found(chat: Terminal) -> bool:
    return chat.modes() == chat.before and chat.shown.rfind(NOT_EDITING) > chat.shown.rfind(EDITING)


def test_thinking_is_dim_and_the_answer_is_not(chat: Terminal, server: FakeServer) -> None:
    server.says({"reasoning_content": "hm"}, "one", "two")
    chat.type(b"a" + ENTER)
    chat.until(b"\x1b[2mhm\x1b[0m\r\n\r\nonetwo\r\n")
    chat.prompt()
    chat.type(CTRL_D)
    assert chat.wait() == 0
    assert left_as_found(chat)


def test_a_dumb_terminal_gets_no_dim(server: FakeServer) -> None:
    server.says({"reasoning_content": "hm"}, "one")
    with terminal("chat", "--url", server.url, "-p", "a", TERM="dumb") as chat:
        assert chat.wait() == 0
        assert chat.shown == b"hm\r\n\r\none\r\n"


def test_ctrl_c_cancels_the_answer_and_nothing_else(chat: Terminal, server: FakeServer) -> None:
    server.begins(chunk({"reasoning_content": "hm"}), chunk({"content": "one"}))
    server.says("fine")
    chat.type(b"a" + ENTER)
    chat.until(b"one")
    chat.type(CTRL_C)
    chat.until(b"[the answer was cut]\r\n")
    assert server.left.wait(PATIENCE)
    chat.prompt()
    chat.type(b"b" + ENTER)
    chat.until(b"fine\r\n")
    chat.prompt()
    chat.type(b"/history" + ENTER)
    chat.until(b"USER: a\r\nASSISTANT (cut): one\r\nUSER: b\r\nASSISTANT: fine\r\n")
    chat.prompt()
    chat.type(b"/quit" + ENTER)
    assert chat.wait() == 0
    assert left_as_found(chat)


def test_ctrl_c_ends_the_wait_for_a_first_token(chat: Terminal, server: FakeServer) -> None:
    server.begins(b": prefill\n\n")
    chat.type(b"a" + ENTER)
    assert server.asked.wait(PATIENCE)
    chat.type(CTRL_C)
    chat.until(b"[no answer; the prompt was forgotten]\r\n")
    assert server.left.wait(PATIENCE)
    chat.prompt()
    chat.type(CTRL_D)
    assert chat.wait() == 0


def test_ctrl_c_at_the_prompt_clears_the_line(chat: Terminal, server: FakeServer) -> None:
    server.says("fine")
    chat.type(b"wrong")
    chat.until(b"g")
    chat.type(CTRL_C)
    chat.prompt()
    chat.type(b"right" + ENTER)
    chat.until(b"fine\r\n")
    assert server.bodies[0]["messages"] == [{"role": "user", "content": "right"}]
    chat.prompt()
    chat.type(CTRL_D)
    assert chat.wait() == 0


def test_lines_are_edited_pasted_and_brought_back(chat: Terminal, server: FakeServer) -> None:
    for answer in ("one.", "two.", "three.", "four."):
        server.says(answer)
    chat.type(b"bx\x7fc\x1b[D\x1b[Da" + ENTER)  # backspace, left, left
    chat.until(b"one.\r\n")
    chat.prompt()
    chat.type(b"\x1b[200~x\ny\x1b[201~" + ENTER)
    chat.until(b"two.\r\n")
    chat.prompt()
    chat.type(b"p\x1b\rq" + ENTER)  # Alt-Enter
    chat.until(b"three.\r\n")
    chat.prompt()
    chat.type(b"\x1b[A\x1b[A\x1b[A\x1b[A\x1b[A" + ENTER)  # up through both lines of two prompts
    chat.until(b"four.\r\n")
    assert [body["messages"][-1]["content"] for body in server.bodies] == ["abc", "x\ny", "p\nq", "abc"]


def test_a_line_that_ends_in_the_last_column_is_not_erased(chat: Terminal, server: FakeServer) -> None:
    line = "".join(chr(ord("0") + i % 10) for i in range(80))
    server.says(*line)
    chat.type(b"a" + ENTER)
    chat.until(line.encode() + b"\r\n")
    chat.prompt()


def test_errors_of_the_server_are_one_line_and_the_chat_goes_on(chat: Terminal, server: FakeServer) -> None:
    server.refuses(400, '{"error": {"message": "too\\nlong"}}')
    server.says("fine")
    chat.type(b"a" + ENTER)
    chat.until(b"ds4batch: too long (HTTP 400)\r\n")
    chat.prompt()
    chat.type(b"b" + ENTER)
    chat.until(b"fine\r\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("answering", [False, True])
def test_a_signal_that_ends_the_chat_restores_the_terminal(
    chat: Terminal, server: FakeServer, number: signal.Signals, answering: bool
) -> None:
    assert chat.modes() != chat.before
    if answering:
        server.begins(chunk({"reasoning_content": "hm"}))
        chat.type(b"a" + ENTER)
        chat.until(b"hm")
    chat.process.send_signal(number)
    assert chat.wait() == 128 + number
    assert left_as_found(chat)
    assert b"Traceback" not in chat.shown
    assert b"never retrieved" not in chat.shown


@pytest.mark.parametrize("answering", [False, True])
def test_a_terminal_that_goes_away_ends_the_chat(chat: Terminal, server: FakeServer, answering: bool) -> None:
    if answering:
        server.begins(*[chunk({"content": "x" * 100})] * 100)
        chat.type(b"a" + ENTER)
        chat.until(b"xxx")
    chat.hang_up()
    assert chat.process.wait(PATIENCE) in (128 + signal.SIGHUP, 1)  # what it notices first: the signal, or that it cannot write
    assert not answering or server.left.wait(PATIENCE)


def test_a_prompt_on_the_command_line_is_interrupted_with_130(server: FakeServer) -> None:
    server.begins(chunk({"reasoning_content": "hm"}))
    with terminal("chat", "--url", server.url, "-p", "a") as chat:
        chat.until(b"hm")
        chat.type(CTRL_C)
        assert chat.wait() == 130
        assert chat.modes() == chat.before
        assert b"Traceback" not in chat.shown
