"""Two servers, processes of their own, on one directory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from ds4batch.kvstore.disk import Disk
from ds4batch.kvstore.format import FLAG_TOOL_MAP
from tests.kvstore.rig import MortalDisk, Time, check, files, open_store, restore, save

ROOT = Path(__file__).parents[2]

_NEIGHBOUR = """
import sys
from pathlib import Path
import numpy as np
from tests.kvstore.rig import check, open_store, restore, save
store = open_store(Path(sys.argv[1]), budget_bytes=int(sys.argv[3]))
rng = np.random.default_rng(int(sys.argv[2]))
hits = 0
for i in range(150):
    text = b"shared " + b"".join([b"abcde ", b"xyz ", b"12345678 "][n] for n in rng.integers(0, 3, rng.integers(1, 4)))
    if rng.integers(2):
        saved = save(store, text, trailer=b"t" * int(rng.integers(0, 30)))
        assert saved.skip is None, saved
    else:
        found = restore(store, text)
        if found is not None:
            check(found, text)
            store.used(found.entry)
            hits += 1
stats = store.stats()
assert stats.removed["corrupt"] == stats.loaded["corrupt"] == 0, stats
print(hits, sum(stats.evicted.values()))
"""

_WRITER = """
import sys, time
from pathlib import Path
from ds4batch.kvstore.format import Reason
from ds4batch.kvstore.payload import FIXED, ArraySpec, StateArray
from tests.kvstore.rig import open_store
def slowly():
    yield bytes(4)
    print("writing", flush=True)
    time.sleep(60)
store = open_store(Path(sys.argv[1]))
store.save(b"half", [1, 2, 3], [StateArray(ArraySpec("x", FIXED, "u8", (8,), 3), slowly)], Reason.COLD)
"""


def start(code: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "error", "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, env={"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_two_processes_that_save_restore_and_evict_never_see_half_a_file(tmp_path: Path) -> None:
    neighbours = [start(_NEIGHBOUR, tmp_path, seed, 8000) for seed in (1, 2)]
    for neighbour in neighbours:
        out, err = neighbour.communicate(timeout=120)
        assert neighbour.returncode == 0, err
        hits, evicted = map(int, out.split())
        assert hits > 0
        assert evicted > 0
    assert all(name.endswith(".kv") for name in files(tmp_path))
    store = open_store(tmp_path)
    assert store.stats().removed["corrupt"] == 0
    assert store.stats().files == len(files(tmp_path))


def test_an_unfinished_file_is_left_while_its_writer_lives_and_removed_after_a_kill(tmp_path: Path) -> None:
    with start(_WRITER, tmp_path) as writer:
        try:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "writing\n"
            (unfinished,) = files(tmp_path)
            open_store(tmp_path)
            assert files(tmp_path) == [unfinished]
        finally:
            os.kill(writer.pid, signal.SIGKILL)
            writer.wait()
    store = open_store(tmp_path)
    assert files(tmp_path) == []
    assert store.find(b"half and more") is None


def test_what_a_neighbour_stores_is_found(tmp_path: Path) -> None:
    one, two = open_store(tmp_path), open_store(tmp_path)
    save(one, b"some text")
    found = restore(two, b"some text and more")
    assert found is not None
    check(found, b"some text and more")


def test_what_a_neighbour_removes_is_a_miss(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    save(store, b"some")
    save(store, b"some text")
    claim = store.claim(b"some text and more")
    assert claim is not None
    (tmp_path / claim.entry.file_name).unlink()
    assert store.load(claim) is None
    assert store.stats().loaded["miss"] == 1
    found = restore(store, b"some text and more")
    assert found is not None
    assert found.text_bytes == 4


def test_a_victim_that_a_neighbour_removed_first_counts_as_room(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    size = save(store, b"first text").entry.file_bytes  # type: ignore[union-attr]
    save(store, b"other text")

    class Behind(MortalDisk):
        def unlink(self, path: Path) -> None:
            super().unlink(path)
            raise FileNotFoundError(2, "No such file or directory")

    behind = open_store(tmp_path, disk=Behind(), budget_bytes=2 * size + 50)
    assert save(behind, b"third text").written


def test_an_unchanged_directory_is_not_read_again(tmp_path: Path, monkeypatch) -> None:
    store = open_store(tmp_path, now=Time(4e9))  # long after the directory's last change
    scans = []
    real = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: scans.append(path) or real(path))
    for _ in range(5):
        assert restore(store, b"some text") is None
    assert scans == []
    save(open_store(tmp_path), b"some text")
    scans.clear()
    assert restore(store, b"some text") is not None
    assert len(scans) == 1


def test_a_file_whose_lock_is_held_is_left_alone(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("ds4batch.kvstore.disk._LOCK_PAUSE", 0.0)
    store = open_store(tmp_path)
    save(store, b"some text", trailer=b"t", flags=FLAG_TOOL_MAP)
    (name,) = files(tmp_path)
    fd = os.open(tmp_path / name, os.O_RDWR)
    try:
        assert Disk().try_lock(fd, exclusive=True)
        assert restore(store, b"some text") is None
        assert store.stats().loaded["refused"] == 1
        assert files(tmp_path) == [name]
    finally:
        os.close(fd)
    found = restore(store, b"some text")
    assert found is not None
    assert found.trailer == b"t"


def test_locks_that_the_file_system_lacks_are_done_without(tmp_path: Path, monkeypatch) -> None:
    def none(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", none)
    store = open_store(tmp_path, disk=MortalDisk())
    assert save(store, b"some text").written
    assert restore(store, b"some text") is not None
