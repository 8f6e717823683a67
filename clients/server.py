"""A scripted server for the clients, with all it says kept: its log, its trace, its metrics.

Judges nothing.
"""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from clients.process import logging_to

CONTEXT = 131_072


class Server:
    """A server that runs."""

    def __init__(self, url: str, model: str, trace: Path) -> None:
        self.url = url
        self.model = model
        self._trace = trace

    def requests(self) -> list[dict[str, Any]]:
        """What the trace tells of each request that has ended, in the order of their arrival."""
        lines = self._trace.read_text(encoding="utf-8").split("\n")[:-1]  # what follows the last newline is being written
        return sorted((json.loads(line) for line in lines), key=lambda record: float(record["time"]))

    def metric(self, name: str) -> float:
        """The sum of a metric's series now. Raises KeyError when there is none."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        found = re.findall(rf"^{re.escape(name)}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE)
        if not found:
            raise KeyError(name)
        return sum(map(float, found))


@contextmanager
def serving(script: dict[str, Any], folder: Path, slots: int = 4) -> Iterator[Server]:
    """A server that says what `script` tells it to, stopped at the end. Its files are in `folder`, which is made.

    Raises NotStarted with its log when it does not start.
    """
    folder.mkdir(parents=True)
    path, log, trace = folder / "scripted.json", folder / "server.log", folder / "trace.jsonl"
    path.write_text(json.dumps(script, ensure_ascii=False), encoding="utf-8")
    options = ["--script", str(path), "--batched-session", str(slots), "--ctx", str(CONTEXT), "--mixed-prefill-quantum", "1024",
               "--trace", str(trace)]  # fmt: skip
    with logging_to(log, options) as url:
        yield Server(url, path.stem, trace)
