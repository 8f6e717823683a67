"""How an answer begins, goes on and ends; what a step evaluates, and what it leaves behind."""

import pytest
from scheduler_rig import TEXT, Reader, Rig

from scheduler import CHAINED, Answered, Ended, JobState, Progress, Routed, Sampled, Stats, StepDone, Verdict
from scheduler.events import PoolStats, SlotStats
from scheduler.fake import END, scripted

pytestmark = pytest.mark.usefixtures("either_device")


def say(prompt: str, answer: str, then: int | None = END):
    """A script that answers `prompt` with `answer` and a stop token."""
    spoken = TEXT.tokenise(answer) + ([] if then is None else [then])
    return scripted({tuple(TEXT.tokenise(prompt)): spoken})


def evaluated(rig: Rig) -> list[int]:
    """Tokens the device worked on, launch by launch, in order."""
    return [token for launch in rig.backend.log for row in launch for token in row.tokens]


def test_a_stop_token_is_neither_shown_nor_kept(either_device):
    rig = Rig(script=say("hello", "yes"))
    job = rig.answer("hello")
    ended = rig.ended(job)
    assert (ended.reason, ended.completion_tokens, job.output.text) == ("stop", 3, "yes")
    assert job.output.finished
    assert list(rig.backend.tokens(0)) == TEXT.tokenise("hello") + TEXT.tokenise("yes")
    assert (END in evaluated(rig)) == either_device  # which costs a position that is cut again


def test_a_stop_token_at_once_is_an_empty_answer():
    rig = Rig(script=say("hello", ""))
    job = rig.answer("hello")
    assert (rig.ended(job).reason, rig.ended(job).completion_tokens, job.output.text) == ("stop", 0, "")
    assert rig.ended(job).prefill_seconds is not None
    assert list(rig.backend.tokens(0)) == TEXT.tokenise("hello")


def test_without_stop_tokens_an_answer_runs_to_its_limit():
    rig = Rig(script=say("hello", "yes", then=END))
    job = rig.answer("hello", max_tokens=6, ignore_eos=True)
    assert (rig.ended(job).reason, rig.ended(job).completion_tokens) == ("length", 6)
    assert job.generated[3] == END


def test_the_last_token_of_a_full_answer_is_shown_and_not_evaluated():
    rig = Rig(script=say("hello", "yes, sir"))
    job = rig.answer("hello", max_tokens=4)
    assert (rig.ended(job).reason, job.output.text) == ("length", "yes,")
    assert list(rig.backend.tokens(0)) == TEXT.tokenise("hello") + TEXT.tokenise("yes")
    assert rig.backend.counts.tokens == 4 + 3


@pytest.mark.parametrize("tail", ["", "and more"])
def test_an_answer_ends_where_the_context_does(tail):
    rig = Rig(ctx=30, script=say("a" * 20, "0123456789" + tail))
    job = rig.answer("a" * 20, max_tokens=1000)
    assert (rig.ended(job).reason, rig.ended(job).completion_tokens, job.output.text) == ("length", 10, "0123456789")
    assert len(rig.backend.tokens(0)) == 29


def test_max_tokens_of_one_costs_no_decode_forward():
    rig = Rig()
    job = rig.answer("hello", max_tokens=1, ignore_eos=True)
    assert rig.ended(job).completion_tokens == 1
    assert rig.backend.counts.launches == 1


def test_the_extra_forward_behind_a_stop_string_is_dropped():
    rig = Rig(script=say("hello", "yes.STOP and more"))
    job = rig.answer("hello", stop=["STOP"], max_tokens=30)
    assert (rig.ended(job).reason, job.output.text) == ("stop", "yes.")
    assert rig.ended(job).completion_tokens == len("yes.STOP")
    assert list(rig.backend.tokens(0)) == TEXT.tokenise("hello") + TEXT.tokenise("yes.")
    assert evaluated(rig)[-1] == TEXT.tokenise("P")[0]  # it had been evaluated


