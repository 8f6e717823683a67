"""A checkpoint that is not whole is never used: one line in the log, and the file removed or left as its fault demands."""

from __future__ import annotations

import logging
import os
import random
import shutil
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from ds4batch.kvstore.counters import Skip
from ds4batch.kvstore.format import FLAG_TOOL_MAP, TAIL_BYTES, BadFile, Reason, Verdict
from ds4batch.kvstore.reader import read_checkpoint
from tests.kvstore.rig import OTHER, FullDisk, MortalDisk, Time, check, files, open_store, restore, save

TEXT = b"what the conversation said so far"
TRAILER = b"KTM\x01map"
ROOT = Path(__file__).parents[2]


@pytest.fixture
def good(tmp_path: Path) -> Path:
    """A checkpoint with a trailer that was used once, so that its header was rewritten."""
    directory = tmp_path / "good"
    store = open_store(directory)
    saved = save(store, TEXT, trailer=TRAILER, flags=FLAG_TOOL_MAP)
    assert saved.entry is not None
    store.used(saved.entry)
    return directory / files(directory)[0]


def in_directory(tmp_path: Path, name: str, data: bytes) -> Path:
    directory = tmp_path / "kv"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    (directory / name).write_bytes(data)
    return directory


def test_no_corrupted_byte_is_accepted(tmp_path: Path, good: Path) -> None:
    rng = random.Random(20)
    data = good.read_bytes()
    end = len(data) - len(TRAILER)
    places = list(range(TAIL_BYTES)) + [rng.randrange(end) for _ in range(1000 - TAIL_BYTES)]  # all of the head among them
    for at in places:
        bad = bytearray(data)
        bad[at] ^= rng.randrange(1, 256)
        store = open_store(in_directory(tmp_path, good.name, bytes(bad)))
        assert restore(store, TEXT) is None, at
        stats = store.stats()
        assert stats.loaded["hit"] == 0
        assert sum(stats.removed.values()) + sum(stats.left.values()) == 1, at
        assert (files(store.directory) == []) == (stats.removed["corrupt"] == 1)


def test_no_corrupted_byte_passes_an_open_store(tmp_path: Path, good: Path) -> None:
    """The file is damaged after its head was read, so only the load can notice."""
    rng = random.Random(21)
    data = good.read_bytes()
    for _ in range(200):
        directory = in_directory(tmp_path, good.name, data)
        store = open_store(directory)
        with (directory / good.name).open("r+b") as file:
            at = rng.randrange(len(data) - len(TRAILER))
            file.seek(at)
            file.write(bytes([data[at] ^ rng.randrange(1, 256)]))
        assert restore(store, TEXT) is None, at
        assert store.find(TEXT) is None


def test_no_truncated_file_is_accepted(tmp_path: Path, good: Path) -> None:
    rng = random.Random(22)
    data = good.read_bytes()
    end = len(data) - len(TRAILER)
    for size in [0, 1, 47, 48, 51, 52, end - 1, end - 7, *(rng.randrange(end) for _ in range(192))]:
        store = open_store(in_directory(tmp_path, good.name, data[:size]))
        assert restore(store, TEXT) is None, size
        assert files(store.directory) == []
        assert store.stats().removed["corrupt"] == 1


def test_a_file_truncated_under_an_open_store_is_refused(tmp_path: Path, good: Path) -> None:
    for size in (0, 60, 200, good.stat().st_size - len(TRAILER) - 1):
        directory = in_directory(tmp_path, good.name, good.read_bytes())
        store = open_store(directory)
        os.truncate(directory / good.name, size)
        assert restore(store, TEXT) is None
        assert files(directory) == []
        assert store.stats().loaded["hit"] == 0


def test_every_byte_matters_to_the_reader_itself(tmp_path: Path) -> None:
    """Without the store around it, and with nothing to tell whose file it is."""
    store = open_store(tmp_path)
    save(store, b"abc", trailer=b"t", flags=FLAG_TOOL_MAP)
    path = tmp_path / files(tmp_path)[0]
    data = path.read_bytes()
    read_checkpoint(MortalDisk(), path)
    for at in range(len(data) - 1):
        bad = bytearray(data)
        bad[at] ^= 1 << (at % 8)
        path.write_bytes(bytes(bad))
        with pytest.raises(BadFile):
            read_checkpoint(MortalDisk(), path)


