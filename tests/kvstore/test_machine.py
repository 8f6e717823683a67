"""Any order of saves, restores, evictions, neighbours, damage and sudden deaths: what is restored is what a cold run would hold."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ds4batch.kvstore.counters import Skip
from ds4batch.kvstore.format import FLAG_TOOL_MAP, BadFile, Reason, Verdict, parse_header
from ds4batch.kvstore.reader import name_of
from ds4batch.kvstore.store import Claim, KVStore
from tests.kvstore.rig import Killed, MortalDisk, Time, check, files, open_store, save

T = TypeVar("T")
BUDGET = 7000
WORDS = st.lists(st.sampled_from([b"system ", b"user a ", b"user bc "]), min_size=1, max_size=4).map(b"".join)
DEATHS = st.one_of(st.none(), st.integers(0, 12))
SERVERS = st.integers(0, 1)
TRAILERS = st.sampled_from([b"", b"KTM", b"KTM and a longer one"])


class Machine(RuleBasedStateMachine):
    """Two servers on one directory, in one process so that each death falls where hypothesis wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="kvstore"))
        self.time = Time()
        self.disks = [MortalDisk(), MortalDisk()]
        self.servers = [self.start(0), self.start(1)]
        self.claims: list[tuple[int, Claim]] = []
        self.damaged: set[str] = set()
        self.damages = 0
        self.trailers: dict[str, set[bytes]] = {}  # what a text's trailer may be

    def teardown(self) -> None:
        shutil.rmtree(self.directory)

    def start(self, which: int) -> KVStore:
        self.disks[which] = MortalDisk()
        return open_store(self.directory, now=self.time, disk=self.disks[which], budget_bytes=BUDGET)

    def mortal(self, which: int, death: int | None, act: Callable[[KVStore], T]) -> T | None:
        """Let a server act until it dies, if it does; a dead one is started again."""
        self.disks[which].left = death
        try:
            return act(self.servers[which])
        except Killed:
            self.claims = [(w, claim) for w, claim in self.claims if w != which]
            self.servers[which] = self.start(which)
            assert not any(".tmp." in name for name in files(self.directory))
            return None
        finally:
            self.disks[which].left = None

    def on_disk(self, text: bytes) -> bool:
        return (self.directory / f"{name_of(text)}.kv").exists()

    @rule(
        which=SERVERS,
        text=WORDS,
        reason=st.sampled_from([Reason.COLD, Reason.CONTINUED, Reason.EVICT]),
        trailer=TRAILERS,
        death=DEATHS,
    )
    def save(self, which, text, reason, trailer, death):
        self.trailers.setdefault(text, set()).add(trailer)
        saved = self.mortal(which, death, lambda s: save(s, text, reason, trailer=trailer, flags=FLAG_TOOL_MAP))
        if saved is None:
            return
        assert saved.skip in (None, Skip.BUDGET)
        if saved.written:
            self.damaged.discard(name_of(text))
            self.trailers[text] = {trailer}
        if not self.claims:
            assert self.size() <= BUDGET

    @rule(which=SERVERS, text=WORDS, death=DEATHS)
    def restore(self, which, text, death):
        stored = [text[:n] for n in range(2, len(text) + 1) if self.on_disk(text[:n])]
        sound = not any(name_of(t) in self.damaged for t in stored)
        tried = 0
        while (claim := self.servers[which].claim(text)) is not None:
            tried += 1
            found = self.servers[which].load(claim)
            if found is None:
                continue
            check(found, text)
            taken = text[: found.text_bytes]
            assert found.trailer in self.trailers[taken] | {b""}
            if sound:
                assert taken == max(stored, key=len)
            self.mortal(which, death, lambda s, entry=found.entry: s.used(entry))
            return
        assert tried <= len(stored)
        assert not (sound and stored)

    @rule(which=SERVERS, text=WORDS)
    def claim(self, which, text):
        """As a server does that must save another session before it can load this one."""
        claim = self.servers[which].claim(text)
        if claim is not None:
            self.claims.append((which, claim))

    @precondition(lambda self: self.claims)
    @rule(text=WORDS)
    def load_claimed(self, text):
        which, claim = self.claims.pop()
        there = (self.directory / claim.entry.file_name).exists()
        found = self.servers[which].load(claim)
        if found is not None:
            check(found, claim.text)
        else:
            assert not there or claim.entry.name in self.damaged

    @rule(which=SERVERS)
    def restart(self, which):
        self.claims = [(w, claim) for w, claim in self.claims if w != which]
        self.servers[which] = self.start(which)
        assert not any(".tmp." in name for name in files(self.directory))

    @rule(which=SERVERS, texts=st.lists(WORDS, min_size=1, max_size=5, unique=True))
    def end_in_order(self, which, texts):
        """All its sessions are saved, each once; none of them makes room of another."""
        kept = []
        for text in texts:
            self.trailers.setdefault(text, set()).add(b"")
            saved = save(self.servers[which], text, Reason.SHUTDOWN)
            if saved.written:
                self.damaged.discard(name_of(text))
            if saved.entry is not None:
                kept.append(text)
        assert all(self.on_disk(text) for text in kept)
        self.restart(which)

    @rule(at=st.integers(0, 1 << 20), flip=st.integers(1, 255), pick=st.integers(0, 10))
    def damage(self, at, flip, pick):
        names = files(self.directory)
        if names:
            path = self.directory / names[pick % len(names)]
            data = bytearray(path.read_bytes())
            data[at % len(data)] ^= flip
            path.write_bytes(bytes(data))
            self.damaged.add(path.name[:40])
            self.damages += 1

    @rule(pick=st.integers(0, 10))
    def someone_deletes_a_file(self, pick):
        names = files(self.directory)
        if names:
            (self.directory / names[pick % len(names)]).unlink()

    @rule(hours=st.integers(1, 100))
    def wait(self, hours):
        self.time.now += hours * 3600

    def size(self) -> int:
        """Bytes of all files but those whose damage makes them a later version's, which are left alone and not counted."""
        return sum(p.stat().st_size for p in self.directory.iterdir() if not self.is_later(p))

    def is_later(self, path: Path) -> bool:
        if path.name[:40] not in self.damaged:
            return False
        try:
            parse_header(path.read_bytes(), path.stat().st_size)
        except BadFile as error:
            return error.verdict is Verdict.FUTURE
        return False

    @invariant()
    def nothing_unfinished_lies_about(self):
        assert not any(".tmp." in name for name in files(self.directory))

    @invariant()
    def sound_files_are_never_called_corrupt(self):
        assert sum(s.stats().removed["corrupt"] for s in self.servers) <= self.damages


TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=150, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def test_a_death_at_any_operation_of_a_save_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    """Each operation in turn, for a first save, an overwriting one, and a changed trailer."""
    counting = MortalDisk()
    save(open_store(tmp_path / "count", disk=counting), b"some text", trailer=b"t")
    operations = len(counting.log)
    assert counting.log[-4:] == ["write", "sync", "rename", "sync_directory"]
    for left in range(operations):
        directory = tmp_path / str(left)
        store = open_store(directory, disk=MortalDisk(left))
        try:
            save(store, b"some text", trailer=b"t")
        except Killed:
            pass
        else:
            raise AssertionError("it lived")
        leftovers = files(directory)
        again = open_store(directory)
        claim = again.claim(b"some text and more")
        renamed = left > counting.log.index("rename")
        assert (claim is not None) == renamed
        if claim is not None:
            found = again.load(claim)
            assert found is not None
            check(found, b"some text and more")
            assert found.trailer == b"t"
        else:
            assert files(directory) == []
            assert len(leftovers) == (left > 0)


def test_a_death_at_any_operation_of_a_change_in_place_leaves_a_good_state(tmp_path: Path) -> None:
    for what in ("use", "trailer", "drop"):
        for left in range(12):
            directory = tmp_path / f"{what}{left}"
            disk = MortalDisk()
            store = open_store(directory, disk=disk)
            entry = save(store, b"some text", trailer=b"old", flags=FLAG_TOOL_MAP).entry
            assert entry is not None
            disk.left = left
            try:
                if what == "use":
                    store.used(entry)
                else:
                    save(store, b"some text", trailer=b"new, and longer" if what == "trailer" else b"", flags=FLAG_TOOL_MAP)
                died = False
            except Killed:
                died = True
            again = open_store(directory)
            claim = again.claim(b"some text")
            assert claim is not None
            found = again.load(claim)
            assert found is not None, (what, left)
            check(found, b"some text")
            if what == "use":
                assert found.trailer == b"old"
                assert found.entry.header.hits in ((0, 1) if died else (1,))
            else:
                new = b"new, and longer" if what == "trailer" else b""
                assert found.trailer in ((b"old", b"", new) if died else (new,))
            assert not died or left < 9
