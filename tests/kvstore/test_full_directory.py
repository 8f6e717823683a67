"""Which checkpoints a full directory gives up: the least valuable first, and nobody's session for what nobody ever used."""

from __future__ import annotations

import random
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4batch.kvstore.counters import Skip
from ds4batch.kvstore.eviction import ABANDONED_AFTER, HALF_LIFE, LIVE_FOR, Incoming, is_live, plan_eviction, score
from ds4batch.kvstore.format import Header, Reason
from ds4batch.kvstore.index import Entry
from ds4batch.kvstore.reader import name_of
from ds4batch.kvstore.store import KVStore
from tests.kvstore.rig import IDENTITY, Time, files, open_store, restore, save

NOW = 1_000_000_000
HOUR = 3600
LEFT = (Reason.EVICT, Reason.SHUTDOWN)


def entry(text: bytes, *, age: float = 0, unused: float | None = None, size: int = 1000, **changes) -> Entry:
    """`age` and `unused` are seconds since it was saved and since it was used."""
    used = NOW - int(age if unused is None else unused)
    header = Header(16, Reason.COLD, 0, 0, 100, 0, IDENTITY.ctx, NOW - int(age), used, size - 100, len(text))
    return Entry(name_of(text), name_of(text) + ".kv", header._replace(**changes), IDENTITY.fingerprint, size)


def order(*entries: Entry, incoming: Incoming | None = None) -> list[str]:
    """Names, first to go first."""
    total = sum(e.file_bytes for e in entries)
    return [e.name for e in plan_eviction(entries, total, total, NOW, incoming).victims]


def names(*entries: Entry) -> list[str]:
    return [e.name for e in entries]


AGES = st.integers(0, 2 * ABANDONED_AFTER)
ENTRIES = st.lists(
    st.tuples(AGES, st.floats(0, 1), st.integers(200, 9000), st.integers(1, 999), st.integers(0, 30), st.sampled_from(Reason)),
    min_size=2,
    max_size=12,
).map(
    lambda rows: [
        entry(b"%d" % i, age=age, unused=age * part if hits else age, size=size, tokens=tokens, hits=hits, reason=reason)
        for i, (age, part, size, tokens, hits, reason) in enumerate(rows)
    ]
)  # fmt: skip


# what goes first


@given(ENTRIES)
def test_no_live_session_goes_while_anything_else_is_there(entries: list[Entry]) -> None:
    live = {e.name for e in entries if e.header.reason in LEFT and NOW - e.header.created < LIVE_FOR}
    never_used_and_older = {e.name for e in entries if not e.header.hits and NOW - e.header.created >= LIVE_FOR}
    going = order(*entries)
    first = min((going.index(name) for name in live), default=len(going))
    assert never_used_and_older <= set(going[:first])


@given(ENTRIES)
def test_of_two_that_differ_in_their_time_alone_the_older_goes_first(entries: list[Entry]) -> None:
    alike = [e._replace(file_bytes=1000, header=e.header._replace(hits=0, tokens=100, reason=Reason.EVICT)) for e in entries]
    used = {e.name: e.header.last_used for e in alike}
    assert [used[name] for name in order(*alike)] == sorted(used.values())


@given(ENTRIES, st.integers(0, 11), st.sampled_from(["hits", "last_used", "tokens"]), st.integers(1, 5000))
def test_a_use_or_a_token_more_or_a_later_use_never_makes_one_go_earlier(
    entries: list[Entry], which: int, what: str, more: int
) -> None:
    old = entries[which % len(entries)]
    value = min(getattr(old.header, what) + more, NOW if what == "last_used" else 1 << 31)
    better = old._replace(header=old.header._replace(**{what: value}))
    others = [e for e in entries if e.name != old.name]
    before, after = order(*others, old), order(*others, better)
    assert set(before[: before.index(old.name)]) <= set(after[: after.index(old.name)])


@given(ENTRIES, st.integers(0, 12 * HOUR))
def test_time_alone_changes_no_order_by_score(entries: list[Entry], later: int) -> None:
    at_once, afterwards = [score(e, NOW) for e in entries], [score(e, NOW + later) for e in entries]
    for i, one in enumerate(at_once):
        for j, other in enumerate(at_once):
            if one > other * (1 + 1e-9):
                assert afterwards[i] > afterwards[j]


