"""A pool smaller than all contexts: who waits, who gives way, who is parked - and that every answer is what it would have been."""

from __future__ import annotations

import pytest
from scheduler_rig import Rig

from scheduler import JobState, Routed

pytestmark = pytest.mark.usefixtures("either_device")

PAGE = 16


def small(slots: int, pages: int, ctx: int = 160, **rest) -> Rig:
    return Rig(slots=slots, ctx=ctx, page_tokens=PAGE, pages=pages, **rest)


def prompt(letter: str, length: int = 32) -> str:
    return letter * (length - 1) + "."


def parked(rig: Rig) -> list[int]:
    return [i for i, slot in enumerate(rig.scheduler.stats().slots) if slot.state == "parked"]


def until_parked(rig: Rig, slots: list[int]) -> None:
    for _ in range(1000):
        if parked(rig) == slots:
            return
        rig.step()
    raise AssertionError(f"{parked(rig)} are parked, not {slots}")


def checked(rig: Rig, jobs) -> None:
    rig.run()
    assert [job.generated for job in jobs] == [rig.alone(job)[: job.limit] for job in jobs]
    assert all(rig.ended(job).reason in ("stop", "length") for job in jobs)
    rig.backend.memory.check()


def test_a_pool_that_cannot_hold_one_context_is_refused_with_the_numbers():
    with pytest.raises(ValueError, match="9 pages of 16 tokens cannot hold one context: 160 take 10"):
        small(4, 9)


def test_a_pool_with_room_for_everybody_never_parks_or_makes_anybody_wait():
    rig = small(4, 40)
    jobs = [rig.submit(prompt(c, 100), max_tokens=400, ignore_eos=True) for c in "abcd"]
    rig.step()
    assert rig.scheduler.stats().running == 4
    checked(rig, jobs)
    assert rig.scheduler.stats().pool[-4:] == (0, 0, 0, 0)


def test_a_job_waits_in_the_queue_until_the_pool_can_hold_its_prompt_and_a_little_more():
    rig = small(4, 10)
    first = rig.submit(prompt("a", 90), max_tokens=40, ignore_eos=True)
    second = rig.submit(prompt("b", 40), max_tokens=8, ignore_eos=True)
    third = rig.submit("c", max_tokens=1, ignore_eos=True)
    rig.step()
    assert (second.slot, third.slot) == (None, None)  # nobody overtakes: the big one would never come in
    assert rig.scheduler.stats().waiting == 2
    checked(rig, [first, second, third])
    assert [e.job for e in rig.events if isinstance(e, Routed)] == [first.id, second.id, third.id]
    assert rig.scheduler.stats().pool.parks == 0


def test_what_a_fork_shares_with_a_running_session_counts_once_at_admission():
    rig = small(4, 12)
    system = prompt("s", 96)
    main = rig.submit(system + "main", max_tokens=20, ignore_eos=True)
    while main.state is not JobState.DECODE:
        rig.step()
    agents = [rig.submit(system + c, max_tokens=8, ignore_eos=True) for c in "ab"]
    rig.step()
    assert [rig.routed(agent).tier for agent in agents] == ["fork", "fork"]  # 6 pages each, of which one is new
    checked(rig, [main, *agents])


def test_idle_sessions_give_their_pages_by_the_ladder_before_anybody_is_parked():
    rig = small(4, 13)
    long = rig.answer(prompt("a", 60), max_tokens=2, ignore_eos=True)
    short = rig.answer(prompt("b", 30), max_tokens=2, ignore_eos=True)
    job = rig.submit(prompt("c", 120), max_tokens=8, ignore_eos=True)
    checked(rig, [job])
    slots = rig.scheduler.stats().slots
    assert slots[short.slot].live_tokens == 0
    assert slots[long.slot].live_tokens > 0
    assert rig.scheduler.stats().pool.evicted_protected == 31
    assert rig.scheduler.stats().pool.parks == 0
    rig.clock.advance(3600)
    rig.answer(prompt("d", 20), max_tokens=2, ignore_eos=True)
    rig.answer(prompt("e", 120), max_tokens=8, ignore_eos=True)
    assert rig.scheduler.stats().pool.evicted_stale > 0


def test_the_youngest_running_session_is_parked_and_comes_back_with_the_same_answer():
    rig = small(3, 12, ctx=192, lookahead=1)
    jobs = [rig.submit(prompt(c, 40), max_tokens=150, ignore_eos=True) for c in "abc"]
    until_parked(rig, [2])
    until_parked(rig, [1, 2])
    assert rig.scheduler.stats().pool.parked > 0
    live = [len(rig.backend.tokens(job.slot)) for job in jobs]
    rig.step()
    assert [len(rig.backend.tokens(job.slot)) > n for job, n in zip(jobs, live, strict=True)] == [True, False, False]
    checked(rig, jobs)
    pool = rig.scheduler.stats().pool
    assert pool.parks == pool.resumes >= 2
    assert pool.parked == 0
    assert rig.backend.counts.tokens == sum(len(job.prompt) + len(job.generated) - 1 for job in jobs)  # none twice


def test_nobody_is_admitted_while_somebody_is_parked_and_all_are_answered():
    rig = small(5, 12, ctx=192, lookahead=1)
    jobs = [rig.submit(prompt(c, 40), max_tokens=140, ignore_eos=True) for c in "abc"]
    until_parked(rig, [2])
    late = rig.submit("late", max_tokens=2, ignore_eos=True)
    rig.step()
    assert late.slot is None
    checked(rig, [*jobs, late])


def test_a_parked_job_that_is_cancelled_leaves_its_session_where_there_is_room_and_nothing_else():
    rig = small(3, 12, ctx=192, lookahead=1)
    jobs = [rig.submit(prompt(c, 40), max_tokens=140, ignore_eos=True) for c in "abc"]
    until_parked(rig, [2])
    rig.scheduler.cancel(jobs[2].id, "client")
    slot = rig.scheduler.stats().slots[jobs[2].slot]
    assert slot.live_tokens == 0 or slot.pages > 0
    assert rig.scheduler.stats().pool.parked == 0
    checked(rig, jobs[:2])


def test_stopping_ends_parked_jobs_too():
    rig = small(3, 12, ctx=192, lookahead=1)
    jobs = [rig.submit(prompt(c, 40), max_tokens=140, ignore_eos=True) for c in "abc"]
    until_parked(rig, [2])
    rig.scheduler.stop(drain=False)
    rig.run()
    assert {rig.ended(job).cause for job in jobs} == {"shutdown"}
    rig.backend.memory.check()


def test_what_is_shared_with_a_running_session_stays_on_the_device():
    rig = small(3, 14, ctx=192, lookahead=1)
    system = prompt("s", 64)
    main = rig.submit(system + "main", max_tokens=110, ignore_eos=True)
    while main.state is not JobState.DECODE:
        rig.step()
    agent = rig.submit(system + "agent", max_tokens=100, ignore_eos=True)
    until_parked(rig, [1])
    assert (agent.tier, agent.slot) == ("fork", 1)
    held = rig.backend.held(agent.slot)
    assert (held.pages, held.own) == (4, 0)
    assert held.parked > 0
    checked(rig, [main, agent])


def test_the_lookahead_is_what_admission_counts_on():
    pages = (32 + 256) // PAGE
    for slack, together in ((0, True), (-1, False)):
        rig = small(2, 2 * pages + slack, ctx=pages * PAGE)
        for c in "ab":
            rig.submit(prompt(c, 32), max_tokens=10_000, ignore_eos=True)
        rig.step()
        assert (rig.scheduler.stats().running == 2) == together
