"""SIGTERM in the middle of streams: the engine ends them and leaves by itself, and nobody has to kill it."""

from __future__ import annotations

import contextlib
import json
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.server.harness import PATIENCE, RealServer, until

STREAMS = 4


def test_the_engine_leaves_in_order_while_streams_run(tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"step_seconds": 0.01, "answers": [{"say": "Round and round.", "end": False}]}))
    options = ("--script", str(script), "--ctx", "20000", "--batched-session", str(STREAMS))
    with contextlib.closing(RealServer(*options)) as server, ThreadPoolExecutor(STREAMS) as pool:
        streams = [pool.submit(server.chat, f"say {i}", stream=True, max_tokens=19000) for i in range(STREAMS)]
        until(lambda: server.metric('ds4batch_slots{state="decode"}') == STREAMS)
        server.process.send_signal(signal.SIGTERM)
        ends = [stream.result(PATIENCE).raw.rstrip().splitlines()[-2:] for stream in streams]
        assert server.wait() == 0
        assert all(event == b"event: error" and b"error" in data for event, data in ends)
        assert any("the engine has left in order" in line for line in server.lines)
