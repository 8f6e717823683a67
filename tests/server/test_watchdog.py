"""What does not get on is ended: requests that stall, engines that hang; and nothing else is."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import pathlib
from types import SimpleNamespace
from typing import Any

import pytest
from harness import Server, running, script, until

from ds4batch.messages import Delta, Event, Finished, Progress, Routed, SlotStat, Stats
from ds4batch.server.engine_link import EngineState
from ds4batch.server.inflight import Job
from ds4batch.server.watchdog import KILL_SECONDS, Watchdog

TIMEOUT = 40.0


class Observer:
    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


class Link:
    """What the watchdog sees of the link, and a clock."""

    def __init__(self) -> None:
        self.heard = 0
        self.status = SimpleNamespace(state=EngineState.READY)
        self.observer: Any = Observer()
        self.done: list[str] = []
        self.now = 1000.0
        self.dog = Watchdog(self, TIMEOUT, lambda: self.now)  # type: ignore[arg-type]  # what it uses of a link is here

    def ping(self) -> None:
        self.done.append("ping")

    def give_up(self, job: Job, cause: Any, status: int, message: str) -> None:
        self.done.append(f"{cause} {job.id} {status}")
        self.observer.cancelled(job, cause)
        job.cancel(cause)

    def replace(self, why: str) -> None:
        self.done.append(why)
        self.status.state = EngineState.RESTARTING

    def job(self, slot: int = 0) -> Job:
        job = Job(len(self.done) + slot + 1, 50, 9, self.now)
        self.event(job, Routed(id=job.id, slot=slot, tier="none", cached_tokens=0, victim="empty", evicted_tokens=0, queue_seconds=0))
        return job

    def event(self, job: Job, event: Event) -> None:
        self.heard += 1
        self.observer.event(job, event, self.now)
        job.push(event, self.now)

    def slots(self, *states: str) -> None:
        self.heard += 1
        slots = [SlotStat(state, 7, 0, 0) for state in states]
        self.observer.stats(Stats(running=0, waiting=0, kv_usage=0.0, slots=slots))

    def wait(self, seconds: float, engine_works: bool = True) -> None:
        """Time goes by; meanwhile the engine works for others, or is silent."""
        end = self.now + seconds
        while self.now < end:
            self.now += self.dog.period
            self.heard += engine_works
            self.dog.tick(self.now)


def token(job: Job) -> Delta:
    return Delta(id=job.id, text="x", tokens=1)


def ended(job: Job) -> Finished:
    return Finished(
        id=job.id,
        reason="abort",
        prompt_tokens=50,
        cached_tokens=0,
        completion_tokens=0,
        queue_seconds=0,
        prefill_seconds=0,
        decode_seconds=0,
    )


def test_a_request_of_which_nothing_comes_while_the_engine_works_is_ended() -> None:
    link = Link()
    job, other = link.job(0), link.job(1)
    for _ in range(2):
        link.wait(TIMEOUT - 2)
        link.event(other, token(other))
        assert link.done == ([] if job.cancelled is None else [f"stall {job.id} 500"])
    assert job.cancelled == "stall"
    assert other.cancelled is None


@pytest.mark.parametrize("kind", ["token", "progress"])
def test_a_slow_request_is_no_stalled_one(kind: str) -> None:
    link = Link()
    job = link.job()
    for i in range(5):
        link.wait(TIMEOUT - 2)
        link.event(job, token(job) if kind == "token" else Progress(job.id, i, 50))
    assert link.done == []


def test_neither_the_queue_nor_host_memory_is_a_stall() -> None:
    link = Link()
    waiting = Job(77, 50, 9, link.now)
    link.observer.submitted(waiting)
    parked = link.job(1)
    link.slots("decode", "parked")
    link.wait(10 * TIMEOUT)
    assert link.done == []
    link.slots("decode", "decode")
    link.wait(TIMEOUT + 2)
    assert link.done == [f"stall {parked.id} 500"]


def test_an_engine_that_frees_the_slot_of_a_stalled_request_lives_on_and_one_that_does_not_is_replaced() -> None:
    link = Link()
    job = link.job()
    link.wait(TIMEOUT + 2)
    link.event(job, ended(job))
    link.wait(5 * TIMEOUT)
    assert link.done == [f"stall {job.id} 500"]
    job = link.job()
    link.wait(2 * TIMEOUT + 2)
    assert link.done[1:] == [f"stall {job.id} 500", f"the engine did not let go of a request for {TIMEOUT:g} s after it was cancelled"]


def test_an_engine_that_does_not_let_go_of_what_its_client_left_is_replaced() -> None:
    link = Link()
    job = link.job()
    link.wait(TIMEOUT / 2)
    link.give_up(job, "client", 0, "")
    link.wait(TIMEOUT - 2)
    assert len(link.done) == 1
    link.wait(4)
    assert "did not let go" in link.done[1]


def test_a_silent_engine_is_asked_and_replaced_when_it_does_not_answer() -> None:
    link = Link()
    link.job()
    link.wait(TIMEOUT / 2 + 2, engine_works=False)
    assert link.done == ["ping"]
    link.heard += 1  # the answer
    link.wait(TIMEOUT / 2 + 2, engine_works=False)
    assert link.done[:2] == ["ping", "stall 1 500"]
    link.wait(TIMEOUT + 2, engine_works=False)
    assert link.done[-1] == f"the engine made no step and answered nothing for {TIMEOUT:g} s"


def test_an_idle_engine_that_answers_is_left_alone_for_ever() -> None:
    link = Link()
    for _ in range(10):
        link.wait(TIMEOUT / 2 + 2, engine_works=False)
        assert link.done[-1] == "ping"
        link.heard += 1
    assert link.done == ["ping"] * 10


def test_a_server_that_was_stopped_itself_blames_nobody() -> None:
    link = Link()
    link.job()
    link.wait(2)
    link.now += 100 * TIMEOUT
    link.dog.tick(link.now)
    assert link.done == []


@pytest.mark.parametrize("state", [EngineState.STARTING, EngineState.RESTARTING, EngineState.DOWN, EngineState.STOPPING])
def test_an_engine_that_loads_or_leaves_may_be_silent(state: EngineState) -> None:
    link = Link()
    link.status.state = state
    link.wait(10 * TIMEOUT, engine_works=False)
    assert link.done == []


def test_only_an_engine_that_cannot_be_killed_makes_the_service_dead() -> None:
    link = Link()
    assert link.dog.alive
    link.wait(TIMEOUT + 2, engine_works=False)
    assert link.dog.alive
    link.wait(KILL_SECONDS, engine_works=False)
    assert not link.dog.alive
    link.observer.engine_down()
    assert link.dog.alive


# over sockets, with processes

T = 1.5
FROZEN = {"n": 9, "freeze": 2}
SAID = "the request stalled: nothing came of it for 1.5 s, it was ended"
PATHS = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"]


def asked(server: Server, path: str, stream: bool, **members: Any) -> Any:
    text = script(**members)
    body: dict[str, Any] = {"stream": stream}
    body |= {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": text}]},
        "/v1/completions": {"prompt": text},
        "/v1/responses": {"input": text},
        "/v1/messages": {"messages": [{"role": "user", "content": text}], "max_tokens": 99},
    }[path]
    return server.request("POST", path, body)


def test_stalled_requests_end_in_their_apis_shape_and_all_others_go_on(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "requests.jsonl"
    with (
        running({"batched_session": 9, "stall_timeout": T, "request_log": str(file)}) as server,
        concurrent.futures.ThreadPoolExecutor(11) as pool,
    ):
        cases = [(path, stream) for path in PATHS for stream in (False, True)]
        frozen = [pool.submit(asked, server, *case, **FROZEN) for case in cases]
        slow = pool.submit(server.chat, script(n=3, progress=6, pdelay=T / 5, delay=T / 3), stream=True)
        server.until_metric("vllm:num_requests_running", 9)
        queued = pool.submit(server.chat, script(n=1))
        for (path, stream), answer in zip(cases, (one.result() for one in frozen), strict=True):
            assert answer.status == (200 if stream else 500), path
            assert SAID in answer.raw.decode(), path
            if stream:
                assert b"w1" in answer.raw  # what came before it
                assert b"[DONE]" not in answer.raw
                assert b"message_stop" not in answer.raw
                assert b"response.completed" not in answer.raw
        assert slow.result().raw.endswith(b"data: [DONE]\n\n")
        assert queued.result().status == 200  # it waited for a slot that a stalled request held, or the slow one
        metrics = server.metrics()
        assert metrics["ds4batch_stalled_requests_total"] == 8
        assert metrics['ds4batch_cancelled_total{cause="stall",phase="decode"}'] == 8
        assert metrics['vllm:request_success_total{finished_reason="error"}'] == 8
        assert server.health()["restarts"] == 0
        server.line("stalled: nothing came of it for 1.5 s while the engine ran, it is ended (job ")
        server.line("decode, 7 tokens, ")
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(records) == 10
    stalled = [one for one in records if one["gone"] == "stall"]
    assert len(stalled) == 8
    assert {(one["error"]["message"], one["tokens_out"]) for one in stalled} == {(SAID, 2)}


def test_an_engine_that_hangs_in_a_request_is_killed_and_started_again() -> None:
    with running({"batched_session": 2, "stall_timeout": T}) as server:
        answer = server.chat(script(hang=True), stream=True)
        assert b"the engine made no step and answered nothing for 1.5 s; it is being restarted" in answer.raw
        until(lambda: server.get("/health").status == 200)
        assert "made no step" in server.health()["last_error"]
        assert (server.health()["restarts"], server.chat().status) == (1, 200)


def test_an_engine_that_does_not_let_go_of_a_request_is_replaced() -> None:
    with running({"batched_session": 1, "stall_timeout": T}) as server:
        assert server.chat(script(deaf=True, **FROZEN)).status == 500
        until(lambda: server.health()["restarts"] == 1)
        assert "did not let go" in server.health()["last_error"]
        until(lambda: server.get("/health").status == 200)
        assert server.chat().status == 200


def test_without_a_timeout_nobody_looks() -> None:
    link = Link()
    dog = Watchdog(link, 0.0, lambda: link.now)  # type: ignore[arg-type]  # likewise
    asyncio.run(dog.run())  # returns at once
    assert dog.alive
