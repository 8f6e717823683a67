"""How each tool is told the load, and where its report has the figures.

Owns the command lines and the forms of the reports of the versions that the requirements beside this file name. Every tool streams chat
completions with temperature 0 and ignore_eos, counts tokens by the server's usage, and makes no request that it does not count.
"""

from __future__ import annotations

import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from bench.tools.load import Load, Seen, ToolFailed, write_prompts

SERVE_CONCURRENCY = Path(__file__).resolve().parent.parent / "serve_concurrency.py"
LOOKS_A_SECOND = 200


class Tool(ABC):
    """One program."""

    name: ClassVar[str]
    report: ClassVar[str]  # where it writes, below a run's folder

    @abstractmethod
    def command(self, load: Load, prompts: Sequence[str], folder: Path) -> list[str]:
        """What to run. Writes what the program reads into `folder`, which is empty."""

    @abstractmethod
    def figures(self, body: dict[str, Any]) -> Seen:
        """The figures of a report. Raises KeyError, IndexError and TypeError for one of another form."""

    def read(self, folder: Path) -> Seen:
        """The figures that a run left in `folder`. Raises ToolFailed."""
        path = folder / self.report
        try:
            return self.figures(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise ToolFailed(f"{self.name}: {path}: {type(error).__name__}: {error}") from None


class Ours(Tool):
    """bench/serve_concurrency.py, which makes its prompts itself, from the same text."""

    name = "ds4batch"
    report = "result.json"

    def command(self, load: Load, prompts: Sequence[str], folder: Path) -> list[str]:
        """`prompts` are what it will ask."""
        options = {
            "--base-url": load.url, "--requests": load.requests, "--concurrency": load.concurrency, "--warmup": 0,
            "--prompt-tokens": load.prompt_tokens, "--max-tokens": load.max_tokens, "--seed": load.seed, "--run-id": load.run_id,
            "--metrics-url": f"{load.url}/metrics", "--json": folder / self.report,
        }  # fmt: skip
        words = [str(word) for pair in options.items() for word in pair]
        return [sys.executable, str(SERVE_CONCURRENCY), "--ignore-eos", "--allow-failures", *words]

    def figures(self, body: dict[str, Any]) -> Seen:
        """docs/benchmarking.md defines them."""
        return Seen(
            completed=body["completed"],
            failed=body["failed"],
            duration_s=body["duration_s"],
            prompt_tokens=body["prompt_tokens"],
            cached_tokens=body["cached_tokens"],
            output_tokens=body["output_tokens"],
            output_throughput=body["output_throughput"],
            ttft_mean=body["ttft_ms"]["mean"],
            ttft_p50=body["ttft_ms"]["p50"],
            token_mean=body["tpot_ms"]["mean"],
            e2e_mean=body["e2el_ms"]["mean"],
        )


class Aiperf(Tool):
    """NVIDIA aiperf."""

    name = "aiperf"
    report = "out/profile_export_aiperf.json"

    def __init__(self, program: Path) -> None:
        """`program` is its executable."""
        self._program = program

    def command(self, load: Load, prompts: Sequence[str], folder: Path) -> list[str]:
        """One worker process: a closed loop this narrow needs no more, and each takes a share of the server's processors.

        A rate far above what the server can do changes nothing but this: aiperf looks for a free place so often a second. Without one
        it asks its event loop for it all the time, and takes more than half a processor to wait for four answers.
        """
        asked = folder / "prompts.jsonl"
        write_prompts(asked, prompts, lambda prompt: {"text": prompt, "output_length": load.max_tokens})
        options = {
            "--model": load.model, "--url": load.url, "--endpoint-type": "chat", "--input-file": asked,
            "--custom-dataset-type": "single-turn", "--dataset-sampling-strategy": "sequential",
            "--concurrency": load.concurrency, "--request-rate": LOOKS_A_SECOND, "--arrival-pattern": "constant",
            "--request-count": load.requests, "--tokenizer": load.tokenizer,
            "--workers-max": 1, "--record-processors": 1, "--ui": "none", "--artifact-dir": folder / "out",
        }  # fmt: skip
        flags = ["--streaming", "--use-server-token-count", "--no-server-metrics", "--no-gpu-telemetry"]
        words = [str(word) for pair in options.items() for word in pair]
        return [str(self._program), "profile", *words, *flags, "--extra-inputs", "temperature:0", "ignore_eos:true"]

    def figures(self, body: dict[str, Any]) -> Seen:
        """Its inter-token latency is what bench/serve_concurrency.py calls TPOT."""
        failed = sum(one["count"] for one in body.get("error_summary") or ())
        return Seen(
            completed=int(body["request_count"]["avg"]),
            failed=failed,
            duration_s=body["benchmark_duration"]["avg"],
            prompt_tokens=int(body["total_usage_prompt_tokens"]["avg"]),
            cached_tokens=int(body["total_usage_prompt_cache_read_tokens"]["avg"]),
            output_tokens=int(body["total_usage_completion_tokens"]["avg"]),
            output_throughput=body["output_token_throughput"]["avg"],
            ttft_mean=body["time_to_first_token"]["avg"],
            ttft_p50=body["time_to_first_token"]["p50"],
            token_mean=body["inter_token_latency"]["avg"],
            e2e_mean=body["request_latency"]["avg"],
        )


class Guidellm(Tool):
    """guidellm of the vLLM project."""

    name = "guidellm"
    report = "out.json"

    def __init__(self, program: Path) -> None:
        """`program` is its executable."""
        self._program = program

    def command(self, load: Load, prompts: Sequence[str], folder: Path) -> list[str]:
        """It sends ignore_eos wherever the length of the answer is part of the data, and stops by the number of requests."""
        asked = folder / "prompts.jsonl"
        write_prompts(asked, prompts, lambda prompt: {"prompt": prompt, "output_tokens_count": load.max_tokens})
        backend = f'kind=openai_http,target={load.url},model={load.model},extras={{"body":{{"temperature":0}}}}'
        options = {
            "--backend": backend,
            "--profile": f"kind=concurrent,streams={load.concurrency}",
            "--constraint": f"kind=max_requests,count={load.requests}",
            "--data": f"kind=json_file,path={asked}",
            "--output": f"kind=json,path={folder / self.report}",
        }
        return [str(self._program), "run", *(word for pair in options.items() for word in pair), "--disable-console"]

    def figures(self, body: dict[str, Any]) -> Seen:
        """Its time per output token has the first one in it; its inter-token latency has not, and weighs requests by their tokens."""
        (run,) = body["benchmarks"]
        metrics, made = run["metrics"], run["requests"]["successful"]
        totals = metrics["request_totals"]
        first = metrics["time_to_first_token_ms"]["successful"]
        return Seen(
            completed=totals["successful"],
            failed=totals["errored"] + totals["incomplete"],
            duration_s=run["duration"],
            prompt_tokens=sum(one["prompt_tokens"] for one in made),
            cached_tokens=sum(one["cached_tokens"] or 0 for one in made),
            output_tokens=sum(one["output_tokens"] for one in made),
            output_throughput=metrics["output_tokens_per_second"]["successful"]["mean"],
            ttft_mean=first["mean"],
            ttft_p50=first["median"],
            token_mean=metrics["inter_token_latency_ms"]["successful"]["mean"],
            e2e_mean=1e3 * metrics["request_latency"]["successful"]["mean"],
        )
