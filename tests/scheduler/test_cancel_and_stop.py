"""A job is cancelled, or the server stops: in the line, in prefill, in decode, between two steps and within one."""

import pytest
from scheduler_rig import Reader, Rig, make_job

from scheduler import Ended, Stopping

pytestmark = pytest.mark.usefixtures("either_device")


def test_a_waiting_job_leaves_the_line():
    rig = Rig(slots=1)
    running = rig.submit("running", max_tokens=30, ignore_eos=True)
    waiting, last = rig.submit("waiting"), rig.submit("last")
    rig.step()
    rig.scheduler.cancel(waiting.id, "client")
    assert rig.scheduler.stats().waiting == 1
    rig.run()
    ended = rig.ended(waiting)
    assert (ended.reason, ended.phase, ended.cause) == ("abort", "queue", "client")
    assert (ended.queue_seconds, ended.prefill_seconds, ended.ttft_seconds) == (None, None, None)
    assert not waiting.output.finished
    assert running.generated == rig.alone(running)
    assert last.generated == rig.alone(last)


def test_a_job_cancelled_before_its_first_step_never_runs():
    rig = Rig()
    job = rig.submit("hello")
    rig.scheduler.cancel(job.id, "client")
    rig.run()
    assert rig.ended(job).phase == "queue"
    assert rig.backend.counts.launches == 0


def test_a_prompt_cut_short_stays_for_the_retry():
    rig = Rig(slots=1)
    prompt = [5, 6, 7] * 300
    job = rig.submit(prompt)
    for _ in range(3):
        rig.step()
    rig.scheduler.cancel(job.id, "client")
    assert rig.scheduler.stats().slots[0] == ("idle", 384, 0, 0, 24, 24)
    rig.step()
    assert (rig.ended(job).phase, rig.ended(job).completion_tokens) == ("prefill", 0)
    assert rig.ended(job).queue_seconds is not None
    assert rig.ended(job).prefill_seconds is None
    retry = rig.answer(prompt)
    assert (rig.routed(retry).tier, rig.routed(retry).cached_tokens) == ("memory-token", 384)
    assert retry.generated == rig.alone(retry)


def test_an_answer_cut_short_keeps_what_was_evaluated(either_device):
    rig = Rig(slots=1)
    job = rig.submit("hello", max_tokens=50, ignore_eos=True)
    for _ in range(5):
        rig.step()
    drawn = list(job.generated)
    rig.scheduler.cancel(job.id, "slow_reader")
    rig.run()
    ended = rig.ended(job)
    assert (ended.reason, ended.phase, ended.cause) == ("abort", "decode", "slow_reader")
    assert not job.output.finished
    assert list(rig.backend.tokens(0)) == job.prompt + (drawn if either_device else drawn[:-1])


def test_the_neighbours_of_a_cancelled_job_do_not_notice():
    rig = Rig(slots=4)
    jobs = [rig.submit(f"question {i} " * 40, max_tokens=30, sampling=i) for i in range(4)]
    for step in range(12):
        rig.step()
        if step == 3:
            rig.scheduler.cancel(jobs[1].id, "client")
        if step == 9:
            rig.scheduler.cancel(jobs[2].id, "client")
    rig.run()
    assert jobs[0].generated == rig.alone(jobs[0])
    assert jobs[3].generated == rig.alone(jobs[3])


def test_a_cancelled_slot_goes_to_the_next_in_line():
    rig = Rig(slots=1)
    job = rig.submit("hello", max_tokens=500, ignore_eos=True)
    after = rig.submit("after")
    rig.step()
    rig.scheduler.cancel(job.id, "client")
    rig.step()
    assert after.slot == 0
    rig.run()
    assert after.generated == rig.alone(after)


def test_cancelling_twice_or_unknown_or_too_late_is_nothing():
    rig = Rig()
    job = rig.submit("hello", max_tokens=50, ignore_eos=True)
    rig.step()
    for _ in range(2):
        rig.scheduler.cancel(job.id, "client")
    rig.scheduler.cancel(999, "client")
    rig.run()
    assert rig.ended(job).reason == "abort"
    done = rig.answer("short")
    rig.scheduler.cancel(done.id, "client")
    assert not rig.scheduler.busy
    assert rig.ended(done).reason in ("stop", "length")