def test_a_few_per_cent_in_tokens_a_byte_are_a_few_minutes() -> None:
    """All sessions of a model have nearly the same tokens a byte: that must not decide before their age does."""
    longer, shorter = (entry(b"%d" % n, age=2 * HOUR, tokens=n, size=10 * n + 50) for n in (2000, 600))
    assert order(longer, shorter) == names(shorter, longer)
    assert score(longer, NOW) / score(shorter, NOW) < 1.01
    later = shorter._replace(header=shorter.header._replace(last_used=NOW - 2 * HOUR + 300))
    assert order(longer, later) == names(longer, later)


def test_twice_the_uses_or_twice_the_tokens_a_byte_are_worth_six_hours() -> None:
    plain = entry(b"plain", age=2 * HOUR)
    for name, better in {"uses": {"hits": 1}, "tokens": {"tokens": 200}, "bytes": {"size": 500}}.items():
        for margin, kept in ((-60, True), (60, False)):
            other = entry(name.encode(), age=2 * HOUR + HALF_LIFE + margin, **better)
            assert order(plain, other)[-1] == (other if kept else plain).name, (name, margin)


def test_a_common_beginning_that_is_used_outlives_sessions_used_before_it() -> None:
    prompt = entry(b"system", age=50 * HOUR, unused=60, hits=40)
    sessions = [entry(b"s%d" % i, age=120 + i, reason=Reason.EVICT) for i in range(3)]
    assert order(prompt, *sessions) == names(*reversed(sessions), prompt)


def test_a_session_that_was_idle_in_its_slot_is_live_when_saved_and_the_first_of_those_to_go() -> None:
    idle = entry(b"idle", age=1, unused=80 * HOUR, reason=Reason.SHUTDOWN)
    fresh = entry(b"fresh", age=1800, reason=Reason.EVICT)
    prompt = entry(b"prompt", age=7200)
    assert order(idle, fresh, prompt) == names(prompt, idle, fresh)


def test_earlier_turns_of_the_incoming_conversation_go_before_other_live_sessions_and_after_all_else() -> None:
    incoming = Incoming(b"one two three", IDENTITY.fingerprint, IDENTITY.ctx)
    turn = entry(b"one two", age=1, reason=Reason.EVICT)
    periodic = entry(b"one t", age=10 * HOUR, unused=1, hits=1, reason=Reason.CONTINUED)
    other = entry(b"other", age=1800, reason=Reason.EVICT)
    prompt = entry(b"one ", age=7200)
    assert order(turn, other, prompt, periodic, incoming=incoming) == names(periodic, prompt, turn, other)
    assert order(turn, other, prompt, periodic) == names(prompt, other, turn, periodic)


@pytest.mark.parametrize("ahead", [60, 400 * 24 * HOUR])
def test_a_clock_that_was_ahead_pins_nothing_for_long(ahead: int) -> None:
    theirs = entry(b"theirs", age=-ahead, reason=Reason.EVICT)
    assert is_live(theirs, NOW) is (ahead < LIVE_FOR)
    ours = entry(b"ours", age=30, reason=Reason.EVICT)
    assert order(theirs, ours)[0] == (ours if ahead < LIVE_FOR else theirs).name


# at the end of a server


def words(number: int, length: int) -> bytes:
    return (b"session %d " % number + b"and on " * length)[: 12 + length]


def crowd(store: KVStore, time: Time, count: int, seed: int) -> None:
    """What a day leaves behind: beginnings, periodic saves, and sessions that gave way and never came back."""
    rnd = random.Random(seed)
    for i in range(count):
        time.now += 60
        save(store, b"crowd " + words(i, rnd.randrange(20, 60)), rnd.choice((Reason.COLD, Reason.CONTINUED)))


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=10),
    others=st.integers(0, 12),
    budget=st.integers(4_000, 40_000),
    seconds=st.sampled_from([0, 0, 1, 30]),
    seed=st.integers(0, 99),
)
def test_saves_of_one_shutdown_never_remove_each_other(
    lengths: list[int], others: int, budget: int, seconds: int, seed: int
) -> None:
    with TemporaryDirectory() as directory:
        time = Time()
        store = open_store(Path(directory), now=time, budget_bytes=budget)
        crowd(store, time, others, seed)
        saved: dict[bytes, int] = {}
        for number, length in enumerate(lengths):
            time.now += seconds
            text = words(number, length)
            result = save(store, text, Reason.SHUTDOWN)
            if result.entry is not None:
                saved[text] = result.entry.file_bytes
            else:
                assert result.skip is Skip.BUDGET
                one = save(open_store(Path(directory) / "alone"), text).entry
                assert one is not None
                too_large = one.file_bytes * 1.01 + 1 > budget
                assert too_large or sum(saved.values()) + one.file_bytes > budget, "something else was kept instead"
        assert store.stats().bytes <= budget
        again = open_store(Path(directory), now=time, budget_bytes=budget)
        assert all(again.find(text) is not None for text in saved)
        by_use = sorted((e for e in again.entries() if e.header.reason is Reason.SHUTDOWN), key=lambda e: -e.header.last_used)
        assert [e.name for e in by_use] == [name_of(text) for text in saved]


