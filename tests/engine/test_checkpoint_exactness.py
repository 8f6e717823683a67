"""The promise across the disk: what a session that came from a checkpoint goes on to, every logit, equals a cold run's.

The real scheduler and store over real models. A checkpoint is read by the engine that wrote it, by a new one, and by one whose pages
have another size; it is saved whole, on the way, while its session goes on, and cut short by a device that fails.
"""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ds4batch.engine.checkpoint import DiskCheckpoints
from ds4batch.engine.engine import Engine
from ds4batch.engine.models.dense import DenseModel
from ds4batch.engine.models.model import Model
from ds4batch.engine.output import Piece, TextOutput
from ds4batch.engine.sampler import Draw
from ds4batch.engine.vocabulary import TokenizerVocabulary
from ds4batch.engine.weights.source import open_weights
from ds4batch.kvstore.identity import Identity, fingerprint
from ds4batch.kvstore.options import Options as StoreOptions
from ds4batch.kvstore.store import KVStore
from ds4batch.messages import Sampling
from ds4batch.tokenizer import load_tokenizer
from scheduler import Job, Options, Routed, Scheduler
from scheduler.checkpoints import Key
from tests.engine.hybrid_models import DENSE, load, save
from tests.engine.models import CPU, engine_of, feed, tiny_model
from tests.engine.test_reuse_exactness import Recording, user

CTX = 1024
IDENTITY = Identity(fingerprint({"model": "demo"}), 16, CTX)
SYSTEM = "<|im_start|>system\n" + "Keep every rule of the house in mind. " * 12 + "<|im_end|>\n"
PATIENCE = 60.0


def open_store(directory: Path, **changes: int) -> KVStore:
    options = {"budget_bytes": 1 << 30, "min_tokens": 32, "boundary_align_tokens": 64, "boundary_trim_tokens": 8} | changes
    return KVStore(directory, IDENTITY, StoreOptions(**options))


class Life:
    """One engine with its store and scheduler."""

    def __init__(self, model: Model, words: TokenizerVocabulary, directory: Path, *, slots: int = 1, page: int = 0, **store: int):
        plain = engine_of(model, slots, CTX, page)
        self.engine = Recording(model, plain.pool, slots, CTX, plain.path)
        self.engine.rows = []
        self.words = words
        self.woken = threading.Event()
        self.checkpoints = DiskCheckpoints(self.engine, open_store(directory, **store), self.woken.set)
        options = Options(
            mixed_prefill_quantum=64, idle_prefill_quantum=256, itl_budget=0.1, max_queue=64, overlap=False, self_check=True
        )
        clock = itertools.count()
        self.scheduler = Scheduler(
            self.engine, words, lambda: next(clock) * 1e-3, slots=slots, options=options, checkpoints=self.checkpoints
        )
        self.ids = itertools.count()
        self.routed: dict[int, Routed] = {}
        self.texts: dict[int, str] = {}

    def ask(self, text: str, max_tokens: int = 4, anchor: int = 0) -> int:
        number = next(self.ids)
        self.texts[number] = ""

        def emit(piece: Piece) -> None:
            self.texts[number] += piece.text

        tokens, words = self.words.tokenise(text), self.words
        self.scheduler.submit(
            Job(
                id=number, tokens=tokens, text=text, max_tokens=max_tokens,
                sampling=Draw(Sampling(temperature=0.0), tokens, words.stop_ids), stop_tokens=words.stop_ids, api="raw", arrival=0.0,
                output=TextOutput(words.token_bytes, words.special_ids, [], emit), anchor=anchor,
            )
        )  # fmt: skip
        return number

    def run(self) -> None:
        end = time.monotonic() + PATIENCE
        while self.scheduler.busy:
            assert time.monotonic() < end
            if self.scheduler.blocked:
                self.woken.wait(PATIENCE)
                self.woken.clear()
            for event in self.scheduler.step():
                if isinstance(event, Routed):
                    self.routed[event.job] = event

    def turn(self, text: str, **rest: int) -> tuple[Routed, str]:
        """Ask and wait; how it was placed, and the answer."""
        number = self.ask(text, **rest)
        self.run()
        return self.routed[number], self.texts[number]

    def end(self) -> None:
        """As a server stops."""
        self.scheduler.save_all()
        self.checkpoints.close()

    def wait(self) -> None:
        """Until everything that was begun is on the disk."""
        end = time.monotonic() + PATIENCE
        while any(self.checkpoints.busy(slot) for slot in range(len(self.engine.sessions))):
            assert time.monotonic() < end
            time.sleep(0.005)