def test_a_finished_answer_that_is_still_being_read_can_be_cancelled(either_device):
    rig = Rig()
    job = rig.submit("hello", max_tokens=1, ignore_eos=True)
    rig.step()
    assert (job.ending, job.drawing) == ((None, 1) if either_device else ("length", 0))
    rig.scheduler.cancel(job.id, "client")
    rig.run()
    assert (rig.ended(job).reason, rig.ended(job).completion_tokens) == ("abort", 0)


def test_a_cancel_from_within_a_step_takes_effect_when_it_has_committed():
    rig = Rig(slots=2)
    other = rig.submit("other", max_tokens=20, ignore_eos=True)

    def slow(sampled):
        rig.scheduler.cancel(job.id, "slow_reader")
        assert rig.scheduler.stats().running == 2

    job = rig.submit("hello", max_tokens=20, ignore_eos=True, output=Reader(on_push=slow))
    rig.step()
    rig.step()
    assert (rig.ended(job).reason, rig.ended(job).cause) == ("abort", "slow_reader")
    rig.run()
    assert other.generated == rig.alone(other)


def test_a_stopping_server_takes_nothing_and_finishes_everything_when_it_drains():
    rig = Rig(slots=1)
    jobs = [rig.submit(f"question {i}") for i in range(3)]
    rig.step()
    rig.scheduler.stop(drain=True)
    with pytest.raises(Stopping):
        rig.submit("too late")
    rig.run()
    assert all(job.generated == rig.alone(job) for job in jobs)
    assert {rig.ended(job).reason for job in jobs} <= {"stop", "length"}


def test_a_server_that_does_not_drain_ends_every_job_with_an_error():
    rig = Rig(slots=2)
    talker = rig.submit("talker", max_tokens=50, ignore_eos=True)
    rig.step()
    reader = rig.submit([7] * 900)
    rig.step()
    waiting = rig.submit("waiting")
    rig.scheduler.stop(drain=False)
    rig.run()
    assert [rig.ended(job).phase for job in (talker, reader, waiting)] == ["decode", "prefill", "queue"]
    for job in (talker, reader, waiting):
        ended = rig.ended(job)
        assert (ended.reason, ended.status, ended.message, ended.cause) == (
            "error", 503, "shutdown requested", "shutdown",
        )  # fmt: skip
    assert rig.scheduler.stats().running == rig.scheduler.stats().waiting == 0


def test_a_drain_can_be_cut_short():
    rig = Rig(slots=1)
    job = rig.submit("hello", max_tokens=500, ignore_eos=True)
    rig.step()
    rig.scheduler.stop(drain=True)
    rig.step()
    rig.scheduler.stop(drain=False)
    rig.run(limit=1)
    assert rig.ended(job).status == 503


def test_a_stop_from_within_a_step_waits_for_its_end():
    rig = Rig()
    job = rig.submit("hello", max_tokens=50, ignore_eos=True)
    job.output = Reader(on_push=lambda sampled: rig.scheduler.stop(drain=False))
    rig.step()
    rig.step()
    assert rig.ended(job).status == 503


def test_two_hundred_cancels_at_random_leave_every_slot_usable():
    rig = Rig(slots=4, max_queue=300)
    jobs = [rig.submit(f"question {i} " * (1 + i % 30), max_tokens=25, sampling=i) for i in range(200)]
    for i, job in enumerate(jobs):
        if i % 3 == 0:
            rig.step()
        rig.scheduler.cancel(jobs[(i * 77) % 200].id, "client")
        del job
    rig.run()
    stats = rig.scheduler.stats()
    assert (stats.running, stats.waiting, stats.ended) == (0, 0, 200)
    assert len([e for e in rig.events if isinstance(e, Ended)]) == 200
    after = [rig.submit(f"afterwards {i}") for i in range(4)]
    rig.step()
    assert sorted(job.slot for job in after if job.slot is not None) == [0, 1, 2, 3]
    rig.run()
    assert all(job.generated == rig.alone(job) for job in after)


def test_an_id_may_come_again_once_its_job_has_ended():
    rig = Rig()
    job = rig.answer("hello")
    rig.scheduler.submit(make_job(job.id, "again"))
    rig.run()
    assert rig.scheduler.stats().ended == 2
