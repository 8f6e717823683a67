"""One load from several programs: their reports are read, their runs take turns, and none meets another's prompts."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import compare_tools
from bench.compare_tools import Run, agree, apart, deviations, measure
from bench.tools.environments import REQUIREMENTS, program
from bench.tools.load import Load, Seen, ToolFailed
from bench.tools.peers import Aiperf, Guidellm, Ours, Tool
from tests.bench.chat_server import ChatServer, serving

REPORTS = Path(__file__).parent / "tool_reports"  # of the versions in bench/tools, on a scripted server: 4 requests of 8 tokens
LOAD = Load("http://127.0.0.1:1", "tiny", Path("/tokenizer"), 2, 2, 40, 8, 0, "run")
SEEN = Seen(2, 0, 2.0, 80, 0, 16, 8.0, 100.0, 90.0, 10.0, 200.0)


class Other(Ours):
    """A second program that reports as the first does."""

    name = "other"


class Broken(Ours):
    """Says why and gives up."""

    name = "broken"

    def command(self, load: Load, prompts: Sequence[str], folder: Path) -> list[str]:
        return [sys.executable, "-c", "print('no such flag'); raise SystemExit(3)"]


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with serving(ChatServer()) as running:
        yield running


def measured(server: ChatServer, folder: Path, tools: Sequence[Tool]) -> list[Run]:
    words = ["-m", "none", "--requests", "3", "--concurrency", "2", "--prompt-tokens", "40", "--max-tokens", "4", "--rounds", "2"]
    return asyncio.run(measure(compare_tools.make_parser().parse_args(words), server.url, tools, folder))


def report(name: str) -> dict[str, Any]:
    body: dict[str, Any] = json.loads((REPORTS / f"{name}.json").read_text(encoding="utf-8"))
    return body


@pytest.mark.parametrize("tool", [Aiperf(Path("aiperf")), Guidellm(Path("guidellm"))], ids=lambda tool: tool.name)
def test_a_real_report_is_read(tool: Tool) -> None:
    seen = tool.figures(report(tool.name))
    assert (seen.completed, seen.failed, seen.output_tokens, seen.prompt_tokens) == (4, 0, 32, 216)
    assert seen.output_throughput == pytest.approx(seen.output_tokens / seen.duration_s, rel=0.02)
    assert seen.e2e_mean == pytest.approx(
        seen.ttft_mean + 7 * seen.token_mean, rel=0.02
    )  # milliseconds all, 7 tokens behind the first
    assert 0 < seen.token_mean < seen.ttft_p50 < 1e3 * seen.duration_s


def test_failures_are_counted() -> None:
    body = report("aiperf")
    body["error_summary"] = [{"error_details": {"code": 503}, "count": 2}, {"error_details": {"code": 400}, "count": 1}]
    assert Aiperf(Path("aiperf")).figures(body).failed == 3
    body = report("guidellm")
    body["benchmarks"][0]["metrics"]["request_totals"] |= {"errored": 2, "incomplete": 1}
    assert Guidellm(Path("guidellm")).figures(body).failed == 3


@pytest.mark.parametrize("text", ["", "{}", '{"benchmarks": []}', "[]"])
def test_a_report_of_another_form_is_refused_with_the_tools_name(tmp_path: Path, text: str) -> None:
    (tmp_path / Guidellm.report).write_text(text, encoding="utf-8")
    with pytest.raises(ToolFailed, match=r"guidellm: .*out\.json"):
        Guidellm(Path("guidellm")).read(tmp_path)
    with pytest.raises(ToolFailed, match=r"aiperf: .*No such file"):
        Aiperf(Path("aiperf")).read(tmp_path)


@pytest.mark.parametrize(
    ("tool", "prompt", "length"),
    [(Aiperf(Path("aiperf")), "text", "output_length"), (Guidellm(Path("guidellm")), "prompt", "output_tokens_count")],
    ids=["aiperf", "guidellm"],
)
def test_prompts_and_the_length_of_answers_go_into_a_file_that_the_command_names(
    tmp_path: Path, tool: Tool, prompt: str, length: str
) -> None:
    command = tool.command(LOAD, ["one", "two"], tmp_path)
    path = tmp_path / "prompts.jsonl"
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{prompt: text, length: 8} for text in ("one", "two")]
    assert any(str(path) in word for word in command)
    assert any(LOAD.url in word for word in command)


def test_tools_take_turns_with_the_same_texts_and_nonces_of_their_own(server: ChatServer, tmp_path: Path) -> None:
    runs = measured(server, tmp_path, [Ours(), Other()])
    assert [(run.tool, run.round) for run in runs] == [("ds4batch", 0), ("other", 0), ("ds4batch", 1), ("other", 1)]
    assert all((run.seen.completed, run.seen.failed, run.seen.output_tokens) == (3, 0, 12) for run in runs)
    asked = [body["messages"][0]["content"] for body in server.streamed]
    assert len(asked) == len(set(asked)) == 4 + 4 * 3  # the first 4 to warm up
    assert len({text.partition("]")[2] for text in asked[4:]}) == 3
    assert set(deviations(runs)) == {"other"}


def test_a_tool_that_fails_is_named_with_what_it_said(server: ChatServer, tmp_path: Path) -> None:
    with pytest.raises(ToolFailed, match=r"broken ended with status 3(?s:.*)no such flag"):
        measured(server, tmp_path, [Ours(), Broken()])


def test_tools_agree_within_the_limit_and_not_beyond() -> None:
    runs = [Run("ds4batch", 0, SEEN, 99.0), Run("other", 0, replace(SEEN, ttft_mean=109.0), 99.0)]
    assert deviations(runs)["other"]["ttft_mean"] == pytest.approx(0.09)
    assert agree(runs, 0.1)
    assert not agree(runs, 0.08)
    # The mean of the rounds counts, not each.
    again = [Run("ds4batch", 1, SEEN, 99.0), Run("other", 1, replace(SEEN, ttft_mean=93.0), 99.0)]
    assert agree([*runs, *again], 0.02)


@pytest.mark.parametrize("change", [{"failed": 1}, {"completed": 1}, {"output_tokens": 15}, {"output_throughput": 6.0}])
def test_another_load_or_another_rate_is_no_agreement(change: dict[str, float]) -> None:
    other = replace(SEEN, **change)  # type: ignore[arg-type]  # the field decides which kind of number
    assert not agree([Run("ds4batch", 0, SEEN, None), Run("other", 0, other, None)], 0.1)


def test_processors_are_halved_and_one_is_refused() -> None:
    assert apart({4, 1, 7}) == ({1, 4}, {7})
    with pytest.raises(ValueError, match="--apart"):
        apart({0})


def test_an_environment_is_built_once_for_its_requirements(tmp_path: Path) -> None:
    home = tmp_path / "aiperf"
    home.mkdir()
    (home / ".installed").write_bytes((REQUIREMENTS / "aiperf.txt").read_bytes())
    assert program("aiperf", tmp_path) == home / "bin" / "aiperf"
    assert not (home / "bin").exists()  # nothing was installed again
