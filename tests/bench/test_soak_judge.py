"""The soak's judgement: it passes what is in order, and fails for each single thing that is not."""

from __future__ import annotations

from typing import Any

import pytest

from bench.soak.books import Imbalance
from bench.soak.faults import FaultKind
from bench.soak.judge import judge
from bench.soak.ledger import BAD_ENDINGS, Ending, Fate
from bench.soak.processes import Holdings
from bench.soak.reference import Comparison, Wrong
from bench.soak.replies import Said
from bench.soak.subject import Stopped
from bench.soak.wire import Behaviour, Manner
from tests.bench.soak_evidence import QUEUE, SLOTS, end, evidence, fault, look, record, refused, rules, series

KILL = fault(FaultKind.KILL, 9.5, 12.0)


def test_what_is_in_order_passes() -> None:
    assert judge(evidence()) == []


@pytest.mark.parametrize(
    ("rule", "spoilt"),
    [
        ("answers", {"comparison": Comparison(1, 3, wrong=(Wrong(record(), Said("Hello thera.", finish="stop", tokens=4)),))}),
        ("answers", {"comparison": Comparison(2, 3, unanswered=("abc",))}),
        ("answers", {"comparison": None}),
        ("unexplained", {"records": [refused()]}),
        ("unexplained", {"records": [record(ending=Ending.FAILED, fates=frozenset({Fate.ERROR}))]}),
        ("unexplained", {"records": [record(ending=Ending.BUSY, retry_after="1", others=QUEUE // 2 - 1)]}),
        ("retry-after", {"records": [record(ending=Ending.BUSY, others=QUEUE)]}),
        ("counters", {"looks": [look(imbalances=(Imbalance("x", 4, 3, 3),))]}),
        ("counters", {"looks": [look(window=(Imbalance("x", 4, 3, 3),))]}),
        ("slots", {"looks": [look(at_rest=SLOTS - 1)]}),
        ("slots", {"looks": [look(widest=SLOTS - 1)]}),
        ("slots", {"looks": [look(running=1)]}),
        ("slots", {"looks": [look(waiting=1)]}),
        ("slots", {"looks": [look(drained=False)]}),
        ("memory", {"series": [series(slope_mib_h=49.0)]}),
        ("processes", {"looks": [look(zombies=(7,))]}),
        ("processes", {"looks": [look(), look(front=Holdings(90 << 20, 12, 4))]}),
        ("processes", {"looks": [look(), look(engine=Holdings(900 << 20, 7, 11))]}),
        ("recovery", {"restarts": {0: 1}}),
        ("recovery", {"restarts": {0: 1}, "faults": [fault(FaultKind.KILL, 1, 2, failed=True)]}),
        ("stop", {"ends": [end(stopped=Stopped(10.5, 0, ()))]}),
        ("stop", {"ends": [end(stopped=Stopped(1.0, None, ()))]}),
        ("stop", {"ends": [end(stopped=Stopped(1.0, 0, (55,)))]}),
        ("stop", {"ends": [end(streams=(*end().streams[1:], record(ending=Ending.CUT)))]}),
        ("stop", {"ends": [end(running=SLOTS - 1)]}),
        ("stop", {"ends": [end(written=0)]}),
        ("stop", {"ends": [end(unsound=1)]}),
        ("stop", {"ends": [end(temporary=1)]}),
        ("run", {"broken_off": "interrupted"}),
        ("run", {"looks": []}),
        ("run", {"ends": []}),
        ("run", {"records": []}),
    ],
)  # fmt: skip
def test_one_thing_out_of_order_fails(rule: str, spoilt: dict[str, Any]) -> None:
    assert rules(evidence(**spoilt)) == {rule}


@pytest.mark.parametrize("ending", sorted(BAD_ENDINGS))
def test_no_fault_excuses_an_answer_that_does_not_end_as_one(ending: Ending) -> None:
    assert rules(evidence(records=[record(ending=ending)], faults=[KILL], restarts={0: 1})) == {"endings"}


def test_a_kill_excuses_what_it_overlaps_and_nothing_later_or_elsewhere() -> None:
    def with_kill(one: Any) -> set[str]:
        return rules(evidence(records=[one], faults=[KILL], restarts={0: 1}))

    assert with_kill(refused()) == set()
    assert with_kill(record(ending=Ending.FAILED, fates=frozenset({Fate.ERROR}))) == set()
    assert with_kill(refused(began=13.5, ended=14.0)) == {"unexplained"}
    assert with_kill(refused(began=8.0, ended=9.0)) == {"unexplained"}
    other = refused(life=1)
    assert rules(evidence(records=[other], faults=[KILL], restarts={0: 1})) == {"unexplained"}


def test_a_refusal_in_a_kill_says_when_to_come_back() -> None:
    kill = {"faults": [KILL], "restarts": {0: 1}}
    silent = record(ending=Ending.UNAVAILABLE, fates=frozenset({Fate.UNAVAILABLE}))
    assert rules(evidence(records=[silent], **kill)) == {"retry-after"}


def test_a_paused_engine_excuses_a_refusal_and_no_broken_answer() -> None:
    pause = [fault(FaultKind.PAUSE, 9.5, 12.0)]
    assert rules(evidence(records=[refused()], faults=pause)) == set()
    broken = record(ending=Ending.FAILED, fates=frozenset({Fate.ERROR}))
    assert rules(evidence(records=[broken], faults=pause)) == {"unexplained"}


def test_damage_a_full_disk_and_a_moved_clock_excuse_nothing() -> None:
    for kind in (FaultKind.CORRUPT, FaultKind.DISK_FULL, FaultKind.CLOCK):
        assert rules(evidence(records=[refused()], faults=[fault(kind, 9.5, 12.0)])) == {"unexplained"}


def test_a_restarted_engine_may_hold_more_than_the_one_before() -> None:
    looks = [look(), look(engine_pid=101, engine=Holdings(950 << 20, 8, 9))]
    assert judge(evidence(looks=looks, faults=[KILL], restarts={0: 1})) == []


def test_a_client_that_does_not_read_may_be_cut_off() -> None:
    stalled = record(ending=Ending.CUT_OFF, behaviour=Behaviour(Manner.STALL), fates=frozenset({Fate.ABORT}))
    assert judge(evidence(records=[stalled])) == []


def test_many_findings_of_a_kind_are_counted_and_not_all_spelled_out() -> None:
    found = judge(evidence(records=[record(i, ending=Ending.CUT) for i in range(40)]))
    assert len(found) == 6
    assert found[-1].detail == "and 35 more"
