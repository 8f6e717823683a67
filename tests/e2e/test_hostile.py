"""A few hundred hostile requests against a server of a scripted model; bench.hostile runs thousands."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.hostile.attack import Attack
from tests.server.harness import RealServer

REQUESTS = 250
SCRIPT = Path(__file__).parents[2] / "bench" / "hostile" / "demo.json"


@pytest.mark.parametrize("dialect", ["qwen3.8"])
def test_hostile_requests_do_no_harm(dialect: str) -> None:
    server = RealServer("--script", str(SCRIPT), "--dialect", dialect, "--ctx", "4096", "--batched-session", "16")
    try:
        with Attack(f"http://127.0.0.1:{server.port}", seed=11, workers=8) as attack:
            attack.run(REQUESTS, 125)
        assert not attack.failures, "\n".join(attack.failures)
        assert not attack.probe.stalls, "\n".join(attack.probe.stalls)
        assert attack.sent == REQUESTS
        assert not [line for line in server.lines if "Traceback" in line]
    finally:
        server.close()
