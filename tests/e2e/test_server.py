"""The whole server on the demo model: real processes, real sockets, real answers."""

from __future__ import annotations

import contextlib
import http.client
import os
import random
import re
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.server.harness import Answer, RealServer, until

DEMO = Path(__file__).parents[2] / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
SLOTS = 16
TOPICS = "the ocean;a clock;winter;bread;a bridge;the moon;music;a garden;trains;paper;glass;rivers;a letter;mountains;salt;ink"
PROMPTS = [f"Write two sentences about {topic}." for topic in TOPICS.split(";")]
ENDLESS: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def server() -> Iterator[RealServer]:
    if not DEMO.exists():
        pytest.fail(f"{DEMO} is missing; `make setup` fetches it")
    with contextlib.closing(RealServer("-m", str(DEMO), "--batched-session", str(SLOTS), "--ctx", "4096")) as running:
        yield running


def text(answer: Answer) -> str:
    assert answer.status == 200, answer.raw
    found = answer.body["choices"][0]["message"]["content"]
    assert isinstance(found, str)
    return found


def settled(server: RealServer) -> None:
    """Wait until nothing runs or waits, and check that every slot is accounted for."""
    until(lambda: server.metric("vllm:num_requests_running") + server.metric("vllm:num_requests_waiting") == 0 or None)
    found = server.metrics()
    states = {key: value for key, value in found.items() if key.startswith("ds4batch_slots{")}
    assert sum(states.values()) == SLOTS
    assert not any(value for key, value in states.items() if "prefill" in key or "decode" in key or "restore" in key)


def test_it_answers_in_sensible_english(server: RealServer) -> None:
    assert "Tokyo" in text(server.chat("What is the capital of Japan?", temperature=0))
    assert "4" in text(server.chat("What is 2+2?", temperature=0))
    health = server.get("/health").body
    assert (health["status"], health["exact_path"], health["slots"]) == ("ok", "native", SLOTS)


@pytest.mark.parametrize("knobs", [{"temperature": 0}, {"temperature": 0.9, "seed": 7, "top_p": 0.95}])
def test_sixteen_at_once_say_what_each_says_alone(server: RealServer, knobs: dict[str, Any]) -> None:
    alone = [text(server.chat(prompt, max_tokens=32, **knobs)) for prompt in PROMPTS]
    with ThreadPoolExecutor(SLOTS) as pool:
        together = list(pool.map(lambda prompt: text(server.chat(prompt, max_tokens=32, **knobs)), PROMPTS))
    assert together == alone
    assert len(set(alone)) == len(alone)
    settled(server)


def test_a_conversation_finds_its_session_and_says_so(server: RealServer) -> None:
    messages = [{"role": "user", "content": "Name three rivers of Europe, please."}]
    body: dict[str, Any] = {"messages": messages, "temperature": 0, "max_tokens": 24}
    first = server.request("POST", "/v1/chat/completions", body)
    usage = first.body["usage"]
    messages += [{"role": "assistant", "content": text(first)}, {"role": "user", "content": "And one of Asia."}]
    second = server.request("POST", "/v1/chat/completions", body).body["usage"]
    cached = second["prompt_tokens_details"]["cached_tokens"]
    assert cached >= usage["prompt_tokens"] + usage["completion_tokens"] - 2
    assert second["prompt_tokens_details"]["cache_write_tokens"] == second["prompt_tokens"] - cached


def test_two_hundred_disconnects_leave_nothing_behind(server: RealServer) -> None:
    rnd = random.Random(5)
    plans = [(rnd.randrange(1, 60), rnd.random() * 1.5, i % 2 == 0) for i in range(200)]

    def visit(plan: tuple[int, float, bool]) -> None:
        words, stay, stream = plan
        content = "Tell a long story. " * words
        sock = server.send({"messages": [{"role": "user", "content": content}], "max_tokens": 400, "stream": stream})
        time.sleep(stay)
        sock.close()

    with ThreadPoolExecutor(24) as pool:
        list(pool.map(visit, plans))
    settled(server)
    with ThreadPoolExecutor(SLOTS) as pool:
        answers = list(pool.map(lambda prompt: text(server.chat(prompt, max_tokens=4)), PROMPTS))
    assert all(answers)


