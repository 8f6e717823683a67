"""What goes in comes out, bit for bit; and the file is laid out as documented."""

from __future__ import annotations

import hashlib
import stat
import struct
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from ds4batch.kvstore.format import FLAG_THINKING_KEY, FLAG_TITLE, FLAG_TOOL_MAP, Reason
from ds4batch.kvstore.payload import APPEND, CARRIERS, FIXED, ArraySpec, StateArray, state_array
from ds4batch.kvstore.tensors import NAMES, as_array, fill
from tests.kvstore.rig import IDENTITY, OTHER, Time, check, contents, files, open_store, restore, save, state_of, tokens_of

TEXT = b"a system prompt, and a question"


def test_every_kind_of_state_comes_back_bit_for_bit(tmp_path: Path) -> None:
    saved = save(open_store(tmp_path), TEXT)
    assert saved.written
    assert saved.skip is None
    found = restore(open_store(tmp_path), TEXT + b" and more")
    assert found is not None
    check(found, TEXT + b" and more")
    assert found.text_bytes == len(TEXT)
    assert [(s.name, s.position) for s in found.specs] == [(a.spec.name, a.spec.position) for a in state_of(tokens_of(TEXT))]


@pytest.mark.parametrize("dtype", sorted(CARRIERS))
def test_every_element_type_comes_back_bit_for_bit(tmp_path: Path, dtype: str) -> None:
    raw = np.random.default_rng(1).integers(0, 256, 3 * 5 * 2 * CARRIERS[dtype].itemsize, np.uint8)
    array = raw.view(CARRIERS[dtype]).reshape(3, 5, 2)
    store = open_store(tmp_path)
    store.save(TEXT, [7, 8, 9], [state_array("x", array, dtype, kind=FIXED, position=2)], Reason.COLD)
    found = restore(store, TEXT)
    assert found is not None
    assert found.arrays["x", 2].dtype == CARRIERS[dtype]
    assert found.arrays["x", 2].shape == (3, 5, 2)
    assert found.arrays["x", 2].tobytes() == raw.tobytes()