def test_sixteen_sessions_saved_at_the_end_of_a_full_directory_all_stay(tmp_path: Path) -> None:
    """Shorter ones have fewer tokens a byte than all that is there already, and were the first to go."""
    time = Time()
    sizes = [save(open_store(tmp_path / "sizes"), words(n, n), Reason.SHUTDOWN).entry for n in range(16)]
    budget = sum(e.file_bytes for e in sizes if e is not None) + 2000
    store = open_store(tmp_path / "full", now=time, budget_bytes=budget)
    crowd(store, time, 40, 1)
    assert store.stats().evicted["pre_store"] > 0  # it is full
    for number in range(16):
        time.now += 1
        assert save(store, words(number, number), Reason.SHUTDOWN).written
    for number in range(16):
        assert restore(open_store(tmp_path / "full", now=time, budget_bytes=budget), words(number, number)) is not None


def test_where_not_all_fit_those_used_last_stay_also_after_the_next_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    time = Time()
    size = save(open_store(tmp_path / "size"), words(0, 30), Reason.SHUTDOWN).entry.file_bytes
    store = open_store(tmp_path / "full", now=time, budget_bytes=6 * size + size // 2)
    crowd(store, time, 10, 1)
    kept = [save(store, words(number, 30), Reason.SHUTDOWN).skip is None for number in range(9)]
    assert kept == [True] * 6 + [False] * 3
    assert store.stats().skipped["budget"] == 3
    tokens = len(words(0, 30))
    assert sum(f"a session of {tokens} tokens is not saved" in line for line in caplog.messages) == 3
    again = open_store(tmp_path / "full", now=time, budget_bytes=6 * size + size // 2)
    for number in (100, 101):  # sessions of the next life, in the same second
        assert save(again, words(number, 28)).written
    left = [number for number in range(9) if again.find(words(number, 30)) is not None]
    assert left == [0, 1, 2, 3]
    assert len(files(tmp_path / "full")) == 6


def test_a_clock_that_was_never_set_stops_no_save_at_the_end(tmp_path: Path) -> None:
    store = open_store(tmp_path, now=Time(1.0))
    for number in range(4):
        assert save(store, words(number, 10), Reason.SHUTDOWN).written
    assert len(files(tmp_path)) == 4


def test_a_session_that_is_on_the_disk_already_counts_as_saved_at_the_end(tmp_path: Path) -> None:
    """Its text is that of a periodic save, which would be the first to go."""
    time = Time()
    size = save(open_store(tmp_path / "size"), words(0, 30)).entry.file_bytes
    store = open_store(tmp_path / "full", now=time, budget_bytes=3 * size + size // 2)
    save(store, words(0, 30), Reason.CONTINUED)
    time.now += 10 * HOUR
    save(store, words(1, 30), Reason.CONTINUED)
    again = save(store, words(0, 30), Reason.SHUTDOWN)
    assert again.entry is not None
    assert (again.written, again.entry.header.reason) == (False, Reason.SHUTDOWN)
    for number in (2, 3):
        assert save(store, words(number, 30), Reason.SHUTDOWN).written
    assert store.find(words(0, 30)) is not None
    assert store.find(words(1, 30)) is None
    renewed = save(store, words(2, 30), Reason.COLD)  # what left its slot stays so
    assert renewed.entry is not None
    assert renewed.entry.header.reason is Reason.SHUTDOWN
