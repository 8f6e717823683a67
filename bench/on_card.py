"""What users of one card see over HTTP, each figure against a goal.

    python -m bench.on_card [--model qwen3-8b | DIR | FILE] [--slots 16] [--ctx 32768]

Start-up, inter-token latency, a long prompt beside decoders, a warm turn. A shape is served with random weights. The decode step that
latencies are compared with is measured first, in the same run and at the same width and context (`bench.kernels.step`). Loads are those
of bench/serve_concurrency.py; a stream that breaks its rules fails the run.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench import serve_concurrency
from bench.server_metrics import RUNNING, parse_metrics, total
from bench.shapes import SHAPES, write_directory
from bench.with_server import serving

CONTEXT = 512


def load(url: str, *arguments: str) -> dict[str, Any]:
    """The report of one load. Raises SystemExit when a stream was rejected."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "load.json"
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            status = serve_concurrency.main(["--base-url", url, "--json", str(path), "--ignore-eos", *arguments])
        if status:
            raise SystemExit(f"{said.getvalue()}\nload {' '.join(arguments)} ended with status {status}")
        found: dict[str, Any] = json.loads(path.read_text())
        return found


def step_ms(model: str, slots: int) -> float:
    """Milliseconds of a captured decode step of `slots` sessions, in a process of its own."""
    command = [sys.executable, "-m", "bench.kernels.step", "--model", model, "--cells", f"{slots}x{CONTEXT}", "--prefill", "0"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"decode .*?: +([0-9.]+) ms", said)
    if found is None:
        raise SystemExit(f"no step time in {said!r}")
    return float(found[1])


@contextlib.contextmanager
def beside(url: str, sessions: int, tokens: int) -> Iterator[None]:
    """While the body runs, `sessions` conversations decode, each for up to `tokens` tokens."""
    command = [sys.executable, "-m", "bench.serve_concurrency", "--base-url", url, "--ignore-eos", "--concurrency", str(sessions),
               "--requests", str(sessions), "--warmup", "0", "--prompt-tokens", "256", "--max-tokens", str(tokens)]  # fmt: skip
    company = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while _running(url) < sessions:
            if company.poll() is not None:
                raise SystemExit("the company ended before all of it was running")
            time.sleep(0.1)
        yield
        if company.poll() is not None:
            raise SystemExit("the company had stopped decoding before the measurement ended")
    finally:
        company.terminate()
        company.wait()


def _running(url: str) -> float:
    """Requests that the server is working on."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as page:
        return total(parse_metrics(page.read().decode()), RUNNING) or 0.0


def say(name: str, value: float, unit: str, goal: float) -> None:
    """One line of the table."""
    print(f"{name:58} {value:9.2f} {unit:4} goal {goal:9.2f}  {'met' if value <= goal else 'MISSED'}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="on_card", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="qwen3-8b", help=f"{', '.join(SHAPES)}, or a model (default: %(default)s)")
    parser.add_argument(
        "--tokenizer", default="models/SmolLM2-135M-Instruct.Q4_1.gguf", help="whose tokenizer a shape is served with"
    )
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--ctx", type=int, default=32768)
    parser.add_argument("--long", type=int, default=16384, help="tokens of the long prompt (default: %(default)s)")
    parser.add_argument("--step-ms", type=float, default=0.0, help="the engine's step, where it is not to be measured")
    parser.add_argument("serve", nargs="*", help="further options of ds4batch serve, after --")
    options = parser.parse_args(argv)
    slots = options.slots
    bare = options.step_ms or step_ms(options.model, slots)
    print(f"engine step of {slots} x {CONTEXT}: {bare:.3f} ms", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        model, extra = options.model, list(options.serve)
        if model in SHAPES:
            write_directory(SHAPES[model], folder, options.tokenizer)
            model, extra = folder, ["--load-format", "dummy", *extra]
        for start in ("first start", "second start, kernels compiled"):
            began = time.monotonic()
            with serving(model, str(slots), str(options.ctx), extra) as url:
                load(url, "--concurrency", "1", "--requests", "1", "--warmup", "0", "--prompt-tokens", "0", "--max-tokens", "1")
                taken = time.monotonic() - began
                if start == "first start":
                    print(f"process start to first token, {start}: {taken:.1f} s", flush=True)
                    continue
                say(f"process start to first token, {start}", taken, "s", 30.0)
                measure(url, bare, slots, options.long, options.ctx // 2)
    return 0


def measure(url: str, bare: float, slots: int, long: int, enough: int) -> None:
    """The loads, and a line for each figure. `enough` tokens outlast any of them."""
    decoding = ["--prompt-tokens", "384", "--max-tokens", "256"]
    full = load(url, "--concurrency", str(slots), "--requests", str(slots * 2), *decoding)
    rate = full["full_width_decode_rate"]["tokens_per_s"]
    print(f"{slots} sessions decode {rate:.0f} tok/s while all are decoding, {1e3 * slots / rate:.3f} ms a step", flush=True)
    say(f"p50 ITL of {slots} sessions", full["itl_ms"]["p50"], "ms", bare * 1.1)
    mixed = load(url, "--concurrency", str(slots - 1), "--requests", str(slots - 1), "--prompt-tokens", "384", "--max-tokens", "768",
                 "--intruder-tokens", str(long), "--intruder-at", "2")["intruder"]  # fmt: skip
    say(f"p99 ITL of {slots - 1} decoders beside a prompt of {mixed['prompt_tokens']}", mixed["itl_during_ms"]["p99"], "ms", 15.0)
    say("TTFT of that prompt", mixed["ttft_ms"], "ms", 900.0)
    with beside(url, slots // 2, enough):
        turns = load(url, "--mode", "sessions", "--sessions", "1", "--turns", "8", "--turn-tokens", "280", "--prompt-tokens", "1024",
                     "--max-tokens", "16")["turns"]  # fmt: skip
    warm = sorted(turn["ttft_ms"]["p50"] for turn in turns[1:])
    say(f"TTFT of a warm 300-token turn beside {slots // 2} decoders, median", warm[len(warm) // 2], "ms", 30.0)
    print("    all warm turns: " + ", ".join(f"{ms:.1f}" for ms in warm), flush=True)


if __name__ == "__main__":
    sys.exit(main())
