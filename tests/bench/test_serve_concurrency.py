"""The load benchmark from its command line to its result, against a small server on a real socket."""

from __future__ import annotations

import asyncio
import io
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bench.http_stream import ChatClient, Outcome, Result
from bench.load import Load
from bench.progress import Progress
from bench.prompts import PromptBook
from bench.serve_concurrency import main
from bench.serve_options import parse_options
from bench.stats import summarize
from tests.bench.chat_server import GOOD, Body, ChatServer, serving

ROOT = Path(__file__).resolve().parents[2]
Bench = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with serving(ChatServer()) as running:
        yield running


@pytest.fixture
def bench(server: ChatServer, tmp_path: Path) -> Bench:
    """Runs the benchmark against `server`: its exit status and its JSON."""

    def run(*argv: str) -> tuple[int, dict[str, Any]]:
        path = tmp_path / "result.json"
        status = main(["--base-url", server.url, "--prompt-tokens", "40", "--warmup", "0", "--json", str(path), *argv])
        return status, json.loads(path.read_text())

    return run


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
def test_each_bad_stream_is_rejected_under_its_own_name(
    bench: Bench, server: ChatServer, kind: str, reason: str
) -> None:
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
        _, result = bench(
            "--requests", "8", "--request-rate", "80", "--burstiness", "0.5", "--seed", seed, "--per-request"
        )
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
    status, result = bench(
        "--mode", "sessions", "--sessions", "3", "--turns", "3", "--turn-tokens", "20", "--think-time", "0.01"
    )
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
    assert server.hung_up == 6


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


def test_a_sweep_compares_each_concurrency_with_the_first(bench: Bench, server: ChatServer) -> None:
    server.tokens, server.token_seconds = 20, 0.01
    status, result = bench("--sweep", "1:2,4", "--requests", "8")
    assert status == 0
    one, four = result["sweep"]
    assert (one["concurrency"], one["requests"], one["decode_ratio"], one["throughput_ratio"]) == (1, 2, 1.0, 1.0)
    assert (four["concurrency"], four["requests"]) == (4, 8)
    assert [run["completed"] for run in result["runs"]] == [2, 8]
    first, second = (run["decode_rate"]["tokens_per_s"] for run in result["runs"])
    assert four["decode_ratio"] == pytest.approx(second / first)
    assert first == pytest.approx(1e3 / result["runs"][0]["tpot_ms"]["mean"])
    assert four["decode_ratio"] > 1  # four streams side by side, each as fast as one alone
    prompts = [body["messages"][0]["content"] for body in server.streamed]
    assert len(set(prompts)) == 10  # no prompt of one cell is left in the server's memory for the next
    assert prompts[0][15:] == next(prompt for prompt in prompts[2:] if prompt[15:] == prompts[0][15:])[15:]


KEYS = {
    "schema",
    "label",
    "date",
    "command",
    "git",
    "host",
    "gpu",
    "config",
    "completed",
    "failed",
    "disconnected",
    "interrupted",
    "failures",
    "duration_s",
    "prompt_tokens",
    "cached_tokens",
    "output_tokens",
    "request_throughput",
    "output_throughput",
    "total_token_throughput",
    "decode_rate",
    "full_width_decode_rate",
    "peak_output_tokens_per_s",
    "peak_concurrency",
    "ttft_ms",
    "tpot_ms",
    "itl_ms",
    "e2el_ms",
    "queue_ms",
    "dispatch_lag_ms",
    "goodput",
    "spec",
    "turns",
    "intruder",
    "server_delta",
    "server_after",
    "per_request",
}
CONFIG_KEYS = {
    "model",
    "shape",
    "mode",
    "concurrency",
    "request_rate",
    "burstiness",
    "prompt_tokens",
    "max_tokens",
    "requests",
    "temperature",
    "shared_prefix",
    "ignore_eos",
    "seed",
}
SUMMARY_KEYS = {
    "mean",
    "std",
    "median",
    "p50",
    "p75",
    "p90",
    "p95",
    "p99",
    "p50_nr",
    "p75_nr",
    "p90_nr",
    "p95_nr",
    "p99_nr",
    "min",
    "max",
    "n",
    "low_n",
}


def test_the_json_holds_every_figure(bench: Bench, server: ChatServer) -> None:
    _, result = bench(
        "--requests",
        "4",
        "--label",
        "a name",
        "--metrics-url",
        server.url + "/metrics",
        "--goodput",
        "ttft:60000",
        "tpot:60000",
        "e2el:60000",
    )
    assert result.keys() == KEYS
    assert result["config"].keys() >= CONFIG_KEYS
    for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2el_ms", "dispatch_lag_ms"):
        assert result[name].keys() == SUMMARY_KEYS
    assert result["label"] == "a name"
    assert result["config"]["shape"] == "40/128"
    assert "--label 'a name'" in result["command"]
    assert result["server_delta"]['vllm:generation_tokens_total{engine="0"}'] == 4 * server.tokens
    assert result["queue_ms"]["mean"] == pytest.approx(150.0)
    assert result["queue_ms"]["p50"] == pytest.approx(150.0)  # half way up the bucket from 100 to 200 ms
    assert result["goodput"]["good"] == 4
    assert result["goodput"]["fraction"] == 1.0
    assert result["per_request"] is None