def test_a_stop_string_inside_a_token_keeps_the_tokens_before_it():
    rig = Rig(script=say("hello", "so th"))
    job = rig.answer("hello", stop=["h"], max_tokens=30)
    assert job.output.text == "so t"
    assert list(rig.backend.tokens(0)) == TEXT.tokenise("hello") + TEXT.tokenise("so ")


def test_a_stop_string_in_the_last_allowed_token_is_a_stop():
    rig = Rig(script=say("hello", "yes.STOP"))
    job = rig.answer("hello", stop=["STOP"], max_tokens=8)
    assert (rig.ended(job).reason, job.output.text) == ("stop", "yes.")


def test_where_a_session_cannot_be_cut_what_is_kept_is_what_is_published():
    rig = Rig(script=say("hello", "yes.STOP and more"), can_rewind=False)
    rig.answer("hello", stop=["STOP"], max_tokens=30)
    assert list(rig.backend.tokens(0)) == TEXT.tokenise("hello") + TEXT.tokenise("yes.STOP")
    visible = rig.answer("hello" + "yes." + "<|end|>next")
    assert rig.routed(visible).tier == "rewind-point"  # nobody claims that the session says only "yes."
    assert visible.generated == rig.alone(visible)


def test_the_text_of_a_step_is_read_behind_the_next_launch(either_device):
    order = []
    rig = Rig(script=say("hello", "yes"))
    launch = rig.backend.launch

    def logged(work):
        order.append("launch")
        launch(work)

    rig.backend.launch = logged
    sample = rig.backend.sample

    def drawn(picks):
        order.append("sample")
        return sample(picks)

    rig.backend.sample = drawn
    rig.answer("hello", output=Reader(on_push=lambda sampled: order.append("read")))
    if either_device:  # the last launch is for the token behind the stop token
        assert order == ["launch", "sample", *["launch", "sample", "read"] * 3, "launch", "sample"]
    else:
        assert order == ["launch", "sample", *["launch", "read", "sample"] * 3]


def test_events_tell_the_whole_story_in_order(either_device):
    rig = Rig(script=say("a" * 200, "hi"))
    job = rig.answer("a" * 200)
    kinds = [type(event) for event in rig.events]
    end = [StepDone, Ended, StepDone] if either_device else [StepDone, Ended]  # the last one's row was cut
    assert kinds == [Routed, Progress, StepDone, Progress, StepDone, StepDone, *end]
    assert [(e.done, e.total) for e in rig.events if isinstance(e, Progress)] == [(128, 200), (200, 200)]
    assert [(s.decode_rows, s.prefill_tokens) for s in rig.steps()] == [
        (0, 128),
        (0, 72),
        (1, 0),
        (1, 0),
        *[(1, 0)] * either_device,
    ]
    assert job.state is JobState.FINISHED


def test_times_are_taken_from_the_clock_at_each_point():
    rig = Rig(slots=1, script=say("a" * 200, "hi!"), price=lambda work: 0.5)
    first = rig.submit("zzz", max_tokens=2, ignore_eos=True)
    job = rig.submit("a" * 200)
    rig.clock.advance(2.0)
    rig.run()
    ended = rig.ended(job)
    assert rig.ended(first).queue_seconds == 2.0
    assert ended.queue_seconds == 3.0  # and two forwards of the other
    assert ended.prefill_seconds == 1.0
    assert ended.decode_seconds == 1.5
    assert ended.ttft_seconds == 4.0
    assert ended.total_seconds == 5.5
    assert rig.routed(job).queue_seconds == 3.0


def test_a_turn_follows_a_turn_with_only_the_new_tokens_evaluated():
    rig = Rig(script=say("hello", "yes"))
    job = rig.answer("hello")
    before = rig.backend.counts.tokens
    more = rig.answer("hello" + job.output.text + "<|end|>go on", max_tokens=1)
    assert rig.backend.counts.tokens - before == len(more.prompt) - rig.routed(more).cached_tokens
    assert rig.routed(more).cached_tokens == len(TEXT.tokenise("hello")) + len(TEXT.tokenise("yes"))


