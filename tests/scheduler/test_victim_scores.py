"""The integer that ranks a slot for a job, and who is driven out."""

import pytest
from scheduler_rig import slot_of

from scheduler.options import IDLE_CAP
from scheduler.reuse import NOT_FOUND, Reuse
from scheduler.slots import Slot, SlotState
from scheduler.victims import EMPTY, score, victim

NOW = 5_000_000.0
STALE = 3600.0
NONE = NOT_FOUND.reuse
BASE = -2 - IDLE_CAP


def held(tokens: int, idle: float | None) -> Slot:
    return slot_of(range(tokens), last_used=None if idle is None else NOW - idle)


def rank(slot: Slot, reuse: Reuse = NONE) -> int:
    return score(slot, reuse, NOW, STALE)


def test_an_alien_ranks_the_empty_slot_first_and_the_shortest_conversation_next():
    assert rank(held(160, 0)) == BASE - 160
    assert rank(held(101, 0)) == BASE - 101
    assert rank(Slot(2)) == EMPTY == 0


def test_reuse_is_worth_its_length():
    assert rank(held(160, 0), Reuse("memory-token", 160, None, 0, False)) == 160


def test_the_owner_of_a_stale_conversation_still_scores_its_length():
    assert rank(held(160, 7200), Reuse("memory-token", 160, None, 0, False)) == 160


def test_the_more_idle_conversation_goes_first_whatever_its_length():
    assert rank(held(160, 7200)) > rank(held(101, 3600))


def test_any_stale_conversation_goes_before_any_protected_one():
    assert rank(held(4_000_000, 3600)) > rank(held(1, 3599))


@pytest.mark.parametrize(
    ("idle", "expected"),
    [
        (3599, BASE - 160),
        (3599.9, BASE - 160),
        (3600, -1 - IDLE_CAP + 3600),
        (IDLE_CAP - 1, -2),
        (IDLE_CAP, -1),
        (IDLE_CAP + 5000, -1),
        (None, -1),
        (-50, BASE - 160),
    ],
)
def test_idleness_counts_in_whole_seconds_up_to_its_cap(idle, expected):
    assert rank(held(160, idle)) == expected


def test_a_foreign_cut_of_a_protected_conversation_never_beats_an_empty_or_a_stale_slot():
    reuse = Reuse("memory-rewind", 1_000_000, None, 1, True)
    assert rank(held(1_000_001, 0), reuse) < rank(held(5, 3600)) < rank(Slot(2))


def test_a_foreign_cut_ranks_among_the_protected_by_what_it_costs():
    cut = Reuse("memory-rewind", 300, None, 800, True)
    assert rank(held(1100, 0), cut) == BASE - 500
    assert rank(held(499, 0)) > rank(held(1100, 0), cut) > rank(held(501, 0))


def test_a_foreign_cut_of_a_stale_conversation_is_reuse():
    assert rank(held(1100, 3600), Reuse("memory-rewind", 300, None, 800, True)) == 300


@pytest.mark.parametrize(
    ("slot", "reuse", "expected"),
    [
        (Slot(0), NONE, ("empty", 0)),
        (held(160, 0), NONE, ("protected", 160)),
        (held(160, 3600), NONE, ("stale", 160)),
        (held(160, 0), Reuse("memory-token", 160, None, 0, False), ("none", 0)),
        (held(160, 0), Reuse("memory-rewind", 100, None, 60, False), ("none", 0)),
        (held(160, 0), Reuse("memory-rewind", 100, None, 60, True), ("protected", 60)),
        (held(160, 3600), Reuse("memory-rewind", 100, None, 60, True), ("stale", 60)),
    ],
)
def test_the_victim_is_named_with_what_it_loses(slot, reuse, expected):
    assert victim(slot, reuse, NOW, STALE) == expected


def test_a_slot_reports_what_it_holds_and_for_how_long():
    assert Slot(0).state(NOW, STALE) is SlotState.EMPTY
    assert held(5, 3599).state(NOW, STALE) is SlotState.IDLE
    assert held(5, 3600).state(NOW, STALE) is SlotState.STALE
    assert held(5, None).state(NOW, STALE) is SlotState.STALE
