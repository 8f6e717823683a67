"""How the fairness benchmark counts, and the keys it makes."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.fairness import Sender, Watched, report, write_keys
from bench.http_stream import Call, Outcome, Result
from ds4batch.server import keys


def result(
    *times: float, prompt: int = 0, cached: int = 0, output: int = 0, outcome: Outcome = Outcome.COMPLETED
) -> tuple[Call, Result]:
    call = Call(0, (), 8)
    end = times[-1] if times else 0.0
    return call, Result(0, 0, outcome, 0.0, 0.0, end, times, output, prompt, cached)


def test_tokens_count_when_they_come_and_prompts_with_the_first_of_them() -> None:
    sender = Sender("few", 4, 1.0)
    sender.results = [
        result(9.0, 11.0, 12.0, prompt=50, output=6),  # two tokens a chunk; its prompt was evaluated before
        result(12.0, 20.0, prompt=50, cached=20, output=2),  # its last token came at the end
        result(19.0, 25.0, prompt=7, output=2),
        result(30.0, prompt=99, output=1),
        result(15.0, 16.0, outcome=Outcome.DISCONNECTED),  # cut: no usage came
        result(outcome=Outcome.FAILED),
    ]
    assert sender.tokens(10.0, 20.0) == (30 + 7, 4 + 1 + 1 + 2)


def test_the_ratio_is_over_the_weights(capsys: pytest.CaptureFixture[str]) -> None:
    many, few = Sender("many", 40, 1.0), Sender("few", 4, 2.0)
    many.results, few.results = [result(1.0, prompt=99, output=1)], [result(1.0, prompt=249, output=1)]
    series = 'ds4batch_key_computed_tokens_total{engine="0",key="few"}'
    watched = Watched({series: 40.0}, {series: 290.0}, 1.0)
    assert report(many, few, 0.0, 2.0, watched) == pytest.approx(1.25)
    assert watched.computed("few") == 250
    assert watched.computed("many") == 0
    assert "both had requests waiting" in capsys.readouterr().out


def test_the_keys_are_those_that_the_server_reads(tmp_path: Path) -> None:
    made = write_keys(tmp_path / "keys", 2.0, same=False)
    read = keys.Keys(str(tmp_path / "keys"))
    assert [(info.name, info.scope, info.weight) for key in made.values() if (info := read.find(key))] == [
        ("many", "user", 1.0), ("few", "user", 2.0), ("admin", "admin", 1.0)
    ]  # fmt: skip
    shared = write_keys(tmp_path / "more", 1.0, same=True)
    assert shared["few"] == shared["many"] != shared["admin"]
