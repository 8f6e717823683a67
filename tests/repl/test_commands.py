from __future__ import annotations

from pathlib import Path

import pytest

from ds4batch.repl import effort
from ds4batch.repl.commands import Chat, CommandError, Leave, run
from ds4batch.repl.transcript import Said, Transcript


def talk(turns: int) -> Transcript:
    return Transcript("sys", [Said(role, f"{role[0]}{i}") for i in range(turns) for role in ("user", "assistant")])


@pytest.mark.parametrize(
    ("word", "fields"),
    [
        ("off", {"think": False, "reasoning_effort": "none"}),
        ("0", {"think": False, "reasoning_effort": "none"}),
        ("1", {"think": True, "reasoning_effort": "1"}),
        ("60", {"think": True, "reasoning_effort": "60"}),
        ("100", {"think": True, "reasoning_effort": "100"}),
        ("low", {"think": True, "reasoning_effort": "low"}),
        ("medium", {"think": True, "reasoning_effort": "medium"}),
        ("high", {"think": True, "reasoning_effort": "high"}),
        ("max", {"think": True, "reasoning_effort": "max"}),
    ],
)
def test_think_takes_words_and_numbers(word: str, fields: dict[str, object]) -> None:
    chat = Chat(Transcript())
    assert effort.fields(chat.effort) == {}
    run(f"/think {word}", chat)
    assert effort.fields(chat.effort) == fields


@pytest.mark.parametrize("word", ["-1", "101", "1.5", "50x", "007", "00", "none", "High", "٣", "1 2"])
def test_think_refuses_what_means_nothing_and_keeps_what_was_set(word: str) -> None:
    chat = Chat(Transcript(), "low")
    with pytest.raises(CommandError, match=r"^/think: expected 0\.\.100, off, low"):
        run(f"/think {word}", chat)
    assert run("/think", chat) == "thinking: low"


def test_new_forgets_the_turns_and_keeps_system_text_and_prefix() -> None:
    prefix = (Said("user", "p"), Said("assistant", "q"))
    chat = Chat(talk(3), "low", prefix)
    assert "after the 2 messages" in run("/new", chat)
    assert chat == Chat(Transcript("sys", list(prefix)), "low", prefix)
    chat.transcript.said += [Said("user", "x"), Said("assistant", "y")]
    run("/new", chat)
    assert chat.transcript.said == list(prefix)


def test_system_takes_lines_and_shows_what_it_removes() -> None:
    chat = Chat(Transcript())
    assert run("/system", chat) == "there is no system text"
    run("/system be  brief\nand  kind ", chat)
    assert chat.transcript.messages() == [{"role": "system", "content": "be  brief\nand  kind"}]
    assert "be  brief" in run("/system", chat)
    assert chat.transcript.messages() == []


def test_history_shows_the_last_turns() -> None:
    chat = Chat(talk(5))
    assert run("/history", chat).split("\n") == [line for i in (2, 3, 4) for line in (f"USER: u{i}", f"ASSISTANT: a{i}")]
    assert run("/history 1", chat) == "USER: u4\nASSISTANT: a4"
    assert run("/history 200", chat).count("USER") == 5
    assert run("/history", Chat(Transcript())) == "nothing was said yet"


@pytest.mark.parametrize("argument", ["0", "201", "-1", "x", "²", "9" * 5000])
def test_history_refuses_a_bad_number(argument: str) -> None:
    with pytest.raises(CommandError, match=r"^/history: expected a number of 1\.\.200"):
        run(f"/history {argument}", Chat(talk(1)))


def test_history_marks_cut_answers_and_shortens_long_ones() -> None:
    said = [Said("user", "a"), Said("assistant", "b", cut=True), Said("user", "c"), Said("assistant", "x\n" * 100)]
    said += [Said("user", "d"), Said("assistant", "é" * 10_000)]
    shown = run("/history", Chat(Transcript("", said)))
    assert "ASSISTANT (cut): b\n" in shown
    assert shown.count("x\n") == 80
    assert "[41 more characters]\nUSER: d" in shown
    assert shown.count("é") == 6000
    assert shown.endswith("\n[4000 more characters]")


def test_a_conversation_is_saved_and_loaded(tmp_path: Path) -> None:
    path = tmp_path / "my talk.json"
    chat = Chat(talk(2), "low")
    assert run(f"/save {path}", chat) == f"saved 4 messages to {path}"
    chat.transcript = Transcript()
    assert run(f"/load {path}", chat) == f"loaded 4 messages from {path}"
    assert chat == Chat(talk(2), "low")


def test_a_file_that_cannot_be_used_changes_nothing(tmp_path: Path) -> None:
    chat = Chat(talk(2))
    with pytest.raises(CommandError, match=r"^/load .*missing: No such file or directory$"):
        run(f"/load {tmp_path / 'missing'}", chat)
    with pytest.raises(CommandError, match=r"^/save .*missing/talk: No such file or directory$"):
        run(f"/save {tmp_path / 'missing' / 'talk'}", chat)
    with pytest.raises(CommandError, match=r"Is a directory$"):
        run(f"/load {tmp_path}", chat)
    (tmp_path / "text").write_text("x")
    with pytest.raises(CommandError, match=r"^/load: .*text: not JSON"):
        run(f"/load {tmp_path / 'text'}", chat)
    for name in ("save", "load"):
        with pytest.raises(CommandError, match=f"^/{name}: name a file$"):
            run(f"/{name}", chat)
    assert chat == Chat(talk(2))


def test_help_names_every_command() -> None:
    shown = run("/help", Chat(Transcript()))
    assert [line.split()[0] for line in shown.split("\n")][:8] == [
        f"/{name}" for name in ("help", "new", "system", "think", "history", "save", "load", "quit")
    ]


def test_quit_leaves() -> None:
    with pytest.raises(Leave):
        run("/quit", Chat(Transcript()))


@pytest.mark.parametrize(("line", "name"), [("/", "/"), ("/ think 3", "/"), ("/etc/hosts?", "/etc/hosts?"), ("/Help", "/Help")])
def test_an_unknown_command_is_named(line: str, name: str) -> None:
    with pytest.raises(CommandError) as caught:
        run(line, Chat(Transcript()))
    assert str(caught.value).startswith(f"unknown command {name};")


def test_a_command_without_arguments_takes_none() -> None:
    chat = Chat(talk(1))
    with pytest.raises(CommandError, match=r"^/new takes no argument$"):
        run("/new chat", chat)
    assert chat == Chat(talk(1))
