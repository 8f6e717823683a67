"""However much one owner sends, another that has work gets its share of the tokens that are computed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from owners_rig import Crowd, Owner, about
from scheduler_rig import Rig, make_job, slot_of

from scheduler import Ended, JobState, QueueFull, Routed, StepDone
from scheduler.cost import CostModel
from scheduler.fairness import spared
from scheduler.interleave import Interleaver, Rest
from scheduler.queue import JobQueue

LIMIT = 1.2
SECONDS = 12.0


def ratio(tokens, *shares: tuple[str, float]) -> float:
    """How far apart the owners are, by the tokens of each over its weight."""
    per_weight = [tokens[name] / weight for name, weight in shares]
    return max(per_weight) / min(per_weight)


def two(crowd: Crowd) -> float:
    return ratio(crowd.run(SECONDS), ("a", 1.0), ("b", 1.0))


@pytest.mark.parametrize("slots", [1, 2, 4, 16])
def test_ten_times_the_requests_bring_no_more_tokens(slots):
    assert two(Crowd(Owner("a", 10 * slots), Owner("b", slots), slots=slots)) <= LIMIT


@pytest.mark.parametrize("slots", [4, 16])
def test_as_many_requests_as_ones_share_of_the_slots_are_enough_for_it(slots):
    """Though mostly none of them waits."""
    assert two(Crowd(Owner("a", 5 * slots), Owner("b", slots // 2), slots=slots)) <= LIMIT


def test_without_names_ten_times_the_requests_bring_ten_times_the_tokens():
    """What the others are measured against: the same load, first come first served."""
    assert two(Crowd(Owner("a", 40), Owner("b", 4), named=False)) > 5


WORK = {
    "long prompts": ({"prompt": about(400, 1200)}, {}),
    "short prompts": ({"prompt": about(4, 10)}, {"prompt": about(200, 400)}),
    "long answers": ({"answer": about(200, 400)}, {}),
    "short answers": ({"answer": about(1, 4)}, {"answer": about(100, 200)}),
    "prompts against answers": (
        {"prompt": about(300, 600), "answer": about(1, 4)},
        {"prompt": about(4, 20), "answer": about(60, 120)},
    ),
    "answers against prompts": (
        {"prompt": about(4, 20), "answer": about(60, 120)},
        {"prompt": about(300, 600), "answer": about(1, 4)},
    ),
    "mixed": ({"prompt": about(4, 900), "answer": about(1, 300)}, {"prompt": about(4, 300), "answer": about(1, 100)}),
}


@pytest.mark.parametrize("slots", [4, 16])
@pytest.mark.parametrize("name", WORK)
def test_nor_does_other_work(name, slots):
    many, few = WORK[name]
    crowd = Crowd(Owner("a", 10 * slots, **many), Owner("b", slots, **few), slots=slots)
    crowd.run(5.0)  # what the answers take is learnt
    assert two(crowd) <= LIMIT


@pytest.mark.parametrize("slots", [4, 16])
def test_weights_share_in_their_ratio(slots):
    crowd = Crowd(Owner("a", 10 * slots), Owner("b", slots, weight=2.0), slots=slots)
    assert ratio(crowd.run(SECONDS), ("a", 1.0), ("b", 2.0)) <= LIMIT


def test_three_owners_get_a_third_each():
    crowd = Crowd(Owner("a", 40), Owner("b", 4, answer=about(50, 100)), Owner("c", 4, prompt=about(200, 400)))
    assert ratio(crowd.run(SECONDS), ("a", 1.0), ("b", 1.0), ("c", 1.0)) <= LIMIT


def test_who_comes_and_goes_saves_nothing_up_and_is_owed_nothing():
    """While it was away the other had everything. When it is back both get alike from then on, at once."""
    crowd = Crowd(Owner("a", 40), Owner("b", 4, present=lambda now: (now // 10) % 2 == 0), seed=2)
    crowd.rig.clock.advance(-crowd.rig.clock() % 20)
    for _ in range(3):
        assert ratio(crowd.run(9.0), ("a", 1.0), ("b", 1.0)) <= LIMIT
        crowd.run(2.0)
        assert crowd.run(8.5)["b"] == 0
        crowd.run(0.5)


def test_one_request_at_a_time_for_long_earns_nothing_for_later():
    crowd = Crowd(Owner("a", 40), Owner("b", 1))
    slow = crowd.run(SECONDS)
    assert slow["a"] > 2 * slow["b"]
    crowd.owners["b"].requests = 40
    assert ratio(crowd.run(8.0), ("a", 1.0), ("b", 1.0)) <= LIMIT


def test_nothing_is_held_against_anybody_for_what_it_got_while_nobody_waited():
    """One ran two long jobs on four slots. Then the line begins to fill, and both get alike from then on."""
    first = Owner("c", 1, present=lambda now: now < 1000.5)  # when it leaves nobody competes
    crowd = Crowd(Owner("a", 2, answer=about(1900, 1900)), Owner("b", 40, present=lambda now: now > 1010), first)
    crowd.run(10.0)
    assert crowd.tokens["a"] > 2000
    crowd.owners["a"].requests = 40
    crowd.owners["a"].answer = about(10, 30)
    assert ratio(crowd.run(8.0), ("a", 1.0), ("b", 1.0)) <= LIMIT


def test_whoever_has_nothing_waiting_leaves_its_slots_to_the_others():
    """No slot is kept free for it: while anybody waits all are taken."""
    crowd = Crowd(Owner("a", 40), Owner("b", 1))
    crowd.run(10.0)
    assert crowd.slack == 0
    assert crowd.tokens["b"] > 0


def test_an_owner_that_comes_gets_the_next_slot():
    """However long the line is before it, and however much was served before."""
    crowd = Crowd(Owner("a", 400), Owner("b", 4, present=lambda now: now > 1010))
    crowd.run(30.0)
    first = crowd.starts.index("b")
    assert set(crowd.starts[first - 5 : first]) == {"a"}
    before = sum(name == "a" for name in crowd.starts[first : first + 4])
    assert before <= 2  # two slots for each, the new one's first


def test_an_owner_never_runs_more_than_its_limit_and_the_others_use_the_rest():
    crowd = Crowd(Owner("a", 40, limit=1), Owner("b", 8, limit=2), Owner("c", 8))
    crowd.run(5.0)
    assert crowd.most["a"] == 1
    assert crowd.most["b"] == 2
    assert crowd.most["c"] >= 1
    assert min(crowd.tokens.values()) > 0


def test_a_limit_leaves_slots_free_rather_than_be_exceeded():
    crowd = Crowd(Owner("a", 40, limit=2))
    crowd.run(2.0)
    assert crowd.most["a"] == 2
    assert crowd.slack > 0


def test_a_limited_owner_saves_nothing_up_for_the_day_its_limit_goes():
    """It wanted more all the time; what it could not have is not owed to it."""
    crowd = Crowd(Owner("a", 40, limit=1), Owner("b", 40))
    crowd.run(SECONDS)
    crowd.owners["a"].limit = 0
    for job in list(crowd.rig.scheduler._roster.queue):
        if job.owner == "a":
            job.owner_limit = 0
    assert two(crowd) <= LIMIT


def test_one_that_waits_for_a_busy_slot_of_its_own_does_not_hold_back_the_time_that_others_start_at():
    """Its virtual time stands still while it waits. Who comes must not be given what was served to the others meanwhile."""
    crowd = Crowd(Owner("a", 20), Owner("r", 0), Owner("b", 20, present=lambda now: now > 1006), slots=2)
    for rest in ({}, {"required_slot": 0, "needs_live_state": True}):
        job = crowd.rig.submit([5] * 20, max_tokens=2000, ignore_eos=True, owner="r", **rest)
        crowd.jobs[job.id] = "r", job
        crowd.rig.step()
    assert (crowd.rig.scheduler.stats().running, crowd.rig.scheduler.stats().waiting) == (1, 1)
    crowd.run(6.1)
    served = crowd.tokens["a"]
    tokens = crowd.run(4.0)
    assert crowd.rig.scheduler.stats().slots[0].state == "decode"
    assert served > 2 * tokens["b"]
    assert ratio(tokens, ("a", 1.0), ("b", 1.0)) <= LIMIT


OWNERS = st.lists(
    st.builds(
        dict,
        requests=st.integers(1, 12),
        prompt=st.sampled_from([about(2, 8), about(30, 60)]),
        answer=st.sampled_from([about(1, 2), about(8, 16)]),
        weight=st.sampled_from([0.1, 0.5, 1.0, 3.0, 10.0]),
        limit=st.sampled_from([0, 0, 1, 2, 3]),
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(OWNERS, st.integers(1, 4), st.sampled_from([None, 140]))
def test_whoever_waits_gets_a_slot_however_many_the_others_send(owners, slots, pages):
    """Nobody ever stops sending, and whoever ends comes again at once. Also where the pages do not suffice for all."""
    crowd = Crowd(*(Owner(str(i), **one) for i, one in enumerate(owners)), slots=slots, pages=pages, lookahead=8)
    crowd.run(0.001)
    first = [job for _, job in crowd.jobs.values()]
    for _ in range(400):
        crowd.run(0.5)
        if all(job.slot is not None for job in first):
            break
    assert all(job.slot is not None for job in first)
    assert all(crowd.most[one.name] <= (one.limit or slots) for one in crowd.owners.values())


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.integers(0, 1000), st.integers(1, 4), st.integers(1, 12))
def test_an_owner_alone_is_served_to_the_step_as_without_a_name(seed, slots, requests):
    seen = []
    for named in (True, False):
        crowd = Crowd(Owner("a", requests, prompt=about(4, 300), answer=about(1, 40)), slots=slots, named=named, seed=seed)
        crowd.run(2.0)
        seen.append([event for event in crowd.rig.events if isinstance(event, Routed | Ended | StepDone)])
    assert seen[0] == seen[1]
    assert [e.job for e in seen[0] if isinstance(e, Routed)] == sorted(e.job for e in seen[0] if isinstance(e, Routed))


def test_who_waits_for_pages_is_not_overtaken_by_another_owner():
    """Though the other was served less, and its job would fit."""
    rig = Rig(slots=4, ctx=160, page_tokens=16, pages=10)
    running = rig.submit([5] * 90, max_tokens=40, ignore_eos=True, owner="b")
    big = rig.submit([6] * 100, max_tokens=8, ignore_eos=True, owner="a")
    rig.step()
    small = [rig.submit([7 + i], max_tokens=1, ignore_eos=True, owner=owner) for i, owner in enumerate("ccb")]
    while running.state is not JobState.FINISHED:
        rig.step()
        assert [job.slot for job in (big, *small)] == [None] * 4
    rig.run()
    assert next(e.job for e in rig.events if isinstance(e, Routed) and e.job != running.id) == big.id


def test_who_may_run_again_does_not_overtake_a_job_that_came_later_and_waits_for_pages():
    """It was at its limit when the other began to wait, it was served less, and its job is the older one."""
    rig = Rig(slots=4, ctx=160, page_tokens=16, pages=10)
    rig.submit([4] * 48, max_tokens=40, ignore_eos=True, owner="a")
    rig.submit([5] * 16, max_tokens=4, ignore_eos=True, owner="c", owner_limit=1)
    second = rig.submit([6] * 16, max_tokens=4, ignore_eos=True, owner="c", owner_limit=1)
    big = rig.submit([7] * 120, max_tokens=4, ignore_eos=True, owner="a")
    rig.run()
    order = [e.job for e in rig.events if isinstance(e, Routed)]
    assert order.index(big.id) < order.index(second.id)


def test_a_cancelled_job_that_waited_for_pages_holds_up_nobody():
    rig = Rig(slots=4, ctx=160, page_tokens=16, pages=10)
    rig.submit([5] * 90, max_tokens=40, ignore_eos=True, owner="b")
    big = rig.submit([6] * 100, max_tokens=8, ignore_eos=True, owner="a")
    rig.step()
    small = rig.submit([7], max_tokens=1, ignore_eos=True, owner="c")
    rig.step()
    assert small.slot is None
    rig.scheduler.cancel(big.id, "client")
    rig.step()
    assert small.slot is not None


# the line


def filled(limit: int, owners: str) -> JobQueue:
    queue = JobQueue(limit, slots=2)
    for i, owner in enumerate(owners):
        queue.push(make_job(i, [5], owner=owner), 0)
    return queue


def room(queue: JobQueue, owner: str) -> int:
    """Jobs that get in before 429."""
    for count in range(100):
        try:
            queue.push(make_job(1000 + len(queue), [5], owner=owner), 0)
        except QueueFull:
            return count
    raise AssertionError("no limit")


def test_one_owner_fills_the_line_to_its_limit_and_no_further():
    assert room(filled(12, ""), "a") == 12


def test_a_full_line_keeps_nobody_out_who_has_less_than_its_share():
    queue = filled(12, "a" * 12)
    assert room(queue, "b") == 6
    assert room(queue, "c") == 4
    assert (room(queue, "a"), room(queue, "b"), room(queue, "c")) == (0, 0, 0)
    assert [queue.waiting(owner) for owner in "abcd"] == [12, 6, 4, 0]


def test_who_filled_the_line_waits_until_it_is_below_the_limit_again():
    queue = filled(4, "aaaa")
    assert room(queue, "b") == 2
    for _ in range(2):
        queue.remove(queue.lines()["a"][0])
    assert room(queue, "a") == 0  # four wait
    queue.remove(queue.lines()["a"][0])
    assert room(queue, "a") == 1


def test_where_nobody_may_wait_nobody_does():
    assert room(filled(0, ""), "a") == 0


def test_retry_after_counts_the_turns_of_the_others():
    queue = filled(3, "aab")
    queue.record_service(10.0)
    with pytest.raises(QueueFull) as full:
        queue.push(make_job(9, [5], owner="a"), 0)
    assert full.value.retry_after == 10  # a slot comes free every 5 s, and every other one is for another


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 12), st.lists(st.tuples(st.sampled_from("abcd"), st.booleans()), max_size=80))
def test_the_line_is_as_long_as_promised_and_counts_right(limit, moves):
    queue = JobQueue(limit, slots=2)
    for i, (owner, leaves) in enumerate(moves):
        line = queue.lines().get(owner, [])
        if leaves and line:
            queue.remove(line[0])
            continue
        owners = len({*queue.lines(), owner})
        full = len(queue) >= limit and len(line) >= limit / owners
        try:
            queue.push(make_job(i, [5], owner=owner), 0)
            assert not full
        except QueueFull:
            assert full
        assert len(queue) <= sum(-(-limit // n) for n in range(1, 5))
        assert {one: queue.waiting(one) for one in "abcd" if queue.waiting(one)} == {
            one: len(jobs) for one, jobs in queue.lines().items()
        }


# prompts in turn


def turns(*rests: tuple[int, str], steps: int) -> list[int]:
    """The slots that are served, 16 tokens a step."""
    options = Rig(itl_budget=0.0001).scheduler._options
    interleaver = Interleaver(options, CostModel())
    waiting = [Rest(slot, 0, 500, owner) for slot, owner in rests]
    return [interleaver.shares(waiting, 4)[0].slot for _ in range(steps)]


def test_prefill_turns_go_round_the_owners_and_then_round_their_slots():
    assert turns((0, "a"), (1, "a"), (2, "b"), (3, "a"), steps=8) == [0, 2, 1, 2, 3, 2, 0, 2]
    assert turns((0, "a"), (1, "a"), (2, "a"), steps=4) == [0, 1, 2, 0]


# whose session goes


def holding(*sessions: tuple[str, int]) -> list:
    slots = [slot_of([5] * length, id=i) if length else slot_of([], id=i) for i, (_, length) in enumerate(sessions)]
    for slot, (owner, _) in zip(slots, sessions, strict=True):
        slot.owner = owner
    return slots


def kept(*sessions: tuple[str, int], asks: str | None) -> frozenset[int]:
    """The sessions that are spared, by the slots they take."""
    slots = holding(*sessions)
    return spared(slots, lambda slot: 1, len(slots), asks)


@pytest.mark.parametrize("asks", ["a", "b", None])
def test_sessions_of_owners_within_their_share_are_spared(asks):
    assert kept(("a", 50), ("a", 50), ("a", 50), ("b", 10), asks=asks) == {3}


@pytest.mark.parametrize(("asks", "expected"), [("a", {2, 3}), ("b", {0, 1}), ("c", set())])
def test_who_asks_is_counted_with_what_it_asks_for(asks, expected):
    """Where a third asks, both have more than a third."""
    assert kept(("a", 50), ("a", 50), ("b", 10), ("b", 10), asks=asks) == expected


def test_with_one_owner_nobody_is_spared():
    assert kept(("a", 50), ("a", 10), asks="a") == frozenset()


def resident(rig: Rig, owner: str, token: int, length: int) -> list[int]:
    """A session of so many tokens."""
    job = rig.answer([token] * length, max_tokens=1, ignore_eos=True, owner=owner)
    return job.prompt


@pytest.mark.parametrize("flooder", ["a", ""])
def test_a_flood_evicts_its_own_sessions_though_anothers_is_shorter(flooder):
    """With nobody's name the shortest goes, as ever."""
    rig = Rig(slots=3)
    first = resident(rig, "b" if flooder else "", 50, 40)
    for i in range(8):
        resident(rig, flooder, 5 + i, 100)
    back = rig.answer([*first, 60, 61], owner="b" if flooder else "")
    assert (back.tier, back.cached) == (("memory-token", 40) if flooder else ("none", 0))


