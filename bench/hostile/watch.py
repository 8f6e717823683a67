"""The server while it is attacked: whether it still answers, its processes' memory and files, and whether it still says the same."""

from __future__ import annotations

import http.client
import json
import os
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import Any

PROBE_SECONDS = 0.1
STALL_SECONDS = 5.0
"""An answer to /health that takes longer counts as a hang of the server. On a busy machine of two cores a good one takes up to
half a second."""
_PATIENCE = 600.0
_GOOD: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Count from one to ten, then say which of the numbers are prime."}],
    "temperature": 0, "max_completion_tokens": 16, "logprobs": True, "top_logprobs": 3,
}  # fmt: skip


class Probe:
    """Asks for /health all the time, on a connection of its own each time. What hangs is counted in its rounds."""

    def __init__(self, address: tuple[str, int], doing: Callable[[], list[str]]) -> None:
        """`doing`: the requests under way, for the report of a stall."""
        self.rounds = 0
        self.slowest = 0.0
        self.slowest_in_batch = 0.0
        self.stalls: list[str] = []
        self._address = address
        self._doing = doing
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(PROBE_SECONDS):
            begun = time.monotonic()
            doing = self._doing()
            try:
                status, _ = get(self._address, "/health")
                problem = "" if status == 200 else f"status {status}"
            except OSError as error:
                problem = repr(error)
            seconds = time.monotonic() - begun
            self.slowest = max(self.slowest, seconds)
            self.slowest_in_batch = max(self.slowest_in_batch, seconds)
            self.rounds += 1
            if problem or seconds > STALL_SECONDS:
                self.stalls.append(
                    f"/health after {seconds:.1f} s: {problem or 'ok'}; under way: {', '.join(doing) or 'nothing'}"
                )


@dataclass(frozen=True)
class Facts:
    """The server between two batches."""

    front_bytes: int  # resident
    engine_bytes: int
    front_files: int  # open
    engine_files: int
    engine_pid: int
    restarts: int
    status: str
    running: int
    waiting: int


class Watch:
    """Reads the facts, and has the good request answered."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address
        _, health = get(address, "/health")
        self.slots: int = health["slots"]
        self._front = _parent(health["engine_pid"])
        self._expected: Any = None

    def facts(self) -> Facts:
        """As they are now."""
        _, health = get(self._address, "/health")
        engine = health["engine_pid"]
        _, metrics = get(self._address, "/metrics")
        return Facts(
            _resident(self._front), _resident(engine), _files(self._front), _files(engine), engine, health["restarts"], health["status"],
            _gauge(metrics, "vllm:num_requests_running"), _gauge(metrics, "vllm:num_requests_waiting"),
        )  # fmt: skip

    def settled(self, files: int, seconds: float = 30.0) -> Facts:
        """The facts once nothing runs or waits and no more than `files` are open in the front, or as they are after `seconds`."""
        end = time.monotonic() + seconds
        while True:
            facts = self.facts()
            quiet = not facts.running and not facts.waiting and facts.front_files <= files
            if quiet or time.monotonic() > end:
                return facts
            time.sleep(0.1)

    def same_answers(self) -> list[str]:
        """Every slot at once, each with the good request; what is wrong with the answers. The first call sets what is right."""

        def ask(_: int) -> Any:
            status, answer = post(self._address, "/v1/chat/completions", _GOOD)
            return (status, answer["choices"] if status == 200 else answer)

        if self._expected is None:
            self._expected = ask(0)
        with ThreadPoolExecutor(self.slots) as pool:
            answers = list(pool.map(ask, range(self.slots)))
        wrong = [answer for answer in answers if answer != self._expected]
        return [f"{len(wrong)} of {len(answers)} answers differ from the first: {str(wrong[0])[:300]}"] if wrong else []

    def fill(self) -> None:
        """Every slot at once with a prompt near the context's length, so that what a slot ever takes is taken."""
        _, health = get(self._address, "/health")

        def ask(i: int) -> None:
            words, status = health["ctx"], 400
            while status == 400 and words > 8:
                words = words * 3 // 4
                status, _ = post(
                    self._address, "/v1/completions", {"prompt": f"{i}" + " word" * words, "max_tokens": 2, "temperature": 0}
                )

        with ThreadPoolExecutor(self.slots) as pool:
            list(pool.map(ask, range(self.slots)))


def get(address: tuple[str, int], path: str) -> tuple[int, Any]:
    """Status, and the body as JSON or text. Raises OSError."""
    return _ask(address, "GET", path, None)


def post(address: tuple[str, int], path: str, body: Any) -> tuple[int, Any]:
    """Status and body. Raises OSError."""
    return _ask(address, "POST", path, json.dumps(body).encode())


def _ask(address: tuple[str, int], method: str, path: str, body: bytes | None) -> tuple[int, Any]:
    with closing(http.client.HTTPConnection(*address, timeout=_PATIENCE)) as connection:
        try:
            connection.request(method, path, body, {"Content-Type": "application/json", "Connection": "close"})
            response = connection.getresponse()
            data = response.read()
        except http.client.HTTPException as error:
            raise OSError(repr(error)) from error
        return response.status, json.loads(data) if response.headers.get_content_type() == "application/json" else data.decode()


def _gauge(metrics: str, name: str) -> int:
    found = re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", metrics, re.M)
    return int(float(found[0])) if found else 0


def _parent(pid: int) -> int:
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])


def _resident(pid: int) -> int:
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))
