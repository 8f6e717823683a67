"""Where the allocator puts large blocks while a model is loaded and while it serves. In a process of its own: it cannot be undone."""

from __future__ import annotations

import json
import platform
import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, json
from ds4batch.engine import heap

class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()]

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
libc.mallinfo2.restype = Info
found = []

def blocks():
    # thirty large ones, freed between small ones that stay: what a conversion leaves behind
    before = libc.mallinfo2()
    taken = [(libc.malloc(2 << 20), libc.malloc(4000)) for _ in range(30)]
    held = libc.mallinfo2()
    for large, _ in taken:
        libc.free(large)
    after = libc.mallinfo2()
    found.append({"apart": held.hblks - before.hblks, "heap": after.arena - before.arena, "left": after.hblks - before.hblks})

heap.load()
blocks()
heap.serve()
blocks()
print(json.dumps(found))
"""

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator is meant")


def test_large_blocks_of_loading_leave_no_holes_and_those_of_serving_stay_on_the_heap() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    loading, serving = json.loads(done.stdout)
    assert loading["apart"] == 30
    assert loading["left"] == 0
    assert loading["heap"] < 2 << 20  # the small ones
    assert serving["apart"] == 0
    assert serving["heap"] > 50 << 20
