"""Which slot a job gets, in which order, and what happens to a conversation that others resemble."""

import pytest
from scheduler_rig import Rig, checkpoint, make_job, options, slot_of

from scheduler import BackendError, QueueFull
from scheduler.fake import FakeBackend, FakeText
from scheduler.queue import JobQueue
from scheduler.reuse import LADDER, Reuse, Tier
from scheduler.router import Router

MEMORY_TOKEN = next(tier for tier in LADDER if tier.name == "memory-token")
SYSTEM = "<|system|>" + "you are a careful worker. " * 40 + "<|end|>"  # over 256 tokens

pytestmark = pytest.mark.usefixtures("either_device")


def user(text: str) -> str:
    return f"<|user|>{text}<|end|>\n<|assistant|>\n"


def chat(rig: Rig, prompt: str, **rest):
    """One turn; returns the job and the history that a client would hold after it."""
    job = rig.answer(prompt, **rest)
    return job, prompt + job.output.text + "<|end|>"


def test_an_alien_goes_to_the_empty_slot_not_to_slot_0():
    rig = Rig()
    rig.answer("hello")
    alien = rig.answer("something else")
    assert (rig.routed(alien).slot, rig.routed(alien).victim) == (1, "empty")


def test_equal_slots_go_to_the_lowest():
    rig = Rig(slots=3)
    assert rig.routed(rig.answer("hello")).slot == 0


def test_without_an_empty_slot_the_shortest_conversation_goes():
    rig = Rig()
    rig.answer("a long conversation about nothing", ignore_eos=True)
    rig.answer("short", ignore_eos=True)
    alien = rig.answer("zzz")
    assert rig.routed(alien).slot == 1
    assert rig.routed(alien).victim == "protected"
    assert rig.routed(alien).evicted_tokens == 5 + 8 - 1  # the last token of a full answer is not evaluated


def test_a_stale_conversation_goes_before_a_shorter_fresh_one():
    rig = Rig()
    rig.answer("a long conversation about nothing", ignore_eos=True)
    rig.clock.advance(3600)
    rig.answer("short", ignore_eos=True)
    alien = rig.answer("zzz")
    assert (rig.routed(alien).slot, rig.routed(alien).victim) == (0, "stale")


def test_the_next_turn_finds_its_own_slot_among_many():
    rig = Rig(slots=4)
    histories = [chat(rig, SYSTEM + user(f"question {i}"))[1] for i in range(4)]
    for i in (2, 0, 3, 1):
        job, _ = chat(rig, histories[i] + user("and then?"))
        assert rig.routed(job).slot == i
        assert rig.routed(job).tier in ("memory-token", "memory-text")
        assert rig.routed(job).evicted_tokens == 0
        assert job.generated == rig.alone(job)


def test_an_answer_the_tokeniser_would_have_cut_otherwise_is_reused_by_its_text():
    text = FakeText()
    prompt = user("say it")
    said = [*text.tokenise("t"), *text.tokenise("he end")]

    def script(history):
        at = len(history) - len(text.tokenise(prompt))
        return said[at] if 0 <= at < len(said) else 3

    rig = Rig(script=script)
    _, history = chat(rig, prompt, max_tokens=30)
    assert text.tokenise(prompt) + said != text.tokenise(history)[:-1]
    rig.text.tokenised.clear()
    job = rig.answer(history + user("more"))
    assert rig.routed(job).tier == "memory-text"
    assert rig.routed(job).cached_tokens == len(text.tokenise(prompt)) + len(said)
    assert list(rig.text.tokenised) == ["<|end|>" + user("more")]
    assert text.render(job.prompt) == job.text


def test_a_retry_reuses_its_prompt_and_answers_alike():
    rig = Rig()
    first = rig.answer(SYSTEM + user("once"))
    again = rig.answer(SYSTEM + user("once"))
    assert rig.routed(again).tier == "memory-rewind"
    assert rig.routed(again).cached_tokens == len(again.tokens) - 1
    assert rig.routed(again).slot == 0
    assert again.generated == first.generated


def test_a_retry_evaluates_one_token_before_it_answers():
    rig = Rig()
    rig.answer(SYSTEM + user("once"))
    before = rig.backend.counts.tokens
    rig.answer(SYSTEM + user("once"), max_tokens=1)
    assert rig.backend.counts.tokens == before + 1


