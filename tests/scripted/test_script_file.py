"""The file of a scripted model: what it may hold, what is said of a mistake in it, and which answer is given."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4batch.scripted.script import Answer, Script, read_script
from ds4batch.scripted.vocabulary import scripted_tokenizer
from ds4batch.server.run import load_text_model
from ds4batch.settings import Settings


def written(directory: Path, content: Any) -> Path:
    path = directory / "play.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return path


def test_everything_a_file_may_say(tmp_path: Path) -> None:
    table = {
        "dialect": "glm",
        "step_seconds": 0.25,
        "answers": [
            {"say": "hello"},
            {"after": "bytes", "say": ["caf", [195, 169], "", [255]], "end": False, "margin": 2},
        ],
    }
    assert read_script(written(tmp_path, table)) == Script(
        (Answer("", b"hello", True, 30.0), Answer("bytes", "café".encode() + b"\xff", False, 2.0)), "glm", 0.25
    )
    assert read_script(written(tmp_path, {"answers": []})) == Script((), "auto", 0.0)


ANSWER = "answers[1]"
MISTAKES: list[tuple[Any, str]] = [
    (b"{", "not JSON: "),
    (b"\xff", "not JSON: "),
    (b"[" * 100_000, "not JSON: "),
    ([], "the script: expected an object"),
    ({}, "answers: expected a list"),
    ({"answers": {}}, "answers: expected a list"),
    ({"answers": [], "answer": []}, "the script: unknown field 'answer'; it may have answers, dialect, step_seconds"),
    ({"answers": [], "dialect": 3}, "dialect: expected a text"),
    ({"answers": [], "step_seconds": -1}, "step_seconds: expected a number of 0 or more"),
    ({"answers": [], "step_seconds": True}, "step_seconds: expected a number of 0 or more"),
    ({"answers": [], "step_seconds": "1"}, "step_seconds: expected a number of 0 or more"),
    (b'{"answers": [], "step_seconds": NaN}', "step_seconds: expected a number of 0 or more"),
    ({"answers": [{"say": ""}, "x"]}, f"{ANSWER}: expected an object"),
    ({"answers": [{"say": ""}, {"after": "x"}]}, f"{ANSWER}.say: is missing"),
    ({"answers": [{"say": ""}, {"say": "", "then": ""}]}, f"{ANSWER}: unknown field 'then'; it may have after, end, margin, say"),
    ({"answers": [{"say": ""}, {"say": "", "after": None}]}, f"{ANSWER}.after: expected a text"),
    ({"answers": [{"say": ""}, {"say": 3}]}, f"{ANSWER}.say: expected a text"),
    ({"answers": [{"say": ""}, {"say": ["x", 3]}]}, f"{ANSWER}.say: expected a text"),
    ({"answers": [{"say": ""}, {"say": [[256]]}]}, f"{ANSWER}.say: a list of bytes holds numbers of 0 to 255"),
    ({"answers": [{"say": ""}, {"say": [["x"]]}]}, f"{ANSWER}.say: a list of bytes holds numbers of 0 to 255"),
    ({"answers": [{"say": ""}, {"say": "", "end": 1}]}, f"{ANSWER}.end: expected true or false"),
    ({"answers": [{"say": ""}, {"say": "", "margin": None}]}, f"{ANSWER}.margin: expected a number of 0 or more"),
]


@pytest.mark.parametrize(("content", "problem"), MISTAKES, ids=[problem[:50] for _, problem in MISTAKES])
def test_a_mistake_is_named_with_its_file_and_field(tmp_path: Path, content: Any, problem: str) -> None:
    path = written(tmp_path, content)
    with pytest.raises(ValueError, match="^" + re.escape(f"{path}: {problem}")):
        read_script(path)


def test_a_server_refuses_a_dialect_that_does_not_exist(tmp_path: Path) -> None:
    path = written(tmp_path, {"answers": [], "dialect": "klingon"})
    with pytest.raises(ValueError, match="the dialect 'klingon' is unknown; there are auto, deepseek-v4, "):
        load_text_model(Settings(script=str(path)))
    assert load_text_model(Settings(script=str(path), dialect="glm")).dialect.name == "glm"  # the option comes first
    with pytest.raises(FileNotFoundError, match=r"nowhere\.json"):
        load_text_model(Settings(script=str(tmp_path / "nowhere.json")))


def test_the_model_is_called_as_its_file(tmp_path: Path) -> None:
    model = load_text_model(Settings(script=str(written(tmp_path, {"answers": []}))))
    assert (model.id, model.name, model.dialect.name) == ("play", "play", "jinja")


# Which answer is given.


def say(*afters: str) -> Script:
    return Script(tuple(Answer(after, f"{i}".encode()) for i, after in enumerate(afters)))


@pytest.mark.parametrize(
    ("afters", "prompt", "chosen"),
    [
        (("one", "two"), "one two", "1"),
        (("one", "two"), "two one", "0"),
        (("one", "two"), "one two one", "0"),
        (("two", "one two"), "one two", "1"),
        (("one two", "two"), "one two", "0"),
        (("", "one"), "one", "1"),
        (("one", ""), "one", "0"),
        (("", "one"), "two", "0"),
        (("one",), "two", ""),
        ((), "two", ""),
        (("same", "same"), "same", "0"),
    ],
)
def test_what_occurs_last_decides_and_of_two_that_end_there_the_longer(afters: tuple[str, ...], prompt: str, chosen: str) -> None:
    assert say(*afters).answer(prompt).say.decode() == chosen


@given(st.text("ab", max_size=12), st.lists(st.text("ab", max_size=3), max_size=5))
def test_the_choice_is_the_best_of_all_that_fit(prompt: str, afters: list[str]) -> None:
    chosen = say(*afters).answer(prompt)
    fitting = [after for after in afters if after and after in prompt]
    if fitting:
        assert chosen.after == max(fitting, key=lambda after: (prompt.rfind(after) + len(after), len(after)))
    else:
        assert (chosen.after, bool(chosen.say)) == ("", "" in afters)


# The vocabulary.


@given(st.text())
def test_any_text_is_a_token_a_byte_and_comes_back(text: str) -> None:
    tokenizer = scripted_tokenizer("x.json")
    clean = text.encode("utf-8", "replace").decode()
    tokens = tokenizer.encode(clean)
    assert tokenizer.decode(tokens) == clean
    if not tokenizer.special_ids & set(tokens):
        assert len(tokens) == len(clean.encode())


def test_markers_are_tokens_of_their_own_wherever_they_stand() -> None:
    tokenizer = scripted_tokenizer("x.json")
    (close,) = tokenizer.encode("</think>")
    assert tokenizer.encode("a</think>b")[1] == close
    assert tokenizer.token_bytes(close) == b"</think>"
    for token in tokenizer.special_ids:
        assert tokenizer.encode(tokenizer.decode([token])) == [token]
    assert {tokenizer.decode([token]) for token in tokenizer.stop_ids} >= {"<|im_end|>", "<|user|>"}
