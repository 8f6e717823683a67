"""A recorded run of agents is asked again as it was, and prices are found that explain what a server took."""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.simulation.costs import DEFAULTS, StepCosts
from bench.simulation.measure import ANSWER, DEEP, LONG, PROMPTS, REPEATS, SHORT, WIDTHS, Seen, fitted, measure, shape
from bench.simulation.measure import _wait as wait_of
from bench.simulation.plots import plot_requests
from bench.simulation.traced import Name, measured, read_trace, script, simulated
from bench.simulation.validate import of_agents
from ds4batch.scripted.vocabulary import scripted_tokenizer
from ds4batch.tokenizer import ModelTokenizer
from tests.bench.chat_server import ChatServer, serving

COSTS = replace(DEFAULTS["cpu-demo"], request=0.0)
SYSTEM = "You are one of several agents. " * 30


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ModelTokenizer:
    path = tmp_path_factory.mktemp("script") / "script.json"
    path.write_text(json.dumps({"answers": [{"say": "x"}]}), encoding="utf-8")
    return scripted_tokenizer(str(path))


def line(tokenizer: ModelTokenizer, name: str, at: float, prompt: str, output: str, **changes: Any) -> dict[str, Any]:
    """What a server's trace has of a request that took 2 s, the first token after 1 s."""
    return {
        "request": f"s4-{name}",
        "time": 1000.0 + at,
        "prompt": prompt,
        "prompt_tokens": len(tokenizer.with_bos(tokenizer.encode(prompt))),
        "output": output,
        "record": {"tokens_out": len(tokenizer.encode(output)), "finish": "length"},
        "routed": {"tier": "none", "cached_tokens": 0},
        "seconds": {"routed": 0.1, "first_token": 1.0, "last_token": 1.9, "end": 2.0},
        **changes,
    }


@pytest.fixture
def trace(tmp_path: Path, tokenizer: ModelTokenizer) -> Path:
    """A main agent, two sub-agents that wait for it, one of which asks again at once, and the main agent that waits for both."""
    first, one, two = SYSTEM + "main, begin.", SYSTEM + "first, work.", SYSTEM + "second, work."
    lines = [
        line(tokenizer, "main-0-turn", 0.0, first, " I begin."),
        line(tokenizer, "sub1-0-turn", 2.5, one, " I worked.", record={"tokens_out": 10, "finish": "stop"}),
        line(tokenizer, "sub2-0-turn", 2.6, two, " So did I."),
        line(tokenizer, "sub1-0-edit", 5.0, one + " Again!", " Done."),
        line(tokenizer, "main-1-turn", 8.0, first + " I begin. They worked.", " I end."),
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in reversed(lines)), encoding="utf-8")
    return path


def test_each_request_waits_for_those_its_client_waited_for(trace: Path, tokenizer: ModelTokenizer) -> None:
    lines = read_trace(trace, tokenizer)
    assert [one.name for one in lines] == [
        Name("main", 0, "turn"), Name("sub1", 0, "turn"), Name("sub2", 0, "turn"), Name("sub1", 0, "edit"), Name("main", 1, "turn"),
    ]  # fmt: skip
    asks = script(lines, tokenizer).asks
    assert [ask.after for ask in asks] == [(), (0,), (0,), (0, 1), (0, 1, 2, 3)]
    assert [ask.pause for ask in asks] == pytest.approx([0.0, 0.5, 0.6, 0.5, 1.0])
    assert [ask.thread for ask in asks] == [0, 1, 2, 1, 0]


def test_the_simulation_reuses_what_the_same_tokens_allow(trace: Path, tokenizer: ModelTokenizer) -> None:
    lines = read_trace(trace, tokenizer)
    model = simulated(lines, tokenizer, COSTS, 4, 4096)
    system = len(tokenizer.encode(SYSTEM))
    # Two sub-agents fork the system prompt; one cuts its answer off again, and the main agent goes on behind its own.
    assert model.reused["fork"] == 2 * system
    assert model.reused["memory-token"] == len(tokenizer.encode(SYSTEM + "main, begin. I begin.")) - 1
    assert model.prompt_tokens == sum(len(one.prompt) for one in lines)
    assert model.output_tokens == measured(lines).output_tokens == 9 + 10 + 10 + 6 + 7
    assert all(0 < model.ttft[one.name] <= model.e2e[one.name] for one in lines)


def test_an_answer_that_ended_by_itself_costs_one_draw_more(trace: Path, tokenizer: ModelTokenizer) -> None:
    lines = read_trace(trace, tokenizer)[:2]
    ended = simulated(lines, tokenizer, COSTS, 4, 4096)
    cut = simulated([lines[0], replace(lines[1], stopped=False)], tokenizer, COSTS, 4, 4096)
    name = lines[1].name
    assert ended.output_tokens == cut.output_tokens
    assert ended.ttft[name] == cut.ttft[name]
    assert ended.e2e[name] - cut.e2e[name] == pytest.approx(COSTS.decode[0][1], rel=0.2)