def test_an_edit_of_the_last_message_stays_on_its_slot():
    rig = Rig()
    _, history = chat(rig, SYSTEM + user("first question"))
    rig.answer(history + user("second question, to be edited"))
    edited = rig.answer(history + user("second question, edited"))
    assert (rig.routed(edited).slot, rig.routed(edited).tier, rig.routed(edited).victim) == (0, "memory-rewind", "none")
    assert edited.generated == rig.alone(edited)
    twice = rig.answer(history + user("third wording"))
    assert (rig.routed(twice).slot, rig.routed(twice).tier) == (0, "memory-rewind")


def test_a_sub_agent_with_the_same_system_prompt_leaves_the_conversation_alone():
    rig = Rig()
    _, history = chat(rig, SYSTEM + user("first question"))
    main, history = chat(rig, history + user("second question"))
    agent = rig.answer(SYSTEM + user("a title, please"))
    assert (rig.routed(agent).slot, rig.routed(agent).victim) == (1, "empty")
    onward = rig.answer(history + user("third question"))
    assert rig.routed(onward).slot == 0
    assert rig.routed(onward).cached_tokens >= len(main.prompt)


def test_a_sub_agent_leaves_a_conversation_of_one_turn_alone_too():
    rig = Rig()
    rig.answer(SYSTEM + user("first question"))
    agent = rig.answer(SYSTEM + user("a title, please"))
    assert rig.routed(agent).slot == 1


def test_a_sub_agent_takes_a_stale_slot_before_it_cuts_a_fresh_conversation():
    rig = Rig()
    rig.answer("zzz")
    rig.clock.advance(3600)
    rig.answer(SYSTEM + user("first question"))
    agent = rig.answer(SYSTEM + user("a title, please"))
    assert (rig.routed(agent).slot, rig.routed(agent).victim) == (0, "stale")


def test_with_no_better_slot_a_cut_at_the_system_prompt_beats_evicting_the_whole():
    rig = Rig()
    rig.answer("x" * 600)
    rig.answer(SYSTEM + user("first question"))
    agent = rig.answer(SYSTEM + user("a title, please"))
    routed = rig.routed(agent)
    assert (routed.slot, routed.tier, routed.victim) == (1, "memory-rewind", "protected")
    assert 0 < routed.evicted_tokens < 40
    assert agent.generated == rig.alone(agent)


def test_among_conversations_with_the_same_system_prompt_the_least_is_lost():
    rig = Rig(slots=3)
    jobs = [
        rig.submit(SYSTEM + user(f"question {letter} to answer"), max_tokens=count, ignore_eos=True)
        for letter, count in (("a", 30), ("b", 5), ("c", 20))
    ]
    rig.run()
    agent = rig.answer(SYSTEM + user("a title, please"))
    assert rig.routed(agent).slot == rig.routed(jobs[1]).slot
    assert rig.routed(agent).victim == "protected"


def test_a_recurrent_state_is_extended_or_cut_to_its_one_saved_point():
    rig = Rig(can_rewind=False)
    first = rig.answer(SYSTEM + user("once"))
    other = rig.answer(SYSTEM + user("another time"))
    assert (rig.routed(other).tier, rig.routed(other).slot) == ("none", 1)
    again = rig.answer(SYSTEM + user("once"))
    assert (rig.routed(again).tier, rig.routed(again).slot) == ("memory-rewind", 0)
    assert rig.routed(again).cached_tokens == len(again.tokens) - 1
    assert again.generated == first.generated
    onward = rig.answer(SYSTEM + user("once") + first.output.text + "<|end|>" + user("more"))
    assert rig.routed(onward).tier in ("memory-token", "memory-text")
    assert onward.generated == rig.alone(onward)


def test_a_tier_that_cannot_be_carried_out_costs_the_reuse_not_the_answer():
    rig = Rig(slots=1, ladder=(Tier("memory-token", MEMORY_TOKEN.probe, lambda hold: None),))
    rig.answer("hello")
    live = list(rig.backend.tokens(0))
    job = rig.answer([*live, 9, 9])
    routed = rig.routed(job)
    assert (routed.tier, routed.fell_from, routed.cached_tokens) == ("none", "memory-token", 0)
    assert (routed.victim, routed.evicted_tokens) == ("protected", len(live))
    assert job.generated == rig.alone(job)


