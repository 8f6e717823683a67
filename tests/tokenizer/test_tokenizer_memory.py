"""What a tokenizer keeps of the words it has seen: little, whatever clients send."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tokenizer.test_directory_tokenizer import byte_level, write
from tests.tokenizer.test_gguf_tokenizer import small

PROGRAM = """
import ctypes, random, sys
from ds4batch.tokenizer import load_tokenizer

class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Info
tokenizer, rnd = load_tokenizer(sys.argv[1]), random.Random(1)

def used(words):
    for _ in range(words // 10):
        tokenizer.encode(" ".join("".join(rnd.choices("~^|<>{}#@!$%&*", k=250)) for _ in range(10)))
    info = libc.mallinfo2()
    return info.uordblks + info.hblkhd

print(used(1200), used(3000))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="asks glibc's allocator what is in use")
@pytest.mark.parametrize("source", ["gguf", "directory"])
def test_words_that_nobody_says_twice_are_not_remembered(source: str, tmp_path: Path) -> None:
    path = str(small(tmp_path / "a.gguf", "qwen2")) if source == "gguf" else write(tmp_path, byte_level())
    one_thread = {**os.environ, "RAYON_NUM_THREADS": "1"}  # each remembers for itself
    done = subprocess.run([sys.executable, "-c", PROGRAM, path], capture_output=True, text=True, check=True, env=one_thread)
    before, after = map(int, done.stdout.split())
    assert after - before < 2 << 20  # 3,000 of them took 24 MB