def test_an_answer_whose_text_has_other_tokens_keeps_its_length(trace: Path, tokenizer: ModelTokenizer) -> None:
    lines = read_trace(trace, tokenizer)
    longer = [replace(one, output_tokens=one.output_tokens + 3) for one in lines]
    assert [len(ask.told.drawn) for ask in script(longer, tokenizer).asks if ask.told] == [12, 13, 13, 9, 10]
    assert simulated(longer, tokenizer, COSTS, 4, 4096).output_tokens == sum(one.output_tokens for one in longer)


@pytest.mark.parametrize("change", [{"request": "chatcmpl-1"}, {"prompt_tokens": 3}, {"routed": None}])
def test_a_trace_of_something_else_is_refused_with_its_line(
    tmp_path: Path, tokenizer: ModelTokenizer, change: dict[str, Any]
) -> None:
    good = line(tokenizer, "main-0-turn", 0.0, "begin", "x")
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(good) + "\n" + json.dumps({**good, **change}) + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"trace\.jsonl, line 2"):
        read_trace(path, tokenizer)


def test_two_runs_are_compared_figure_by_figure(trace: Path, tokenizer: ModelTokenizer, tmp_path: Path) -> None:
    real = measured(read_trace(trace, tokenizer))
    assert all(check.deviation == 0.0 for check in of_agents(real, real))
    slower = real._replace(ttft={name: 2 * seconds for name, seconds in real.ttft.items()}, makespan=real.makespan * 1.25)
    checks = {check.name: check.deviation for check in of_agents(real, slower)}
    assert checks["TTFT mean, ms"] == pytest.approx(1.0)
    assert checks["output tokens/s"] == pytest.approx(-0.2)
    model = simulated(read_trace(trace, tokenizer), tokenizer, COSTS, 4, 4096)
    assert {check.name: check.deviation for check in of_agents(real, model)}["tokens reused, fork"] == math.inf
    plot_requests(tmp_path / "requests.png", real, model)
    assert (tmp_path / "requests.png").stat().st_size > 10_000


def test_prices_are_found_that_explain_every_wait() -> None:
    """A server whose steps cost what a table says is measured, and the table comes out."""
    truth: StepCosts = DEFAULTS["cpu-demo"]
    seen = Seen(
        steps={rows: truth.base(rows, rows * (SHORT + ANSWER // 2)) for rows in WIDTHS},
        long_step=truth.base(4, 4 * (LONG + ANSWER // 2)),
        long_rows=4,
        long_tokens=LONG,
        again=truth.request + truth.base(1, SHORT),
        first={tokens: wait_of(truth, tokens) for tokens in (*PROMPTS, DEEP)},
    )
    found = fitted(seen, shape("found", "a test"))
    assert found.held == pytest.approx(truth.held, rel=0.01)
    assert found.request == pytest.approx(truth.request, rel=0.01)
    assert found.reach == pytest.approx(truth.reach, rel=0.05)
    for rows, seconds in truth.decode:
        assert dict(found.decode)[rows] == pytest.approx(seconds, rel=0.01)
    for tokens in (100, 256, 1000, 1600):
        assert wait_of(found, tokens) == pytest.approx(wait_of(truth, tokens), rel=0.02)


def test_a_server_is_asked_every_kind_of_load_that_fits_and_nothing_twice_but_on_purpose() -> None:
    with serving(ChatServer(token_seconds=0.001, first_token_seconds=0.001)) as server:
        seen = asyncio.run(measure(server.url, slots=2, ctx=600))
    assert set(seen.steps) == {1, 2}
    assert set(seen.first) == set(PROMPTS)  # the deepest would not fit
    assert min(seen.again, seen.long_step, *seen.steps.values(), *seen.first.values()) > 0.0
    assert server.most_running == 2
    asked = Counter(body["messages"][0]["content"] for body in server.streamed)
    assert sorted(asked.values())[-2:] == [1, REPEATS + 1]


def test_noise_does_not_make_more_rows_cheaper() -> None:
    steps = {1: 0.016, 2: 0.015, 4: 0.020}
    seen = Seen(steps, 0.019, 4, LONG, 0.02, {tokens: 0.03 + tokens * 3e-4 for tokens in PROMPTS})
    found = fitted(seen, shape("found", "a test"))
    assert found.held == 0.0
    assert dict(found.decode) == {1: 0.016, 2: 0.016, 4: 0.020}