def test_a_damaged_trailer_is_left_out_and_costs_nothing_else(
    tmp_path: Path, good: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = good.read_bytes()
    end = len(data) - len(TRAILER)
    flipped = [data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :] for at in range(end, len(data))]
    for bad in [*flipped, *(data[:size] for size in range(end, len(data)))]:
        store = open_store(in_directory(tmp_path, good.name, bad))
        assert list(store.trailers()) == []
        caplog.clear()
        found = restore(store, TEXT)
        assert found is not None
        check(found, TEXT)
        assert found.trailer == b""
        assert [record.getMessage().split(": ", 1)[1] for record in caplog.records] == ["its trailer is damaged, and not used"]
        assert not save(store, TEXT, trailer=TRAILER, flags=FLAG_TOOL_MAP).written  # it only gets its trailer back
        assert [trailer for _, trailer in store.trailers()] == [TRAILER]
        assert (store.directory / good.name).read_bytes()[end:] == TRAILER


def test_a_renamed_file_is_not_taken_for_another_text(tmp_path: Path, good: Path) -> None:
    directory = in_directory(tmp_path, "0" * 40 + ".kv", good.read_bytes())
    store = open_store(directory)
    with pytest.raises(BadFile, match="name") as caught:
        read_checkpoint(MortalDisk(), directory / ("0" * 40 + ".kv"))
    assert caught.value.verdict is Verdict.CORRUPT
    assert restore(store, TEXT) is None