@pytest.mark.parametrize("dtype", NAMES)
def test_tensors_keep_their_bits_through_arrays_and_back(dtype: torch.dtype) -> None:
    bits = torch.randint(0, 256, (2, 3, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    tensor = bits.view(dtype)
    pool = torch.zeros(2, 4, tensor.shape[-1], dtype=dtype)
    fill(pool[:, 1:], as_array(tensor))  # a strided view, as a page of a pool is
    assert torch.equal(pool[:, 1:].contiguous().view(torch.uint8), bits)


def test_fill_refuses_another_shape_or_type() -> None:
    target = torch.zeros(2, 3, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="does not go into"):
        fill(target, np.zeros((2, 2), np.uint16))
    with pytest.raises(ValueError, match="does not go into"):
        fill(target, np.zeros((2, 3), np.float32))
    assert not target.any()


def test_arrays_may_come_in_pieces_of_any_size(tmp_path: Path) -> None:
    data = bytes(range(240))
    spec = ArraySpec("k", APPEND, "f32", (2, 5, 3, 2), 3)
    pieces = [data[:1], data[1:1], memoryview(data)[1:130], bytearray(data[130:])]
    store = open_store(tmp_path)
    assert store.save(TEXT, [1, 2, 3], [StateArray(spec, lambda: iter(pieces))], Reason.COLD).written
    found = restore(store, TEXT)
    assert found is not None
    assert found.arrays["k", 3].tobytes() == data


@pytest.mark.parametrize("short", [True, False])
def test_an_array_of_another_size_than_its_shape_is_an_error_that_leaves_nothing(tmp_path: Path, short: bool) -> None:
    spec = ArraySpec("k", FIXED, "u8", (8,), 3)
    store = open_store(tmp_path)
    with pytest.raises(ValueError, match=r"array k: . bytes came, its shape has 8"):
        store.save(TEXT, [1, 2, 3], [StateArray(spec, lambda: [bytes(7 if short else 9)])], Reason.COLD)
    assert files(tmp_path) == []


def test_an_error_in_the_source_of_an_array_passes_through_and_leaves_nothing(tmp_path: Path) -> None:
    def broken():
        yield bytes(4)
        raise RuntimeError("device lost")

    store = open_store(tmp_path)
    with pytest.raises(RuntimeError, match="device lost"):
        store.save(TEXT, [1, 2, 3], [StateArray(ArraySpec("k", FIXED, "u8", (8,), 3), broken)], Reason.COLD)
    assert files(tmp_path) == []
    assert save(store, TEXT).written


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        (ArraySpec("k", APPEND, "u8", (1, 1, 4, 1), 3), "shape"),
        (ArraySpec("k", APPEND, "u8", (1, 1, 3, 1), 2), "position 2"),
        (ArraySpec("k", APPEND, "u8", (3,), 3), "shape"),
        (ArraySpec("k", FIXED, "u8", (3,), 4), "position 4 is not in 1..3"),
        (ArraySpec("k", FIXED, "u8", (3,), 0), "position 0 is not in 1..3"),
    ],
)
def test_arrays_that_are_not_the_state_of_the_tokens_are_refused(tmp_path: Path, spec: ArraySpec, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        open_store(tmp_path).save(TEXT, [1, 2, 3], [StateArray(spec, lambda: [bytes(3)])], Reason.COLD)


def test_the_file_is_laid_out_as_documented(tmp_path: Path) -> None:
    store = open_store(tmp_path, now=Time(1234567))
    save(store, TEXT, Reason.COLD, flags=FLAG_TOOL_MAP | FLAG_THINKING_KEY, trailer=b"KTM\x01rest")
    (name,) = files(tmp_path)
    assert name == hashlib.sha1(TEXT).hexdigest() + ".kv"
    data = (tmp_path / name).read_bytes()
    assert data[:4] == b"KVC\x01"
    assert tuple(data[4:8]) == (16, 1, 1 | 4, IDENTITY.model_id)
    assert struct.unpack_from("<IIIB", data, 8) == (len(TEXT), 0, 4096, 2)
    assert data[21:24] == bytes(3)
    created, last_used, payload, text_bytes = struct.unpack_from("<QQQI", data, 24)
    assert (created, last_used, text_bytes) == (1234567, 1234567, len(TEXT))
    assert data[52 : 52 + text_bytes] == TEXT
    start = 52 + text_bytes
    assert struct.unpack_from(f"<{1 + len(TEXT)}I", data, start) == (len(TEXT), *tokens_of(TEXT))
    assert data[start + payload :] == b"KTM\x01rest"
    for array in contents(state_of(tokens_of(TEXT))).values():
        assert any(data[at : at + len(array)] == array for at in range(0, len(data), 64))


def test_directory_and_files_are_private(tmp_path: Path) -> None:
    save(open_store(tmp_path / "kv"), TEXT)
    assert stat.S_IMODE((tmp_path / "kv").stat().st_mode) == 0o700
    (name,) = files(tmp_path / "kv")
    assert stat.S_IMODE((tmp_path / "kv" / name).stat().st_mode) == 0o600


def test_a_use_is_counted_in_the_file(tmp_path: Path) -> None:
    now = Time()
    store = open_store(tmp_path, now=now)
    save(store, TEXT)
    for _ in range(3):
        now.now += 10
        found = restore(store, TEXT)
        assert found is not None
        store.used(found.entry)
    (entry,) = open_store(tmp_path).entries()
    assert (entry.header.hits, entry.header.last_used) == (3, 1_000_030)
    assert restore(open_store(tmp_path), TEXT) is not None


def test_saving_a_text_again_only_renews_its_trailer(tmp_path: Path) -> None:
    now = Time()
    store = open_store(tmp_path, now=now)
    save(store, TEXT, trailer=b"one, and long", flags=FLAG_TITLE)
    inode = next(tmp_path.iterdir()).stat().st_ino
    now.now += 60
    again = save(store, TEXT, trailer=b"two", flags=FLAG_TOOL_MAP)
    assert not again.written
    assert again.entry is not None
    assert next(tmp_path.iterdir()).stat().st_ino == inode
    found = restore(open_store(tmp_path), TEXT)
    assert found is not None
    assert found.trailer == b"two"
    assert found.entry.header.flags == FLAG_TOOL_MAP
    assert found.entry.header.last_used == now.now
    save(store, TEXT)
    found = restore(open_store(tmp_path), TEXT)
    assert found is not None
    assert (found.trailer, found.entry.header.flags) == (b"", 0)
    assert store.stats().stored["evict"] == 1
    assert store.stats().known["evict"] == 2


def test_trailers_are_read_without_their_payloads_and_only_of_the_own_model(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    save(store, b"first", trailer=b"tools", flags=FLAG_TOOL_MAP)
    save(store, b"second", trailer=b"title", flags=FLAG_TITLE)
    save(open_store(tmp_path, identity=OTHER), b"third", trailer=b"theirs", flags=FLAG_TOOL_MAP)
    store.refresh()
    assert [trailer for _, trailer in store.trailers()] == [b"tools"]


def test_what_was_restored_survives_its_file(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    save(store, TEXT)
    found = restore(store, TEXT)
    assert found is not None
    store.discard(found.entry, "the prefill after it failed")
    assert files(tmp_path) == []
    assert store.find(TEXT) is None
    assert store.stats().removed["prefill_failed"] == 1
    check(found, TEXT)
    with pytest.raises(ValueError, match="read-only"):
        found.arrays["k", len(TEXT)][0] = 0


def test_threads_that_save_and_restore_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    store = open_store(tmp_path, budget_bytes=30_000)
    problems: list[BaseException] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            for _ in range(40):
                text = b"shared start " + bytes(rng.integers(97, 101, rng.integers(0, 3), np.uint8)) * 9
                if rng.integers(2):
                    save(store, text)
                elif (found := restore(store, text + b"!")) is not None:
                    check(found, text + b"!")
                    store.used(found.entry)
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    stats = store.stats()
    assert stats.loaded["corrupt"] == stats.removed["corrupt"] == 0
    assert stats.bytes == sum(p.stat().st_size for p in tmp_path.iterdir()) <= 30_000