def test_goodput_counts_only_requests_that_meet_every_goal(bench: Bench, server: ChatServer) -> None:
    server.first_token_seconds = 0.05
    server.behave = lambda number, body: "no done" if number == 0 else GOOD
    _, result = bench("--requests", "4", "--goodput", "ttft:20", "e2el:60000")
    assert (result["goodput"]["good"], result["goodput"]["fraction"]) == (0, 0.0)
    server.streamed.clear()
    _, result = bench("--requests", "4", "--goodput", "ttft:60000")
    assert (result["goodput"]["good"], result["goodput"]["fraction"]) == (3, 0.75)  # a rejected request is not good


def test_plots_are_written_as_png(bench: Bench, server: ChatServer, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    server.behave = lambda number, body: "no token" if number == 1 else GOOD
    directory = tmp_path / "deep" / "plots"
    bench("--requests", "6", "--plot", str(directory), "--intruder-tokens", "2000", "--intruder-at", "0")
    assert sorted(path.name for path in directory.iterdir()) == ["latency_percentiles.png", "token_timeline.png"]
    for path in directory.iterdir():
        assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
        assert path.stat().st_size > 5000


def test_a_sweep_names_its_plots_by_concurrency(bench: Bench, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    bench("--requests", "2", "--sweep", "1,2", "--plot", str(tmp_path / "p"))
    assert {path.name.split("_")[0] for path in (tmp_path / "p").iterdir()} == {"c1", "c2"}


def test_run_by_its_path_it_prints_plain_lines_and_loads_no_matplotlib(server: ChatServer, tmp_path: Path) -> None:
    program = (
        f"import sys, runpy; sys.argv[0] = {str(ROOT / 'bench/serve_concurrency.py')!r}\n"
        "try:\n    runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "finally:\n    print('matplotlib' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "--base-url", server.url, "--requests", "5", "--prompt-tokens", "0"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert lines[0] == "concurrency 8: 5 requests"
    assert lines[5] == "concurrency 8: 5/5, 20 tokens"
    assert lines[-1] == "False"
    assert "TTFT" in done.stdout
    assert "\x1b" not in done.stdout + done.stderr


def test_an_interrupt_keeps_what_was_measured(server: ChatServer) -> None:
    server.behave = lambda number, body: "hang" if number >= 3 else GOOD
    options = parse_options(
        [
            "--base-url",
            server.url,
            "--requests",
            "9",
            "--concurrency",
            "3",
            "--warmup",
            "0",
            "--intruder-tokens",
            "50",
            "--intruder-at",
            "0",
        ]
    )

    async def interrupted() -> None:
        async with ChatClient(
            server.url, model="tiny", temperature=0.0, ignore_eos=False, no_think=False, timeout=60
        ) as client:
            load = Load(
                client,
                PromptBook("some text ", 0, "r", 10),
                options,
                Progress(Console(stderr=True), "load"),
                concurrency=3,
                requests=9,
            )
            running = asyncio.ensure_future(load.run())
            while server.finished < 3 or server.running < 3:
                await asyncio.sleep(0.01)
            running.cancel()
            measured = await running
            assert measured.interrupted
            assert len(measured.results) == 9
            reasons = [result.reason for result in measured.results]
            assert reasons.count("interrupted") == 9 - reasons.count("")
            assert reasons.count("") in (2, 3)  # the intruder may have been one of the three that were answered

    asyncio.run(interrupted())


def test_on_a_terminal_progress_is_a_bar() -> None:
    screen = io.StringIO()
    progress = Progress(Console(file=screen, force_terminal=True, width=100), "concurrency 2")
    with progress.running(2):
        for index in range(2):
            progress.advance(Result(index, 0, Outcome.COMPLETED, 0.0, 0.0, 1.0, output_tokens=5))
    assert "2/2" in screen.getvalue()
    assert "10 tokens" in screen.getvalue()
    assert "\x1b" in screen.getvalue()


def test_the_servers_difference_leaves_the_warm_up_out(bench: Bench, server: ChatServer) -> None:
    _, result = bench("--requests", "3", "--warmup", "2", "--metrics-url", server.url + "/metrics")
    assert result["server_delta"]['vllm:generation_tokens_total{engine="0"}'] == 3 * server.tokens


def test_an_interrupted_run_still_writes_its_result(server: ChatServer, tmp_path: Path) -> None:
    server.behave = lambda number, body: "hang" if number >= 3 else GOOD
    command = [
        sys.executable,
        str(ROOT / "bench/serve_concurrency.py"),
        "--base-url",
        server.url,
        "--prompt-tokens",
        "0",
    ]
    command += ["--requests", "9", "--concurrency", "3", "--warmup", "0", "--json", str(tmp_path / "r.json")]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as bench:
        while server.finished < 3 or server.running < 3:
            assert bench.poll() is None
            time.sleep(0.02)
        bench.send_signal(signal.SIGINT)
        _, errors = bench.communicate(timeout=60)
    assert bench.returncode == 130, errors
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["interrupted"]
    assert (result["completed"], result["failures"][0]["reason"], result["failures"][0]["count"]) == (
        3,
        "interrupted",
        6,
    )