def test_company_does_not_change_an_answer():
    rig = Rig(slots=8)
    jobs = [rig.submit(f"question {i} " * (i + 1), sampling=i, max_tokens=10 + i) for i in range(20)]
    rig.run()
    for job in jobs:
        assert job.generated == rig.alone(job)
        assert job.output.tokens == job.generated


def test_an_idle_step_does_nothing():
    rig = Rig()
    assert not rig.scheduler.busy
    assert rig.step() == []
    rig.answer("hello")
    assert not rig.scheduler.busy
    assert rig.step() == []


def test_stats_tell_what_each_slot_does():
    rig = Rig(slots=4, ctx=1000)
    rig.answer("old", max_tokens=3, ignore_eos=True)
    rig.clock.advance(4000)
    rig.answer("zzzz", max_tokens=3, ignore_eos=True)
    rig.submit("talker", max_tokens=50, ignore_eos=True)
    rig.step()
    rig.submit([7] * 700)
    rig.submit("bound", required_slot=2)
    rig.step()
    stats = rig.scheduler.stats()
    assert stats == Stats(
        running=2,
        waiting=1,
        kv_usage=(5 + 6 + 6 + 32) / 4000,
        slots=(
            SlotStats("stale", 5, 0, 0, 1, 1),
            SlotStats("idle", 6, 0, 0, 1, 1),
            SlotStats("decode", 6, 0, 0, 1, 1),
            SlotStats("prefill", 32, 32, 700, 2, 2),
        ),
        accepted=5,
        ended=2,
        pool=PoolStats(pages=4 * 63, page_bytes=rig.backend.room().page_bytes, used=5, unshared=5),
    )


def test_a_steered_jobs_token_is_read_before_its_next_one_is_drawn() -> None:
    """What its output makes of a token decides how the next is drawn, also where the device runs ahead."""
    rig = Rig(slots=2)
    steered = rig.submit("hello", max_tokens=9, steered=True, ignore_eos=True)
    other = rig.submit("you", max_tokens=9, ignore_eos=True)
    read, chained = [], []
    sample, launch = rig.backend.sample, rig.backend.launch

    def watched(picks):
        if any(pick.slot == steered.slot for pick in picks):
            read.append(len(steered.output.tokens))
        return sample(picks)

    def counted(work):
        chained.extend(row for row in work if row.tokens is CHAINED)
        return launch(work)

    rig.backend.sample, rig.backend.launch = watched, counted
    rig.run()
    assert read == list(range(9))
    assert [rig.ended(job).completion_tokens for job in (steered, other)] == [9, 9]
    assert bool(chained) == rig.backend.chains


class Exact:
    """An output that ends its turn with a given verdict."""

    def __init__(self, verdict: Verdict) -> None:
        self.verdict = verdict

    def push(self, sampled: Sampled) -> Verdict:
        return self.verdict

    def finish(self, reason: Answered) -> Answered:
        return reason


def test_a_verdict_may_keep_nothing():
    rig = Rig()
    job = rig.answer("hello", output=Exact(Verdict("stop", 0)))
    assert rig.ended(job).reason == "stop"
    assert list(rig.backend.tokens(0)) == job.prompt


@pytest.mark.parametrize("keep", [-1, 2])
def test_a_verdict_that_keeps_what_was_never_drawn_is_an_error(keep):
    rig = Rig()
    job = rig.answer("hello", output=Exact(Verdict("stop", keep)))
    assert (rig.ended(job).reason, rig.ended(job).status) == ("error", 500)


def test_without_overlap_a_token_is_read_in_the_step_that_drew_it() -> None:
    rig = Rig(slots=1, overlap=False)
    job = rig.submit("hello", max_tokens=3)
    texts = []
    while rig.scheduler.busy:
        rig.step()
        texts.append(len(job.output.tokens))
    assert texts == [1, 2, 3]
