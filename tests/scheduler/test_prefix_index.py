"""The index finds the session that shares most with a prompt, whatever happened to the sessions before."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_rig import make_job

from scheduler.prefix_index import BLOCK, PrefixIndex, names_of

SLOTS = 4


def whole(sessions):
    return lambda slot, most: max(0, min(len(sessions[slot]), most))


def index_of(sessions):
    index = PrefixIndex(len(sessions))
    for slot, tokens in enumerate(sessions):
        index.update(slot, tokens)
    return index


def donors(sessions, prompt, index=None, fork_point=None):
    found = (index or index_of(sessions)).donors(make_job(1, prompt), lambda slot: sessions[slot], fork_point or whole(sessions))
    return [tuple(donor) for donor in found]


def test_the_longest_comes_first_and_the_lowest_among_equals():
    base = list(range(500))
    sessions = [base[:100] + [7] * 50, base[:300], base[:300] + [9] * 9, base[:299]]
    assert donors(sessions, base) == [(1, 300), (2, 300)]


def test_less_than_a_block_is_not_worth_it():
    assert donors([list(range(BLOCK - 1))], list(range(500))) == []
    assert donors([list(range(BLOCK))], list(range(500))) == [(0, BLOCK)]


def test_one_token_is_left_to_evaluate():
    base = list(range(4 * BLOCK))
    assert donors([base, [*base, 1]], base) == [(0, 4 * BLOCK - 1), (1, 4 * BLOCK - 1)]


def test_a_session_that_can_only_be_taken_at_some_points_is_outdone_by_a_shorter_one():
    base = list(range(400))
    sessions = [base[:390], base[:200]]
    assert donors(sessions, base, fork_point=lambda slot, most: (128, min(most, 200))[slot]) == [(1, 200), (0, 128)]


def test_equal_names_are_not_trusted():
    base = list(range(400))
    sessions = [list(base), base[:128]]
    index = index_of(sessions)
    sessions[0][5] = 99  # nobody told the index
    assert donors(sessions, base, index) == [(1, 128)]


def test_what_two_sessions_share_is_known_by_their_names():
    base = list(range(400))
    index = index_of([base, base[:130] + [1] * 200, [1] * 300])
    job = make_job(1, base)
    assert [index.shared(slot, job) for slot in range(3)] == [384, 128, 0]


def test_a_look_up_reads_the_prompt_once_and_two_sessions_however_many_there_are():
    base = list(range(64 * BLOCK))
    read = 0

    class Counting(list):
        def __getitem__(self, at):
            nonlocal read
            read += len(range(*at.indices(len(self)))) if isinstance(at, slice) else 1
            return super().__getitem__(at)

    sessions = [Counting(base + [slot] * 30) for slot in range(64)]
    index = index_of(sessions)
    job = make_job(1, [*base, 999])
    names_of(job)
    read = 0
    assert len(index.donors(job, lambda slot: sessions[slot], whole(sessions))) == 2
    assert read <= 2 * len(base) + 64 * BLOCK


blocks = st.lists(st.sampled_from([1, 2]), min_size=0, max_size=6)  # a block is one number, BLOCK times
kinds = st.sampled_from(["grow", "cut", "replace", "empty"])
changes = st.lists(st.tuples(st.integers(0, SLOTS - 1), kinds, blocks, st.integers(0, BLOCK)))


@settings(max_examples=200, deadline=None)
@given(changes=changes, prompt=blocks, tail=st.integers(1, BLOCK))
def test_after_any_changes_the_best_donor_is_the_one_that_a_search_of_all_finds(changes, prompt, tail):
    sessions = [[] for _ in range(SLOTS)]
    index = PrefixIndex(SLOTS)
    for slot, what, numbers, odd in changes:
        tokens = [n for n in numbers for _ in range(BLOCK)] + [3] * odd
        if what == "grow":
            sessions[slot] += tokens
        elif what == "cut":
            del sessions[slot][len(sessions[slot]) // 2 :]
        else:
            sessions[slot] = tokens if what == "replace" else []
        (index.replace if what == "replace" else index.update)(slot, sessions[slot])
    wanted = [n for n in prompt for _ in range(BLOCK)] + [3] * tail
    expected = []
    for slot, tokens in enumerate(sessions):
        common = next((i for i, (a, b) in enumerate(zip(tokens, wanted, strict=False)) if a != b), min(len(tokens), len(wanted)))
        expected.append((-min(common, len(wanted) - 1), slot))
    expected = [(slot, -n) for n, slot in sorted(expected) if -n >= BLOCK][:2]
    assert donors(sessions, wanted, index) == expected