def test_a_text_whose_other_tokenisation_does_not_fit_is_read_anew():
    letters = FakeText().tokenise("t") + FakeText().tokenise("h")
    # the session spells "th" in two tokens a time, the tokeniser needs one
    rig = Rig(slots=1, ctx=40, script=lambda history: letters[(len(history) - 1) % 2])
    first = rig.answer("b", max_tokens=37, ignore_eos=True)
    job = rig.answer("b" + first.output.text + "hxyz")
    assert (rig.routed(job).fell_from, rig.routed(job).cached_tokens) == ("memory-text", 0)
    assert job.prompt == job.tokens
    assert job.generated == rig.alone(job)


def test_an_error_while_a_prompt_is_prepared_is_that_jobs_alone():
    def broken(hold):
        raise BackendError("no tokeniser")

    rig = Rig(slots=1, ladder=(Tier("memory-token", MEMORY_TOKEN.probe, broken),))
    rig.answer("hello")
    live = list(rig.backend.tokens(0))
    job = rig.submit([*live, 9])
    other = rig.submit("other")
    rig.run()
    assert (rig.ended(job).reason, rig.ended(job).status, rig.ended(job).phase) == ("error", 500, "queue")
    assert other.generated == rig.alone(other)


def counting_ladder(asked: list[int]) -> tuple[Tier, ...]:
    """Token reuse that notes which jobs were compared."""

    def probe(view):
        asked.append(view.job.id)
        return MEMORY_TOKEN.probe(view)

    return (Tier("memory-token", probe, MEMORY_TOKEN.materialise),)


def test_a_slot_is_compared_once_until_a_job_has_left_it():
    asked: list[int] = []
    slot = slot_of(range(100))
    router = Router([slot], FakeBackend(1, 200), options(), counting_ladder(asked))
    job = make_job(1, range(120))
    assert router.probe(slot, job).reuse.tokens == 100
    assert router.probe(slot, job).reuse.tokens == 100
    assert asked == [1]
    slot.checkpoint, slot.generation = checkpoint(range(50)), slot.generation + 1
    assert router.probe(slot, job).reuse.tokens == 50
    assert asked == [1, 1]


def test_a_slot_starts_a_new_generation_when_its_job_leaves():
    rig = Rig(slots=1)
    assert [rig.answer(prompt).generation for prompt in ("hello", "other", "third")] == [0, 1, 2]


def test_waiting_jobs_are_not_compared_while_nothing_changes():
    asked: list[int] = []
    rig = Rig(slots=2, ladder=counting_ladder(asked))
    rig.answer("hello")
    rig.answer("other")
    asked.clear()
    running = rig.submit("zzzz", required_slot=0, max_tokens=30, ignore_eos=True)
    rig.step()
    assert asked == [running.id]
    waiting = rig.submit("yyyy", required_slot=0)
    for _ in range(10):
        rig.step()
    assert asked == [running.id]
    rig.run()
    assert asked == [running.id, waiting.id]


# the waiting line


def test_jobs_run_in_the_order_they_came():
    rig = Rig(slots=1)
    jobs = [rig.submit(f"job number {i}") for i in range(5)]
    rig.run()
    order = sorted(jobs, key=lambda job: rig.events.index(rig.routed(job)))
    assert order == jobs


def test_a_job_bound_to_a_busy_slot_holds_up_nobody_and_keeps_its_place():
    rig = Rig(slots=2)
    runner = rig.submit("a long runner", max_tokens=40, ignore_eos=True)
    rig.step()
    bound = rig.submit("bound", required_slot=rig.routed(runner).slot)
    free = rig.submit("free", max_tokens=2, ignore_eos=True)
    later = rig.submit("later", max_tokens=2, ignore_eos=True)
    rig.run()
    assert rig.routed(free).slot == 1
    assert rig.events.index(rig.ended(later)) < rig.events.index(rig.routed(bound))
    assert rig.routed(bound).slot == rig.routed(runner).slot


def test_a_bound_job_takes_its_slot_whatever_it_holds():
    rig = Rig(slots=3)
    rig.answer("hello there")
    job = rig.answer("zzz", required_slot=0)
    assert (rig.routed(job).slot, rig.routed(job).victim) == (0, "protected")