def test_decoders_go_on_and_scrapes_are_answered_while_a_long_prompt_arrives(server: RealServer) -> None:
    before = server.metrics()
    with ThreadPoolExecutor(6) as pool:
        decoders = [pool.submit(server.chat, prompt, max_tokens=160, **ENDLESS) for prompt in PROMPTS[:4]]
        until(lambda: server.metric('ds4batch_slots{state="decode"}') == 4 or None)
        long = pool.submit(server.chat, "one two three four five " * 500, max_tokens=4, temperature=0)
        scrapes = 0
        while not long.done():
            scrapes += server.get("/metrics").status == 200
        assert long.result().body["usage"]["prompt_tokens"] > 2400
        assert all(decoder.result().events[-1] == "[DONE]" for decoder in decoders)
    after = server.metrics()
    assert scrapes > 20
    assert after["ds4batch_prefill_chunk_tokens_count"] - before["ds4batch_prefill_chunk_tokens_count"] > 10
    rows = "ds4batch_decode_batch_rows_count"
    assert after[rows] - before[rows] >= 159


def test_the_openai_package_streams_and_lists(server: RealServer) -> None:
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="any")
    model = client.models.list().data[0].id
    assert client.models.retrieve(model).id == model
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "What is the capital of Japan?"}],
        stream=True,
        temperature=0,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "Tokyo" in "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens > 3


def test_a_killed_engine_ends_eight_streams_with_an_error_and_comes_back(server: RealServer) -> None:
    front = server.process.pid
    with ThreadPoolExecutor(8) as pool:
        streams = [pool.submit(server.chat, prompt, max_tokens=2000, **ENDLESS) for prompt in PROMPTS[:8]]
        until(lambda: server.metric('ds4batch_slots{state="decode"}') == 8 or None)
        os.kill(server.get("/health").body["engine_pid"], signal.SIGKILL)
        answers = [stream.result() for stream in streams]
    for answer in answers:
        assert b"event: error\n" in answer.raw
        assert "[DONE]" not in answer.raw.decode()
    down = server.get("/health")
    assert (down.status, down.body["status"]) == (503, "restarting")
    until(lambda: server.get("/health").status == 200 or None)
    assert "Tokyo" in text(server.chat("What is the capital of Japan?", temperature=0))
    assert server.get("/health").body["restarts"] == 1
    assert server.process.pid == front
    assert server.process.poll() is None
    settled(server)


def test_a_signal_ends_running_streams_and_the_server() -> None:
    with contextlib.closing(RealServer("-m", str(DEMO), "--batched-session", "4", "--ctx", "1024")) as server:
        with ThreadPoolExecutor(4) as pool:
            streams = [pool.submit(server.chat, prompt, max_tokens=900, **ENDLESS) for prompt in PROMPTS[:4]]
            until(lambda: server.metric('ds4batch_slots{state="decode"}') == 4 or None)
            server.process.send_signal(signal.SIGTERM)
            assert all(b"event: error\n" in stream.result().raw for stream in streams)
        assert server.wait() == 0


def refused(*arguments: str) -> str:
    """What a server that cannot start prints."""
    with contextlib.closing(RealServer(*arguments, wait=False)) as server:
        assert server.wait() == 1
        return "\n".join(server.lines)


def test_a_model_file_cut_in_half_is_refused_with_what_is_missing(tmp_path: Path) -> None:
    half = tmp_path / "half.gguf"
    half.write_bytes(DEMO.read_bytes()[: DEMO.stat().st_size // 2])
    said = refused("-m", str(half))
    assert "half.gguf" in said
    assert re.search(r"blk\.\d+\.\w+", said)
    assert "Traceback" not in said


def test_a_context_that_cannot_fit_is_refused_with_the_numbers() -> None:
    said = refused("-m", str(DEMO), "--batched-session", "64", "--ctx", "4000000")
    assert "GiB" in said
    assert "--batched-session or --ctx" in said
    assert "Traceback" not in said


def test_a_port_in_use_is_refused_by_name(server: RealServer) -> None:
    said = refused("-m", str(DEMO), "--port", str(server.port))
    assert f"127.0.0.1:{server.port}" in said
    assert "Traceback" not in said


def test_a_file_that_is_not_there_and_one_that_is_no_model_are_refused(tmp_path: Path) -> None:
    assert "nowhere.gguf" in refused("-m", "nowhere.gguf")
    text_file = tmp_path / "notes.txt"
    text_file.write_text("not a model")
    assert "notes.txt" in refused("-m", str(text_file))


def test_a_second_signal_ends_the_server_at_once() -> None:
    with contextlib.closing(RealServer("-m", str(DEMO), "--batched-session", "2", "--ctx", "1024")) as server:

        def hold() -> None:
            with contextlib.suppress(OSError, http.client.HTTPException):
                server.chat(PROMPTS[0], max_tokens=900, **ENDLESS)

        holder = threading.Thread(target=hold, daemon=True)
        holder.start()
        until(lambda: server.metric('ds4batch_slots{state="decode"}') == 1 or None)
        os.kill(server.get("/health").body["engine_pid"], signal.SIGSTOP)  # so that the first signal cannot be answered
        server.process.send_signal(signal.SIGTERM)
        server.line("stopping")
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 130
        holder.join()
