from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import gc, weakref
from collections import deque
from ds4batch.server.garbage import keep_what_is_there

start = [[] for _ in range(400_000)]  # what a process has at its start
{call}

class Request:
    def __init__(self):
        self.held = [[self] for _ in range(100)]

most, alive, running = 0, weakref.WeakSet(), deque(maxlen=64)  # a request is no youngest object any more when it ends
for _ in range(3_000):
    request = Request()
    alive.add(request)
    running.append(request)
    most = max(most, len(alive))
print(most)
"""


def most_alive(call: str) -> int:
    found = subprocess.run([sys.executable, "-c", PROGRAM.format(call=call)], capture_output=True, text=True, check=True)
    return int(found.stdout)


def test_what_requests_leave_in_cycles_is_found_soon_whatever_there_was_at_the_start() -> None:
    assert most_alive("keep_what_is_there()") < 500
    assert most_alive("gc.collect(); gc.freeze()") > 900  # waits until there is a quarter as much as at the start