@pytest.mark.parametrize(("waited", "placed"), [(29.5, False), (30.0, True)])
def test_after_30_seconds_a_bound_job_takes_any_slot(waited, placed):
    rig = Rig(slots=2)
    rig.submit("a long runner", max_tokens=400, ignore_eos=True)
    rig.step()
    bound = rig.submit("bound", required_slot=0)
    rig.step()
    rig.clock.advance(waited)
    rig.step()
    assert (bound.slot == 1) == placed
    rig.run()
    assert bound.generated == rig.alone(bound)


def test_a_job_that_needs_live_state_waits_for_its_slot_and_is_told_when_it_is_gone():
    rig = Rig(slots=2)
    rig.submit("a long runner", max_tokens=40, ignore_eos=True)
    rig.step()
    bound = rig.submit("bound", required_slot=0, needs_live_state=True)
    rig.step()
    rig.clock.advance(1000)
    rig.step()
    assert bound.slot is None
    rig.run()
    ended = rig.ended(bound)
    assert (ended.reason, ended.status, ended.phase) == ("error", 409, "queue")
    assert "replaying the full" in (ended.message or "")
    assert rig.scheduler.stats().slots[0].live_tokens > 0  # the conversation there is untouched


def test_a_job_that_needs_live_state_continues_where_a_tier_offers_it():
    def found(view):
        return Reuse("live", view.checkpoint.length, None, 0, False)

    def carry_out(hold):
        return [*hold.backend.tokens(hold.slot), *hold.job.tokens]

    rig = Rig(slots=1, ladder=(Tier("live", found, carry_out, live_state=True),))
    rig.answer("hello")
    live = list(rig.backend.tokens(0))
    job = rig.answer("result", required_slot=0, needs_live_state=True)
    assert rig.routed(job).tier == "live"
    assert job.generated == rig.backend.answer([*live, *job.tokens], 0, 8, job.stop_tokens)


def test_the_line_is_bounded_and_says_when_to_come_back():
    rig = Rig(slots=1, max_queue=2)
    jobs = [rig.submit(f"job {i}") for i in range(3)]  # one for the free slot, two to wait
    with pytest.raises(QueueFull) as full:
        rig.submit("one too many")
    assert full.value.retry_after >= 1
    assert rig.scheduler.stats().waiting == 3
    rig.run()
    assert all(job.generated == rig.alone(job) for job in jobs)
    assert rig.scheduler.stats().accepted == 3


def test_a_refused_job_leaves_no_trace():
    rig = Rig(slots=1, max_queue=0)
    rig.submit("running")
    refused = make_job(77, "refused")
    with pytest.raises(QueueFull):
        rig.scheduler.submit(refused)
    rig.run()
    rig.scheduler.submit(refused)  # it may come again
    rig.run()
    assert rig.ended(refused).reason in ("stop", "length")


def test_retry_after_follows_the_time_jobs_take():
    queue = JobQueue(limit=0, slots=2)
    assert queue.retry_after() == 1
    for seconds in (10.0, 14.0):
        queue.record_service(seconds)
    assert queue.retry_after() == 6
    queue.record_service(10_000.0)
    assert queue.retry_after() == 60


@pytest.mark.parametrize("length", [40, 41])
def test_a_prompt_that_fills_the_context_is_refused(length):
    rig = Rig(ctx=40)
    with pytest.raises(ValueError, match="no room in a context of 40"):
        rig.submit([5] * length)
    assert rig.answer([5] * 39).limit == 1


@pytest.mark.parametrize(
    ("prompt", "rest", "message"),
    [
        ([], {}, "tokens: the prompt is empty"),
        ([-1], {}, "tokens: not all are ids"),
        ([2**32], {}, "tokens: not all are ids"),
        ([1], {"max_tokens": 0}, "max_tokens: 0 is below 1"),
        ([1], {"required_slot": 2}, "required_slot: there is no slot 2"),
        ([1], {"required_slot": -1}, "required_slot: there is no slot -1"),
    ],
)
def test_a_job_that_can_never_run_is_refused_by_name(prompt, rest, message):
    rig = Rig()
    with pytest.raises(ValueError, match=message):
        rig.submit(prompt, **rest)
    assert not rig.scheduler.busy


def test_a_job_is_submitted_once():
    rig = Rig()
    job = rig.submit("hello")
    with pytest.raises(ValueError, match="submitted already"):
        rig.scheduler.submit(job)
    with pytest.raises(ValueError, match="submitted already"):
        rig.scheduler.submit(make_job(job.id, "another with the same id"))
