"""The load benchmark from its command line to its result, against a small server on a real socket."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.serve_concurrency import main
from bench.stats import summarize
from tests.bench.chat_server import GOOD, Bench, Body, ChatServer, bench_of, serving


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with serving(ChatServer()) as running:
        yield running


@pytest.fixture
def bench(server: ChatServer, tmp_path: Path) -> Bench:
    return bench_of(server, tmp_path)


def is_intruder(body: Body) -> bool:
    return len(body["messages"][0]["content"]) > 5000


def test_a_good_load_is_counted_whole(bench: Bench, server: ChatServer) -> None:
    status, result = bench("--requests", "12", "--concurrency", "4", "--seed", "3", "--per-request")
    assert status == 0
    assert (result["completed"], result["failed"], result["failures"]) == (12, 0, [])
    assert result["output_tokens"] == 12 * server.tokens
    assert result["prompt_tokens"] == sum(request["prompt_tokens"] for request in result["per_request"]) > 0
    assert result["cached_tokens"] == sum(request["prompt_tokens"] // 2 for request in result["per_request"])
    assert result["ttft_ms"]["n"] == result["tpot_ms"]["n"] == result["e2el_ms"]["n"] == 12
    assert result["itl_ms"]["n"] == 12 * (server.tokens - 1)
    assert server.most_running == result["peak_concurrency"] == 4
    assert result["output_throughput"] == pytest.approx(result["output_tokens"] / result["duration_s"])
    assert result["ttft_ms"]["low_n"]


def test_the_summary_is_that_of_the_requests(bench: Bench) -> None:
    _, result = bench("--requests", "9", "--concurrency", "3", "--per-request")
    requests = result["per_request"]
    for name in ("ttft_ms", "tpot_ms", "e2el_ms"):
        assert result[name] == pytest.approx(vars(summarize([request[name] for request in requests])))
    for request in requests:
        assert request["e2el_ms"] > request["ttft_ms"] > 0
        assert request["tpot_ms"] == pytest.approx((request["e2el_ms"] - request["ttft_ms"]) / 3)


def test_ttft_ignores_the_role_chunk_and_keepalives(bench: Bench, server: ChatServer) -> None:
    server.first_token_seconds = 0.15  # both are sent before this pause
    _, result = bench("--requests", "3", "--concurrency", "3")
    assert result["ttft_ms"]["min"] >= 150
    assert result["itl_ms"]["n"] == 3 * (server.tokens - 1)


DEFECTS = {
    "no done": "no_done",
    "missing usage": "usage_missing",
    "error event": "error_event",
    "named error event": "error_event",
    "broken json": "broken_json",
    "wrong finish reason": "bad_finish_reason",
    "no finish reason": "bad_finish_reason",
    "no token": "no_token",
    "disconnect": "network_error",
    "zero tokens": "usage_out_of_range",
    "too many tokens": "usage_out_of_range",
    "busy": "http_429",
}


@pytest.mark.parametrize(("kind", "reason"), DEFECTS.items())
def test_each_bad_stream_is_rejected_under_its_own_name(bench: Bench, server: ChatServer, kind: str, reason: str) -> None:
    server.behave = lambda number, body: kind if number in (1, 4) else GOOD
    status, result = bench("--requests", "6", "--concurrency", "2")
    assert status == 1
    assert [(failure["reason"], failure["count"]) for failure in result["failures"]] == [(reason, 2)]
    assert (result["completed"], result["failed"]) == (4, 2)
    assert result["ttft_ms"]["n"] == result["e2el_ms"]["n"] == 4  # a rejected stream is in no latency list
    assert result["output_tokens"] == 4 * server.tokens


def test_a_wrong_token_count_is_rejected_only_with_ignore_eos(bench: Bench, server: ChatServer) -> None:
    server.behave = lambda number, body: "wrong token count" if number == 0 else GOOD
    assert bench("--requests", "2", "--max-tokens", "6")[0] == 0
    server.streamed.clear()
    status, result = bench("--requests", "2", "--max-tokens", "6", "--ignore-eos")
    assert status == 1
    assert [failure["reason"] for failure in result["failures"]] == ["wrong_token_count"]


def test_a_stream_that_stops_is_timed_out(bench: Bench, server: ChatServer) -> None:
    server.behave = lambda number, body: "hang" if number == 0 else GOOD
    status, result = bench("--requests", "2", "--concurrency", "1", "--timeout", "1")
    assert status == 1
    assert [failure["reason"] for failure in result["failures"]] == ["timeout"]


def test_failures_may_be_allowed_but_are_still_reported(
    bench: Bench, server: ChatServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.behave = lambda number, body: "no done" if number == 0 else GOOD
    status, result = bench("--requests", "3", "--allow-failures")
    assert (status, result["failed"]) == (0, 1)
    assert "1 x no_done" in capsys.readouterr().out


def test_nothing_completed_is_a_failure_even_if_failures_are_allowed(bench: Bench, server: ChatServer) -> None:
    server.behave = lambda number, body: "no done"
    status, result = bench("--requests", "2", "--allow-failures")
    assert (status, result["completed"], result["ttft_ms"]["p50"]) == (1, 0, None)


def test_the_request_asks_for_what_the_flags_say(bench: Bench, server: ChatServer) -> None:
    bench("--requests", "1", "--max-tokens", "3", "--ignore-eos", "--no-think")
    (body,) = server.streamed
    assert body["stream"] is True
    assert body["stream_options"] == {"include_usage": True}
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("tiny", 3, 0.0)
    assert body["ignore_eos"] is True
    assert body["chat_template_kwargs"] == {"enable_thinking": False}


def test_warm_up_requests_are_made_and_not_measured(bench: Bench, server: ChatServer) -> None:
    _, result = bench("--requests", "4", "--warmup", "3")
    assert len(server.streamed) == 7
    assert result["completed"] == 4
    prompts = [body["messages"][0]["content"] for body in server.streamed]
    assert len(set(prompts)) == 7


def test_a_server_that_answers_no_warm_up_is_not_loaded(server: ChatServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.behave = lambda number, body: "busy"
    assert main(["--base-url", server.url, "--prompt-tokens", "0", "--warmup", "2", "--requests", "50"]) == 1
    assert len(server.streamed) == 2
    assert "http_429" in capsys.readouterr().err


def test_a_server_that_is_not_there_is_said_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--base-url", "http://127.0.0.1:9", "--requests", "1"]) == 2
    assert "http://127.0.0.1:9" in capsys.readouterr().err


def test_the_open_loop_sends_on_schedule_and_reports_its_lag(bench: Bench, server: ChatServer) -> None:
    server.first_token_seconds = 0.8  # longer than the whole schedule: a closed loop could not keep up
    _, result = bench("--requests", "10", "--request-rate", "50", "--per-request")
    starts = [request["start_s"] for request in result["per_request"]]
    assert starts == sorted(starts)
    assert starts[-1] < 0.2
    assert result["dispatch_lag_ms"]["n"] == 10
    assert result["dispatch_lag_ms"]["min"] >= 0
    assert result["peak_concurrency"] == 10
    assert result["config"]["mode"] == "poisson"


def test_the_schedule_is_the_same_for_the_same_seed(bench: Bench) -> None:
    def starts(seed: str) -> list[float]:
        _, result = bench("--requests", "8", "--request-rate", "80", "--burstiness", "0.5", "--seed", seed, "--per-request")
        return [request["start_s"] for request in result["per_request"]]

    assert starts("1") == pytest.approx(starts("1"), abs=1e-6)
    assert starts("1") != pytest.approx(starts("2"), abs=1e-6)


def test_a_bounded_open_loop_charges_the_wait_to_the_request(
    bench: Bench, server: ChatServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.first_token_seconds = 0.05
    _, result = bench("--requests", "6", "--request-rate", "1000", "--max-concurrency", "1", "--per-request")
    assert server.most_running == 1
    assert result["dispatch_lag_ms"]["max"] > 5 * 50 - 10  # one of them waited for the five others
    assert all(request["ttft_ms"] > request["dispatch_lag_ms"] + 50 for request in result["per_request"])
    assert "--max-concurrency" in capsys.readouterr().out


def test_sessions_send_their_whole_history_with_every_turn(bench: Bench, server: ChatServer) -> None:
    status, result = bench("--mode", "sessions", "--sessions", "3", "--turns", "3", "--turn-tokens", "20", "--think-time", "0.01")
    assert (status, result["completed"]) == (0, 9)
    by_length = sorted(server.streamed, key=lambda body: len(body["messages"]))
    assert [len(body["messages"]) for body in by_length] == [1] * 3 + [3] * 3 + [5] * 3
    answer = "word0 word1 word2 word3 "
    for last in by_length[-3:]:
        messages = last["messages"]
        assert [message["role"] for message in messages] == ["user", "assistant"] * 2 + ["user"]
        assert messages[1]["content"] == messages[3]["content"] == answer
        assert [messages] != [other["messages"] for other in by_length if other["messages"] == messages[:3]]
        assert sum(other["messages"] == messages[:3] for other in by_length) == 1  # the turn before is its prefix
    assert [turn["turn"] for turn in result["turns"]] == [1, 2, 3]
    assert [turn["completed"] for turn in result["turns"]] == [3, 3, 3]


def test_a_session_ends_at_its_first_failure_and_the_rest_is_counted(bench: Bench, server: ChatServer) -> None:
    server.behave = lambda number, body: "no done" if len(body["messages"]) == 3 and number < 5 else GOOD
    status, result = bench("--mode", "sessions", "--sessions", "1", "--turns", "4")
    assert status == 1
    reasons = {failure["reason"]: failure["count"] for failure in result["failures"]}
    assert reasons == {"no_done": 1, "skipped_after_failure": 2}
    assert result["completed"] + result["failed"] == 4


def test_hang_ups_are_neither_completed_nor_failed(bench: Bench, server: ChatServer) -> None:
    server.tokens, server.token_seconds = 60, 0.01  # long enough for the server to notice
    status, result = bench(
        "--requests",
        "20",
        "--concurrency",
        "5",
        "--disconnect-fraction",
        "0.5",
        "--disconnect-after",
        "2",
        "--metrics-url",
        server.url + "/metrics",
    )
    assert status == 0
    assert (result["completed"], result["failed"], result["disconnected"]) == (10, 0, 10)
    assert result["ttft_ms"]["n"] == 10
    assert result["server_after"] == {"running": 0.0, "waiting": 0.0}
    assert server.hung_up == 10


def test_a_hang_up_in_prefill_comes_before_the_first_token(bench: Bench, server: ChatServer) -> None:
    server.first_token_seconds = 1.0  # without a warm-up the hang-up comes within 50 ms
    status, result = bench(
        "--requests", "6", "--concurrency", "3", "--disconnect-fraction", "1", "--metrics-url", server.url + "/metrics"
    )
    assert (status, result["disconnected"]) == (0, 6)
    assert server.generated == 0
    assert server.hung_up == server.finished  # of those that had reached the server by then
    assert result["server_after"]["running"] == 0


def test_the_intruder_is_reported_apart_from_the_load(bench: Bench, server: ChatServer) -> None:
    server.tokens, server.token_seconds = 12, 0.01
    server.behave = lambda number, body: "late" if is_intruder(body) else GOOD
    _, result = bench(
        "--requests",
        "12",
        "--concurrency",
        "3",
        "--intruder-tokens",
        "2000",
        "--intruder-at",
        "25%",
        "--max-tokens",
        "16",
    )
    bodies = [body for body in server.streamed if is_intruder(body)]
    assert len(bodies) == 1
    intruder = result["intruder"]
    assert intruder["reason"] == ""
    assert intruder["asked_tokens"] == 2000
    assert intruder["prompt_tokens"] == pytest.approx(2000, rel=0.01)
    assert intruder["ttft_ms"] > 0
    assert intruder["decoders"] >= 1
    assert intruder["itl_during_ms"]["n"] >= 1
    assert intruder["itl_during_ms"]["n"] + intruder["itl_outside_ms"]["n"] == result["itl_ms"]["n"]
    assert result["completed"] == result["ttft_ms"]["n"] == 12
    assert result["output_tokens"] == 12 * 12


def test_what_the_intruder_costs_the_others_is_seen_during_its_prefill(bench: Bench, server: ChatServer) -> None:
    server.tokens, server.token_seconds = 100, 0.01

    def behave(number: int, body: Body) -> str:
        if is_intruder(body):
            threading.Event().wait(0.2)  # the whole server stands still, as if it prefilled without yielding
        return GOOD

    server.behave = behave
    _, result = bench("--requests", "2", "--concurrency", "2", "--intruder-tokens", "2000", "--intruder-at", "0.5")
    intruder = result["intruder"]
    assert intruder["decoders"] == 2
    assert intruder["itl_during_ms"]["max"] >= 190
    assert intruder["itl_outside_ms"]["n"] > intruder["itl_during_ms"]["n"]


def test_a_rejected_intruder_fails_the_run_under_a_name_of_its_own(bench: Bench, server: ChatServer) -> None:
    server.behave = lambda number, body: "error event" if is_intruder(body) else GOOD
    status, result = bench("--requests", "8", "--intruder-tokens", "2000")
    assert status == 1
    assert [failure["reason"] for failure in result["failures"]] == ["intruder:error_event"]
    assert (result["completed"], result["intruder"]["ttft_ms"]) == (8, None)


def test_an_intruder_that_came_too_late_is_not_passed_over(bench: Bench) -> None:
    status, result = bench("--requests", "2", "--intruder-tokens", "2000", "--intruder-at", "60")
    assert status == 1
    assert [failure["reason"] for failure in result["failures"]] == ["intruder:not_sent"]