def test_the_log_names_the_file_and_the_fault(tmp_path: Path, good: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        open_store(in_directory(tmp_path, good.name, b""))
        open_store(in_directory(tmp_path, good.name, good.read_bytes()[:100]))
    first, second = [record.getMessage() for record in caplog.records]
    assert good.name in first
    assert "removed: the file is empty" in first
    assert "truncated: 100 bytes of" in second


@pytest.mark.parametrize(("offset", "value", "line"), [(3, 2, "format version 2"), (20, 3, "payload version 3")])
def test_a_file_of_a_later_version_is_left(
    tmp_path: Path, good: Path, caplog: pytest.LogCaptureFixture, offset: int, value: int, line: str
) -> None:
    data = bytearray(good.read_bytes())
    data[offset] = value
    with caplog.at_level(logging.WARNING):
        store = open_store(in_directory(tmp_path, good.name, bytes(data)))
    assert line in caplog.text
    assert restore(store, TEXT) is None
    assert files(store.directory) == [good.name]
    assert store.stats().left["future"] == 1
    store.refresh()
    assert store.stats().left["future"] == 1  # said once


def test_a_payload_of_an_unknown_kind_is_left(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    save(store, TEXT)
    path = tmp_path / files(tmp_path)[0]
    data = bytearray(path.read_bytes().replace(b"append/1", b"append/2"))
    end = len(data) - TAIL_BYTES
    data[end + 4 : end + 8] = struct.pack("<I", zlib.crc32(data[48:end]))
    data[-4:] = struct.pack("<I", zlib.crc32(data[end:-4]))
    path.write_bytes(bytes(data))
    assert restore(open_store(tmp_path), TEXT) is None
    assert files(tmp_path) == [path.name]


def test_another_models_checkpoint_is_left_and_not_used(tmp_path: Path) -> None:
    save(open_store(tmp_path, identity=OTHER), TEXT)
    store = open_store(tmp_path)
    assert restore(store, TEXT) is None
    assert len(files(tmp_path)) == 1
    assert restore(open_store(tmp_path, identity=OTHER), TEXT) is not None


def test_a_file_that_became_another_models_while_we_knew_it_is_refused(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    save(store, TEXT)
    claim = store.claim(TEXT)
    assert claim is not None
    other = open_store(tmp_path, identity=OTHER)
    assert save(other, TEXT).written
    assert store.load(claim) is None
    assert store.stats().loaded["refused"] == 1
    assert restore(other, TEXT) is not None


def test_a_checkpoint_of_a_larger_context_is_left_and_not_used(tmp_path: Path) -> None:
    larger = open_store(tmp_path).identity
    save(open_store(tmp_path), TEXT)
    smaller = open_store(tmp_path, identity=type(larger)(larger.fingerprint, 16, larger.ctx // 2))
    assert restore(smaller, TEXT) is None
    assert len(files(tmp_path)) == 1


def test_a_damaged_prefix_falls_back_to_the_next_best(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    save(store, TEXT[:10])
    save(store, TEXT)
    path = max(tmp_path.iterdir(), key=lambda p: p.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))
    found = restore(store, TEXT)
    assert found is not None
    assert found.text_bytes == 10
    assert store.stats().loaded == {"hit": 1, "miss": 0, "corrupt": 1, "refused": 0}


def test_files_of_other_names_are_not_touched(tmp_path: Path) -> None:
    names = ["notes.txt", "x.kv", "0" * 39 + ".kv", "0" * 40 + ".kv.bak"]
    for name in names:
        (tmp_path / name).write_bytes(b"")
    store = open_store(tmp_path, budget_bytes=1)
    assert store.entries() == []
    assert files(tmp_path) == sorted(names)


def test_an_unreadable_file_is_left(tmp_path: Path, good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = in_directory(tmp_path, good.name, good.read_bytes())
    real = os.open

    def denied(path, *args, **rest):
        if str(path).endswith(".kv"):
            raise PermissionError(13, "Permission denied")
        return real(path, *args, **rest)

    monkeypatch.setattr(os, "open", denied)
    store = open_store(directory)
    assert restore(store, TEXT) is None
    assert store.stats().left["unreadable"] == 1
    assert files(directory) == [good.name]


def test_a_sector_that_cannot_be_read_is_an_error_and_no_fault(
    tmp_path: Path, good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(in_directory(tmp_path, good.name, good.read_bytes()))

    def failing(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", failing)
    assert restore(store, TEXT) is None
    assert store.stats().loaded["refused"] == 1
    assert files(store.directory) == [good.name]


# writing into trouble


@pytest.mark.parametrize("room", [0, 1, 51, 60, 500])
def test_a_full_disk_is_a_counted_skip_without_leftovers(tmp_path: Path, room: int) -> None:
    disk = FullDisk(1 << 20)
    store = open_store(tmp_path, disk=disk)
    save(store, b"before")
    kept = files(tmp_path)
    disk.room = room
    saved = save(store, TEXT)
    assert saved.skip is Skip.NO_SPACE
    assert store.stats().skipped["no_space"] == 1
    assert files(tmp_path) == kept
    disk.room = 1 << 20
    assert save(store, TEXT).written


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, memoryview(data)[:7]))
    store = open_store(tmp_path)
    assert save(store, TEXT).written
    found = restore(store, TEXT)
    assert found is not None
    check(found, TEXT)


def test_a_write_that_takes_nothing_is_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path)
    monkeypatch.setattr(os, "write", lambda fd, data: 0)
    assert save(store, TEXT).skip is Skip.NO_SPACE
    assert files(tmp_path) == []


def test_a_vanished_directory_is_a_counted_skip(tmp_path: Path) -> None:
    store = open_store(tmp_path / "kv")
    save(store, b"before")
    shutil.rmtree(tmp_path / "kv")
    assert save(store, TEXT).skip is Skip.DIRECTORY
    assert restore(store, b"before") is None
    assert store.stats().files == 0


@pytest.mark.parametrize("call", ["open", "rename", "fsync"])
@pytest.mark.parametrize(
    ("number", "skip"), [(13, Skip.PERMISSION), (30, Skip.PERMISSION), (28, Skip.NO_SPACE), (122, Skip.NO_SPACE), (5, Skip.IO)]
)
def test_each_refusal_of_the_system_has_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int, skip: Skip
) -> None:
    from ds4batch.kvstore.disk import Disk

    store = open_store(tmp_path, disk=Disk())
    real = getattr(os, call)

    def failing(target, *rest, **more):
        if call == "open" and ".tmp." not in str(target):
            return real(target, *rest, **more)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, failing)
    assert save(store, TEXT).skip is skip
    monkeypatch.undo()
    assert files(tmp_path) == []
    assert store.stats().skipped[skip.value] == 1


_AS_NOBODY = """
import os
os.chdir({directory!r})
from tests.kvstore.rig import open_store, restore, save
if os.geteuid() == 0:
    os.setuid(65534)  # permissions do not bind root
from pathlib import Path
for kv in (Path("readable"), Path("locked")):
    store = open_store(kv)
    restored = restore(store, b"before, and on")
    print(kv, restored is not None, save(store, b"after").skip.value, store.stats().skipped["permission"])
"""


def test_a_directory_without_permission_costs_its_checkpoints_only(tmp_path: Path) -> None:
    for kv in (tmp_path / "readable", tmp_path / "locked"):
        save(open_store(kv), b"before")
    tmp_path.chmod(0o755)
    (tmp_path / "readable").chmod(0o555)
    next((tmp_path / "readable").iterdir()).chmod(0o444)
    (tmp_path / "locked").chmod(0)
    code = _AS_NOBODY.format(directory=str(tmp_path))
    try:
        result = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    finally:
        (tmp_path / "readable").chmod(0o755)
        (tmp_path / "locked").chmod(0o755)
    assert result.stdout.splitlines() == ["readable True permission 1", "locked False permission 1"], result.stderr


def test_a_directory_that_cannot_be_listed_costs_its_checkpoints_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(open_store(tmp_path), b"before")

    def denied(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "scandir", denied)
    store = open_store(tmp_path)
    assert restore(store, b"before") is None
    monkeypatch.undo()
    assert restore(store, b"before") is not None


def test_trouble_is_said_once_and_not_with_every_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = open_store(tmp_path, disk=FullDisk(0))
    with caplog.at_level(logging.WARNING):
        for i in range(5):
            save(store, b"text %d" % i)
    assert [r.getMessage() for r in caplog.records] == [f"checkpoints in {tmp_path}: No space left on device"]


def test_a_path_that_is_no_directory_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "kv").write_text("")
    with pytest.raises(ValueError, match="kv is not a directory"):
        open_store(tmp_path / "kv")


def test_a_file_that_cannot_be_removed_is_still_not_used(tmp_path: Path, good: Path) -> None:
    class Stuck(MortalDisk):
        def unlink(self, path: Path) -> None:
            raise PermissionError(1, "Operation not permitted")

    directory = in_directory(tmp_path, good.name, good.read_bytes()[: -len(TRAILER) - 1])
    store = open_store(directory, disk=Stuck())
    assert restore(store, TEXT) is None
    assert (store.stats().left["corrupt"], store.stats().removed["corrupt"]) == (1, 0)
    assert files(directory) == [good.name]


def test_short_sessions_and_texts_without_bytes_are_not_saved(tmp_path: Path) -> None:
    store = open_store(tmp_path, min_tokens=5)
    assert save(store, b"four").skip is Skip.TOO_SHORT
    assert store.save(b"", [1] * 6, [], Reason.COLD).skip is Skip.TEXT
    assert files(tmp_path) == []


def test_a_future_clock_does_no_harm(tmp_path: Path) -> None:
    save(open_store(tmp_path, now=Time(9e9)), TEXT)
    store = open_store(tmp_path, now=Time(1000.0))
    assert restore(store, TEXT) is not None


def test_a_damaged_file_that_was_replaced_meanwhile_stays(tmp_path: Path, good: Path) -> None:
    """Between our reading and our removing, a neighbour stored the text anew."""
    data = good.read_bytes()
    directory = in_directory(tmp_path, good.name, data)
    store = open_store(directory)
    claim = store.claim(TEXT)
    assert claim is not None
    (directory / good.name).write_bytes(data[: -len(TRAILER) - 1])
    real = os.pread

    def replaced(fd: int, count: int, offset: int) -> bytes:
        found = real(fd, count, offset)
        (directory / "new").write_bytes(data)
        (directory / "new").rename(directory / good.name)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pread", replaced)
        assert store.load(claim) is None
    assert files(directory) == [good.name]
    assert restore(store, TEXT) is not None