@pytest.fixture(scope="module")
def words(demo_path: str) -> TokenizerVocabulary:
    return TokenizerVocabulary(load_tokenizer(demo_path))


@pytest.fixture
def equal_cold(demo: DenseModel) -> Callable[[Life], int]:
    """Checks every row a life drew from against a fresh session; how many there were."""
    cold = engine_of(demo, 1, CTX)

    def check(life: Life) -> int:
        for tokens, logits in life.engine.rows:
            cold.truncate(0, 0)
            assert torch.equal(feed(cold, 0, tokens, 512), logits), f"after {len(tokens)} tokens"
        return len(life.engine.rows)

    return check


def test_a_session_that_gave_way_comes_back_with_its_bits(
    demo: DenseModel, words: TokenizerVocabulary, tmp_path: Path, equal_cold: Callable[[Life], int]
) -> None:
    life = Life(demo, words, tmp_path)
    first = SYSTEM + user("Name a river.")
    routed, answer = life.turn(first)
    assert routed.tier == "none"
    held = len(life.engine.tokens(0))
    life.turn(user("Something else altogether. " * 8))
    second = first + answer + "<|im_end|>\n" + user("And a lake?")
    routed, _ = life.turn(second)
    assert (routed.tier, routed.cached_tokens, routed.victim) == ("disk-text", held, "protected")
    assert routed.source
    assert equal_cold(life) >= 10
    life.end()


@pytest.mark.parametrize("page", [0, 128])
def test_a_new_engine_goes_on_where_the_old_one_stopped_whatever_its_pages(
    demo: DenseModel, words: TokenizerVocabulary, tmp_path: Path, equal_cold: Callable[[Life], int], page: int
) -> None:
    old = Life(demo, words, tmp_path, slots=2, page=256)
    first = SYSTEM + user("Name a river.")
    _, answer = old.turn(first)
    held = len(old.engine.tokens(0))
    old.end()
    new = Life(demo, words, tmp_path, slots=2, page=page)
    routed, _ = new.turn(first + answer + "<|im_end|>\n" + user("And a lake?"))
    assert (routed.tier, routed.cached_tokens) == ("disk-text", held)
    routed, _ = new.turn(first)  # a retry of what the checkpoint of the cold prompt holds, beside a live session
    assert routed.tier in ("fork", "disk-text", "memory-rewind")
    assert equal_cold(new) >= 4
    new.end()


def test_saves_on_the_way_hold_what_a_cold_run_holds_while_the_session_goes_on(
    demo: DenseModel, words: TokenizerVocabulary, tmp_path: Path, equal_cold: Callable[[Life], int]
) -> None:
    life = Life(demo, words, tmp_path, continued_interval_tokens=64)
    first = SYSTEM + user("Name a river.")
    anchor = len(words.tokenise(SYSTEM))
    life.turn(first, max_tokens=40, anchor=anchor)
    life.wait()
    stats = life.checkpoints.store.stats()
    assert stats.stored["cold"] == 1
    assert stats.stored["continued"] >= 2
    lengths = {entry.header.tokens for entry in life.checkpoints.store.entries()}
    assert anchor in lengths
    assert {64, 128} <= lengths
    life.checkpoints.close()  # not saved: as if it had been killed
    new = Life(demo, words, tmp_path)
    routed, _ = new.turn(SYSTEM + user("Name a town."))
    assert (routed.tier, routed.cached_tokens) == ("disk-text", anchor)
    assert equal_cold(new) >= 1
    new.end()


