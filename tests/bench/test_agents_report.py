"""The figures of the agents' benchmark: from trace lines, metrics and requests to goals met and missed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from bench import agents
from bench.agent_check import Check, check
from bench.agent_client import AgentClient, Answer, Request
from bench.agent_report import Evidence, Figure, check_figures, prefill_figures, request_figures, scenario_figures
from bench.agent_restart import disk_figures, plain_read_rate, restart_figures
from bench.agent_scenario import Record
from bench.agent_servers import arithmetic_only, ctx_for
from bench.agent_store_cost import cost_figures
from bench.agent_trace import STALE_SECONDS, Placed, by_tier, load_rate, losses, prefilled, read_trace, widest
from tests.bench.chat_server import ChatServer, serving


def record(
    name: str, prompt: int, cached: int, new: int, *, kind: str = "turn", failure: str = "", hung_up: bool = False
) -> Record:
    body = {"model": "tiny", "messages": [{"role": "user", "content": name}], "max_tokens": 4, "temperature": 0}
    answer = Answer("word0 word1 word2 word3 ", "", (), "length", prompt, cached, 4, hung_up, failure)
    return Record(Request(name, name.split("-")[0], kind, body), answer, prompt or 100, new)


def named(figures: Sequence[Figure], name: str) -> Figure:
    (figure,) = [figure for figure in figures if figure.name.strip() == name]
    return figure


def place(request: str, slot: int, at: float, *, evicted: int = 0, ended: float | None = None) -> Placed:
    return Placed(request, slot, "none", 0, evicted, at, at + 0.5 if ended is None else ended)


def main(request: str) -> bool:
    return request.startswith("main")


def test_driving_the_owner_out_counts_and_an_empty_slot_makes_it_needless() -> None:
    crowd = [place("main-0", 0, 1), place("a", 1, 2), place("b", 0, 3, evicted=70)]
    (loss,) = losses(crowd, 2, main)
    assert (loss.request, loss.slot, loss.tokens, loss.better) == ("b", 0, 70, 0)
    (loss,) = losses(crowd, 4, main)
    assert loss.better == 2


def test_a_slot_taken_in_the_same_step_was_not_left() -> None:
    both = [place("main-0", 0, 1), place("b", 0, 3.0, evicted=70), place("a", 1, 3.0000004)]
    assert losses(both, 2, main)[0].better == 0
    later = [place("main-0", 0, 1), place("b", 0, 3.0, evicted=70), place("a", 1, 3.5)]
    assert losses(later, 2, main)[0].better == 1


def test_a_stale_session_is_a_better_victim_and_a_fresh_one_is_not() -> None:
    for idle, better in ((STALE_SECONDS + 1, 1), (STALE_SECONDS - 1, 0)):
        placed = [place("a", 1, 0.0, ended=1.0), place("main-0", 0, 2.0), place("b", 0, 1.0 + idle, evicted=9)]
        assert losses(placed, 2, main)[0].better == better


def test_the_owner_is_followed_to_its_last_slot_and_lost_once() -> None:
    placed = [
        place("main-0", 0, 1),
        place("main-1", 1, 2),
        place("a", 0, 3, evicted=5),  # what the owner had left behind
        place("b", 1, 4, evicted=6),
        place("c", 1, 5, evicted=7),  # b's, no longer the owner's
        place("main-2", 1, 6, evicted=8),  # its own
    ]
    assert [loss.tokens for loss in losses(placed, 2, main)] == [6]


def test_a_trace_is_read_in_the_order_of_routing_and_broken_lines_are_left_out(tmp_path: Path) -> None:
    def line(name: str, arrived: float, routed: float | None) -> str:
        how = {"slot": 2, "tier": "memory-token", "cached_tokens": 7, "evicted_tokens": 0, "victim": "none"}
        seconds = {"routed": routed, "end": 9.0}
        return json.dumps({"request": name, "time": arrived, "routed": None if routed is None else how, "seconds": seconds})

    path = tmp_path / "trace"
    path.write_text("\n".join([line("b", 10.0, 3.0), line("a", 11.0, 0.5), line("queued", 1.0, None), line("c", 1.0, 1.0)[:40]]))
    assert [p.request for p in read_trace(path)] == ["a", "b"]
    assert read_trace(path)[0] == Placed("a", 2, "memory-token", 7, 0, 11.5, 20.0)
    assert read_trace(tmp_path / "none") == []


METRICS = {
    'vllm:prompt_tokens_total{engine="0"}': 900.0,
    'ds4batch_reused_tokens_total{engine="0",tier="memory-token"}': 500.0,
    'ds4batch_reused_tokens_total{engine="0",tier="none"}': 0.0,
    'ds4batch_disk_load_seconds_sum{engine="0"}': 0.5,
    'ds4batch_disk_load_bytes_total{engine="0"}': 2e6,
}


def test_the_metrics_say_what_was_evaluated_and_what_was_reused() -> None:
    assert prefilled(METRICS) == 400
    assert by_tier(METRICS) == {"memory-token": 500}
    assert load_rate(METRICS) == 4e6
    assert prefilled({}) is None
    assert load_rate({}) is None
    assert by_tier({}) == {}


def test_memory_is_compared_where_sharing_saves_most() -> None:
    def reading(shared: float, unshared: float) -> dict[str, float]:
        return {f'ds4batch_memory_bytes{{kind="sessions_{name}"}}': v for name, v in (("shared", shared), ("unshared", unshared))}

    assert widest([reading(0, 0), reading(30, 100), reading(80, 90)]) == (30, 100)
    assert widest([{}, reading(0, 0)]) is None


def test_prefill_is_held_against_what_was_new() -> None:
    records = [record("a", 500, 400, 90), record("b", 200, 150, 50)]
    ratio = named(prefill_figures(records, {}), "prefilled / new")
    assert (ratio.value, ratio.met) == (pytest.approx(150 / 140), True)
    by_metrics = named(prefill_figures(records, METRICS), "prefilled / new")
    assert (by_metrics.value, by_metrics.met) == (pytest.approx(400 / 140), False)


def test_a_failed_request_is_in_no_token_count_and_misses_its_goal() -> None:
    records = [record("a", 500, 400, 90), record("b", 0, 0, 50, failure="http_500: no")]
    assert named(prefill_figures(records, {}), "prompt tokens received").value == 500
    failed = named(request_figures(records), "failed")
    assert (failed.value, failed.met) == (1, False)
    assert "http_500" in failed.text


def test_a_prompt_that_was_given_up_counts_as_received_and_new() -> None:
    figures = prefill_figures([record("a", 0, 0, 30, kind="hangup", hung_up=True)], {})
    assert named(figures, "prompt tokens received").value == 100
    assert named(figures, "new to the box").value == 30


def test_a_server_that_reports_nothing_misses_no_goal_about_it() -> None:
    figures = scenario_figures(Evidence([record("a", 500, 480, 20)], [{}, {}], None, 16), main)
    assert named(figures, "memory with sharing / without").met is None
    assert named(figures, "main agent driven out").met is None
    assert all(figure.met is not False for figure in figures)


def test_other_prompt_lengths_in_the_usage_are_told() -> None:
    odd = record("a", 500, 0, 1)
    figures = request_figures([Record(odd.request, odd.answer, 499, 1)])
    assert named(figures, "counted otherwise").value == 1
    assert not [f for f in request_figures([odd]) if f.name == "counted otherwise"]


@pytest.mark.parametrize(
    ("outcome", "met"),
    [
        (Check(1, (), 3, (), 0, 0), [True, True]),
        (Check(1, ("x",), 3, (), 0, 0), [False, True]),
        (Check(1, (), 3, ("x",), 0, 0), [True, False]),
        (Check(1, (), 2, (), 1, 0), [True, False]),
        (Check(0, (), 0, (), 0, 0), [True, None]),
    ],
)
def test_one_different_answer_misses_the_goal(outcome: Check, met: list[bool | None]) -> None:
    assert [figure.met for figure in check_figures(outcome)] == met


def test_after_a_restart_each_conversation_has_its_own_limit() -> None:
    second = [record("a", 700, 640, 50), record("b", 700, 0, 50)]
    figures = restart_figures([], second, tail=10)
    assert named(figures, "conversations found again").met is False
    assert named(figures, "within new + tail").value == 1
    assert named(restart_figures([], second[:1], tail=10), "within new + tail").met is True
    assert named(restart_figures([], second[:1], tail=9), "within new + tail").met is False


def test_the_store_costs_nothing_that_was_measured_without_a_store() -> None:
    assert named(cost_figures([10.6] * 9, [10.0] * 9, 5, []), "cost").met is False
    assert named(cost_figures([10.4] * 9, [10.0] * 9, 5, []), "cost").met is True
    assert named(cost_figures([10.6] * 9, [10.0] * 9, 0, []), "cost").met is None
    assert named(cost_figures([], [10.0], 0, []), "answered").met is False


def test_checkpoints_are_read_as_they_lie(tmp_path: Path) -> None:
    assert plain_read_rate(tmp_path / "none") is None
    assert plain_read_rate(tmp_path) is None
    (tmp_path / "a.kv").write_bytes(bytes(1 << 16))
    rate = plain_read_rate(tmp_path)
    assert rate is not None
    assert named(disk_figures(METRICS, rate), "loads, bytes a second").text.startswith("4 MB/s; a plain read")


def test_the_oracle_gets_what_changes_bits_and_nothing_else() -> None:
    extra = [
        "--kv-disk-dir",
        "/x",
        "--dtype",
        "fp32",
        "--page-tokens=64",
        "--dequantise",
        "--kv-cache-dtype=bf16",
        "-t",
        "1",
        "--cors",
    ]
    assert arithmetic_only(extra) == ["--dtype", "fp32", "--dequantise", "--kv-cache-dtype=bf16", "-t", "1"]


def test_a_context_is_a_whole_number_of_steps() -> None:
    assert [ctx_for(n) for n in (1, 256, 257)] == [256, 256, 512]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--turns", "2"], "--turns"),
        (["--kill"], "--kill"),
        (["--base-url", "http://x", "--restart"], "--base-url"),
        (["--restart", "--store-cost"], "not allowed"),
        (["--slots", "4,0"], "--slots"),
        (["--slots", "many"], "--slots"),
        (["--check", "some"], "--check"),
        (["--json", "/nowhere/at/all.json"], "--json"),
        ([], "-m/--model"),
    ],
)
def test_bad_options_are_named(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        agents.main(["-m", "/nowhere.gguf", *argv])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_hang_up_closes_the_connection_and_an_answer_is_read_whole() -> None:
    whole = record("a", 0, 0, 0).request
    given_up = Request("b", "b", "hangup", {**whole.body, "max_tokens": 1000}, hangup_after=2)
    with serving(ChatServer(tokens=40, token_seconds=0.01)) as server:

        async def both() -> tuple[Answer, Answer]:
            async with AgentClient(server.url, 20.0) as client:
                assert await client.first_model() == "tiny"
                return await client.ask(given_up), await client.ask(whole)

        first, second = asyncio.run(both())
    assert (first.hung_up, first.content) == (True, "word0 word1 ")
    assert (second.hung_up, second.failure, second.output_tokens) == (False, "", 4)
    assert server.hung_up == 1


@pytest.mark.parametrize("kind", ["busy", "error event", "broken json", "disconnect", "no done"])
def test_a_bad_stream_is_a_failure_with_a_reason(kind: str) -> None:
    with serving(ChatServer(behave=lambda number, body: kind)) as server:

        async def ask() -> Answer:
            async with AgentClient(server.url, 20.0) as client:
                return await client.ask(record("a", 0, 0, 0).request)

        answer = asyncio.run(ask())
    assert answer.failure


def test_answers_are_held_against_the_same_request_made_alone() -> None:
    right, wrong = record("a", 1, 0, 1), record("b", 1, 0, 1)
    wrong = Record(wrong.request, Answer("other words", finish_reason="length", output_tokens=4), 1, 1)
    with serving(ChatServer()) as server:
        result = asyncio.run(check(server.url, 20.0, [right, wrong], [right, wrong]))
    assert (result.compared, result.mismatches, result.failed) == (2, ("b",), 0)
    strangers = [body for body in server.streamed if body["max_tokens"] == 1]
    assert len(strangers) == 2  # one before each