def test_a_spared_session_goes_when_nothing_else_can():
    rig = Rig(slots=2)
    resident(rig, "b", 50, 40)
    first = rig.submit([7] * 50, owner="a", max_tokens=50, ignore_eos=True)
    second = rig.submit([8] * 50, owner="a", max_tokens=50, ignore_eos=True)
    rig.step()
    assert {first.slot, second.slot} == {0, 1}
    assert rig.routed(second).victim == "protected"


def test_pages_are_taken_from_the_greedy_first():
    rig = Rig(slots=4, ctx=160, page_tokens=16, pages=12)
    first = resident(rig, "b", 50, 40)
    for i in range(3):
        resident(rig, "a", 5 + i, 45)
    rig.answer([9] * 100, owner="a", max_tokens=20, ignore_eos=True)
    assert rig.answer([*first, 60], owner="b").cached == 40
    assert rig.scheduler.stats().pool.evicted_protected > 0


# what is told, and what is refused


def test_owners_are_told_once_somebody_has_a_name_and_only_while_they_have_work():
    rig = Rig(slots=1)
    rig.answer("nobody's")
    assert rig.scheduler.stats().owners == ()
    rig.submit([5] * 40, max_tokens=3, ignore_eos=True, owner="a")
    job = rig.submit([6] * 40, max_tokens=3, ignore_eos=True, owner="b")
    rig.step()
    told = {one.owner: one for one in rig.scheduler.stats().owners}
    assert (told["a"].running, told["b"].waiting) == (1, 1)
    rig.run()
    last = {one.owner: one[1:] for one in rig.scheduler.stats().owners}
    assert last == {"a": (0, 0, 43), "b": (0, 0, 43)}
    assert rig.scheduler.stats().owners == ()
    again = rig.answer([6] * 40 + job.generated, max_tokens=3, ignore_eos=True, owner="b")
    assert again.cached == 42
    assert rig.scheduler.stats().owners == (("b", 0, 0, 43 + 1 + 3),)  # what was reused is not counted


@pytest.mark.parametrize(
    ("rest", "message"),
    [
        ({"owner_limit": -1}, "owner_limit: -1 is below 0"),
        ({"owner_weight": 0.0}, "owner_weight: 0.0 is not a number above 0"),
        ({"owner_weight": float("nan")}, "owner_weight: nan is not"),
        ({"owner_weight": float("inf")}, "owner_weight: inf is not"),
    ],
)
def test_an_owner_that_could_not_be_served_is_refused_by_name(rest, message):
    with pytest.raises(ValueError, match=message):
        make_job(1, [5], **rest)