def _live_until_killed(directory: str, demo_path: str) -> None:
    """What the victim runs: one conversation gives way to another and is saved; the second is being saved when the end comes."""
    words = TokenizerVocabulary(load_tokenizer(demo_path))
    model = DenseModel(open_weights(demo_path), CPU, torch.bfloat16, CTX)
    life = Life(model, words, Path(directory), continued_interval_tokens=64)
    _, answer = life.turn(SYSTEM + user("Name a river."))
    life.turn(user("Something else altogether. " * 8), max_tokens=1)
    life.wait()
    print("saved " + answer.encode().hex(), flush=True)
    while True:
        life.turn(user("Yet another matter. " * 30 + str(next(life.ids))), max_tokens=40)


def test_after_kill_9_in_the_middle_of_stores_every_logit_equals_a_cold_run(
    demo: DenseModel, words: TokenizerVocabulary, demo_path: str, tmp_path: Path, equal_cold: Callable[[Life], int]
) -> None:
    call = f"from {__name__} import _live_until_killed as live; live({str(tmp_path)!r}, {demo_path!r})"
    with subprocess.Popen(
        [sys.executable, "-c", call], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    ) as victim:
        assert victim.stdout is not None
        said = victim.stdout.readline().split()
        before = len(list(tmp_path.glob("*.kv")))
        end = time.monotonic() + PATIENCE
        while not any(path.suffix != ".kv" for path in tmp_path.iterdir()) and time.monotonic() < end:
            time.sleep(0.001)  # until a store is under way
        victim.kill()
    assert said[0] == "saved"
    assert before >= 1
    answer = bytes.fromhex(said[1]).decode()
    life = Life(demo, words, tmp_path)
    routed, _ = life.turn(SYSTEM + user("Name a river.") + answer + "<|im_end|>\n" + user("And a lake?"))
    assert routed.tier == "disk-text"
    assert routed.cached_tokens > 100
    assert equal_cold(life) >= 4
    assert all(path.suffix in (".kv", ".lock") for path in tmp_path.iterdir())  # what was half written is gone
    life.end()


def test_none_of_1000_flipped_bytes_and_200_cuts_is_used(words: TokenizerVocabulary, tmp_path: Path) -> None:
    model = tiny_model(ctx=CTX, vocab=49152)
    first = SYSTEM + user("Name a river.")
    old = Life(model, words, tmp_path, cold_max_tokens=0)
    _, answer = old.turn(first, max_tokens=2)
    old.end()
    (file,) = tmp_path.glob("*.kv")
    good = file.read_bytes()
    second = first + answer + "<|im_end|>\n" + user("And a lake?")
    whole = Life(model, words, tmp_path)
    assert whole.turn(second, max_tokens=1)[0].tier == "disk-text"
    whole.checkpoints.close()
    cold = Life(model, words, tmp_path / "nothing")
    cold.turn(second, max_tokens=1)
    expected = cold.engine.rows[0]
    cold.checkpoints.close()
    chance = random.Random(11)
    for attempt in range(1200):
        damaged = bytearray(good)
        if attempt < 1000:
            damaged[chance.randrange(len(good))] ^= 1 << chance.randrange(8)
        else:
            del damaged[chance.randrange(len(good)) :]
        for left in tmp_path.glob("*.kv*"):
            left.unlink()
        file.write_bytes(damaged)
        life = Life(model, words, tmp_path)
        assert life.turn(second, max_tokens=1)[0].tier == "none"
        (tokens, logits), *_ = life.engine.rows
        assert tokens == expected[0]
        assert torch.equal(logits, expected[1])
        life.checkpoints.close()


def test_a_damaged_checkpoint_costs_one_cold_prefill_and_is_gone(
    demo: DenseModel, words: TokenizerVocabulary, tmp_path: Path, equal_cold: Callable[[Life], int]
) -> None:
    old = Life(demo, words, tmp_path, cold_max_tokens=0)
    first = SYSTEM + user("Name a river.")
    _, answer = old.turn(first)
    old.end()
    (file,) = tmp_path.glob("*.kv")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 16
    file.write_bytes(data)
    new = Life(demo, words, tmp_path, cold_max_tokens=0)
    second = first + answer + "<|im_end|>\n" + user("And a lake?")
    routed, _ = new.turn(second)
    assert (routed.tier, routed.cached_tokens, routed.fell_from) == ("none", 0, "disk-text")
    assert not file.exists()
    assert new.checkpoints.store.stats().removed["corrupt"] == 1
    assert equal_cold(new) >= 1
    new.end()


