"""What the load benchmark leaves behind: a sweep's comparison, the JSON, the plots, and what an interrupt saves."""

from __future__ import annotations

import asyncio
import io
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from bench.http_stream import ChatClient, Outcome, Result
from bench.load import Load
from bench.progress import Progress
from bench.prompts import PromptBook
from bench.serve_options import parse_options
from tests.bench.chat_server import GOOD, Bench, ChatServer, bench_of, serving

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with serving(ChatServer()) as running:
        yield running


@pytest.fixture
def bench(server: ChatServer, tmp_path: Path) -> Bench:
    return bench_of(server, tmp_path)


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
        async with ChatClient(server.url, model="tiny", temperature=0.0, ignore_eos=False, no_think=False, timeout=60) as client:
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
