"""Conversations that outlive their slot, their engine and their server: the demo model over HTTP, real signals, a real directory."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.server.harness import Answer, RealServer, Server, until

DEMO = Path(__file__).parents[2] / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL = ("-m", str(DEMO), "--ctx", "2048", "--batched-session", "2", "-t", "1")
SMALL = ("--kv-cache-min-tokens", "64", "--kv-cache-boundary-align-tokens", "64", "--kv-cache-boundary-trim-tokens", "8",
         "--kv-cache-continued-interval-tokens", "128", "--kv-disk-min-free-mb", "0")  # fmt: skip
TOPICS = ("rivers", "clocks", "bread")
TAIL = 128 + 8  # tokens since the last periodic save


class Conversation:
    """A client that keeps its history, and asks the same of a server that never stores anything."""

    def __init__(self, topic: str, repeats: int = 30) -> None:
        self.messages = [{"role": "user", "content": f"Tell me about {topic}. " + f"Mind the {topic}, please. " * repeats}]

    def ask(self, server: Server, then: str) -> tuple[dict[str, Any], list[dict[str, str]]]:
        """The usage of the next answer, and the history it belongs to."""
        asked = list(self.messages)
        answer = server.request("POST", "/v1/chat/completions", body(asked))
        assert answer.status == 200, answer.raw
        self.messages += [{"role": "assistant", "content": text(answer)}, {"role": "user", "content": then}]
        return answer.body["usage"], asked


def body(messages: list[dict[str, str]], **more: Any) -> dict[str, Any]:
    return {"messages": messages, "temperature": 0, "max_tokens": 12, **more}


def text(answer: Answer) -> str:
    found = answer.body["choices"][0]["message"]["content"]
    assert isinstance(found, str)
    return found


def evaluated(usage: dict[str, Any]) -> int:
    return int(usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"])


def cached(usage: dict[str, Any]) -> int:
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def storing(directory: Path, *more: str) -> RealServer:
    return RealServer(*MODEL, *SMALL, "--kv-disk-dir", str(directory), *more)


def kill_engine(server: Server) -> None:
    health = server.health()
    os.kill(health["engine_pid"], signal.SIGKILL)
    until(lambda: (now := server.health())["restarts"] > health["restarts"] and now["status"] == "ok")


def kv(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`ds4batch kv ...` as a user runs it."""
    return subprocess.run([sys.executable, "-m", "ds4batch.cli", "kv", *arguments], capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def plain() -> Iterator[RealServer]:
    """A server without a store: what everything is held against."""
    if not DEMO.exists():
        pytest.fail(f"{DEMO} is missing; `make setup` fetches it")
    with contextlib.closing(RealServer(*MODEL)) as server:
        yield server


def all_as_without_a_store(plain: Server, conversations: list[Conversation]) -> None:
    """Every answer of every history is the one that a server gives that evaluates it itself."""
    for conversation in conversations:
        for i, message in enumerate(conversation.messages):
            if message["role"] == "assistant":
                answer = plain.request("POST", "/v1/chat/completions", body(conversation.messages[:i]))
                assert text(answer) == message["content"]


def test_conversations_go_on_after_eviction_stop_kill_and_the_tool_reads_what_is_there(plain: RealServer, tmp_path: Path) -> None:
    directory = tmp_path / "kv"
    talks = [Conversation(topic) for topic in TOPICS]  # one more than there are slots
    with contextlib.closing(storing(directory)) as server:
        assert "checkpoints in" in server.line("checkpoints in")
        for talk in talks:
            usage, _ = talk.ask(server, "Go on.")
            assert cached(usage) < usage["prompt_tokens"] / 4
        for talk in talks:  # each was driven out by the others
            usage, _ = talk.ask(server, "And then?")
            assert evaluated(usage) < 24, "a session that gave way was not found again"
        kill_engine(server)
        for talk in talks:
            usage, _ = talk.ask(server, "Why?")
            assert cached(usage) > 0
            assert evaluated(usage) <= TAIL + 48
        metrics = server.metrics()
        assert metrics['ds4batch_route_total{tier="disk-text",victim="empty"}'] >= 2
        assert metrics['ds4batch_disk_store_total{reason="evict"}'] >= 3
        assert metrics['ds4batch_disk_load_total{result="hit"}'] >= 5
        assert metrics["ds4batch_disk_load_bytes_total"] > 0
        assert metrics["ds4batch_disk_load_seconds_count"] == metrics['ds4batch_disk_load_total{result="hit"}']
    assert server.process.returncode == 0
    with contextlib.closing(storing(directory)) as server:
        for talk in talks:
            usage, _ = talk.ask(server, "Who?")
            assert evaluated(usage) < 24, "a session was not saved at the end of its server"
    all_as_without_a_store(plain, talks)
    listed = kv("ls", "--kv-disk-dir", str(directory))
    assert listed.returncode == 0
    assert {"shutdown", "evict", "cold"} <= {word for line in listed.stdout.splitlines() for word in line.split()}
    assert kv("verify", "--kv-disk-dir", str(directory)).stdout.splitlines()[-1].endswith(" 0 bad")
    assert kv("prune", "--kv-disk-dir", str(directory), "--kv-disk-space-mb", "0").returncode == 0
    assert not list(directory.iterdir())


def test_a_full_directory_keeps_all_that_is_saved_at_the_end(plain: RealServer, tmp_path: Path) -> None:
    """Short conversations, which have the fewest tokens a byte, after long ones that nobody came back to."""
    full = ("--kv-disk-space-mb", "32", "--batched-session", "3")
    with contextlib.closing(storing(tmp_path, *full)) as server:
        for topic in ("coal", "wool", "salt"):
            Conversation(topic, 50).ask(server, "Go on.")
    talks = [Conversation(topic, repeats) for topic, repeats in zip(TOPICS, (14, 10, 12), strict=True)]
    with contextlib.closing(storing(tmp_path, *full)) as server:
        for talk in talks:
            talk.ask(server, "Go on.")
        assert server.metric('ds4batch_disk_evicted_total{phase="pre_store"}') > 0
    assert server.process.returncode == 0
    with contextlib.closing(storing(tmp_path, *full)) as server:
        for talk in talks:
            usage, _ = talk.ask(server, "And then?")
            assert evaluated(usage) < 24, "a session was saved at the end of its server and gone at the next start"
    all_as_without_a_store(plain, talks)


def test_an_engine_killed_at_any_moment_leaves_nothing_that_is_used_and_wrong(plain: RealServer, tmp_path: Path) -> None:
    directory = tmp_path / "kv"
    rnd = random.Random(3)
    talks = [Conversation(topic) for topic in TOPICS]
    with contextlib.closing(storing(directory)) as server:
        for talk in talks:
            talk.ask(server, "Go on.")
        for round_ in range(3):
            noise = [{"role": "user", "content": f"Noise {round_} {i}. " + "Say nothing at all. " * 60} for i in range(4)]
            with ThreadPoolExecutor(4) as pool:  # prompts that are stored on their way and drive each other out
                asked = [pool.submit(server.request, "POST", "/v1/chat/completions", body([one])) for one in noise]
                time.sleep(0.4 + 0.8 * rnd.random())
                kill_engine(server)
                assert all(one.result().status in (200, 503) for one in asked)
            for talk in talks:
                usage, _ = talk.ask(server, "And then?")
                assert cached(usage) > 0
        assert server.metric('ds4batch_disk_load_total{result="corrupt"}') == 0
    all_as_without_a_store(plain, talks)
    assert kv("verify", "--kv-disk-dir", str(directory)).stdout.splitlines()[-1].endswith(" 0 bad")
    assert not list(directory.glob("*.tmp.*"))


def test_two_servers_share_a_directory_and_what_is_in_it(plain: RealServer, tmp_path: Path) -> None:
    directory = tmp_path / "kv"
    talks = [Conversation(topic) for topic in TOPICS[:2]]
    with contextlib.closing(storing(directory)) as one, contextlib.closing(storing(directory)) as two:
        for talk in talks:
            talk.ask(one, "Go on.")
        talks[0].ask(two, "And then?")  # from nothing, but now it has looked
        usage, _ = talks[1].ask(two, "And then?")
        assert cached(usage) >= 64
    all_as_without_a_store(plain, talks)


def test_a_conversation_whose_client_leaves_while_it_is_restored_is_there_for_the_next_request(
    plain: RealServer, tmp_path: Path
) -> None:
    directory = tmp_path / "kv"
    talk = Conversation("rivers")
    with contextlib.closing(storing(directory)) as server:
        talk.ask(server, "Go on.")
    with contextlib.closing(storing(directory)) as server:
        for _ in range(6):
            sock = server.send(body(talk.messages, stream=True))
            time.sleep(random.Random(1).random() * 0.02)
            sock.close()
        until(lambda: server.metric("vllm:num_requests_running") + server.metric("vllm:num_requests_waiting") == 0 or None)
        usage, _ = talk.ask(server, "And then?")
        assert cached(usage) > 0
        states = {key: value for key, value in server.metrics().items() if key.startswith("ds4batch_slots{")}
        assert sum(states.values()) == 2
        assert states['ds4batch_slots{state="restore"}'] == 0
    all_as_without_a_store(plain, [talk])


class Cramped(RealServer):
    """A server none of whose files may be larger than 256 KiB, as if the disk were full."""

    def _start(self, command: list[str], wait: bool) -> None:
        super()._start(["sh", "-c", 'ulimit -f 512; exec "$@"', "sh", *command], wait)


def goes_on_without(server: Server, reason: str, plain: Server) -> None:
    talks = [Conversation(topic) for topic in TOPICS]
    for _ in range(2):
        for talk in talks:
            talk.ask(server, "Go on.")
    all_as_without_a_store(plain, talks)
    assert server.metric(f'ds4batch_disk_skipped_total{{reason="{reason}"}}') > 0
    assert server.metric('ds4batch_disk_store_total{reason="evict"}') == 0


def test_a_full_disk_costs_the_checkpoints_and_says_so_once(plain: RealServer, tmp_path: Path) -> None:
    with contextlib.closing(Cramped(*MODEL, *SMALL, "--kv-disk-dir", str(tmp_path / "kv"))) as server:
        goes_on_without(server, "no_space", plain)
        assert sum("File too large" in line for line in server.lines) == 1
    assert not list((tmp_path / "kv").iterdir())


def test_a_directory_that_cannot_be_made_costs_the_checkpoints_and_says_so_once(plain: RealServer) -> None:
    with contextlib.closing(RealServer(*MODEL, *SMALL, "--kv-disk-dir", "/proc/ds4batch/kv")) as server:
        goes_on_without(server, "directory", plain)
        assert sum("/proc/ds4batch/kv" in line and "No such file" in line for line in server.lines) == 1


def test_options_that_cannot_work_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for more, said in (
        (("--kv-disk-dir", str(tmp_path / "file")), "is not a directory"),
        (("--kv-disk-dir", str(tmp_path), "--kv-cache-cold-max-tokens", "100"), "--kv-cache-cold-max-tokens: 100"),
    ):
        with contextlib.closing(RealServer(*MODEL, *more, wait=False)) as server:
            assert server.wait() == 1
            lines = "\n".join(server.lines)
            assert said in lines
            assert "Traceback" not in lines