def test_who_is_restored_does_not_hold_up_who_decodes_and_a_client_may_leave_meanwhile(
    demo: DenseModel,
    words: TokenizerVocabulary,
    tmp_path: Path,
    equal_cold: Callable[[Life], int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old = Life(demo, words, tmp_path)
    first = SYSTEM + user("Name a river.")
    _, answer = old.turn(first)
    old.end()
    life = Life(demo, words, tmp_path, slots=2)
    gate = threading.Event()
    load = life.checkpoints.store.load
    monkeypatch.setattr(life.checkpoints.store, "load", lambda claim: (gate.wait(PATIENCE), load(claim))[1])
    decoding = life.ask(user("Count to a hundred."), max_tokens=30)
    second = first + answer + "<|im_end|>\n" + user("And a lake?")
    leaving = life.ask(second)
    while life.scheduler.stats().slots[1].state != "restore":
        life.scheduler.step()
    for _ in range(8):
        life.scheduler.step()
    assert life.scheduler.stats().slots[1].live_tokens == 0
    assert len(life.engine.rows) >= 8
    life.scheduler.cancel(leaving, "client")
    staying = life.ask(second)
    gate.set()
    life.run()
    assert life.routed[staying].tier == "disk-text"
    assert leaving not in life.routed
    assert life.texts[decoding]
    assert equal_cold(life) >= 30
    life.end()
    assert life.engine.pool.free + sum(len(set(s.pages)) for s in life.engine.sessions) == life.engine.pool.pages


@pytest.mark.parametrize("page", [0, 128])
def test_state_that_cannot_be_shortened_comes_back_with_its_saved_point(tmp_path: Path, page: int) -> None:
    save(*DENSE, tmp_path / "model")
    model = load(tmp_path / "model", ctx=512)
    store = open_store(tmp_path / "kv")
    tokens = [(i * 7) % 150 + 3 for i in range(150)]

    def engine() -> tuple[Engine, DiskCheckpoints]:
        made = engine_of(model, 2, 512, page)
        return made, DiskCheckpoints(made, store, lambda: None)

    one, out = engine()
    feed(one, 0, tokens[:90], 32)
    one.mark(0)
    feed(one, 0, tokens[90:140], 32)
    out.save(0, Key("text"), "evict")
    out.close()
    two, back = engine()
    back.replace(1, None, "text and more")
    end = time.monotonic() + PATIENCE
    while (restored := back.restored(1)) is None:
        assert time.monotonic() < end
        time.sleep(0.005)
    assert (restored.tokens, restored.text, restored.answered) == (140, 4, True)
    expected = feed(engine_of(model, 1, 512, page), 0, tokens, 150)
    assert torch.equal(feed(two, 1, tokens[140:], 32), expected)
    assert [two.can_truncate(1, n) for n in (0, 90, 100, 140, 149)] == [True, True, False, False, False]
    assert two.truncate(1, 90)
    assert torch.equal(feed(two, 1, tokens[90:], 64), expected)
    back.close()


def test_a_session_that_the_device_loses_while_it_is_copied_is_not_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = engine_of(tiny_model(), 1, CTX)
    feed(made, 0, [i % 100 for i in range(100)], 64)
    out = DiskCheckpoints(made, open_store(tmp_path), lambda: None)
    gate = threading.Event()
    save = out.store.save
    monkeypatch.setattr(out.store, "save", lambda *args, **rest: (gate.wait(PATIENCE), save(*args, **rest))[1])
    out.save(0, Key("text"), "continued")
    made.sessions[0].poison()
    assert made.pool.free == 0, "its page must not be handed out while it is read"
    gate.set()
    out.close()
    assert made.pool.free == made.pool.pages
    assert out.store.stats().skipped["lost"] == 1
    assert not list(tmp_path.iterdir())
