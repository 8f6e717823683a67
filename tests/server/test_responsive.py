from __future__ import annotations

import concurrent.futures
import json
import time

from harness import Server, running, script


def slowest_scrape(server: Server, busy: concurrent.futures.Future[object]) -> tuple[float, int]:
    """The longest scrape while `busy` runs, and how many there were."""
    slowest, count = 0.0, 0
    while not busy.done():
        start = time.perf_counter()
        assert server.get("/metrics").status == 200
        slowest, count = max(slowest, time.perf_counter() - start), count + 1
    return slowest, count


def test_scrapes_go_on_while_a_large_prompt_is_parsed_and_tokenised() -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "word " * 40} for _ in range(500)]}
    body = json.dumps({"messages": [message] * 250}).encode()
    assert len(body) > 20_000_000
    with running() as server, concurrent.futures.ThreadPoolExecutor(1) as pool:
        start = time.perf_counter()
        busy = pool.submit(lambda: server.request("POST", "/v1/chat/completions", body))
        slowest, count = slowest_scrape(server, busy)
        whole = time.perf_counter() - start
        assert busy.result().body["error"]["code"] == "context_length_exceeded"
        assert count >= 4
        assert slowest < whole / 2


def test_scrapes_go_on_during_a_flood_of_tokens() -> None:
    with running({"batched_session": 8}) as server, concurrent.futures.ThreadPoolExecutor(9) as pool:

        def flood() -> None:
            with concurrent.futures.ThreadPoolExecutor(8) as clients:
                for answer in clients.map(lambda _: server.chat(script(n=1500), stream=True), range(8)):
                    assert answer.raw.endswith(b"data: [DONE]\n\n")

        start = time.perf_counter()
        slowest, count = slowest_scrape(server, pool.submit(flood))
        assert count >= 4
        assert slowest < (time.perf_counter() - start) / 2
