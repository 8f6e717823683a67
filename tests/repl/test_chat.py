"""The command in process, against a server over real sockets, with pipes for standard input and output."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ds4batch.cli import main
from ds4batch.repl.client import Client
from ds4batch.repl.commands import Chat
from ds4batch.repl.loop import Outcome, Repl, feed, interact
from ds4batch.repl.terminal import Screen
from ds4batch.repl.transcript import Said, Transcript
from tests.repl.fake_server import PATIENCE, FakeServer, chunk


class Interrupting(io.StringIO):
    """Standard output that presses ctrl-C when it sees a text."""

    def __init__(self, at: str) -> None:
        super().__init__()
        self._at = at

    def write(self, text: str) -> int:
        if self._at in text:
            signal.raise_signal(signal.SIGINT)
        return super().write(text)


class Desk:
    """A chat with its outputs."""

    def __init__(self, server: FakeServer, out: io.StringIO | None = None) -> None:
        self.chat = Chat(Transcript())
        self.out = out or io.StringIO()
        self.err = io.StringIO()
        screen = Screen(self.out, terminal=True, dim=False)
        self.repl = Repl(Client(server.url), self.chat, {}, screen, self.err)

    @property
    def said(self) -> list[Said]:
        return self.chat.transcript.said


def contents(body: dict[str, Any]) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in body["messages"]]


def test_the_history_goes_along_with_its_thinking(server: FakeServer) -> None:
    desk = Desk(server)
    server.says({"reasoning_content": "hm"}, "one")
    server.says("two")
    assert [desk.repl.enter(" a "), desk.repl.enter("b")] == [Outcome.DONE] * 2
    assert server.bodies[1]["messages"] == [
        {"role": "user", "content": " a "},
        {"role": "assistant", "content": "one", "reasoning_content": "hm"},
        {"role": "user", "content": "b"},
    ]
    assert desk.out.getvalue() == "hm\n\none\ntwo\n"
    assert desk.err.getvalue() == ""


def test_an_interrupted_answer_is_kept_as_shown_and_the_server_is_left(server: FakeServer) -> None:
    desk = Desk(server, Interrupting("two"))
    server.begins(chunk({"reasoning_content": "hm"}), chunk({"content": "one "}), chunk({"content": "two"}))
    server.says("fine")
    assert desk.repl.ask("a") is Outcome.CUT
    assert server.left.wait(PATIENCE)
    assert desk.said == [Said("user", "a"), Said("assistant", "one two", "hm", cut=True)]
    assert desk.out.getvalue() == "hm\n\none two\n"
    assert desk.err.getvalue() == "[the answer was cut]\n"
    assert desk.repl.ask("b") is Outcome.DONE
    assert contents(server.bodies[1]) == [("user", "a"), ("assistant", "one two"), ("user", "b")]


def test_an_answer_interrupted_while_thinking_is_kept(server: FakeServer) -> None:
    desk = Desk(server, Interrupting("hm"))
    server.begins(chunk({"reasoning_content": "hm"}))
    assert desk.repl.ask("a") is Outcome.CUT
    assert desk.said == [Said("user", "a"), Said("assistant", "", "hm", cut=True)]


@pytest.mark.parametrize("kind", ["error", "drop", "end"])
def test_an_answer_that_breaks_is_kept_as_cut(server: FakeServer, kind: str) -> None:
    desk = Desk(server)
    piece = chunk({"content": "one"})
    if kind == "error":
        server.sends(piece, b'event: error\ndata: {"error": {"message": "engine died"}}\n\n')
    elif kind == "drop":
        server.breaks(piece)
    else:
        server.sends(piece)
    assert desk.repl.ask("a") is Outcome.FAILED
    assert desk.said == [Said("user", "a"), Said("assistant", "one", cut=True)]
    assert desk.out.getvalue() == "one\n"
    error = desk.err.getvalue()
    assert error.startswith("ds4batch: ")
    assert error.endswith("; what was shown is kept as a cut answer\n")
    assert error.count("\n") == 1


def test_a_prompt_that_got_no_answer_is_forgotten_and_the_chat_goes_on(server: FakeServer) -> None:
    desk = Desk(server)
    server.refuses(429, '{"error": {"message": "busy"}}')
    server.says("fine")
    assert desk.repl.ask("a") is Outcome.FAILED
    assert desk.err.getvalue() == "ds4batch: busy (HTTP 429)\n"
    assert desk.repl.ask("b") is Outcome.DONE
    assert contents(server.bodies[1]) == [("user", "b")]
    assert desk.said == [Said("user", "b"), Said("assistant", "fine")]


@pytest.mark.parametrize(
    ("pieces", "reason", "note"),
    [
        (["a"], "stop", ""),
        (["a"], "length", "[the answer reached its token limit]\n"),
        (["a"], "tool_calls", "[the answer ended with tool_calls]\n"),
        ([], "stop", "[the answer is empty]\n"),
    ],
)
def test_what_the_answer_does_not_show_is_noted(server: FakeServer, pieces: list[str], reason: str, note: str) -> None:
    desk = Desk(server)
    server.says(*pieces, reason=reason)
    assert desk.repl.ask("a") is Outcome.DONE
    assert desk.err.getvalue() == note
    assert desk.said == [Said("user", "a"), Said("assistant", "".join(pieces))]


def test_thinking_set_by_a_command_holds_for_the_next_prompts(server: FakeServer) -> None:
    desk = Desk(server)
    for line in ("a", "/think 40", "b", "/think off", "c"):
        if not line.startswith("/"):
            server.says("x")
        assert desk.repl.enter(line) is Outcome.DONE
    asked = [{name: body[name] for name in ("think", "reasoning_effort") if name in body} for body in server.bodies]
    assert asked == [{}, {"think": True, "reasoning_effort": "40"}, {"think": False, "reasoning_effort": "none"}]


def test_a_typed_chat_survives_errors_and_interrupts_and_ends_with_its_input(server: FakeServer) -> None:
    desk = Desk(server)
    server.says("fine")
    typed: Iterator[str | BaseException] = iter(["/nothing", KeyboardInterrupt(), "", "   ", "a", EOFError()])

    def read() -> str:
        item = next(typed)
        if isinstance(item, BaseException):
            raise item
        return item

    assert interact(desk.repl, read) == 0
    assert next(typed, None) is None
    assert desk.out.getvalue() == "fine\n"
    assert desk.err.getvalue().startswith("ds4batch: unknown command /nothing;")


def test_quit_ends_a_typed_chat(server: FakeServer) -> None:
    assert interact(Desk(server).repl, lambda: "/quit") == 0


def test_a_pipe_is_entered_line_by_line(server: FakeServer) -> None:
    desk = Desk(server)
    server.says("one")
    server.says("two")
    assert feed(desk.repl, [b"a\r\n", b"\n", b"/think low\n", "é /b".encode()]) == 0
    assert contents(server.bodies[1]) == [("user", "a"), ("assistant", "one"), ("user", "é /b")]
    assert desk.out.getvalue() == "one\nthinking: low\ntwo\n"


@pytest.mark.parametrize(("bad", "message"), [(b"\xff\n", "standard input, line 1: not UTF-8"), (b"/x\n", "unknown command /x;")])
def test_a_bad_line_of_a_pipe_costs_that_line_and_the_status(server: FakeServer, bad: bytes, message: str) -> None:
    desk = Desk(server)
    server.says("fine")
    assert feed(desk.repl, [bad, b"b\n"]) == 1
    assert desk.err.getvalue().startswith(f"ds4batch: {message}")
    assert contents(server.bodies[0]) == [("user", "b")]


def test_an_interrupt_ends_a_pipe(server: FakeServer) -> None:
    desk = Desk(server, Interrupting("one"))
    server.begins(chunk({"content": "one"}))
    assert feed(desk.repl, [b"a\n", b"b\n"]) == 130
    assert len(server.bodies) == 1


def test_the_prefix_file_and_the_options_go_into_the_request(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = tmp_path / "prefix"
    prefix.write_text("USER: p\nASSISTANT: q\n")
    server.says({"reasoning_content": "hm"}, "answer")
    options = ["--system", "s", "--prefix-file", str(prefix), "--model", "m", "--temperature", "0", "--max-tokens", "9"]
    assert main(["chat", "--url", server.url + "/v1/", *options, "--think-level", "70", "-p", "/hi"]) == 0
    assert server.bodies == [
        {
            "messages": [
                {"role": "system", "content": "s"},
                {"role": "user", "content": "p"},
                {"role": "assistant", "content": "q"},
                {"role": "user", "content": "/hi"},
            ],
            "model": "m",
            "temperature": 0.0,
            "max_tokens": 9,
            "think": True,
            "reasoning_effort": "70",
            "stream": True,
        }
    ]
    assert capsys.readouterr() == ("answer\n", "")


@pytest.mark.parametrize(
    ("flags", "fields"),
    [
        (["--think"], {"think": True, "reasoning_effort": "high"}),
        (["--think-max"], {"think": True, "reasoning_effort": "max"}),
        (["--nothink"], {"think": False, "reasoning_effort": "none"}),
        (["--think-level", "0"], {"think": False, "reasoning_effort": "none"}),
        ([], {}),
    ],
)
def test_thinking_is_an_option(server: FakeServer, flags: list[str], fields: dict[str, Any]) -> None:
    server.says("x")
    assert main(["chat", "--url", server.url, *flags, "-p", "a"]) == 0
    assert server.bodies[0].items() >= fields.items()
    assert len(server.bodies[0]) == 2 + len(fields)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--url", "localhost:8000"], "expected http://HOST:PORT"),
        (["--url", "ftp://x"], "expected http://HOST:PORT"),
        (["--url", "http://x:99999"], "expected http://HOST:PORT"),
        (["--url", "http://"], "expected http://HOST:PORT"),
        (["--url", "http://[x"], "expected http://HOST:PORT"),
        (["--think-level", "101"], "argument --think-level: expected a number of 0..100, got '101'"),
        (["--think-level", "high"], "argument --think-level: expected a number of 0..100, got 'high'"),
        (["--think", "--nothink"], "not allowed with argument"),
        (["--max-tokens", "0"], "argument --max-tokens: expected a whole number from 1 on"),
        (["--temperature", "nan"], "argument --temperature: expected a number from 0 on"),
        (["--temperature", "warm"], "argument --temperature: expected a number from 0 on"),
        (["-p", " "], "argument -p/--prompt: is empty"),
    ],
)
def test_a_wrong_command_line_is_refused(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["chat", *options])
    assert left.value.code == 2
    assert message in capsys.readouterr().err


def test_a_prefix_file_that_cannot_be_used_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = tmp_path / "prefix"
    assert main(["chat", "--prefix-file", str(prefix), "-p", "a"]) == 1
    assert capsys.readouterr().err == f"ds4batch: {prefix}: No such file or directory\n"
    prefix.write_text("USER: a\nUSER: b")
    assert main(["chat", "--prefix-file", str(prefix), "-p", "a"]) == 1
    assert capsys.readouterr().err == f"ds4batch: {prefix}: line 2: expected ASSISTANT:\n"


def test_a_failed_prompt_is_an_exit_status(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.refuses(500, "broken")
    assert main(["chat", "--url", server.url, "-p", "a"]) == 1
    assert capsys.readouterr() == ("", "ds4batch: broken (HTTP 500)\n")


def test_standard_input_that_is_no_terminal_is_read_by_lines(server: FakeServer) -> None:
    server.says("one")
    command = [sys.executable, "-m", "ds4batch.cli", "chat", "--url", server.url]
    done = subprocess.run(command, input=b"a\n/quit\nnot this\n", capture_output=True, timeout=PATIENCE, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"one\n", b"")


def test_a_reader_that_leaves_ends_the_chat_quietly(server: FakeServer) -> None:
    server.begins(*[chunk({"content": "x" * 10_000})] * 50)
    command = [sys.executable, "-m", "ds4batch.cli", "chat", "--url", server.url, "-p", "a"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(1) == b"x"
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(PATIENCE) == 1
    assert server.left.wait(PATIENCE)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_standard_output_that_cannot_be_written_is_named(server: FakeServer) -> None:
    server.says("one")
    command = [sys.executable, "-m", "ds4batch.cli", "chat", "--url", server.url, "-p", "a"]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, timeout=PATIENCE, check=False)
    assert (done.returncode, done.stderr) == (1, b"ds4batch: standard output: No space left on device\n")
