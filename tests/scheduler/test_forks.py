"""Who forks from whom: a beginning that another session holds is never evaluated again, and nobody is harmed for it."""

import pytest
from scheduler_rig import Rig

from scheduler import JobState
from scheduler.prefix_index import BLOCK

SYSTEM = "<|system|>" + "you are a careful worker. " * 40 + "<|end|>"  # over 256 tokens

pytestmark = pytest.mark.usefixtures("either_device")


def user(text: str) -> str:
    return f"<|user|>{text}<|end|>\n<|assistant|>\n"


def shared(rig: Rig) -> int:
    return len(rig.text.tokenise(SYSTEM + "<|user|>"))


def prefilled(rig: Rig, *jobs) -> int:
    return sum(len(job.prompt) - job.cached for job in jobs)


def running(rig: Rig, prompt: str, **rest):
    """A job that is decoding."""
    job = rig.submit(prompt, max_tokens=400, ignore_eos=True, **rest)
    while job.state is not JobState.DECODE:
        rig.step()
    return job


def test_eight_sub_agents_fork_from_a_busy_main_agent():
    rig = Rig(slots=16)
    main = running(rig, SYSTEM + user("the great plan"))
    agents = [rig.submit(SYSTEM + user(f"{i} is your part of it")) for i in range(8)]
    rig.run()
    for agent in agents:
        routed = rig.routed(agent)
        assert (routed.tier, routed.victim, routed.evicted_tokens) == ("fork", "empty", 0)
        assert routed.cached_tokens >= shared(rig)
        assert agent.generated == rig.alone(agent)
    assert main.generated == rig.alone(main)
    assert prefilled(rig, *agents) < 8 * 40


def test_eight_sub_agents_leave_an_idle_main_agent_alone():
    rig = Rig(slots=10)
    main = rig.answer(SYSTEM + user("the great plan"))
    agents = [rig.submit(SYSTEM + user(f"{i} is your part of it")) for i in range(8)]
    rig.run()
    assert {rig.routed(agent).tier for agent in agents} == {"fork"}
    assert all(rig.routed(agent).slot != main.slot for agent in agents)
    onward = rig.answer(SYSTEM + user("the great plan") + main.output.text + "<|end|>" + user("go on"))
    assert (rig.routed(onward).slot, rig.routed(onward).tier) == (main.slot, "memory-token")


def test_while_a_stale_slot_exists_a_fork_goes_there_and_the_main_agent_stays():
    rig = Rig(slots=3)
    rig.answer("old")
    rig.answer("older" * 30)
    rig.clock.advance(3600)
    main = rig.answer(SYSTEM + user("the great plan"))
    agents = [rig.answer(SYSTEM + user(f"part {i}")) for i in range(2)]
    assert [(rig.routed(a).victim, rig.routed(a).tier) for a in agents] == [("stale", "fork")] * 2
    assert all(agent.slot != main.slot for agent in agents)


