"""When to save, what to keep, and which prefix to take: pure functions, with the format's worked values."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4batch.kvstore.counters import Skip
from ds4batch.kvstore.eviction import ABANDONED_AFTER, HALF_LIFE, Incoming, covered_by, decayed_hits, plan_eviction, score
from ds4batch.kvstore.format import Header, Reason
from ds4batch.kvstore.identity import Identity, fingerprint, weights_identity
from ds4batch.kvstore.index import Entry, Index
from ds4batch.kvstore.options import Options
from ds4batch.kvstore.reader import name_of
from ds4batch.kvstore.triggers import Schedule, aligned_length, cold_length, continued_step, worth_saving
from tests.kvstore.rig import IDENTITY, OTHER, MortalDisk, Time, files, open_store, restore, save

DEFAULTS = Options(budget_bytes=4096 << 20)
NOW = 10_000_000
HOUR = 3600


def entry(text: bytes = b"x", *, size: int = 1000, whose: Identity = IDENTITY, **changes) -> Entry:
    header = Header(16, Reason.CONTINUED, 0, whose.model_id, 100, 0, whose.ctx, NOW, NOW, size - 100, len(text))
    name = name_of(text)
    return Entry(name, name + ".kv", header._replace(**changes), whose.fingerprint, size)


# when to save


@pytest.mark.parametrize(
    ("tokens", "length"), [(10000, 8192), (600, 600), (544, 544), (2079, 2079), (2080, 2048), (4127, 2048), (4128, 4096)]
)
def test_a_cold_save_ends_on_the_alignment_or_takes_the_whole_prompt(tokens: int, length: int) -> None:
    assert aligned_length(tokens, DEFAULTS) == length


def test_cold_saves_keep_to_their_range_and_prefer_the_anchor() -> None:
    assert cold_length(511, 0, DEFAULTS) == 0
    assert cold_length(512, 0, DEFAULTS) == 512
    assert cold_length(30000, 0, DEFAULTS) == 28672
    assert cold_length(30001, 600, DEFAULTS) == 0
    assert cold_length(9000, 600, DEFAULTS) == 600
    assert cold_length(9000, 511, DEFAULTS) == 8192
    assert cold_length(9000, 600, replace(DEFAULTS, cold_max_tokens=0)) == 0


def test_short_sessions_and_images_are_not_worth_saving() -> None:
    assert worth_saving(512, DEFAULTS)
    assert not worth_saving(511, DEFAULTS)
    assert not worth_saving(9999, DEFAULTS, images=True)


def test_the_interval_is_rounded_up_to_the_alignment() -> None:
    assert continued_step(DEFAULTS) == 10240
    assert continued_step(replace(DEFAULTS, continued_interval_tokens=0)) == 0


def saves(
    schedule: Schedule, start: int, end: int, *, fail: tuple[int, ...] = (), options: Options = DEFAULTS
) -> list[tuple[Reason, int]]:
    """All saves of a session that grows from `start` to `end` and stops where it is told to."""
    done = []
    position: int | None = start
    while (position := schedule.next_stop(position, options)) is not None and position <= end:
        reason = schedule.due(position, options)
        assert reason is not None, position
        done.append((reason, position))
        schedule = schedule.after(reason, position, position not in fail)
    return done


def test_periodic_saves_are_at_absolute_positions_whatever_was_saved_before() -> None:
    periodic = [(Reason.CONTINUED, 10240), (Reason.CONTINUED, 20480), (Reason.CONTINUED, 30720)]
    assert saves(Schedule(), 0, 40000) == periodic
    assert saves(Schedule(cold_at=600), 0, 40000) == [(Reason.COLD, 600), *periodic]
    assert saves(Schedule(last_store=10000), 10000, 40000) == periodic
    assert saves(Schedule(last_store=10240), 10240, 40000) == periodic[1:]
    assert saves(Schedule(), 0, 40000, options=replace(DEFAULTS, continued_interval_tokens=0)) == []


def test_where_cold_and_periodic_meet_there_is_one_save() -> None:
    assert saves(Schedule(cold_at=10240), 0, 20480) == [(Reason.COLD, 10240), (Reason.CONTINUED, 20480)]


def test_a_cold_save_that_failed_leaves_the_periodic_one_due() -> None:
    failed = Schedule(cold_at=10240).after(Reason.COLD, 10240, stored=False)
    assert failed.due(10240, DEFAULTS) is Reason.CONTINUED


def test_nothing_is_saved_between_stops_or_inside_a_tool_call() -> None:
    schedule = Schedule(cold_at=600)
    assert schedule.due(599, DEFAULTS) is None
    assert schedule.due(10239, DEFAULTS) is None
    assert schedule.due(10240, DEFAULTS, in_tool_call=True) is None


@given(st.integers(0, 50000), st.integers(0, 50000), st.integers(0, 50000))
def test_a_session_never_passes_a_due_position(start: int, cold: int, last: int) -> None:
    schedule = Schedule(cold, last)
    stop = schedule.next_stop(start, DEFAULTS)
    assert stop is not None
    assert stop > start
    assert schedule.due(stop, DEFAULTS) is not None
    assert all(schedule.due(p, DEFAULTS) is None for p in {start + 1, (start + stop) // 2, stop - 1} if start < p < stop)


# what to keep


def test_hits_halve_every_six_hours() -> None:
    def hits(count: int, hours: float) -> float:
        return decayed_hits(entry(hits=count, last_used=int(NOW - hours * HOUR)), NOW)

    assert hits(4, 6) == 2
    assert hits(100, 24) == 6.25
    assert hits(1, 48) == 0
    assert hits(4, -5) == 4
    assert decayed_hits(entry(hits=4, last_used=0, created=NOW - HALF_LIFE), NOW) == 2
    assert decayed_hits(entry(hits=4, last_used=0, created=0), NOW) == 0


def test_the_score_is_tokens_a_byte_and_twice_that_for_an_anchor() -> None:
    assert score(entry(size=100 << 20, tokens=8192, reason=Reason.COLD), NOW) == pytest.approx(1.5625e-4)
    assert score(entry(size=100 << 20, tokens=8192), NOW) == pytest.approx(0.78125e-4)
    assert score(entry(tokens=1000, hits=1, reason=Reason.EVICT), NOW) == pytest.approx(4.0)
    assert score(entry(tokens=1000), NOW, covered=True) == pytest.approx(0.05)
    assert score(entry(tokens=1000, hits=1), NOW, covered=True) == pytest.approx(2 * (0.05 + 0.225))


def test_only_covered_periodic_checkpoints_of_the_same_server_are_superseded() -> None:
    incoming = Incoming(b"one two three", IDENTITY.fingerprint, IDENTITY.ctx)
    covered = [entry(b"one"), entry(b"one two")]
    others = [
        entry(b"on!"),
        entry(b"one two three"),
        entry(b"one ", reason=Reason.COLD),
        entry(b"one t", whose=OTHER),
        entry(b"one tw", ctx=IDENTITY.ctx - 1),
    ]
    assert covered_by([*others, *covered], incoming) == {e.name for e in covered}


def test_room_is_made_by_score_then_age_and_never_beyond_need() -> None:
    low = entry(b"low", tokens=10)
    older, newer = entry(b"older", tokens=20, last_used=NOW - 5), entry(b"newer", tokens=20)
    high = entry(b"high", tokens=30)
    everything = [high, newer, low, older]
    assert plan_eviction(everything, 0, 4000, NOW) == ((), True)
    assert plan_eviction(everything, 1, 4000, NOW) == ((low,), True)
    assert plan_eviction(everything, 1001, 4000, NOW) == ((low, older), True)
    assert plan_eviction(everything, 4000, 4000, NOW) == ((low, older, newer, high), True)
    assert plan_eviction(everything, 4001, 4000, NOW) == ((), False)
    assert plan_eviction(everything, 10**9, None, NOW) == ((), True)


def test_a_protected_checkpoint_stays_and_nothing_is_removed_in_vain() -> None:
    low, high = entry(b"low", tokens=10), entry(b"high", tokens=30)
    assert plan_eviction([low, high], 1, 2000, NOW, protected={low.name}) == ((high,), True)
    assert plan_eviction([low, high], 1500, 2000, NOW, protected={low.name}) == ((), False)


def test_a_superseded_checkpoint_goes_before_one_of_lower_score() -> None:
    """Nested periodic saves of one conversation must not push the others out."""
    covered, other = entry(b"one two", tokens=200), entry(b"three", tokens=100)
    incoming = Incoming(b"one two three", IDENTITY.fingerprint, IDENTITY.ctx)
    assert plan_eviction([covered, other], 1, 2000, NOW, incoming).victims == (covered,)
    assert plan_eviction([covered, other], 1, 2000, NOW).victims == (other,)


def test_the_abandoned_go_before_small_fresh_ones() -> None:
    """With a large fixed state a fresh, short checkpoint has the lowest score for as long as it stays short."""
    then = NOW - ABANDONED_AFTER
    huge = entry(b"huge", size=10_000, tokens=9000, hits=1000, created=then, last_used=then)
    fresh = entry(b"fresh", size=10_000, tokens=600)
    assert score(huge, NOW) > score(fresh, NOW)
    assert plan_eviction([huge, fresh], 1, 20_000, NOW).victims == (huge,)


@given(
    st.lists(st.tuples(st.integers(1, 500), st.integers(1, 99), st.booleans()), max_size=12),
    st.integers(0, 900),
    st.integers(0, 2000),
)
def test_a_plan_fits_or_removes_nothing(sizes: list[tuple[int, int, bool]], wanted: int, room: int) -> None:
    entries = [entry(b"%d" % i, size=size, tokens=tokens) for i, (size, tokens, _) in enumerate(sizes)]
    protected = {e.name for e, (_, _, held) in zip(entries, sizes, strict=True) if held}
    plan = plan_eviction(entries, wanted, room, NOW, protected=protected)
    assert not protected & {e.name for e in plan.victims}
    left = sum(e.file_bytes for e in entries) - sum(e.file_bytes for e in plan.victims)
    if plan.fits:
        assert left + wanted <= room
        assert not plan.victims or left + plan.victims[-1].file_bytes + wanted > room
    else:
        assert plan.victims == ()
        held = sum(e.file_bytes for e in entries if e.name in protected)
        assert held + wanted > room


# which prefix


@given(st.lists(st.text("ab", min_size=1, max_size=6), max_size=8), st.text("ab", max_size=8))
def test_the_longest_stored_prefix_is_found(stored: list[str], request: str) -> None:
    index = Index(IDENTITY, 1)
    for text in stored:
        index.put(entry(text.encode()))
    wanted = max((t for t in stored if request.startswith(t)), key=len, default=None)
    found = index.find(request.encode())
    assert (found and found.name) == (wanted and name_of(wanted.encode()))


def test_only_usable_checkpoints_are_found() -> None:
    index = Index(IDENTITY, 50)
    index.put(entry(b"a", tokens=49))
    index.put(entry(b"ab", whose=OTHER))
    index.put(entry(b"abc", ctx=IDENTITY.ctx + 1))
    assert index.find(b"abcd") is None
    assert len(index) == 3
    index.put(entry(b"a", tokens=50))
    assert index.find(b"abcd") == entry(b"a", tokens=50)
    assert index.total_bytes == 3000


# the store's own part


def test_room_is_made_before_the_write_and_never_of_what_is_claimed(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    size = save(store, b"first text").entry.file_bytes  # type: ignore[union-attr]
    save(store, b"other text")
    tight = open_store(tmp_path, budget_bytes=2 * size + 100)
    claim = tight.claim(b"first text, and on")
    assert claim is not None
    for text in (b"third text", b"fourth one"):
        assert save(tight, text).written
        assert tight.find(b"first text") is not None
    assert tight.stats().evicted == {"open": 0, "pre_store": 2, "post_store": 0}
    assert tight.load(claim) is not None
    for text in (b"fifth text", b"sixth text"):
        save(tight, text)
    assert tight.find(b"first text") is None


def test_a_save_that_cannot_fit_evicts_nothing(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    size = save(store, b"first text").entry.file_bytes  # type: ignore[union-attr]
    assert save(open_store(tmp_path, budget_bytes=size + 1), b"first text" * 100).skip is Skip.BUDGET
    assert save(open_store(tmp_path, max_file_bytes=size), b"first text" * 2).skip is Skip.FILE_CAP
    held = open_store(tmp_path, budget_bytes=size + size // 2)
    claim = held.claim(b"first text")
    assert claim is not None
    assert save(held, b"other text").skip is Skip.BUDGET
    claim.release()
    claim.release()
    assert save(held, b"other text").written
    assert len(files(tmp_path)) == 1


def test_the_free_floor_makes_room_of_our_own_files_before_it_refuses(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    size = save(store, b"first text").entry.file_bytes  # type: ignore[union-attr]

    class Tight(MortalDisk):
        def free_bytes(self, path: Path) -> int:
            return 5 * size - sum(p.stat().st_size for p in path.iterdir())

    tight = open_store(tmp_path, disk=Tight(), min_free_bytes=3 * size)
    assert save(tight, b"other text").written
    assert save(tight, b"third text").written
    assert tight.stats().evicted["pre_store"] == 1
    assert save(open_store(tmp_path, disk=Tight(), min_free_bytes=5 * size), b"fourth one").skip is Skip.FREE_FLOOR
    assert len(files(tmp_path)) == 2


def test_opening_brings_the_directory_down_to_its_budget(tmp_path: Path) -> None:
    now = Time()
    store = open_store(tmp_path, now=now)
    sizes = []
    for text in (b"first text", b"other text", b"third text"):
        now.now += 1
        sizes.append(save(store, text).entry.file_bytes)  # type: ignore[union-attr]
    opened = open_store(tmp_path, now=now, budget_bytes=sizes[1] + sizes[2])
    assert opened.stats().evicted["open"] == 1
    assert opened.find(b"first text") is None
    assert restore(opened, b"third text") is not None


def test_the_budget_counts_other_models_files_too(tmp_path: Path) -> None:
    size = save(open_store(tmp_path, identity=OTHER), b"their text").entry.file_bytes  # type: ignore[union-attr]
    store = open_store(tmp_path, budget_bytes=size + size // 2)
    assert store.stats().bytes == size
    assert save(store, b"ours").written
    assert len(files(tmp_path)) == 1


def test_a_hundred_hits_of_yesterday_lose_against_fresh_use(tmp_path: Path) -> None:
    now = Time()
    store = open_store(tmp_path, now=now)
    old = save(store, b"once popular").entry
    assert old is not None
    for _ in range(100):
        store.used(old)
    now.now += 48 * HOUR
    fresh = save(store, b"used now now").entry
    assert fresh is not None
    for _ in range(3):
        store.used(fresh)
    tight = open_store(tmp_path, now=now, budget_bytes=fresh.file_bytes + 1)
    assert tight.find(b"used now now") is not None
    assert tight.find(b"once popular") is None


def test_the_start_line_says_what_is_stored_when(tmp_path: Path) -> None:
    line = open_store(tmp_path, min_tokens=512, boundary_align_tokens=2048, budget_bytes=4096 << 20).describe()
    assert "0 files, 0.0 MiB of 4096.0 MiB" in line
    assert "cold prompts of 512 to 30000 tokens, every 10240 tokens" in line


@pytest.mark.parametrize(
    "bad",
    [
        {"budget_bytes": -1},
        {"min_tokens": 0},
        {"cold_max_tokens": 100},
        {"boundary_align_tokens": 0},
        {"boundary_trim_tokens": -1},
        {"continued_interval_tokens": -1},
    ],
)
def test_options_that_cannot_work_are_refused_by_name(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        Options(**{"budget_bytes": 0, **bad})


# whose it is


def test_the_fingerprint_depends_on_facts_and_not_on_their_order() -> None:
    assert fingerprint({"a": 1, "b": [1.5, "x"]}) == fingerprint({"b": [1.5, "x"], "a": 1})
    assert fingerprint({"a": 1}) != fingerprint({"a": "1"})
    assert len(fingerprint({})) == 16


def test_any_change_of_a_weight_file_changes_the_identity(tmp_path: Path) -> None:
    one, two = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    one.write_bytes(bytes(5_000_000))
    two.write_bytes(b"")
    first = weights_identity([one, two])
    assert weights_identity([two, one]) == first
    two.write_bytes(b"x")
    second = weights_identity([one, two])
    assert second != first
    with one.open("r+b") as file:
        file.seek(4_999_999)
        file.write(b"x")
    assert weights_identity([one, two]) not in (first, second)


@pytest.mark.parametrize(("field", "value"), [("fingerprint", b"short"), ("quant_bits", 0), ("ctx", 0)])
def test_an_identity_that_no_header_can_hold_is_refused(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        replace(IDENTITY, **{field: value})