def test_a_fork_shares_pages_and_is_counted_once():
    rig = Rig(slots=4, page_tokens=16)
    rig.answer(SYSTEM + user("one"))
    alone = rig.scheduler.stats().pool
    assert alone.used == alone.unshared
    for i in range(3):
        rig.answer(SYSTEM + user(f"part {i}"))
    pool = rig.scheduler.stats().pool
    assert pool.unshared >= 4 * (shared(rig) // 16)
    assert pool.used <= shared(rig) // 16 + 4 * 4
    rig.backend.memory.check()


def test_the_own_session_comes_first_and_a_longer_one_is_forked_into_its_slot():
    rig = Rig(slots=3)
    running(rig, SYSTEM + user("the great plan"))
    rig.answer("someone else", required_slot=1)
    short = rig.submit(SYSTEM[:200], max_tokens=1, ignore_eos=True, required_slot=2)
    while short.state is not JobState.FINISHED:
        rig.step()
    job = rig.answer(SYSTEM + user("part"))
    routed = rig.routed(job)
    assert (routed.slot, routed.tier, routed.victim) == (short.slot, "fork", "none")
    assert job.generated == rig.alone(job)


def test_a_required_slot_may_be_filled_by_a_fork():
    rig = Rig(slots=3)
    rig.answer(SYSTEM + user("the great plan"))
    job = rig.answer(SYSTEM + user("part"), required_slot=2)
    assert (rig.routed(job).slot, rig.routed(job).tier) == (2, "fork")


def test_a_retry_and_the_next_turn_stay_in_their_slot():
    rig = Rig(slots=4)
    first = rig.answer(SYSTEM + user("one"))
    again = rig.answer(SYSTEM + user("one"))
    assert (rig.routed(again).slot, rig.routed(again).tier) == (first.slot, "memory-rewind")


def test_a_prompt_that_ends_in_earlier_turns_of_a_conversation_forks_and_leaves_it_whole():
    rig = Rig(slots=2)
    text = SYSTEM + user("one")
    for word in ("two", "three"):
        text += rig.answer(text).output.text + "<|end|>" + user(word)
    last = rig.answer(text)
    job = rig.answer(SYSTEM + user("one"))
    assert (rig.routed(job).tier, rig.routed(job).victim) == ("fork", "empty")
    assert job.slot != last.slot
    assert rig.scheduler.stats().slots[last.slot].live_tokens > len(last.prompt)


def test_among_protected_conversations_the_one_that_loses_least_gives_way_to_a_fork():
    rig = Rig(slots=3)
    main = running(rig, SYSTEM + user("the great plan"))
    other = rig.answer("y" * 300)
    kin = rig.answer(SYSTEM + user("a first part") * 3)
    job = rig.answer(SYSTEM + user("part"))
    assert rig.routed(job).victim == "protected"
    assert job.slot == kin.slot  # longer than the other, but most of it is in the main agent's session too
    assert other.slot != main.slot != job.slot


def test_a_fork_from_a_prompt_that_is_still_evaluated_takes_what_is_there():
    rig = Rig(slots=2, idle_prefill_quantum=128)
    rig.submit(SYSTEM * 3 + user("x"))
    rig.step()
    rig.step()
    job = rig.submit(SYSTEM * 3 + user("y"))
    rig.step()
    assert rig.routed(job).tier == "fork"
    assert rig.routed(job).cached_tokens in (128, 256)
    rig.run()
    assert job.generated == rig.alone(job)


def test_short_beginnings_are_not_forked():
    rig = Rig(slots=2)
    rig.answer("a" * (BLOCK - 1) + "b")
    assert rig.routed(rig.answer("a" * (BLOCK - 1) + "c")).tier == "none"


def test_a_recurrent_state_is_forked_at_its_end_and_nowhere_else():
    rig = Rig(slots=3, can_rewind=False)
    first = running(rig, SYSTEM + user("one"))
    there = list(rig.backend.tokens(first.slot))
    onward = rig.submit([*there, *([5] * 10)])
    before = rig.submit([*there[:-40], *([5] * 10)])
    rig.step()
    assert (rig.routed(onward).tier, rig.routed(onward).cached_tokens) in (
        ("fork", len(there)),
        ("fork", first.points[-1].tokens),
    )
    assert rig.routed(before).tier == "none"
    rig.run()
    assert onward.generated == rig.alone(onward)


def test_what_a_device_spoilt_is_lost_in_the_fork_too():
    rig = Rig(slots=2, chains=True)
    main = running(rig, SYSTEM + user("the great plan"))
    rig.backend.spoil_next()
    rig.step()  # launched, and nobody knows yet
    fork = rig.submit(SYSTEM + user("part"))
    rig.step()
    assert rig.routed(fork).tier == "fork"
    rig.run()
    assert [rig.ended(job).status for job in (main, fork)] == [500, 500]
    again = rig.answer(SYSTEM + user("part"))
    assert again.generated == rig.alone(again)


def test_a_fork_published_unfinished_does_not_inherit_the_text_of_what_it_replaced():
    rig = Rig(slots=2)
    running(rig, SYSTEM + user("the great plan"))
    rig.answer("hi", max_tokens=2, ignore_eos=True)
    job = rig.submit(SYSTEM + user("part" * 400))
    rig.step()
    assert rig.routed(job).tier == "fork"
    rig.scheduler.cancel(job.id, "client")
    rig.step()
    slot = rig.scheduler._roster.slots[job.slot]
    assert slot.checkpoint.length >= shared(rig)
    assert slot.checkpoint.text is None
